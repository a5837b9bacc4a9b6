"""Blocks of steps, and what the largest statistic over everything tested reaches when blocks are permuted.

Steps resemble their neighbours, so whole blocks of steps are permuted: under the hypothesis that peers are
exchangeable, which of them got which series of a block is arbitrary. The largest statistic over all ranks
and metrics gives p-values that hold for everything that was tested, however it depends on each other
(Westfall and Young 1993, max-T). docs/methods.md compares this with the alternatives.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosis.evidence import Ints
from diagnosis.limits import (
    ALPHA,
    BLOCK_MS,
    BLOCK_STEPS,
    FEWEST_PERMUTATIONS,
    MANY_RANKS,
    MAX_BLOCKS,
    MAX_BLOCKS_OF_MANY,
    MIN_BLOCKS,
    PERMUTATION_WORK,
    PERMUTATIONS,
)
from diagnosis.shift import Numbers, median
from diagnosis.steps import Bools, Floats

Singles = npt.NDArray[np.float32]

SEED = 20_260_329
_EXACT = 4_096
"""Two ranks have 2^blocks relabellings: up to this many, all are taken."""
_MEMORIES = 6
"""Blocks as long as this many memories: neighbours then correlate by less than a tenth, and p-values hold."""
_CYCLIC_FROM = 32
"""From so many peers on, a block's series are shifted around the circle of ranks instead of shuffled: a subgroup
of all permutations, so that the test stays exact, and an order of magnitude faster."""
_CHUNK = 131_072
"""Values worked on at a time: half a MiB, which stays in a core's cache."""
_MEMORY_ROWS = 64
_FEWEST_MEMORY_ROWS = 12
"""Ranks whose autocorrelation is taken (of many metrics: the fewer): more do not change the sum."""
_BIAS_ROUNDS = 5
_SAFETY = 1.5
"""Blocks are taken to resemble each other this much more than was measured: p-values err to the safe side."""
_FURTHEST = 10.0
"""A block counts no further than so many usual scatters from the median peer: one long pause must not hide what all
other blocks say, and ten times the usual in every block is found all the same."""


class TooFewBlocksError(ValueError):
    """The steps make too few independent blocks for a test to say anything."""

    def __init__(self, blocks: int, needed: int, block: int) -> None:
        self.blocks, self.needed, self.block = blocks, needed, block
        super().__init__(f"{blocks} blocks of {block} steps; the test needs {needed}: watch longer")


def blocks_needed(ranks: int) -> int:
    """Fewest blocks with which one rank that stands out in all of them reaches half of ``ALPHA``."""
    return max(MIN_BLOCKS, 1 + math.ceil(math.log(2 / ALPHA) / math.log(ranks)))


def shortest_block(count: int, step_ms: float, ranks: int = 2) -> int:
    """Steps per block before autocorrelation is looked at."""
    most = MAX_BLOCKS if ranks < MANY_RANKS else MAX_BLOCKS_OF_MANY
    return max(BLOCK_STEPS, math.ceil(BLOCK_MS / step_ms), math.ceil(count / most))


@dataclass(frozen=True)
class Cut:
    """How the steps are cut into blocks."""

    length: int
    """Steps per block."""
    inflation: Floats
    """Per metric: how much more the mean over blocks varies than blocks in a shuffled order would tell."""


def cut(differences: Numbers, step_ms: float) -> Cut:
    """Blocks of at least ``BLOCK_STEPS`` and ``BLOCK_MS``, and of ``_MEMORIES`` times the time (integrated
    autocorrelation) after which the differences of ranks to their peers have forgotten themselves.

    ``differences``: metrics × … × ranks × steps; peers are along the axis of ranks. All metrics lengthen the
    blocks as far as the steps suffice; only the first one's memory can make them too few. Raises
    :class:`TooFewBlocksError`.
    """
    ranks, count = differences.shape[-2:]
    shortest = shortest_block(count, step_ms, differences[0].size // count)
    rows = differences.reshape(len(differences), -1, count)
    few = max(_FEWEST_MEMORY_ROWS, min(_MEMORY_ROWS, 512 // len(differences)))
    if rows.shape[1] > few:  # the same whatever the numbers of the ranks
        rows = rows[:, canonical_order(rows[0])[:few]]
    memories = [memory(metric) for metric in rows]
    needed = blocks_needed(ranks)
    longest = count // needed
    # Blocks of one memory length still hold most of the dependence; shorter ones would not.
    least = max(shortest, math.ceil(memories[0].steps))
    if longest < least:
        raise TooFewBlocksError(count // least, needed, least)
    length = min(wanted_block(shortest, max(one.upper for one in memories)), longest)
    return Cut(length, np.array([inflation(_SAFETY * one.upper, length) for one in memories]))


@dataclass(frozen=True)
class Memory:
    """Integrated autocorrelation time, in steps."""

    steps: float
    upper: float
    """With its standard error (Madras and Sokal 1988): taken too short, it would do harm where it matters."""


def inflation(memory_steps: float, length: int) -> float:
    """How much more the mean of blocks of ``length`` steps in a row varies than that of shuffled ones: neighbouring
    blocks still resemble each other. For correlation that decays exponentially."""
    decay = memory_steps / length / 2
    return 1 / (1 - decay * (1 - math.exp(-1 / decay)))


def wanted_block(shortest: int, memory_steps: float) -> int:
    """Steps per block where steps are plenty."""
    return max(shortest, math.ceil(_MEMORIES * memory_steps))


def memory(differences: Numbers) -> Memory:
    """Integrated autocorrelation time in steps: 1 + 2 Σ ρ up to the first ρ < 0.02, ranks (axis 0) together.

    Taken of the order of the values, not of the values: rare long pauses would hide the dependence of all
    other steps.
    """
    count = differences.shape[1]
    gaps = np.isnan(differences)
    if gaps.any():
        differences = differences[~gaps.all(axis=1)]
        if not len(differences):
            return Memory(1.0, 1.0)
        middle = np.nanmedian(differences, axis=1, keepdims=True)
        differences = np.where(np.isnan(differences), middle, differences)
    order = np.empty(differences.shape)
    place = np.argsort(differences, axis=1, kind="stable")
    np.put_along_axis(order, place, np.arange(count, dtype=np.float64)[None], axis=1)
    order[(differences == differences[:, :1]).all(axis=1)] = 0.0
    order -= order.mean(axis=1, keepdims=True)
    # A rank that drifts is a finding, and no reason to trust nothing.
    line = np.arange(count) - (count - 1) / 2
    order -= (order @ line / (line @ line))[:, None] * line
    spectrum = np.abs(np.fft.rfft(order, n=2 * count, axis=1)) ** 2
    lags = np.arange(max(2, count // 4))
    correlation = np.fft.irfft(spectrum.sum(axis=0))[: len(lags)] / (count - lags)
    if correlation[0] <= 0:
        return Memory(1.0, 1.0)
    correlation = correlation / correlation[0]
    found, stop = 1.0, 1
    for _ in range(_BIAS_ROUNDS):
        # Taking the mean away takes τ / n from every correlation, the line as much (Marriott and Pope 1954).
        missing = 2 * found / count
        unbiased = (correlation + missing) / (1 + missing)
        below = np.flatnonzero(unbiased < 0.02)
        stop = int(below[0]) if len(below) else len(unbiased)
        found = max(1.0, float(1 + 2 * unbiased[1:stop].sum()))
    return Memory(found, found * (1 + math.sqrt(2 * (2 * stop + 1) / order.size)))


def canonical_order(rows: Numbers) -> list[int]:
    """An order of the rows (axis 0) that their contents decide and that means nothing: the same verdict follows
    whatever numbers the ranks have."""
    return sorted(
        range(len(rows)), key=lambda row: hashlib.blake2b(rows[row].tobytes(), digest_size=16).digest()
    )


def block_means(values: Numbers, length: int) -> tuple[Floats, Floats]:
    """Means over blocks of steps (axis −1 → blocks), NaN where less than half of a block is known, and each
    block's share of all steps. What is left over goes to the last block: the newest steps count too."""
    count = values.shape[-1]
    bounds = np.arange(count // length) * length
    sizes = np.diff(np.append(bounds, count))
    gaps = np.isnan(values)
    if not gaps.any():
        sums = np.add.reduceat(values, bounds, axis=-1)
        return np.asarray(sums / sizes, np.float64), sizes / count
    sums = np.add.reduceat(np.where(gaps, 0.0, values), bounds, axis=-1)
    known = sizes - np.add.reduceat(gaps.astype(np.int64), bounds, axis=-1)
    means = np.full(known.shape, np.nan)
    np.divide(sums, known, out=means, where=known * 2 >= sizes)
    return means, sizes / count


@dataclass(frozen=True)
class MaxT:
    """Statistics × groups × peers."""

    statistic: Floats
    q: Floats
    """Two-sided, corrected over all statistics, groups and peers; 1 where there is nothing to test."""


def max_t(blocks: Floats, weights: Floats, inflation: Floats) -> MaxT:
    """Test each peer of each group in each statistic: a weighted sum over blocks.

    ``blocks``: statistics × groups × peers × blocks (NaN where not known), differences to peers. ``weights``:
    statistics × blocks. ``inflation``: per statistic (:class:`Cut`). Blocks are relabelled among the peers of
    each group, in all statistics and groups alike, which keeps the dependence between them. Peers with fewer
    blocks than a test needs are not judged.
    """
    statistics, groups, peers, count = blocks.shape
    order = np.array(
        [canonical_order(np.ascontiguousarray(blocks[:, g].swapaxes(0, 1))) for g in range(groups)]
    )
    blocks = np.take_along_axis(blocks, order[None, :, :, None], axis=2)
    known = ~np.isnan(blocks)
    centred = _centred(blocks, known)
    # A drift goes as far as it goes; cut off, it would be a level.
    straight = (weights >= 0).all(axis=1)
    usual = _usual(centred, known)
    usual = np.where(_spread(centred, known, weights) > 0, usual, 0.0)
    # In units of the peers' usual scatter; a constant statistic has nothing to find.
    unit = np.where(usual > 0, usual, np.inf)[..., None, None]
    middle = np.nan_to_num(median(np.where(known, centred, np.nan), axis=2))
    furthest = np.where(straight, _FURTHEST, np.inf)[:, None, None, None]
    values = np.where(known, np.clip((centred - middle) / unit, -furthest, furthest), 0.0)
    spread = _spread(values, known, weights)
    scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 0).astype(np.float32)
    values = values.astype(np.float32)
    shared = (weights**2 / (weights**2).sum(axis=1, keepdims=True)).astype(np.float32)
    fewest = min(blocks_needed(peers), count)
    whole = bool(known.all())
    tables = [_tables(values[number]) for number in range(statistics)]
    seen = [None if whole else _tables(known[number].astype(np.float32)) for number in range(statistics)]
    observed = np.empty((statistics, groups, peers))
    reached: list[Singles] = []

    def of(number: int, labels: Ints) -> Singles:
        weight = weights[number].astype(np.float32)
        got = _relabelled(tables[number], seen[number], weight, shared[number], labels, fewest)
        got *= scale[number][:, None, None]
        return got

    same = _unchanged(peers, count)
    for number in range(statistics):
        observed[number] = of(number, same)[:, 0] / math.sqrt(inflation[number])
    per_chunk = max(1, _CHUNK // (groups * peers))
    for labels in _chunks(peers, count, _drawn(statistics, groups, peers, count), per_chunk):
        largest = np.zeros(len(labels), np.float32)
        for number in range(statistics):
            np.maximum(largest, of(number, labels).max(axis=(0, 2)), out=largest)
        reached.append(largest)
    by_chance = np.sort(np.concatenate(reached))
    # A hair below, so that a relabelling that changes nothing counts as reaching the observed value.
    beyond = len(by_chance) - np.searchsorted(by_chance, observed * (1 - 1e-5), side="left")
    q = beyond / len(by_chance) if is_exact(peers, count) else (1 + beyond) / (1 + len(by_chance))
    place = np.argsort(order, axis=1)[None]
    return MaxT(np.take_along_axis(observed, place, axis=2), np.take_along_axis(np.asarray(q), place, axis=2))


def _centred(blocks: Floats, known: Bools) -> Floats:
    """Less the mean of all peers, which no relabelling changes. 0 where not known."""
    filled = np.where(known, blocks, 0.0)
    number = np.maximum(known.sum(axis=(-1, -2), keepdims=True), 1)
    return np.where(known, filled - filled.sum(axis=(-1, -2), keepdims=True) / number, 0.0)


def _usual(centred: Floats, known: Bools) -> Floats:
    """How far peers lie apart within a block, as a rule (statistics × groups): 1.4826 · MAD over the peers, the
    median over blocks; the root of the mean square where most peers are equal. No relabelling changes it."""
    apart = np.where(known, centred, np.nan)
    within = 1.4826 * median(np.abs(apart - median(apart, axis=2)), axis=2)
    usual = median(within, axis=3)[:, :, 0, 0]
    rough = np.sqrt((centred**2).sum(axis=(2, 3)) / np.maximum(known.sum(axis=(2, 3)), 1))
    return np.asarray(np.where(usual > 1e-9 * rough, usual, rough))


def _spread(centred: Floats, known: Bools, weights: Floats) -> Floats:
    """Standard deviation of the weighted sum over relabellings (statistics × groups); 0 where it is rounding."""
    number = np.maximum(known.sum(axis=2), 1)
    mean = centred.sum(axis=2) / number
    variance = np.where(known, (centred - mean[:, :, None]) ** 2, 0.0).sum(axis=2) / number
    spread = np.sqrt((variance * weights[:, None, :] ** 2).sum(axis=-1))
    rounding = 1e-9 * (1 + np.abs(centred).max(axis=(2, 3))) * np.abs(weights).max(axis=1)[:, None]
    return np.where(spread > rounding, spread, 0.0)


def is_exact(peers: int, blocks: int) -> bool:
    """Whether all relabellings are taken."""
    return peers == 2 and 2**blocks <= _EXACT


def _drawn(statistics: int, groups: int, peers: int, blocks: int) -> int:
    work = statistics * groups * peers * blocks
    return max(FEWEST_PERMUTATIONS, min(PERMUTATIONS, PERMUTATION_WORK // work))


def _chunks(peers: int, blocks: int, drawn: int, per_chunk: int) -> list[Ints]:
    """Relabellings × blocks × peers: whose series each peer gets; × blocks alone: by how much all are shifted."""
    if is_exact(peers, blocks):
        flips = np.array(list(itertools.product([0, 1], repeat=blocks)), np.int64)
        return [np.stack([flips, 1 - flips], axis=2)]
    random = np.random.default_rng([SEED, peers, blocks])
    sizes = [min(per_chunk, drawn - done) for done in range(0, drawn, per_chunk)]
    if peers >= _CYCLIC_FROM:
        shifts = random.integers(0, peers, (drawn, blocks))
        return np.split(shifts, np.cumsum(sizes)[:-1])
    labels = np.argsort(random.random((drawn, blocks, peers)), axis=2)
    return np.split(labels, np.cumsum(sizes)[:-1])


def _relabelled(
    values: Singles,
    seen: Singles | None,
    weights: Singles,
    shares: Singles,
    labels: Ints,
    fewest: int,
) -> Singles:
    """The statistic of each peer after each relabelling: groups × relabellings × peers.

    The weighted sum over blocks, over the peer's own scatter where that exceeds the usual (1): peers that are
    equally restless are exchangeable and share one scatter, but the luck of a restless one would look like
    slowness (studentized permutation: Janssen 1997; Chung and Romano 2013). Scatter is taken from neighbouring
    blocks, so that an onset or a drift is no scatter. ``seen``: 1 where a block is known, None where all are.
    """
    blocks = len(values)
    shape = (len(values[0]), len(labels), values[0].shape[-1])
    total, squares = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    share, pairs, number = (
        np.zeros(shape, np.float32),
        np.zeros(shape, np.float32),
        np.zeros(shape, np.float32),
    )
    first = before = seen_before = total
    for block in range(blocks):
        series = values[block][:, labels[:, block]]
        total += weights[block] * series
        first = first if block else series
        step = series - before if block else None
        if seen is not None:
            here = seen[block][:, labels[:, block]]
            share += shares[block] * here
            number += here
            if step is not None:
                step *= here * seen_before
                pairs += here * seen_before
            seen_before = here
        if step is not None:
            squares += np.multiply(step, step, out=step)
        before = series
    if seen is None and blocks > 2:
        squares -= (before - first) ** 2 / (blocks - 1)  # an even rise is no scatter
        np.maximum(squares, 0, out=squares)
    squares /= 2 * np.maximum(pairs, 1) if seen is not None else max(1, 2 * (blocks - 1))
    scatter = np.sqrt(squares, out=squares)
    np.maximum(scatter, 1, out=scatter)
    np.abs(total, out=total)
    total /= scatter
    if seen is None:
        return total
    # A peer with fewer blocks scatters more; one with too few says nothing.
    return np.asarray(
        np.where(number > fewest - 0.5, total / np.sqrt(np.maximum(share, 1e-6)), 0), np.float32
    )


def _tables(series: Singles) -> Singles:
    """Blocks × groups × what a label picks: one peer's value, or the values of all peers from one on, around the
    circle. ``series``: groups × peers × blocks."""
    columns = np.ascontiguousarray(np.moveaxis(series, -1, 0))
    peers = columns.shape[-1]
    if peers < _CYCLIC_FROM:
        return columns
    around = np.concatenate([columns, columns], axis=-1)
    return np.lib.stride_tricks.sliding_window_view(around, peers, axis=-1)


def _unchanged(peers: int, blocks: int) -> Ints:
    """The label that leaves all as it is."""
    if peers >= _CYCLIC_FROM:
        return np.zeros((1, blocks), np.int64)
    return np.broadcast_to(np.arange(peers), (1, blocks, peers))
