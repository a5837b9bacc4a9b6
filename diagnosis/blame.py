"""Which ranks hold the job up, and what that costs: tests over the account, no words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from diagnosis.evidence import Ints
from diagnosis.growth import growth
from diagnosis.levels import Partitions, SetFinding, comparable, explaining, found_sets
from diagnosis.limits import (
    ALPHA,
    BLOCK_STEPS,
    CHANGE_MADS,
    EVIDENCE_RANKS,
    MIN_EFFECT_MS,
    MIN_EFFECT_SHARE,
    SIDE_ALPHA,
    TAIL_COST_SHARE,
)
from diagnosis.outliers import Metrics, OwnTest, metric_outliers, own_outliers
from diagnosis.permutation import TooFewBlocksError
from diagnosis.shift import Numbers, Shift, hodges_lehmann, peer_difference
from diagnosis.steps import Floats


@dataclass(frozen=True)
class Tested:
    """One tested difference of one rank in one metric, ms per step."""

    effect: float
    q: float
    shift: Shift | None = None
    """Robust estimate with its interval; for the own time, against peers."""


@dataclass(frozen=True)
class Rare:
    """A rank that is slow in some steps only."""

    row: int
    share: float
    """Of the steps."""
    cost_ms: float
    """What those steps add, on average over all steps."""
    q: float


@dataclass(frozen=True)
class Drift:
    """A rank that becomes slower than its peers little by little."""

    row: int
    ms: float
    """By how much within the steps that were compared."""
    q: float


@dataclass(frozen=True)
class Blame:
    """Rows are those of the values that were tested."""

    culprits: tuple[int, ...]
    by: Literal["peers", "history"]
    tests: dict[tuple[int, int], Tested]
    """(metric, row) of each culprit."""
    odd: tuple[int, ...] = ()
    """Rows that are faster than all others, where most are slower: peers do not say who is wrong."""
    sets: tuple[SetFinding, ...] = ()
    """The fewest nodes, stages, switches that explain culprits; culprits in none are findings of their own."""
    rare: tuple[Rare, ...] = ()
    """Not among the culprits: in the mean they are about as fast as their peers."""
    drifts: tuple[Drift, ...] = ()
    """Likewise."""


def matters(effect_ms: float, step_ms: float) -> bool:
    return effect_ms >= _mattering(step_ms)


def _mattering(step_ms: float) -> float:
    return max(MIN_EFFECT_MS, MIN_EFFECT_SHARE * step_ms)


def by_peers(
    values: Metrics, groups: Sequence[Sequence[int]], step_ms: float, partitions: Partitions | None = None
) -> Blame:
    """Ranks, and sets of ranks, that take longer than their peers.

    ``values``: metrics × ranks × steps (ms; NaN where not known), own time first. ``groups``: rows that are
    peers. ``partitions``: kinds of sets whose members can be slow together (node, stage, switch), the likeliest
    first. Ranks and all kinds of sets share one error (Bonferroni over them).

    Own time alone accuses, so that a healthy job is tested in one measure; the other metrics are tested on the
    culprits. Found ranks are taken out and the rest is tested again, so that a great fault does not hide a
    smaller one; no more than half of a group can be found that way. Raises
    :class:`diagnosis.permutation.TooFewBlocksError`.
    """
    tested = [list(group) for group in groups if len(group) > 1]
    sets = comparable(partitions or {}, tested)
    search = _search(values[0], tested, step_ms, 1 + len(sets))
    slow = search.slow
    found = []
    if sets:
        quiet = {row: test.q for row, test in slow.items()}
        found = found_sets(search.differences, sets, step_ms, _mattering(step_ms), 1 + len(sets), quiet)
        for one in found:
            for row in one.rows:
                effect = float(search.effects[row])
                if effect >= one.effect / 2:
                    slow.setdefault(row, Tested(effect, one.q))
    culprits = tuple(sorted(slow))
    return Blame(
        culprits,
        "peers",
        {**{(0, row): slow[row] for row in culprits}, **_other_metrics(values, tested, slow, step_ms)},
        tuple(sorted(search.odd)),
        explaining(found, slow),
        tuple(one for one in search.rare if one.row not in slow),
        tuple(one for one in search.drifts if one.row not in slow),
    )


@dataclass
class _Search:
    """What is found of the ranks, pass after pass."""

    differences: Numbers
    """Ranks × steps, to all peers; NaN for ranks without any."""
    effects: Floats
    slow: dict[int, Tested] = field(default_factory=dict)
    odd: list[int] = field(default_factory=list)
    rare: list[Rare] = field(default_factory=list)
    drifts: list[Drift] = field(default_factory=list)


def _search(own: Numbers, tested: list[list[int]], step_ms: float, levels: int) -> _Search:
    found = _Search(np.full_like(own, np.nan), np.full(len(own), np.nan))
    left = [(len(group), group) for group in tested]
    first = True
    while left:
        again: list[tuple[int, list[int]]] = []
        sizes = {len(group) for _, group in left}
        for size in sorted(sizes):
            batch = [(whole, group) for whole, group in left if len(group) == size]
            rows = np.array([group for _, group in batch])
            try:
                test = own_outliers(own[rows], step_ms)
            except TooFewBlocksError:
                if first:
                    raise
                continue  # too few ranks are left to say more about
            # Groups of one size are corrected together; over sizes and levels, by Bonferroni.
            factor = levels * len(sizes)
            for place, (whole, group) in enumerate(batch):
                slow = _slow(test, place, factor, step_ms)
                if slow and whole - size + len(slow) <= whole / 2:
                    found.slow.update({group[peer]: tested for peer, tested in slow.items()})
                    again.append((whole, [row for peer, row in enumerate(group) if peer not in slow]))
                elif first and not slow:
                    apart = (test.q[place] * factor <= ALPHA) & (-test.effect[place] >= _mattering(step_ms))
                    found.odd += [group[peer] for peer in np.flatnonzero(apart)]
            if first:
                found.differences[rows] = test.differences
                found.effects[rows] = test.effect
                found.rare += _rare(test, rows, len(sizes), step_ms)
                found.drifts += _drifts(test, rows, len(sizes), step_ms)
        left = [(whole, group) for whole, group in again if len(group) > 1]
        first = False
    return found


def _slow(test: OwnTest, place: int, factor: int, step_ms: float) -> dict[int, Tested]:
    """Peers of one group that are slower by what matters."""
    q = np.minimum(1.0, test.q[place] * factor)
    apart = np.flatnonzero((q <= ALPHA) & (test.effect[place] >= _mattering(step_ms)))
    return {
        int(peer): Tested(
            float(test.effect[place, peer]), float(q[peer]), hodges_lehmann(test.blocks[place, peer])
        )
        for peer in apart
    }


def _rare(test: OwnTest, rows: Ints, factor: int, step_ms: float) -> list[Rare]:
    q = np.minimum(1.0, test.rare_q * factor)
    # Pauses that all have, in turns, are nobody's.
    extra = test.rare_ms - np.median(test.rare_ms, axis=1, keepdims=True)
    found = np.argwhere((q <= SIDE_ALPHA) & (extra >= TAIL_COST_SHARE * step_ms))
    return [
        Rare(int(rows[g, p]), float(test.rare_share[g, p]), float(test.rare_ms[g, p]), float(q[g, p]))
        for g, p in found
    ]


def _drifts(test: OwnTest, rows: Ints, factor: int, step_ms: float) -> list[Drift]:
    q = np.minimum(1.0, test.drift_q * factor)
    # Who was faster and is now as fast as its peers is no trouble: the newest quarter must be slow.
    newest = np.nan_to_num(test.blocks[..., -max(1, test.blocks.shape[-1] // 4) :]).mean(axis=-1)
    least = _mattering(step_ms)
    found = np.argwhere((q <= SIDE_ALPHA) & (test.drift_ms >= least) & (newest >= least / 2))
    return [Drift(int(rows[g, p]), float(test.drift_ms[g, p]), float(q[g, p])) for g, p in found]


def _other_metrics(
    values: Metrics, tested: list[list[int]], slow: dict[int, Tested], step_ms: float
) -> dict[tuple[int, int], Tested]:
    """How the slowest culprits differ from their innocent peers in all other metrics, corrected together."""
    slowest = sorted(slow, key=lambda row: (-slow[row].effect, row))[:EVIDENCE_RANKS]
    group_of = {row: group for group in tested for row in group}
    peers = {row: [other for other in group_of[row] if other not in slow] for row in slowest}
    slowest = [row for row in slowest if peers[row]]
    if not slowest or len(values) == 1:
        return {}
    try:
        effect, q = metric_outliers(values, slowest, [peers[row] for row in slowest], step_ms)
    except TooFewBlocksError:
        return {}  # they were found among more peers than are innocent
    return {
        (metric, row): Tested(float(effect[metric, place]), float(q[metric, place]))
        for place, row in enumerate(slowest)
        for metric in range(1, len(values))
    }


def by_history(before: Floats, after: Floats, step_ms: float) -> dict[int, Tested]:
    """Rows whose own time (ranks × steps, ms) grew by what matters, beyond the noise of its blocks, by what
    matters more than that of all others (when all grow, some a little more, nobody is to blame), and
    significantly. Raises :class:`diagnosis.outliers.TooFewBlocksError`."""
    growths = after.mean(axis=1) - before.mean(axis=1)
    grown = []
    for row, old in enumerate(before):
        blocks = [float(np.mean(part)) for part in np.array_split(old, max(1, len(old) // BLOCK_STEPS))]
        middle = float(np.median(blocks))
        noise = 1.4826 * float(np.median(np.abs(np.array(blocks) - middle)))
        # The noise besides the test: the steps that are compared also chose where the past ends.
        if matters(float(growths[row]), step_ms) and growths[row] > CHANGE_MADS * noise:
            grown.append(row)
    others = [float(grew) for row, grew in enumerate(growths) if row not in grown]
    if not grown or (others and not matters(float(min(growths[grown])) - max(others), step_ms)):
        return {}
    test = growth(before, after, step_ms)
    return {row: Tested(float(test.effect[row]), float(test.q[row])) for row in grown if test.q[row] <= ALPHA}


def cost_ms(stages: list[Floats], without: tuple[int, ...]) -> float:
    """Mean step minus what it would be if the rows ``without`` ran like their peers.

    A step is a row of stages that each rank must finish before any goes on (ranks × steps, ms): the time
    until it arrives, then its part in the collective. Each lasts as long as its slowest rank (the frontier of
    StageFrontier, arXiv 2606.06751), and peers are among the others, so what remains is the slowest of the
    others. What one culprit costs alone is small where another is as slow; together they cost what both hide.
    """
    others = [row for row in range(len(stages[0])) if row not in without]
    if not others:
        return 0.0
    return float(sum(np.mean(own.max(axis=0) - own[others].max(axis=0)) for own in stages))


def distance_to_peers(own: Floats) -> Floats:
    """Mean difference of each row to the median of the other rows, ms."""
    if len(own) < 2:
        return np.zeros(len(own))
    return np.asarray(peer_difference(own).mean(axis=1))
