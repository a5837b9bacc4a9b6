"""A real server and a real agent for measurements and live tests: started, and ended, as a user's would be."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from bot.server import running_server
from bot.settings import Settings

T = TypeVar("T")
NODE, TOKEN = "node-under-test", "token-under-test"
START_S = 120.0
"""A server starts in a second or two; on a machine full of other work its processes take much longer."""


def until(condition: Callable[[], T | None], what: str, within_s: float) -> T:
    """Ask again and again until the condition is true; give its value."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"within {within_s:.0f} s did not come about: {what}")


@contextmanager
def server_thread(settings: Settings) -> Iterator[str]:
    """The server in a thread with a loop of its own; gives its URL."""
    ready, stop = threading.Event(), threading.Event()
    url: list[str] = []

    async def serve() -> None:
        async with running_server(settings) as running:
            url.append(running.url)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        until(lambda: ready.is_set() or not thread.is_alive(), "the server's start", START_S)
        assert url, "the server did not start: its thread's exception says why"
        yield url[0]
    finally:
        stop.set()
        thread.join()


@contextmanager
def agent_process(url: str, state: Path, *, quiet: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """`sysom agent` as a process of its own."""
    environment = os.environ | {
        "SYSOM_SERVER": url,
        "SYSOM_NODE": NODE,
        "SYSOM_NODE_TOKEN": TOKEN,
        "SYSOM_STATE": str(state),
        "SYSOM_RUNTIME": str(state / "run"),
        # On a busy machine of two CPUs the usual budget may be passed: what is shed then is tested elsewhere.
        "SYSOM_CPU_BUDGET_PERCENT": "20",
    }
    words = [] if quiet else ["-v"]
    process = subprocess.Popen([sys.executable, "-m", "bot.cli", *words, "agent"], env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
