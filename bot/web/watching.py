"""What is looked after while the server runs: files that change, the store's health, the event loop's lag; and
what of it is said at ``/healthz``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from bot.intake import Intake
from bot.web.metrics import Metrics
from diagnosis.store import StoreError

log = logging.getLogger(__name__)

FILES_EVERY_S = 1.0
HEALTH_EVERY_S = 10.0
LAG_EVERY_S = 0.1
STUCK_S = 60.0
"""A batch that is written for longer: the longest honest one takes about a second, a busy file ten."""
FAILED_FOR_S = 60.0
"""For how long a failure of the store is told at /healthz, when nothing was stored since."""
_SOUND = frozenset({"ok", "unchecked", "checking"})


class Watching:
    """One server's. ``refreshed``: each looks after one thing and gives a warning, or nothing."""

    def __init__(self, intake: Intake, metrics: Metrics, refreshed: Sequence[Callable[[], str]] = ()) -> None:
        self._intake = intake
        self._metrics = metrics
        self._refreshed = refreshed
        self._warnings: list[str] = []
        self._failure: tuple[float, int, str] | None = None
        self._unreadable = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """For the length of an ``async with``."""
        loops = (
            self._every(FILES_EVERY_S, self._files),
            self._every(HEALTH_EVERY_S, self._health),
            self._measure_lag(),
        )
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def failed(self, words: str) -> None:
        """The store did not take a batch."""
        self._failure = time.monotonic(), self._metrics.counts.read().get("stored", 0), words

    def problems(self) -> list[str]:
        """Why the server does not work as it should; empty when it does."""
        found = []
        if (stuck := self._intake.stuck_s()) > STUCK_S:
            found.append(f"a batch has been written for {stuck:.0f} s: is the store's disk stuck?")
        if self._failure is not None:
            at, stored, words = self._failure
            since = self._metrics.counts.read().get("stored", 0) - stored
            if time.monotonic() - at < FAILED_FOR_S and not since:
                found.append(words)
        if self._unreadable:
            found.append(self._unreadable)
        store = self._metrics.store
        if store is not None and store.integrity not in _SOUND:
            found.append(f"the store {store.path} is damaged: {store.integrity}")
        return found

    def warnings(self) -> list[str]:
        """What needs a person, while the server works."""
        tokens, store = self._intake.tokens, self._metrics.store
        own = [tokens.problem, tokens.warning, *self._warnings, *(store.warnings if store else ())]
        return [words for words in own if words]

    async def _files(self) -> None:
        if self._intake.tokens.stale():
            await asyncio.to_thread(self._intake.tokens.refresh)
        self._warnings = [await asyncio.to_thread(one) for one in self._refreshed]

    async def _health(self) -> None:
        try:
            # Shielded: a call that is given up ends the process that writes.
            self._metrics.store = await asyncio.shield(self._intake.health())
            self._unreadable = ""
        except StoreError as error:
            self._unreadable = str(error)

    async def _every(self, seconds: float, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await look()
            except Exception:
                log.exception("looking after the server failed; it is tried again")
            await asyncio.sleep(seconds)

    async def _measure_lag(self) -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(LAG_EVERY_S)
            self._metrics.loop_lag.observe(max(time.perf_counter() - begin - LAG_EVERY_S, 0.0))
