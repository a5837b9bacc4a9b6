"""The bot's clock: seconds that only go forward, and a sleep. Tests put one in its place that they move."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from any fixed point; never goes back."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The real one."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
