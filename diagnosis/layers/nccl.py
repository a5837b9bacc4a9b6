"""Collective communication: who comes late to the collectives.

In a blocking all-reduce, all-gather, reduce-scatter or barrier all ranks leave together, so the last to
arrive has the shortest duration. That needs no synchronised clocks. Broadcast, reduce, gather and scatter
let some ranks leave early and say nothing.
"""

from __future__ import annotations

import numpy as np

from diagnosis.evidence import Ints
from diagnosis.steps import Bools, Floats, Joined, Steps
from probes.records import Op

TOGETHER = (
    int(Op.ALLREDUCE),
    int(Op.ALLREDUCE_COALESCED),
    int(Op.ALLGATHER),
    int(Op.ALLGATHER_BASE),
    int(Op.ALLGATHER_COALESCED),
    int(Op.REDUCE_SCATTER),
    int(Op.REDUCE_SCATTER_BASE),
    int(Op.REDUCE_SCATTER_COALESCED),
    int(Op.ALLREDUCE_SPARSE),
    int(Op.BARRIER),
)
"""Collectives that no rank leaves before all have come."""


def lateness(table: Joined) -> tuple[Floats, Bools]:
    """Ranks × collectives of one communicator: ms by which a rank came after the first, and where that is
    known (an op of ``TOGETHER`` that ended on two ranks or more)."""
    known = table.seen & (table.duration_ns >= 0) & np.isin(table.op, TOGETHER)
    known &= known.sum(axis=0) >= 2
    longest = np.where(known, table.duration_ns, -1).max(axis=0, initial=-1)
    return np.where(known, (longest - table.duration_ns) / 1e6, 0.0), known


def lateness_per_step(table: Joined, steps: Steps) -> tuple[Floats, Bools]:
    """Ranks × steps of ``steps``, ms: lateness that arose in the step, and where it is known.

    Step k runs from one anchor to the next: what made a rank late in it shows in the collectives after the
    opening anchor, up to and including the closing one. Where a collective begins before the one ahead of it
    has ended (buckets), a rank late in the first is late in the second too: only the increment counts.
    """
    late, known = lateness(table)
    arose, arose_known = late.copy(), known.copy()
    if late.shape[1] > 1:
        overlaps = _overlaps(table)
        arose[:, 1:] -= np.where(overlaps, late[:, :-1], 0.0)
        arose_known[:, 1:] &= ~overlaps | known[:, :-1]
    first = np.searchsorted(table.seq, steps.seq) + 1
    after_last = np.searchsorted(table.seq, steps.next_seq) + 1
    rows = [table.ranks.index(rank) for rank in steps.ranks]
    per_step, whole = _sums(arose[rows], arose_known[rows], first, after_last)
    return per_step, whole


def after_last_arrival(table: Joined, steps: Steps) -> Floats:
    """Per step, ms: how long its collectives took once the last rank had come. ∞ where it is not known.

    It is the shortest duration of any rank. What holds up a rank's communication before that costs nothing: it
    waits for the last one anyway. Of overlapping collectives the last counts.
    """
    known = table.seen & (table.duration_ns >= 0)
    told = known.any(axis=0) & np.isin(table.op, TOGETHER)
    shortest = np.where(known, table.duration_ns, np.iinfo(np.int64).max).min(
        axis=0, initial=np.iinfo(np.int64).max
    )
    ms = np.where(told, shortest / 1e6, 0.0)
    if len(ms) > 1:
        ms[:-1][_overlaps(table)] = 0.0
    first, after_last = np.searchsorted(table.seq, steps.seq), np.searchsorted(table.seq, steps.next_seq)
    per_step, whole = _sums(ms[None], told[None], first, after_last)
    return np.where(whole[0], per_step[0], np.inf)


def _overlaps(table: Joined) -> Bools:
    """Which collectives (but the first) begin before the one ahead of them has ended. One rank that did not
    wait is enough: all run the same code, and the late one sees short durations."""
    known = table.seen & (table.duration_ns >= 0)
    ended = table.enter_ns[:, :-1] + table.duration_ns[:, :-1]
    both = known[:, :-1] & table.seen[:, 1:]
    return np.asarray((both & (table.enter_ns[:, 1:] < ended)).any(axis=0))


def _sums(values: Floats, known: Bools, first: Ints, after_last: Ints) -> tuple[Floats, Bools]:
    """Rows × steps: sums of the columns ``first`` to ``after_last`` (exclusive), and whether all are known."""
    none = np.zeros((len(values), 1))
    total = np.concatenate([none, np.cumsum(np.where(known, values, 0.0), axis=1)], axis=1)
    counted = np.concatenate([none, np.cumsum(known, axis=1)], axis=1)
    whole = counted[:, after_last] - counted[:, first] == after_last - first
    return np.where(whole, total[:, after_last] - total[:, first], 0.0), whole
