"""The real server on a free port, in a thread, for tests that speak to it over the network."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp


@contextmanager
def serving(app: ASGIApp, port: int = 0) -> Iterator[str]:
    """Serve ``app``; gives its address. Port 0 takes a free one."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # by name: else asyncio leaves Nagle's algorithm on
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        # The socket listens already: a request that comes early waits for the server.
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
