"""Steps that become longer little by little, with no step at which they turned slow: heat, a leak, growing inputs.

A change-point test sees nothing of it, or stairs that are not there. So: medians of blocks of steps, on which
a single pause or heavy tails do nothing; a level from which on a straight line rises (broken-stick regression,
Hinkley 1971: each bend is tried, least squares); and the trend test of Mann (1945) and Kendall, exact, on
blocks so long that neighbours have forgotten each other (autocorrelated steps make runs that look like trends:
Hamed and Rao 1998).
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np

from diagnosis.limits import (
    ALPHA,
    BLOCK_MS,
    BLOCK_STEPS,
    CHANGE_MADS,
    CHANGE_SHARE,
    MIN_BLOCKS,
)
from diagnosis.permutation import memory, wanted_block
from diagnosis.steps import Floats

_MAX_BLOCKS = 240


@dataclass(frozen=True)
class Drift:
    """Steps that rise along a line from ``first`` to the newest one; before it, they stand on ``before_ms``."""

    first: int
    """Step at which the rise begins; the first of the series where it rises from the start."""
    before_ms: float
    now_ms: float
    """Where the line stands at the newest step."""
    per_step_ms: float
    error: float
    """Sum of squares that level and line leave, per step."""
    p: float
    """Chance of such a trend, or a clearer one, in steps without any."""

    @property
    def ms(self) -> float:
        return self.now_ms - self.before_ms


def drift(step_ms: Floats) -> Drift | None:
    """The rise of a series of step times (ms, in the order of time) that goes on until its end; None where it does
    not matter (``CHANGE_SHARE``), is not above the noise, may be chance, or is a step rather than a line."""
    count = len(step_ms)
    length = block_length(step_ms)
    if count // length < 2 * MIN_BLOCKS:
        return None
    at, medians = block_medians(step_ms, length)
    found = _bent(at, medians)
    if found is None:
        return None
    bend, low, slope = found
    rise = slope * (count - bend)
    left = medians - low - slope * np.maximum(at - bend, 0.0)
    if float((left**2).sum()) >= _error_of_a_step(medians):
        return None
    noise = 1.4826 * float(np.median(np.abs(left - np.median(left))))
    if rise < CHANGE_SHARE * low or rise < CHANGE_MADS * noise:
        return None
    steps = step_ms - low - slope * np.maximum(np.arange(count) - bend, 0.0)
    apart = wanted_block(length, memory(steps[None]).upper)
    if count // apart < MIN_BLOCKS:
        return None
    _, independent = block_medians(step_ms, apart)
    p = _rising_by_chance(independent)
    if p > ALPHA:
        return None
    return Drift(round(bend), low, low + rise, slope, float((left**2).mean()), p)


def block_length(step_ms: Floats) -> int:
    """Steps per block: as many as what is compared elsewhere, and not more blocks than tell something."""
    usual = float(np.median(step_ms))
    return max(BLOCK_STEPS, math.ceil(BLOCK_MS / max(usual, 1e-6)), math.ceil(len(step_ms) / _MAX_BLOCKS))


def blocks_of_time(step_ms: Floats) -> list[int]:
    """Where blocks of steps begin that last as long as what is compared elsewhere, each by its own steps; then the
    number of steps."""
    count = len(step_ms)
    least = max(BLOCK_STEPS, math.ceil(count / _MAX_BLOCKS))
    elapsed = np.concatenate([[0.0], np.cumsum(np.maximum(step_ms, 0.0))])
    bounds = [0]
    while True:
        end = int(np.searchsorted(elapsed, elapsed[bounds[-1]] + BLOCK_MS))
        end = max(end, bounds[-1] + least)
        if end > count:
            break
        bounds.append(end)
    # What is left over goes to the last.
    return [*bounds[:-1], count] if len(bounds) > 1 else [0, count]


def block_medians(step_ms: Floats, length: int) -> tuple[Floats, Floats]:
    """Middle of each whole block (what is left over goes to the last), and the median of its steps."""
    blocks = len(step_ms) // length
    bounds = [*range(0, blocks * length, length), len(step_ms)]
    at = np.array([(a + b) / 2 for a, b in itertools.pairwise(bounds)])
    return at, np.array([np.median(step_ms[a:b]) for a, b in itertools.pairwise(bounds)])


def error_of_levels(step_ms: Floats, bounds: list[int]) -> float:
    """What levels between ``bounds`` leave, as :attr:`Drift.error`."""
    at, medians = block_medians(step_ms, block_length(step_ms))
    place = np.searchsorted(bounds[1:-1], at, side="right")
    left = np.concatenate(
        [medians[place == level] - np.mean(medians[place == level]) for level in np.unique(place)]
    )
    return float((left**2).mean())


def _bent(at: Floats, medians: Floats) -> tuple[float, float, float] | None:
    """Where a level turns into a rising line, the level, and the slope; the bend is at 0 where a line alone does as
    well (one parameter less: Schwarz's criterion). None where nothing rises."""
    count = len(at)
    best: tuple[float, float, float, float] | None = None
    for begin in range(count - MIN_BLOCKS + 1):
        bend = 0.0 if begin == 0 else float(at[begin])
        over = np.maximum(at - bend, 0.0)
        centred = over - over.mean()
        slope = float(centred @ medians / (centred @ centred))
        low = float(medians.mean() - slope * over.mean())
        error = float(((medians - low - slope * over) ** 2).sum()) + 1e-12
        score = count * math.log(error) + (math.log(count) if begin else 0.0)
        if slope > 0 and (best is None or score < best[0]):
            best = score, bend, low, slope
    return None if best is None or best[2] <= 0 else best[1:]


def _error_of_a_step(medians: Floats) -> float:
    """Sum of squares that two levels leave, with the best place for the step between them."""
    count = np.arange(1, len(medians))
    centred = medians - medians.mean()
    before = np.cumsum(centred)[:-1]
    gain = before**2 * (1 / count + 1 / (len(medians) - count))
    return float((centred**2).sum() - gain.max())


def _rising_by_chance(blocks: Floats) -> float:
    """Chance that a shuffled order has as many pairs in rising order (Mann–Kendall, one-sided, exact). Ties count
    against it."""
    count = len(blocks)
    rising = int(np.triu(blocks[None, :] > blocks[:, None], 1).sum())
    return _chance_of_pairs(count, rising)


@functools.cache
def _chance_of_pairs(count: int, rising: int) -> float:
    """P(K ≥ rising) for the number of rising pairs K of a random order of ``count`` values: the distribution of
    inversions, value by value."""
    chance = np.ones(1)
    for placed in range(2, count + 1):
        chance = np.convolve(chance, np.full(placed, 1 / placed))
    return float(min(1.0, chance[rising:].sum()))
