"""Serving an application inside somebody else's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from bot.web.certificate import Certificate

GRACE_S = 2
"""How long open requests may finish when the server closes."""
IDLE_S = 10.0
"""A connection on which no request has begun (all of its headers are there) for so long is ended."""
SPARE_FILES = 256
"""Of the files that this process may open, those that connections leave to everything else."""
HEAD_BYTES = 16 << 10
"""Address and headers of a request, together; more is answered with 400."""


class _Server(uvicorn.Server):
    """Signals belong to the program that runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: uvicorn itself waits for ever for a request, and for the rest of a refused one."""
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, _Connection) and connection.idle_since < now - IDLE_S:
                    connection.transport.abort()
        return await super().on_tick(counter)


class _Connection(H11Protocol):
    """Knows since when it has been idle, and is not there when there are too many."""

    _since = 0.0

    @property
    def idle_since(self) -> float:
        """Loop time; infinity while a request is answered."""
        busy = self.cycle is not None and not self.cycle.response_complete
        return float("inf") if busy else self._since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._since = self.loop.time()
        # asyncio does so only for sockets made for IPPROTO_TCP by name, which create_server's are not. Without it a
        # response's body waits for the acknowledgement of its head, which the other side delays by 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        if len(self.connections) > _max_connections():
            transport.abort()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()


def _max_connections() -> int:
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES, 64)


@contextlib.asynccontextmanager
async def listening(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    ws: Literal["none", "websockets-sansio"] = "none",
    certificate: Certificate | None = None,
) -> AsyncIterator[str]:
    """Serve ``app`` for the length of an ``async with``; gives its URL. Port 0 takes a free one.

    ``ws``: uvicorn's implementation of WebSockets, for an application that has some. ``certificate``: speak https.

    Raises OSError when the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    config = uvicorn.Config(
        app,
        ws=ws,
        http=_Connection,
        h11_max_incomplete_event_size=HEAD_BYTES,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
    )
    server = _Server(config)
    # The listening socket takes connections from here on: nobody has to wait for the server's loop.
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if certificate is None else "https"
    try:
        yield f"{scheme}://{shown}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()
