"""Collective communication: who comes late to the collectives.

In a blocking all-reduce, all-gather, reduce-scatter or barrier all ranks leave together, so the last to
arrive has the shortest duration. That needs no synchronised clocks. Broadcast, reduce, gather and scatter
let some ranks leave early and say nothing.
"""

from __future__ import annotations

import numpy as np

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
        ended = table.enter_ns[:, :-1] + table.duration_ns[:, :-1]
        both = known[:, 1:] & known[:, :-1]
        # One rank that did not wait is enough: all run the same code, and the late one sees short durations.
        overlapping = (both & (table.enter_ns[:, 1:] < ended)).any(axis=0)
        arose[:, 1:] -= np.where(overlapping, late[:, :-1], 0.0)
        arose_known[:, 1:] &= ~overlapping | known[:, :-1]
    total = np.concatenate(
        [np.zeros((len(late), 1)), np.cumsum(np.where(arose_known, arose, 0.0), axis=1)], axis=1
    )
    counted = np.concatenate([np.zeros((len(late), 1)), np.cumsum(arose_known, axis=1)], axis=1)
    first = np.searchsorted(table.seq, steps.seq) + 1
    after_last = np.searchsorted(table.seq, steps.next_seq) + 1
    rows = [table.ranks.index(rank) for rank in steps.ranks]
    per_step = (total[:, after_last] - total[:, first])[rows]
    whole = (counted[:, after_last] - counted[:, first])[rows] == (after_last - first)
    return np.where(whole, per_step, 0.0), whole
