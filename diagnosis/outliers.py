"""Rank-outlier tests: does one rank differ from its peers by more than chance, step for step?

Each step compares a rank with the median of the others in the same step, so whatever slows all alike cancels.
What is tested together is corrected together: permutation.py says how, docs/methods.md why this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diagnosis.limits import EVIDENCE_PEERS, TAIL_MADS, TAIL_STEP_SHARE
from diagnosis.permutation import (
    TooFewBlocksError,
    block_means,
    canonical_order,
    cut,
    max_t,
)
from diagnosis.shift import Numbers, median, peer_difference
from diagnosis.steps import Floats

__all__ = ["TooFewBlocksError", "peer_difference", "rank_outliers"]

Metrics = Numbers | Sequence[Numbers]
"""Metrics × ranks × steps: one array, or one of each metric."""


@dataclass(frozen=True)
class RankTest:
    """Metrics × ranks: ``effect`` is the mean paired difference to the median of the other ranks, ``q`` the
    two-sided p-value corrected over all metrics and ranks. A rank with too few steps: effect NaN or q 1."""

    effect: Floats
    q: Floats
    block: int
    """Steps per block."""
    blocks: int


def rank_outliers(values: Numbers, step_ms: float) -> RankTest:
    """Test every rank against the others in every metric at once.

    ``values``: metrics × ranks × steps, NaN where a step is not known; the first metric decides whether the
    steps suffice. ``step_ms``: mean step. The result depends on the values alone, not on the order of ranks.
    Raises :class:`TooFewBlocksError`.
    """
    differences = peer_difference(values)
    made = cut(differences, step_ms)
    blocks, sizes = block_means(differences, made.length)
    test = max_t(blocks[:, None], np.broadcast_to(sizes, (len(values), len(sizes))), made.inflation)
    return RankTest(_mean(differences), test.q[:, 0], made.length, len(sizes))


@dataclass(frozen=True)
class OwnTest:
    """What one measure, the own time, says of the ranks of several groups; groups × peers. The three tests are
    corrected together over all ranks of all groups."""

    effect: Floats
    """Mean difference to the median of the other peers, ms per step."""
    q: Floats
    rare_share: Floats
    """Share of the steps in which the rank stands out though it need not do so in the mean."""
    rare_ms: Floats
    """What those steps cost on average over all steps."""
    rare_q: Floats
    drift_ms: Floats
    """By how much the difference grew from the first block to the last (straight line)."""
    drift_q: Floats
    blocks: Floats
    """Groups × peers × blocks: mean differences, NaN where not known."""
    differences: Numbers
    """Groups × peers × steps."""
    block: int


def own_outliers(own: Numbers, step_ms: float) -> OwnTest:
    """Test every rank of groups of one size against its peers: by its mean, by how often a single step stands
    out, and by a drift.

    ``own``: groups × peers × steps, NaN where not known. A rank that is slow in every fiftieth step, or a little
    more from block to block, hides in the mean. Raises :class:`TooFewBlocksError`.
    """
    differences = peer_difference(own)
    made = cut(differences[None], step_ms)
    blocks, sizes = block_means(differences, made.length)
    outlying = _outlying(differences, step_ms)
    rare, _ = block_means(outlying, made.length)
    with_all = np.asarray(~np.isnan(blocks).any(axis=-1, keepdims=True))
    slopes = np.where(with_all, blocks, np.nan)  # with gaps, a level would look like a drift
    middle = np.cumsum(sizes) - sizes / 2
    weights = sizes * (middle - (middle * sizes).sum())
    weights /= (weights * middle).sum() / (middle[-1] - middle[0])
    test = max_t(
        np.stack([blocks, rare, slopes]), np.stack([sizes, sizes, weights]), made.inflation.repeat(3)
    )
    excess = np.where(outlying > 0, differences, 0.0)
    return OwnTest(
        effect=_mean(differences),
        q=test.q[0],
        rare_share=_mean(outlying),
        rare_ms=np.asarray(excess.mean(axis=-1), np.float64),
        rare_q=test.q[1],
        drift_ms=np.where(with_all[..., 0], (np.nan_to_num(blocks) * weights).sum(axis=-1), 0.0),
        drift_q=test.q[2],
        blocks=blocks,
        differences=differences,
        block=made.length,
    )


def _outlying(differences: Numbers, step_ms: float) -> Numbers:
    """1 where a single step stands out, else 0; NaN stays."""
    spread = median(np.abs(differences - median(differences, axis=-1)), axis=(-1, -2))
    limit = np.maximum(TAIL_STEP_SHARE * step_ms, TAIL_MADS * 1.4826 * spread)
    return np.asarray(np.where(np.isnan(differences), np.nan, differences > limit), differences.dtype)


def set_series(differences: Numbers, sets: Sequence[Sequence[int]]) -> Floats:
    """Sets × steps: the mean over a set's ranks of the difference of each to its peers; NaN where none is known.

    ``differences``: ranks × steps. ``sets``: rows.
    """
    known = ~np.isnan(differences)
    filled = np.where(known, differences, 0.0)
    series = np.full((len(sets), differences.shape[1]), np.nan)
    for place, rows in enumerate(sets):
        count = np.asarray(known[list(rows)].sum(axis=0))
        np.divide(filled[list(rows)].sum(axis=0), count, out=series[place], where=count > 0)
    return series


def set_outliers(series: Floats, step_ms: float) -> Floats:
    """Test whole sets (a node's ranks, a switch's) against the other sets of their kind: q-values per set.

    ``series``: of :func:`set_series`, at least two sets. Whole sets are relabelled, never single ranks: members
    share a machine and its noise, and rank by rank that would look like many agreeing witnesses. Raises
    :class:`TooFewBlocksError`.
    """
    made = cut(series[None], step_ms)
    blocks, sizes = block_means(series, made.length)
    return np.asarray(max_t(blocks[None, None], sizes[None], made.inflation).q[0, 0])


def metric_outliers(
    values: Metrics, slow: Sequence[int], peers: Sequence[Sequence[int]], step_ms: float
) -> tuple[Floats, Floats]:
    """In which metrics ranks that were found already differ from their peers: effects and q-values, metrics × slow.

    ``values``: metrics × ranks × steps. ``peers``: of each of ``slow``, at least one. Corrected over all metrics
    and all of ``slow``; those were found by another test, at ALPHA, so that a healthy job never comes here. Of many
    peers, the same few are taken whatever their numbers. Raises :class:`TooFewBlocksError`.
    """
    few = min(EVIDENCE_PEERS, min(len(rows) for rows in peers))
    pools = []
    for row, others in zip(slow, peers, strict=True):
        order = canonical_order(np.ascontiguousarray(values[0][list(others)]))
        pools.append([row, *(others[place] for place in order[:few])])
    differences = peer_difference(np.stack([metric[np.array(pools)] for metric in values]))
    made = cut(differences, step_ms)
    blocks, sizes = block_means(differences, made.length)
    test = max_t(blocks, np.broadcast_to(sizes, (len(values), len(sizes))), made.inflation)
    return _mean(differences[:, :, 0]), test.q[:, :, 0]


def _mean(values: Numbers) -> Floats:
    """Mean over steps of what is known; NaN where nothing is."""
    gaps = np.isnan(values)
    if not gaps.any():
        return np.asarray(values.mean(axis=-1, dtype=np.float64))
    known = np.asarray((~gaps).sum(axis=-1))
    mean = np.full(known.shape, np.nan)
    np.divide(np.where(gaps, 0.0, values).sum(axis=-1), known, out=mean, where=known > 0)
    return mean
