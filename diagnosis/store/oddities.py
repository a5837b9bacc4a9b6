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
CLOCK_OFF_NS = 60_000_000_000
"""A node's clock further than this from the server's gets a note: its instants cannot be matched to what
people remember."""


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
        f"the clock of {node} jumped {times} ({by}); its times here are by its newest clock, "
        "order and durations are as they were"
    )


def clock_note(node: str, lag_ns: int) -> str | None:
    """``lag_ns``: the server's time minus the node's, at the quickest batch of this boot (the time a batch
    needs to arrive is in it). None when the clocks agree well enough."""
    seconds = f"{abs(lag_ns) / 1e9:.0f} s"
    if lag_ns < -CLOCK_OFF_NS:
        return f"the clock of {node} is {seconds} ahead of the server's: set up time synchronisation there"
    if lag_ns > CLOCK_OFF_NS:
        return (
            f"the clock of {node} is {seconds} behind the server's, or everything that it sent came that late"
        )
    return None
