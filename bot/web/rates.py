"""How much is taken from whom: token buckets, in bounded memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_KEYS = 20_000
"""Buckets that are kept, about 200 bytes each; beyond, the one that was asked longest ago is forgotten (full)."""


class Rate:
    """Per key ``per_s`` on average and ``burst`` at once. One thread's."""

    def __init__(
        self,
        per_s: float,
        burst: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_keys: int = MAX_KEYS,
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._max_keys = max_keys
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, key: str) -> float:
        """Seconds until one may be taken; 0 when it may be now."""
        return max(min(1.0, self._burst) - self._level(key), 0.0) / self._per_s

    def take(self, key: str, amount: float = 1.0) -> None:
        """Count ``amount``. What goes beyond the burst is owed: nothing may be taken until it is made up."""
        self._levels[key] = self._level(key) - amount, self._clock()
        self._levels.move_to_end(key)
        if len(self._levels) > self._max_keys:
            self._levels.popitem(last=False)

    def _level(self, key: str) -> float:
        level, at = self._levels.get(key, (self._burst, 0.0))
        return min(self._burst, level + (self._clock() - at) * self._per_s)
