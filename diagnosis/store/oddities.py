"""What is odd about a node's batches in a window, in words: clocks that jumped or are off, batches that miss.

Pure. The sentences go to ``Evidence.notes`` and from there into a verdict's ``not_seen``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

JUMP_NS = 1_000_000_000
"""A change of the offset to UTC above this is a jump; time synchronisation slews less between two batches."""
CLOCK_OFF_NS = 10_000_000_000
"""A node's clock further than this from the server's is not used: its instants are put on the server's clock.
Below, they are within any window that one can ask for (30 s at the least), and lateness looks the same."""
CLOCK_BATCHES = 60
"""The newest batches of a boot that say how its clock stands to the server's: a minute. Of a minute at least
one batch arrives at once, and after the server's own clock was set the old ones are soon forgotten."""


class BatchTime(NamedTuple):
    """Name and time of one batch of one agent; instants are the node's monotonic nanoseconds."""

    seq: int
    start_ns: int
    end_ns: int
    utc_offset_ns: int


def missing(batches: Sequence[BatchTime], start_ns: int, end_ns: int) -> int:
    """How many of one agent's batches of the window [start, end) are missing.

    ``batches``: those of the window, with one neighbour on either side where there is one. Of a gap that
    reaches out of the window, the part in it counts, as if its batches were equally long.
    """
    count = 0
    for before, after in pairwise(sorted(batches)):
        gap = after.seq - before.seq - 1
        length = after.start_ns - before.end_ns
        inside = min(after.start_ns, end_ns) - max(before.end_ns, start_ns)
        if gap > 0 and length > 0 and inside > 0:
            count += math.ceil(gap * inside / length)
    return count


def missing_note(node: str, count: int) -> str:
    is_are = "batch of {} is" if count == 1 else "batches of {} are"
    return f"{count} {is_are.format(node)} missing: nothing is known about its ranks in that time"


def jumps(batches: Sequence[BatchTime], newest_offset_ns: int) -> list[int]:
    """By how many nanoseconds a node's UTC clock jumped, in order of time: within the batches of one boot,
    and from them to the newest offset that is known."""
    in_order = sorted(batches, key=lambda batch: (batch.end_ns, batch.utc_offset_ns))
    offsets = [batch.utc_offset_ns for batch in in_order]
    changes = [after - before for before, after in pairwise([*offsets, newest_offset_ns])]
    return [change for change in changes if abs(change) > JUMP_NS]


def jump_note(node: str, changes: Sequence[int]) -> str:
    by = ", ".join(f"{change / 1e9:+.1f} s" for change in changes[:3]) + (", …" if len(changes) > 3 else "")
    times = "once" if len(changes) == 1 else f"{len(changes)} times"
    return (
        f"the clock of {node} jumped {times} ({by}); its times here are all by one clock, order and "
        "durations are as they were"
    )


class Clock(NamedTuple):
    """How the UTC clock of a node stands, within one boot."""

    own_offset_ns: int
    """UTC minus monotonic time by the node's own clock, the newest that is known."""
    lag_ns: int
    """The server's time minus the node's, at the quickest of the newest batches (the time that a batch needs
    to arrive is in it)."""
    live: bool
    """Whether those batches came at the pace at which they were made: not out of a spool."""

    @property
    def corrected_ns(self) -> int:
        """What to add to the node's time when its clock is off for sure; 0 otherwise. Nothing arrives before
        it was sent, so a clock that is ahead shows; one that is behind looks like a spool being sent, but for
        the pace."""
        ahead = self.lag_ns < -CLOCK_OFF_NS
        behind = self.lag_ns > CLOCK_OFF_NS and self.live
        return self.lag_ns if ahead or behind else 0

    @property
    def offset_ns(self) -> int:
        """UTC minus monotonic time, to be used for all instants of this boot."""
        return self.own_offset_ns + self.corrected_ns


def clock(own_offset_ns: int, arrivals: Sequence[tuple[int, int]]) -> Clock:
    """``arrivals``: (end by the node's monotonic clock, arrival by the server's UTC) of the newest batches of
    one boot, in order of their end; at least one."""
    lag = min(received - end for end, received in arrivals) - own_offset_ns
    (first_made, first_came), (last_made, last_came) = arrivals[0], arrivals[-1]
    made, came = last_made - first_made, last_came - first_came
    return Clock(own_offset_ns, lag, live=made > 0 and came >= made / 2)


def clock_note(node: str, clock: Clock) -> str | None:
    """None when the clocks agree well enough."""
    if abs(clock.lag_ns) <= CLOCK_OFF_NS:
        return None
    seconds = f"{abs(clock.lag_ns) / 1e9:.0f} s"
    if not clock.corrected_ns:
        return (
            f"the clock of {node} is {seconds} behind the server's, or everything that it sent came that late"
        )
    side = "ahead of" if clock.lag_ns < 0 else "behind"
    return (
        f"the clock of {node} is {seconds} {side} the server's: its times here are by the server's; set up "
        "time synchronisation there"
    )
