"""Which ranks compute longer than the ranks that do the same work: always, since an instant, or now and then.

Ranks of one stage do the same work on different data, so each step compares a rank with the median of the
others in its stage: what slows all alike cancels, and a longer stage is nobody's fault. Under the hypothesis
that ranks of a stage are exchangeable, each is among the j slowest of m in a step with probability j/m (j: how many
stand out); how often one was gives an exact binomial p-value, multiplied by everything that was tried
(Bonferroni), so it holds under any dependence between ranks.

Pure: arrays in, structs out. Rows follow the trace's ranks, columns its steps; NaN where nothing is known.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from scipy import stats

from diagnosis.evidence import Ints
from diagnosis.limits import (
    ALPHA,
    ALWAYS_STEPS,
    LEVEL_STEPS,
    MIN_EFFECT_SHARE,
    OCCASIONAL_MADS,
    OCCASIONAL_STEPS,
    TRACE_EFFECT_SHARE,
)
from diagnosis.replay.trace import BACKWARD, FORWARD, OTHER, Trace
from diagnosis.steps import Bools, Floats


@dataclass(frozen=True)
class Compute:
    """Computation per rank and step, in ms, NaN where a rank lacks operations that its peers have."""

    forward: Floats
    backward: Floats
    other: Floats
    """Everything else that is no communication: optimizer, garbage collection, loading of data."""
    shape: Ints
    """Per rank: its stage; ranks of one number are peers."""
    replica: Ints
    """Per rank: its pipeline; the same micro batches pass through all ranks of one number."""

    @property
    def total(self) -> Floats:
        return self.forward + self.backward + self.other


@dataclass(frozen=True)
class Slow:
    """One rank that computes longer than its peers."""

    row: int
    steps: Bools
    """In which steps it was slow: all, those since ``onset``, or single ones."""
    onset: int
    """Column of the first slow step; 0 where it was slow from the start."""
    excess_ms: float
    """Median over those steps of what it took longer than the median of its peers."""
    forward_ms: float
    """Mean excess over those steps in each kind of computation."""
    backward_ms: float
    other_ms: float
    forward_ratio: float
    backward_ratio: float
    q: float
    slowest_in: int
    """In how many of ``steps`` nobody of its stage was slower, other slow ranks aside."""
    by_micro_batch: bool
    """Steps alone were too few: micro batches decided."""
    occasional: bool


def compute_of(trace: Trace) -> Compute:
    """Sums of computation. A rank and step with fewer operations of a kind than most of
    the stage has there is not comparable."""
    roles = trace.roles
    sums: list[Floats] = []
    for role in (FORWARD, BACKWARD, OTHER):
        chosen = roles == role
        count = trace.sums(chosen, np.ones(len(roles)))
        total = trace.sums(chosen)
        for stage in range(trace.stages):
            rows = np.flatnonzero(trace.stage == stage)
            total[rows] = np.where(count[rows] == _nan(np.nanmax, count[rows], 0), total[rows], np.nan)
        sums.append(total)
    return Compute(sums[0], sums[1], sums[2], trace.stage, trace.replica)


def excess(values: Floats, stage: Ints, without: frozenset[int] = frozenset()) -> Floats:
    """What each rank takes longer than the median of the others of its stage, step by step (ranks × steps).
    Ranks in ``without`` are compared, and nobody with them. NaN where a rank has no peer in the step."""
    out = np.full(values.shape, np.nan)
    kept = np.array([row not in without for row in range(len(values))], np.bool_)
    for number in np.unique(stage):
        peers = np.flatnonzero((stage == number) & kept)
        left = np.flatnonzero((stage == number) & ~kept)
        if len(peers) > 1:
            out[peers] = values[peers] - median_of_others(values[peers])
        if len(peers) and len(left):
            out[left] = values[left] - _nan(np.nanmedian, values[peers], 0)
    return out


def median_of_others(values: Floats) -> Floats:
    """Ranks × steps: the median of the other ranks in the step, NaN ones aside."""
    ordered = np.sort(values, axis=0)
    place = np.argsort(np.argsort(values, axis=0, kind="stable"), axis=0, kind="stable")
    count = (~np.isnan(values)).sum(axis=0)
    low, high = np.maximum((count - 2) // 2, 0), np.maximum((count - 1) // 2, 0)
    last = len(values) - 1

    def other(index: Ints) -> Floats:
        below = np.take_along_axis(ordered, index[None, :], axis=0)
        above = np.take_along_axis(ordered, np.minimum(index + 1, last)[None, :], axis=0)
        return np.asarray(np.where(place > index, below, above))

    return np.asarray(np.where((count > 1) & ~np.isnan(values), (other(low) + other(high)) / 2, np.nan))


def apart(over: Floats, usual: Floats, replica: Ints) -> Floats:
    """What of a rank's excess is its own: less what the other ranks of its pipeline have too, in proportion.

    A long micro batch is long in all stages, a bad machine in one. ``over``: excess (ranks × columns),
    ``usual``: what it is an excess over. Only what the others have too much is taken off: of two ranks, one is fast
    where the other is slow.
    """
    ratio = np.divide(over, usual, out=np.full_like(over, np.nan), where=usual > 0)
    shared = np.zeros_like(over)
    for number in np.unique(replica):
        rows = np.flatnonzero(replica == number)
        if len(rows) > 1:
            others = median_of_others(ratio[rows])
            shared[rows] = np.where(np.isnan(others), 0.0, np.maximum(others, 0.0))
    return np.asarray(over - shared * usual)


def slow_ranks(trace: Trace, compute: Compute, step_ms: Floats) -> list[Slow]:
    """Ranks that are slow for good or since an instant, the worst first; then those slow now and then.

    ``step_ms``: length of each step. Found one after the other: whoever is named counts no longer as a peer,
    so that two in one stage do not hide each other.
    """
    found: list[Slow] = []
    threshold = TRACE_EFFECT_SHARE * float(np.mean(step_ms))
    while True:
        named = frozenset(slow.row for slow in found)
        over = _own_excess(compute, named)
        best = _next(trace, compute, over, named, threshold)
        if best is None:
            break
        found.append(best)
    named = frozenset(slow.row for slow in found)
    return found + _occasional(compute, _own_excess(compute, named), named, step_ms)


def _own_excess(compute: Compute, named: frozenset[int]) -> Floats:
    over = excess(compute.total, compute.shape, named)
    return apart(over, compute.total - over, compute.replica)


def too_fast(compute: Compute, over: Floats, step_ms: Floats) -> list[int]:
    """Ranks that most of their peers are slower than, and alike: then peers do not tell who is right.

    With two ranks in a stage there is no majority, and the slower one counts as slow.
    """
    threshold = TRACE_EFFECT_SHARE * float(np.mean(step_ms))
    odd: list[int] = []
    for row in range(len(over)):
        peers = np.flatnonzero(compute.shape == compute.shape[row])
        known = ~np.isnan(over[row])
        if len(peers) < 3 or not known.any():
            continue
        values = over[row, known]
        if np.median(values) <= -threshold and (values < -threshold / 2).mean() >= ALWAYS_STEPS:
            low = int((_nan(np.nanmedian, over[peers], 1) <= -threshold).sum())
            hits = _among(
                -over[np.ix_(peers, np.flatnonzero(known))], int(np.flatnonzero(peers == row)[0]), low
            )
            if _tail(hits, int(known.sum()), low / len(peers), len(over) * low) <= ALPHA:
                odd.append(row)
    return odd


def _next(
    trace: Trace, compute: Compute, over: Floats, named: frozenset[int], threshold: float
) -> Slow | None:
    """The rank that stands out most of those not yet named, if it does."""
    level = _since_median(over)
    for row in np.argsort(-level, kind="stable").tolist():
        if level[row] < threshold:
            break
        if row in named:
            continue
        onset, tried = _onset(over[row])
        steps = ~np.isnan(over[row]) & (np.arange(over.shape[1]) >= onset)
        values = over[row, steps]
        middle = float(np.median(values))
        if middle < threshold or (values > middle / 2).mean() < ALWAYS_STEPS:
            continue
        rivals = _rivals(compute.shape, named, row)
        seen = over[rivals][:, steps]
        top = int((_nan(np.nanmedian, seen, 1) >= threshold).sum())
        slowest = _among(seen, int(np.flatnonzero(rivals == row)[0]), top)
        tests = len(over) * tried * top
        q = _tail(slowest, int(steps.sum()), top / len(rivals), tests)
        fine = q > ALPHA
        if fine:
            q = _by_micro_batch(trace, row, rivals, steps, top, tests)
        if q <= ALPHA:
            return _slow(compute, row, steps, onset, named, q, slowest, by_micro_batch=fine)
    return None


def _since_median(over: Floats) -> Floats:
    """Per rank the largest of its median excess over all steps, over the newest half and over the newest few; −inf
    where unknown."""
    count = over.shape[1]
    newest = [over[:, -length:] for length in (count, count - count // 2, LEVEL_STEPS)]
    medians = np.stack([_nan(np.nanmedian, part, 1) for part in newest])
    return np.asarray(np.where(np.isnan(medians), -np.inf, medians).max(axis=0))


def _onset(values: Floats) -> tuple[int, int]:
    """Column from which on a rank's excess stands on a new level, 0 where it does not; and how many instants
    were tried."""
    change = level_change(values)
    if change is None or change.after <= 0 or change.before >= change.after / 2:
        return 0, 1
    return change.column, change.tried


@dataclass(frozen=True)
class Change:
    """A series that stands on one level before a column, and on another from it on (medians)."""

    column: int
    before: float
    after: float
    tried: int
    """How many columns could have been it."""


def level_change(values: Floats) -> Change | None:
    """The split with the largest standardised difference of means; None when the values before and after it are
    not nearly all on their side of the middle, or too few."""
    known = np.flatnonzero(~np.isnan(values))
    count = len(known)
    if count < 2 * LEVEL_STEPS:
        return None
    seen = values[known]
    sums = np.cumsum(seen)
    at = np.arange(LEVEL_STEPS, count - LEVEL_STEPS + 1)
    before, after = sums[at - 1] / at, (sums[-1] - sums[at - 1]) / (count - at)
    split = int(at[np.argmax(np.abs(after - before) * np.sqrt(at * (count - at)))])
    low, high = float(np.median(seen[:split])), float(np.median(seen[split:]))
    above = seen > (low + high) / 2
    right = above[split:].mean() if high > low else 1 - above[split:].mean()
    left = 1 - above[:split].mean() if high > low else above[:split].mean()
    if min(left, right) < ALWAYS_STEPS:
        return None
    return Change(int(known[split]), low, high, len(at))


def everybody(compute: Compute) -> Change | None:
    """When the computation of all ranks alike changed its level: the median over ranks of each rank's time in
    units of its own median."""
    total = compute.total
    return level_change(_nan(np.nanmedian, total / _nan(np.nanmedian, total, 1)[:, None], 0))


def _rivals(shape: Ints, named: frozenset[int], row: int) -> Ints:
    """The rank and those that it is compared with."""
    same = np.flatnonzero(shape == shape[row])
    return np.array([r for r in same.tolist() if r == row or r not in named], np.int64)


def _among(values: Floats, place: int, top: int) -> int:
    """In how many columns the row at ``place`` is among the ``top`` largest; a tie counts against it."""
    others = np.delete(values, place, axis=0)
    return int(((others >= values[place]).sum(axis=0) < top).sum())


def _tail(hits: int, trials: int, chance: float, tests: int) -> float:
    """Bonferroni over ``tests``: chance of so many hits in so many trials."""
    if chance >= 1 or trials == 0:
        return 1.0
    return min(1.0, tests * float(stats.binom.sf(hits - 1, trials, chance)))


def _by_micro_batch(trace: Trace, row: int, rivals: Ints, steps: Bools, top: int, tests: int) -> float:
    """The same test where each micro batch of each step is a trial, its forward and backward together (they share
    its length, so they are no two witnesses): the rank must be the slowest in nearly all.

    Micro batches of one step share whatever befell the machine in it, so this is weaker evidence; but data
    differs from one micro batch to the next, so uneven work does not pass.
    """
    forward = _per_operation(trace, rivals, FORWARD, steps)
    backward = _per_operation(trace, rivals, BACKWARD, steps)
    if forward is None or backward is None:
        return 1.0
    both = min(forward, backward, key=lambda table: table.shape[1])
    if forward.shape == backward.shape:
        both = np.asarray(forward + backward)
    hits, trials = _among(both, int(np.flatnonzero(rivals == row)[0]), top), both.shape[1]
    if hits < ALWAYS_STEPS * trials:
        return 1.0
    return _tail(hits, trials, top / len(rivals), tests)


def _per_operation(trace: Trace, rivals: Ints, role: int, steps: Bools) -> Floats | None:
    """Ranks × (steps and operations): what each of ``rivals`` takes longer than the median of its stage's others,
    less what its pipeline shares; None where ranks have not equally many operations."""
    chosen = np.flatnonzero((trace.roles == role) & steps[trace.column])
    order = np.lexsort(
        (trace.micro_batch[chosen], trace.chunk[chosen], trace.column[chosen], trace.row[chosen])
    )
    count = np.bincount(trace.row[chosen], minlength=len(trace.ranks))
    if count[rivals[0]] == 0 or (count[rivals] != count[rivals[0]]).any():
        return None
    whole = np.flatnonzero(count == count[rivals[0]])
    kept = chosen[order][np.isin(trace.row[chosen[order]], whole)]
    table = trace.duration[kept].reshape(len(whole), -1)
    over = excess(table, trace.stage[whole])
    own = apart(over, table - over, trace.replica[whole])
    return np.asarray(own[np.searchsorted(whole, rivals)])


def _slow(
    compute: Compute,
    row: int,
    steps: Bools,
    onset: int,
    named: frozenset[int],
    q: float,
    slowest: int,
    *,
    by_micro_batch: bool = False,
    occasional: bool = False,
) -> Slow:
    over = excess(compute.total, compute.shape, named)[row, steps]
    parts: dict[str, tuple[float, float]] = {}
    for name, values in (
        ("forward", compute.forward),
        ("backward", compute.backward),
        ("other", compute.other),
    ):
        more = float(np.mean(excess(values, compute.shape, named)[row, steps]))
        mine = float(np.mean(values[row, steps]))
        parts[name] = more, mine / (mine - more) if mine > more else 1.0
    return Slow(
        row=row,
        steps=steps,
        onset=onset,
        excess_ms=float(np.median(over)),
        forward_ms=parts["forward"][0],
        backward_ms=parts["backward"][0],
        other_ms=parts["other"][0],
        forward_ratio=parts["forward"][1],
        backward_ratio=parts["backward"][1],
        q=q,
        slowest_in=slowest,
        by_micro_batch=by_micro_batch,
        occasional=occasional,
    )


def _occasional(compute: Compute, over: Floats, named: frozenset[int], step_ms: Floats) -> list[Slow]:
    """Ranks that are far slower than their peers in some steps: those that take more of all such incidents than
    chance would give them. One incident per step, the worst; it may hit any rank alike."""
    rows = np.array([row for row in range(len(over)) if row not in named], np.int64)
    rows = rows[~np.isnan(over[rows]).all(axis=1)] if len(rows) else rows
    if len(rows) < 2:
        return []
    spread = np.zeros(len(rows))
    for number in np.unique(compute.shape[rows]):
        mates = compute.shape[rows] == number
        spread[mates] = 1.4826 * float(_nan(np.nanmedian, np.abs(over[rows[mates]])))
    least = np.maximum(MIN_EFFECT_SHARE * step_ms, OCCASIONAL_MADS * spread[:, None])
    beyond = np.where(np.isnan(over[rows]), -np.inf, over[rows] - least)
    incidents = (beyond >= 0).any(axis=0)
    worst = beyond.argmax(axis=0)
    found = []
    for place, row in enumerate(rows.tolist()):
        mine = incidents & (worst == place)
        hits = int(mine.sum())
        q = _tail(hits, int(incidents.sum()), 1 / len(rows), len(rows))
        if hits >= OCCASIONAL_STEPS and q <= ALPHA:
            onset = int(np.flatnonzero(mine)[0])
            found.append(_slow(compute, row, mine, onset, named, q, hits, occasional=True))
    return sorted(found, key=lambda slow: -slow.excess_ms)


def _nan(function: object, values: Floats, axis: int | None = None) -> Floats:
    """A NaN-aware reduction that is silent where all is NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(function(values, axis=axis))  # type: ignore[operator]
