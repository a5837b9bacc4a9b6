"""Waiting for what other processes do."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 90.0
"""A busy machine may take many seconds to start a Python process; a test that waits longer has failed."""


async def until(condition: Callable[[], T | None], what: str, seconds: float = DEADLINE_S) -> T:
    """The first true value of ``condition``."""
    try:
        async with asyncio.timeout(seconds):
            while not (value := condition()):  # noqa: ASYNC110 - processes end without an event of ours
                await asyncio.sleep(0.01)
            return value
    except TimeoutError:
        raise AssertionError(f"{what} did not come about within {seconds} s") from None


def wait_until(condition: Callable[[], T | None], what: str, seconds: float = DEADLINE_S) -> T:
    """:func:`until`, without an event loop."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not come about within {seconds} s"
        time.sleep(0.01)
    return value


def is_gone(pid: int) -> bool:
    """Whether a process has ended, though perhaps nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
