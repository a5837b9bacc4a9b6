"""Collective communication: who comes late to the collectives.

In a blocking all-reduce, all-gather, reduce-scatter or barrier all ranks leave together, so the last to
arrive has the shortest duration. That needs no synchronised clocks. Broadcast, reduce, gather and scatter
let some ranks leave early and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from diagnosis.evidence import Ints, RankEvidence
from diagnosis.joined import AT_ONCE
from diagnosis.pairing import step_index
from diagnosis.steps import BULK_BYTES, Bools, Floats, Joined, Steps
from probes.records import Op, TimedBy

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

_ENQUEUED = 50.0
"""Bytes per ns (50 GB/s) that no host-timed transfer of a library on CPUs reaches, and any enqueue exceeds."""


_TOGETHER = np.zeros(128, np.bool_)
_TOGETHER[list(TOGETHER)] = True


def leave_together(op: Ints) -> Bools:
    """Which ops are of ``TOGETHER``."""
    return np.asarray(_TOGETHER[np.clip(op, 0, len(_TOGETHER) - 1)])


def lateness(table: Joined, rows: slice = slice(None)) -> tuple[Floats, Bools]:
    """Ranks (``rows`` of the table) × collectives of one communicator: ms by which a rank came after the first, and
    where that is known (an op of ``TOGETHER`` that ended on two ranks or more)."""
    known = table.known(rows)
    known &= leave_together(table.op) & (table.durations.ended >= 2)
    late = (table.durations.longest - table.duration_ns[rows]) / 1e6
    return late if known.all() else np.where(known, late, 0.0), known


def lateness_per_step(table: Joined, steps: Steps) -> tuple[Floats, Bools]:
    """Ranks × steps of ``steps``, ms: lateness that arose in the step, and where it is known.

    Step k runs from one anchor to the next: what made a rank late in it shows in the collectives after the
    opening anchor, up to and including the closing one. Where a collective begins before the one ahead of it
    has ended (buckets), a rank late in the first is late in the second too: only the increment counts.
    """
    first = np.searchsorted(table.seq, steps.seq) + 1
    after_last = np.searchsorted(table.seq, steps.next_seq) + 1
    shape = (len(table.ranks), steps.count)
    late, known = np.zeros(shape), np.zeros(shape, np.bool_)
    for begin in range(0, len(table.ranks), AT_ONCE):
        rows = slice(begin, begin + AT_ONCE)
        late[rows], known[rows] = _sums(*_arose(table, rows), first, after_last)
    if table.ranks != steps.ranks:
        place = {rank: row for row, rank in enumerate(table.ranks)}
        order = [place[rank] for rank in steps.ranks]
        late, known = late[order], known[order]
    return late, known


def after_last_arrival(table: Joined, steps: Steps) -> Floats:
    """Per step, ms: how long its collectives took once the last rank had come. ∞ where it is not known.

    It is the shortest duration of any rank. What holds up a rank's communication before that costs nothing: it
    waits for the last one anyway. Of overlapping collectives the last counts.
    """
    ms = transfer_ms(table)
    told = (table.durations.ended > 0) & leave_together(table.op)
    first, after_last = np.searchsorted(table.seq, steps.seq), np.searchsorted(table.seq, steps.next_seq)
    per_step, whole = _sums(ms[None], told[None], first, after_last)
    return np.where(whole[0], per_step[0], np.inf)


@dataclass(frozen=True)
class Timing:
    """Of several communicators together; ranks × steps."""

    late_ms: Floats
    """Lateness that arose in the step."""
    known: Bools
    after_last_ms: Floats
    """How long the rank's collectives took once the last had come; ∞ where it is not known."""


def timing(tables: Iterable[Joined], steps: Steps) -> Timing:
    """:func:`lateness_per_step` and :func:`after_last_arrival` where steps are not those of one communicator: what
    lies in a rank's own step counts, on all communicators that it shares with others."""
    shape = (len(steps.ranks), steps.count)
    late, after = np.zeros(shape), np.zeros(shape)
    met, unknown = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for table in tables:
        if len(table.ranks) < 2 or not leave_together(table.op).any():
            continue
        arose, known = _arose(table)
        least = transfer_ms(table)
        for row, rank in enumerate(table.ranks):
            mine = steps.row_of.get(rank, -1)
            if mine < 0:
                continue
            bounds = steps.start_ns[mine], steps.end_ns[mine], steps.seen[mine]
            step = step_index(*bounds, table.enter_ns[row], closing=True)
            inside = (step >= 0) & table.seen[row] & leave_together(table.op)
            late[mine] += np.bincount(step[inside], arose[row][inside], steps.count)
            met[mine] += np.bincount(step[inside], minlength=steps.count)
            unknown[mine] += np.bincount(step[inside & ~known[row]], minlength=steps.count)
            step = step_index(*bounds, table.enter_ns[row])
            inside = (step >= 0) & table.seen[row]
            after[mine] += np.bincount(step[inside], least[inside], steps.count)
    known_steps = (met > 0) & (unknown == 0) & steps.seen
    return Timing(np.where(known_steps, late, 0.0), known_steps, np.where(met > 0, after, np.inf))


def compute_or_communication(longest: Floats, shortest: Floats, base: Floats) -> Floats:
    """P = (Tmax − Tmin) / (Tmax − Tbase) of CCL-D (arXiv 2605.04478), over the durations of one collective on its
    members: near 1 somebody came late, near 0 the transfer itself is slow; NaN where it took no longer than
    ``base``, the duration without either."""
    over = longest - base
    share = np.divide(longest - shortest, over, out=np.full_like(over, np.nan), where=over > 0)
    return np.clip(share, 0.0, 1.0)


def ends_at_enqueue(rank: RankEvidence) -> bool:
    """Whether the host saw collectives end when they were enqueued (NCCL without device timing): such durations
    tell late enqueues only. They give themselves away by moving more than any network or memory can."""
    if rank.timed_by == TimedBy.DEVICE:
        return False
    if any("nccl" in f"{one.uid} {one.desc}".lower() for one in rank.communicators):
        return True
    table = rank.collectives
    bulk = (table.bytes >= BULK_BYTES) & (table.duration_ns > 0) & leave_together(table.op)
    return bool(bulk.any()) and float(np.median(table.bytes[bulk] / table.duration_ns[bulk])) > _ENQUEUED


def _arose(table: Joined, rows: slice = slice(None)) -> tuple[Floats, Bools]:
    """Lateness by which a collective exceeds the one ahead of it where they overlap, ms, and where it is known."""
    late, known = lateness(table, rows)
    overlaps = np.flatnonzero(table.durations.overlaps) + 1
    if not len(overlaps):
        return late, known
    arose, arose_known = late.copy(), known.copy()
    arose[:, overlaps] -= late[:, overlaps - 1]
    arose_known[:, overlaps] &= known[:, overlaps - 1]
    return arose, arose_known


def transfer_ms(table: Joined) -> Floats:
    """Per collective, ms: how long it took once the last had come; of overlapping ones the last counts."""
    told = (table.durations.ended > 0) & leave_together(table.op)
    ms = np.where(told, table.durations.shortest / 1e6, 0.0)
    if len(ms) > 1:
        ms[:-1][table.durations.overlaps] = 0.0
    return ms


def _sums(values: Floats, known: Bools, first: Ints, after_last: Ints) -> tuple[Floats, Bools]:
    """Rows × steps: sums of the columns ``first`` to ``after_last`` (exclusive), and whether all are known."""
    total = np.zeros((len(values), values.shape[1] + 1))
    if known.all():
        np.cumsum(values, axis=1, out=total[:, 1:])
        return total[:, after_last] - total[:, first], np.ones((len(values), len(first)), np.bool_)
    np.cumsum(np.where(known, values, 0.0), axis=1, out=total[:, 1:])
    counted = np.zeros(total.shape, np.int64)
    np.cumsum(known, axis=1, out=counted[:, 1:])
    whole = counted[:, after_last] - counted[:, first] == after_last - first
    return np.where(whole, total[:, after_last] - total[:, first], 0.0), whole
