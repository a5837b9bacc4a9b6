"""Serving an application inside somebody else's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Literal

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
async def listening(
    app: ASGIApp, host: str, port: int, *, ws: Literal["none", "websockets-sansio"] = "none"
) -> AsyncIterator[str]:
    """Serve ``app`` for the length of an ``async with``; gives its URL. Port 0 takes a free one.

    ``ws``: uvicorn's implementation of WebSockets, for an application that has some.

    Raises OSError when the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    config = uvicorn.Config(app, ws=ws, log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S)
    server = _Server(config)
    # The listening socket takes connections from here on: nobody has to wait for the server's loop.
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()
