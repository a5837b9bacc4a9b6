"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class MovedClock:
    def __init__(self) -> None:
        self.seconds = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.seconds + seconds, next(self._order), woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Let time pass; everything that becomes due runs at its own instant, and to its end."""
        end = self.seconds + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            due, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                self.seconds = max(self.seconds, due)
                woken.set_result(None)
                await settle()
        self.seconds = end
        await settle()


async def settle() -> None:
    """Let everything run that can without time passing (no I/O takes part in these tests)."""
    for _ in range(40):
        await asyncio.sleep(0)
