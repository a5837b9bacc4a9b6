"""The workspace's clock: real time, plus what a test has moved it forward, and timers that follow both."""

import asyncio
import itertools
import time
from collections.abc import Callable


class Clock:
    """Seconds since 1970 (UTC). `advance` moves it forward at once and fires the timers that became due."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._ids = itertools.count()
        self._timers: dict[int, tuple[float, Callable[[], None], asyncio.TimerHandle]] = {}

    def now(self) -> float:
        return time.time() + self._ahead

    def after(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        """Run `call` once, `seconds` from now; gives a function that calls it off."""
        timer = next(self._ids)
        handle = asyncio.get_running_loop().call_later(seconds, self._fire, timer)
        self._timers[timer] = (self.now() + seconds, call, handle)
        return lambda: self._cancel(timer)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass without waiting for them; the timers that become due run in their order."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: advance({seconds})")
        self._ahead += seconds
        for timer, (due, call, handle) in sorted(self._timers.items(), key=lambda item: item[1][0]):
            if timer not in self._timers:
                continue  # one that fired just now called it off
            handle.cancel()
            if due <= self.now():
                self._fire(timer)
            else:
                left = asyncio.get_running_loop().call_later(due - self.now(), self._fire, timer)
                self._timers[timer] = (due, call, left)

    def stop(self) -> None:
        """Call off every timer."""
        for timer in list(self._timers):
            self._cancel(timer)

    def _fire(self, timer: int) -> None:
        entry = self._timers.pop(timer, None)
        if entry is not None:
            entry[1]()

    def _cancel(self, timer: int) -> None:
        entry = self._timers.pop(timer, None)
        if entry is not None:
            entry[2].cancel()
