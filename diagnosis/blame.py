"""Which ranks hold the job up, and what that costs: tests over the account, no words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from diagnosis.limits import ALPHA, BLOCK_STEPS, CHANGE_MADS, MIN_EFFECT_MS, MIN_EFFECT_SHARE
from diagnosis.outliers import RankTest, growth, peer_difference, rank_outliers
from diagnosis.steps import Floats


@dataclass(frozen=True)
class Tested:
    """One tested difference of one rank in one metric, ms per step."""

    effect: float
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


def matters(effect_ms: float, step_ms: float) -> bool:
    return effect_ms >= max(MIN_EFFECT_MS, MIN_EFFECT_SHARE * step_ms)


def by_peers(values: Floats, groups: list[list[int]], step_ms: float) -> Blame:
    """Ranks that take longer than their peers.

    ``values``: metrics × ranks × steps (ms), own time first. ``groups``: rows that are peers. Found ranks are
    taken out and the rest is tested again, so that a great fault does not hide a smaller one; no more than
    half of a group can be found that way. Raises :class:`diagnosis.outliers.TooFewBlocksError`.
    """
    culprits: list[int] = []
    tests: dict[tuple[int, int], Tested] = {}
    odd: list[int] = []
    tested = [group for group in groups if len(group) > 1]
    for group in tested:
        left = list(group)
        while len(left) > 1:
            test = rank_outliers(values[:, left], step_ms)
            q = np.minimum(1.0, test.q * len(tested))
            slow = _standing_out(test, q, step_ms, +1)
            if not slow or len(group) - len(left) + len(slow) > len(group) / 2:
                if len(left) == len(group) and not slow:
                    odd += [left[place] for place in _standing_out(test, q, step_ms, -1)]
                break
            for place in slow:
                culprits.append(left[place])
                for metric in range(len(values)):
                    tests[metric, left[place]] = Tested(
                        float(test.effect[metric, place]), float(q[metric, place])
                    )
            left = [row for place, row in enumerate(left) if place not in slow]
    return Blame(tuple(sorted(culprits)), "peers", tests, tuple(sorted(odd)))


def _standing_out(test: RankTest, q: Floats, step_ms: float, sign: int) -> list[int]:
    own = sign * test.effect[0]
    return [
        place for place, effect in enumerate(own) if q[0, place] <= ALPHA and matters(float(effect), step_ms)
    ]


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
