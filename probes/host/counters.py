"""How much counters of the kernel grew between two readings."""

from __future__ import annotations

from collections.abc import Hashable

KEPT_READINGS = 64
"""A counter that was not read for so long is forgotten: what it counted for has gone."""


class Counters:
    """Totals as last seen. A probe calls :meth:`turn` once per reading."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[int, int]] = {}
        """Counter → (its total, the reading that saw it)."""
        self._reading = 0

    def grown(self, key: Hashable, total: int) -> int:
        """What was added to the counter since it was last asked for. 0 when it is new, and when it went back: then
        it counts anew, and since when is not known."""
        before, _ = self._seen.get(key, (total, 0))
        self._seen[key] = (total, self._reading)
        return max(0, total - before)

    def turn(self) -> None:
        """The next reading begins."""
        self._reading += 1
        if self._reading % KEPT_READINGS == 0:
            oldest = self._reading - KEPT_READINGS
            self._seen = {key: seen for key, seen in self._seen.items() if seen[1] >= oldest}
