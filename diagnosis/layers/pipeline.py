"""Where a traced job's steps go: phases that sum to the step, what each kind of trouble costs, who waits.

Accounting is the stage frontier of StageFrontier (arXiv 2606.06751); costs come from the what-if replay
(arXiv 2505.05713). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.evidence import Evidence, Ints
from diagnosis.replay.trace import BACKWARD, COLLECTIVE, FORWARD, OTHER, RECV, SEND, Trace
from diagnosis.replay.whatif import Replayed
from diagnosis.replay.workers import Change, Compute, Slow, excess
from diagnosis.steps import Bools, Floats
from diagnosis.verdict import Layer

PHASES: dict[str, Layer] = {
    "gather-parameters": "nccl",
    "forward": "gpu",
    "backward": "gpu",
    "pipeline": "nccl",
    "collectives": "nccl",
    "other-compute": "gpu",
}
"""In the order in which a step goes through them. ``pipeline`` is sends and receives, waiting included."""


def phases(trace: Trace) -> Floats:
    """Phases × ranks × steps, in ms: how long each rank was in each phase. What overlaps counts once,
    computation first, so that the sum is the time in which anything ran."""
    roles = trace.roles
    computes = roles <= OTHER
    every = _uncovered(trace, np.ones(len(roles), np.bool_))
    alone = np.where(computes, _uncovered(trace, computes), 0.0)
    moved = np.where(computes, 0.0, every)
    room = trace.sums(computes | True, every) - trace.sums(computes, alone)
    claimed = trace.sums(~computes, moved)
    share = np.divide(room, claimed, out=np.zeros_like(room), where=claimed > 0)
    gathers = np.array(["param" in name and "gather" in name for name in trace.names], np.bool_)[trace.kind]
    pipeline = (roles == SEND) | (roles == RECV)
    return np.stack(
        [
            trace.sums(gathers & (roles == COLLECTIVE), moved) * share,
            trace.sums(roles == FORWARD, alone),
            trace.sums(roles == BACKWARD, alone),
            trace.sums(pipeline, moved) * share,
            trace.sums(~gathers & (roles == COLLECTIVE), moved) * share,
            trace.sums(roles == OTHER, alone),
        ]
    )


def _uncovered(trace: Trace, chosen: Bools) -> Floats:
    """Per row: the part of a chosen operation during which none that began earlier still ran."""
    rows = np.flatnonzero(chosen)
    out = np.zeros(len(chosen))
    if not len(rows):
        return out
    start = trace.start[rows]
    end = start + trace.duration[rows]
    base = trace.cell[rows] * (float(end.max()) + 1.0)
    latest = np.concatenate([[-np.inf], np.maximum.accumulate(base + end)[:-1]]) - base
    out[rows] = np.maximum(end - np.maximum(start, latest), 0.0)
    return out


@dataclass(frozen=True)
class Frontier:
    exposed: Floats
    """Phases × steps, ms: what the phase adds to the time of whoever is furthest. They sum to the longest
    rank's time; more is ``unexplained``."""
    leader: Ints
    """Phases × steps: row of the rank that is furthest at the end of the phase."""
    unexplained: Floats
    """Per step: the step less what is exposed (nothing ran)."""


def frontier(parts: Floats, step_ms: Floats) -> Frontier:
    """F[s] = max over ranks of the time in phases 1..s; the phase's exposed time is F[s] − F[s−1]."""
    reached = np.cumsum(np.where(np.isnan(parts), -np.inf, parts), axis=0)
    furthest = reached.max(axis=1)
    exposed = np.diff(furthest, axis=0, prepend=0.0)
    return Frontier(exposed, np.asarray(reached.argmax(axis=1), np.int64), step_ms - furthest[-1])


@dataclass(frozen=True)
class Costs:
    """Mean step and where what it loses against the ideal goes, in ms per step: ``replayed`` = ``ideal`` +
    ``unseen`` + ``links`` + ``slow`` + ``uneven`` + ``stages`` + ``rest``, exactly. Taken away in this order; what
    comes later is what is left then."""

    replayed: float
    unseen: float
    """Waiting for ranks that were not recorded."""
    links: float
    """Slow links."""
    slow: float
    """What the slow ranks cost together."""
    uneven: float
    """Ranks of one stage compute differently long, from step to step and micro batch to micro batch."""
    stages: float
    """Stages compute differently long. What ``uneven`` and ``stages`` cost depends on which is taken away first:
    each gets the mean of both ways (the Shapley value of two)."""
    rest: float
    """Transfers and everything else that varies."""
    ideal: float
    alone: tuple[float, ...]
    """Per slow rank: what it costs alone."""
    links_behind: float
    """What slow links would cost if no rank were slow: a slow rank may hide them."""
    by_stage: tuple[float, ...]
    """Per stage: what it costs that this stage is not ideal (M_S where it is the last)."""

    @property
    def slowdown_left(self) -> float:
        """S without the slow and the unseen ranks."""
        return (self.ideal + self.uneven + self.stages + self.rest) / self.ideal if self.ideal > 0 else 1.0


def costs(replayed: Replayed, compute: Compute, slow: list[Slow], unlinked: Floats) -> Costs:
    """Replay with one trouble after the other taken away. ``compute`` and ``slow`` for the same steps;
    ``unlinked``: durations as they would be without slow links."""
    trace = replayed.trace
    whole = replayed.graph.members == replayed.graph.expected
    now = np.where(whole, replayed.duration, np.minimum(replayed.ideal, replayed.duration))
    seen = float(replayed.run(now).mean())
    hidden = float(replayed.run(_like_peers(trace, compute, slow, now)).mean())
    now = np.minimum(now, unlinked)
    free = float(replayed.run(now).mean())
    cured = _like_peers(trace, compute, slow, now)
    healthy = float(replayed.run(cured).mean())
    roles = trace.roles
    even = mean_by(cured, trace.kind, trace.stage[trace.row], roles <= OTHER)
    evened = float(replayed.run(even).mean())
    flat = mean_by(cured, trace.kind, np.zeros(len(roles), np.int64), roles <= OTHER)
    level = float(replayed.run(flat).mean())
    # Each stage's computations times what brings their mean to that of all stages.
    alike = np.divide(cured * flat, even, out=cured.copy(), where=even > 0)
    levelled = float(replayed.run(alike).mean())
    perfect = np.where(roles <= OTHER, flat, replayed.ideal)
    ideal = float(replayed.run(perfect).mean())
    alone = tuple(
        free - float(replayed.run(_like_peers(trace, compute, [one], now)).mean())
        if len(slow) > 1
        else free - healthy
        for one in slow
    )
    by_stage = tuple(
        healthy - float(replayed.run(np.where(trace.stage[trace.row] == stage, perfect, cured)).mean())
        if trace.stages > 1
        else 0.0
        for stage in range(trace.stages)
    )
    return Costs(
        replayed=replayed.replayed_ms,
        unseen=replayed.replayed_ms - seen,
        links=seen - free,
        slow=free - healthy,
        uneven=(healthy - evened + levelled - level) / 2,
        stages=(healthy - levelled + evened - level) / 2,
        rest=level - ideal,
        ideal=ideal,
        alone=alone,
        links_behind=hidden - healthy,
        by_stage=by_stage,
    )


def _like_peers(trace: Trace, compute: Compute, slow: list[Slow], duration: Floats) -> Floats:
    """Durations if each slow rank had computed, in its slow steps, as long as the median of its peers."""
    out = duration.copy()
    named = frozenset(one.row for one in slow)
    for role, values in (
        (FORWARD, compute.forward),
        (BACKWARD, compute.backward),
        (OTHER, compute.other),
    ):
        over = excess(values, compute.shape, named)
        for one in slow:
            with np.errstate(invalid="ignore", divide="ignore"):
                factor = (values[one.row] - over[one.row]) / values[one.row]
            factor = np.where(np.isfinite(factor) & one.steps, np.clip(factor, 0.0, 1.0), 1.0)
            rows = np.flatnonzero((trace.row == one.row) & (trace.roles == role))
            out[rows] *= factor[trace.column[rows]]
    return out


def mean_by(duration: Floats, kind: Ints, group: Ints, chosen: Bools) -> Floats:
    """Durations with those of chosen rows replaced by the mean of their kind and group. All per row."""
    out = duration.copy()
    rows = np.flatnonzero(chosen)
    if len(rows):
        key = kind[rows] * (int(group.max()) + 1) + group[rows]
        count = np.bincount(key)
        out[rows] = (np.bincount(key, weights=duration[rows]) / np.maximum(count, 1))[key]
    return out


def grow_together(trace: Trace, without: frozenset[int]) -> float:
    """Correlation over micro batches between forward and backward, each rank against its own mean: near 1 where
    longer sequences make both longer. 0 where too few are known."""
    rows = [np.flatnonzero(trace.roles == role) for role in (FORWARD, BACKWARD)]
    if not all(map(len, rows)):
        return 0.0
    width = int(trace.chunk.max()) + 2
    keys = [
        (trace.cell[r] * width + trace.chunk[r] + 1) * (1 << 20) + np.maximum(trace.micro_batch[r], -1) + 1
        for r in rows
    ]
    unique = [np.unique(key, return_index=True) for key in keys]
    _, first, second = np.intersect1d(unique[0][0], unique[1][0], return_indices=True)
    forward, backward = rows[0][unique[0][1][first]], rows[1][unique[1][1][second]]
    kept = ~np.isin(trace.row[forward], list(without))
    forward, backward = forward[kept], backward[kept]
    if len(forward) < 3:
        return 0.0
    group = trace.row[forward] * width + trace.chunk[forward] + 1
    apart = []
    for chosen in (forward, backward):
        values = trace.duration[chosen]
        mean = np.bincount(group, weights=values) / np.maximum(np.bincount(group), 1)
        apart.append(values - mean[group])
    scale = float(np.sqrt((apart[0] ** 2).sum() * (apart[1] ** 2).sum()))
    return float((apart[0] * apart[1]).sum()) / scale if scale > 0 else 0.0


def waited(replayed: Replayed, role: int) -> Floats:
    """Per rank, mean per step: how long its receives (sends, collectives) waited for the other side, in ms."""
    sums = replayed.trace.sums(replayed.trace.roles == role, replayed.wait)
    known = ~np.isnan(sums)
    return np.asarray(np.where(known, sums, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1))


@dataclass(frozen=True)
class Link:
    """Two ranks between which transfers are slow though both were there in time."""

    sender: int
    """Row of the trace; with ``receiver`` in the direction that is slower."""
    receiver: int
    ratio: float
    """Of its median transfer to that of its peers."""
    ms: float
    peers_ms: float


@dataclass(frozen=True)
class Case:
    """All that the words are made from. ``replayed``, ``costs`` and ``sample``: some steps of a large trace."""

    evidence: Evidence
    trace: Trace
    compute: Compute
    step_ms: Floats
    slow: list[Slow]
    minor: list[Slow]
    """Slow, and the job hardly notices."""
    replayed: Replayed
    costs: Costs
    links: list[Link]
    change: Change | None

    def rank(self, row: int) -> int:
        return self.trace.ranks[row]

    @property
    def link_ms(self) -> float:
        """What the slow links cost, or would if no rank were slow, in ms per step."""
        return max(self.costs.links, self.costs.links_behind)

    @property
    def mean_ms(self) -> float:
        return self.costs.replayed

    @property
    def slowdown(self) -> str:
        """S of the paper, as a sentence."""
        return (
            f"Against a step without any unevenness, this one is {self.replayed.slowdown:.2f} times as long."
        )


def level_before(case: Case, column: int) -> tuple[str, out.Baseline]:
    begin, last = (wording.instant(instant_of(case, c)) for c in (column, column - 1))
    before = case.step_ms[:column]
    first = wording.instant(instant_of(case, 0))
    return begin, out.Baseline(
        step_ms=round(float(np.median(before)), 3), start=first, end=last, steps=len(before)
    )


def instant_of(case: Case, column: int) -> int:
    """UTC ns at which a step began: the lower median over ranks, so that one wrong clock does no harm."""
    number = int(case.trace.steps[column])
    starts = []
    for rank in case.trace.ranks:
        table = case.evidence.ranks[rank].operations
        if table is not None and (mine := table.step == number).any():
            starts.append(int(table.start_ns[mine].min()))
    starts.sort()
    return starts[(len(starts) - 1) // 2]
