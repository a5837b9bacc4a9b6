"""Rank-outlier tests: does one rank differ from its peers by more than chance, step for step?

Each step compares a rank with the median of the others in the same step, so whatever slows all alike
cancels. Steps resemble their neighbours, so whole blocks of steps are permuted: under the hypothesis that
ranks are exchangeable, which rank got which series of a block is arbitrary. The largest statistic over all
ranks and metrics gives p-values that hold for everything that was tested (Westfall and Young 1993, max-T).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from diagnosis.evidence import Ints
from diagnosis.limits import ALPHA, BLOCK_MS, BLOCK_STEPS, MAX_BLOCKS, MIN_BLOCKS, PERMUTATIONS
from diagnosis.steps import Floats

_SEED = 20_260_329
_EXACT = 4_096
"""Two ranks have 2^blocks relabellings: up to this many, all are taken."""
_MEMORIES = 6
"""Blocks as long as this many memories: neighbours then correlate by less than a tenth, and p-values hold."""
_CHUNK = 2_000_000


class TooFewBlocksError(ValueError):
    """The steps make too few independent blocks for a test to say anything."""

    def __init__(self, blocks: int, needed: int, block: int) -> None:
        self.blocks, self.needed, self.block = blocks, needed, block
        super().__init__(f"{blocks} blocks of {block} steps; the test needs {needed}: watch longer")


@dataclass(frozen=True)
class RankTest:
    """Metrics × ranks: ``effect`` is the mean paired difference to the median of the other ranks, ``q`` the
    two-sided p-value corrected over all metrics and ranks."""

    effect: Floats
    q: Floats
    block: int
    """Steps per block."""
    blocks: int


def peer_difference(values: Floats) -> Floats:
    """Difference of each rank (axis −2) to the median of the others, step by step (axis −1)."""
    count = values.shape[-2]
    ordered = np.sort(values, axis=-2)
    # Which place each rank has; the median of the others then needs no loop over ranks.
    place = np.argsort(np.argsort(values, axis=-2, kind="stable"), axis=-2, kind="stable")
    low, high = (count - 2) // 2, (count - 1) // 2

    def other(index: int) -> Floats:
        below = np.take(ordered, [index], axis=-2)
        above = np.take(ordered, [index + 1], axis=-2)
        return np.asarray(np.where(place > index, below, above))

    return np.asarray(values - (other(low) + other(high)) / 2)


def blocks_needed(ranks: int) -> int:
    """Fewest blocks with which one rank that stands out in all of them reaches half of ``ALPHA``."""
    return max(MIN_BLOCKS, 1 + math.ceil(math.log(2 / ALPHA) / math.log(ranks)))


def block_length(differences: Floats, step_ms: float) -> int:
    """Steps per block: at least ``BLOCK_STEPS`` and ``BLOCK_MS``, and ``_MEMORIES`` times the time (integrated
    autocorrelation) after which the differences of ranks to their peers have forgotten themselves.

    ``differences``: metrics × ranks × steps. All metrics lengthen the blocks as far as the steps suffice;
    only the first one's memory can make them too few. Raises :class:`TooFewBlocksError`.
    """
    ranks, count = (int(size) for size in differences.shape[1:])
    shortest = max(BLOCK_STEPS, math.ceil(BLOCK_MS / step_ms), math.ceil(count / MAX_BLOCKS))
    memory = [_memory(metric) for metric in differences]
    needed = blocks_needed(ranks)
    longest = count // needed
    # Blocks of one memory length still hold most of the dependence; shorter ones would not.
    least = max(shortest, math.ceil(memory[0]))
    if longest < least:
        raise TooFewBlocksError(count // least, needed, least)
    return min(max(shortest, math.ceil(_MEMORIES * max(memory))), longest)


def _memory(differences: Floats) -> float:
    """Integrated autocorrelation time in steps: 1 + 2 Σ ρ up to the first ρ < 0.02, ranks together.

    Taken of the order of the values, not of the values: rare long pauses would hide the dependence of all
    other steps.
    """
    count = differences.shape[1]
    order = np.argsort(np.argsort(differences, axis=1, kind="stable"), axis=1, kind="stable").astype(
        np.float64
    )
    order[(differences == differences[:, :1]).all(axis=1)] = 0.0
    order -= order.mean(axis=1, keepdims=True)
    spectrum = np.abs(np.fft.rfft(order, n=2 * count, axis=1)) ** 2
    correlation = np.fft.irfft(spectrum, axis=1)[:, : max(2, count // 4)].sum(axis=0)
    if correlation[0] <= 0:
        return 1.0
    correlation = correlation / correlation[0]
    below = np.flatnonzero(correlation < 0.02)
    stop = int(below[0]) if len(below) else len(correlation)
    return float(1 + 2 * correlation[1:stop].sum())


def rank_outliers(values: Floats, step_ms: float) -> RankTest:
    """Test every rank against the others in every metric at once.

    ``values``: metrics × ranks × steps, without gaps; the first metric decides whether they suffice.
    ``step_ms``: mean step. The result depends on the values alone, not on the order of ranks.
    Raises :class:`TooFewBlocksError`.
    """
    ranks, count = values.shape[1:]
    order = sorted(range(ranks), key=lambda r: (float(values[0, r].mean()), values[:, r].tobytes()))
    differences = peer_difference(values[:, order])
    length = block_length(differences, step_ms)
    blocks = count // length
    # The steps left over go to the last block: the newest ones count too.
    bounds = np.arange(blocks) * length
    sums = np.add.reduceat(differences, bounds, axis=2)
    effect = differences.mean(axis=2)
    # Distance from the mean rank, which no relabelling changes: then no metric can reach further than one in
    # which a single rank stands out in every block.
    centre = effect.mean(axis=1, keepdims=True)
    largest, spread = _null(sums / count - centre[:, :, None] / blocks)
    scale = np.where(spread > 0, spread, 1.0)[:, None]
    statistic = np.where(spread[:, None] > 0, np.abs(effect - centre) / scale, 0.0)
    # A hair below, so that a relabelling that changes nothing counts as reaching the observed value.
    reached = largest[:, None, None] >= statistic * (1 - 1e-9)
    q = reached.mean(axis=0) if _is_exact(ranks, blocks) else (1 + reached.sum(axis=0)) / (1 + len(largest))
    back = np.argsort(order)
    return RankTest(effect[:, back], q[:, back], length, blocks)


@dataclass(frozen=True)
class GrowthTest:
    """Per rank: ``effect`` is the mean after less the mean before, ``q`` the two-sided p-value corrected over
    all ranks."""

    effect: Floats
    q: Floats


def growth(before: Floats, after: Floats, step_ms: float) -> GrowthTest:
    """Test every rank against its own past: which blocks of steps are old and which are new is permuted, for
    all ranks at once, and the largest growth over ranks gives the p-values (max-T, as for peers).

    ``before``, ``after``: ranks × steps, ms. Where the past ends was found in the steps themselves, so the
    p-values are optimistic where nothing changed: they alone accuse nobody. Raises
    :class:`TooFewBlocksError`.
    """
    stretches = (before, after)
    memory = max(_memory(part - part.mean(axis=1, keepdims=True)) for part in stretches)
    count = before.shape[1] + after.shape[1]
    shortest = max(
        BLOCK_STEPS, math.ceil(BLOCK_MS / step_ms), math.ceil(count / MAX_BLOCKS), math.ceil(memory)
    )

    def blocks_of(length: int) -> tuple[int, int]:
        return before.shape[1] // length, after.shape[1] // length

    def enough(length: int) -> bool:
        old, new = blocks_of(length)
        return min(old, new) > 0 and math.comb(old + new, new) >= 2 / ALPHA

    if not enough(shortest):
        raise TooFewBlocksError(min(blocks_of(shortest)), MIN_BLOCKS, shortest)
    wanted = max(shortest, math.ceil(_MEMORIES * memory))
    length = next(length for length in range(wanted, shortest - 1, -1) if enough(length))
    old, new = blocks_of(length)
    means = [
        part[:, : blocks * length].reshape(len(part), blocks, length).mean(axis=2)
        for part, blocks in zip(stretches, (old, new), strict=True)
    ]
    blocks = np.concatenate(means, axis=1)
    labels = np.arange(old + new) >= old
    random = np.random.default_rng(_SEED)
    drawn = np.argsort(random.random((PERMUTATIONS, old + new)), axis=1)
    weights = np.where(labels[drawn], 1 / new, -1 / old)
    grown = blocks @ weights.T
    observed = blocks @ np.where(labels, 1 / new, -1 / old) / math.sqrt(_inflation(memory / length))
    spread = np.sqrt(np.mean(grown**2, axis=1))
    scale = np.where(spread > 1e-9 * (1 + np.abs(blocks).max(axis=1)), spread, np.inf)
    largest = np.abs(grown / scale[:, None]).max(axis=0)
    reached = largest[:, None] >= np.abs(observed / scale) * (1 - 1e-9)
    effect = after.mean(axis=1) - before.mean(axis=1)
    return GrowthTest(np.asarray(effect), (1 + reached.sum(axis=0)) / (1 + PERMUTATIONS))


def _inflation(memories: float) -> float:
    """How much more two stretches in a row vary than stretches of shuffled blocks do: neighbouring blocks
    still resemble each other. For correlation that decays exponentially; ``memories`` per block's length."""
    decay = memories / 2
    return 1 / (1 - decay * (1 - math.exp(-1 / decay))) if decay > 0 else 1.0


def _is_exact(ranks: int, blocks: int) -> bool:
    return ranks == 2 and 2**blocks <= _EXACT


def _null(sums: Floats) -> tuple[Floats, Floats]:
    """Largest standardised statistic of each relabelling, and the spread per metric that standardises.

    ``sums``: metrics × ranks × blocks, each block's share of the mean difference.
    """
    metrics, ranks, blocks = sums.shape
    batches = list(_relabellings(ranks, blocks, metrics))
    column = np.arange(blocks)
    means = [sums[:, labels, column].sum(axis=-1) for labels in batches]  # metrics × relabellings × ranks
    all_means = np.concatenate(means, axis=1)
    spread = np.sqrt(np.mean(all_means**2, axis=(1, 2)))
    # Rounding of constant metrics is not a spread.
    spread = np.where(spread > 1e-9 * (1 + np.abs(sums).max(axis=(1, 2))), spread, 0.0)
    scale = np.where(spread > 0, spread, np.inf)[:, None, None]
    return np.abs(all_means / scale).max(axis=(0, 2)), spread


def _relabellings(ranks: int, blocks: int, metrics: int) -> list[Ints]:
    """Relabellings × ranks × blocks: which rank's series each rank gets in each block. In chunks."""
    if _is_exact(ranks, blocks):
        flips = np.array(list(itertools.product([0, 1], repeat=blocks)), np.int64)
        return [np.stack([flips, 1 - flips], axis=1)]
    random = np.random.default_rng(_SEED)
    per_chunk = max(1, _CHUNK // (ranks * blocks * metrics))
    chunks: list[Ints] = []
    for done in range(0, PERMUTATIONS, per_chunk):
        size = min(per_chunk, PERMUTATIONS - done)
        draw = random.random((size, ranks, blocks))
        chunks.append(np.argsort(draw, axis=1))
    return chunks
