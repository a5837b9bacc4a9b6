"""Serving an application inside somebody else's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

GRACE_S = 2
"""How long open requests may finish when the server closes."""


class _Server(uvicorn.Server):
    """Signals belong to the program that runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, host: str, port: int) -> AsyncIterator[str]:
    """Serve ``app`` for the length of an ``async with``; gives its URL. Port 0 takes a free one.

    Raises OSError when the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()
