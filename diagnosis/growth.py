"""Has one rank turned slower than it was? A permutation test of each rank against its own past."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from diagnosis.limits import ALPHA, MIN_BLOCKS, PERMUTATIONS
from diagnosis.permutation import SEED, TooFewBlocksError, inflation, memory, shortest_block, wanted_block
from diagnosis.steps import Floats


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
    memories = [memory(part - part.mean(axis=1, keepdims=True)) for part in stretches]
    forgets = max(memories, key=lambda one: one.upper)
    count = before.shape[1] + after.shape[1]
    shortest = max(shortest_block(count, step_ms), math.ceil(forgets.steps))

    def blocks_of(length: int) -> tuple[int, int]:
        return before.shape[1] // length, after.shape[1] // length

    def enough(length: int) -> bool:
        old, new = blocks_of(length)
        return min(old, new) > 0 and math.comb(old + new, new) >= 2 / ALPHA

    if not enough(shortest):
        raise TooFewBlocksError(min(blocks_of(shortest)), MIN_BLOCKS, shortest)
    wanted = wanted_block(shortest, forgets.upper)
    length = next(length for length in range(wanted, shortest - 1, -1) if enough(length))
    old, new = blocks_of(length)
    means = [
        part[:, : blocks * length].reshape(len(part), blocks, length).mean(axis=2)
        for part, blocks in zip(stretches, (old, new), strict=True)
    ]
    blocks = np.concatenate(means, axis=1)
    labels = np.arange(old + new) >= old
    random = np.random.default_rng(SEED)
    drawn = np.argsort(random.random((PERMUTATIONS, old + new)), axis=1)
    weights = np.where(labels[drawn], 1 / new, -1 / old)
    grown = blocks @ weights.T
    observed = blocks @ np.where(labels, 1 / new, -1 / old) / math.sqrt(inflation(forgets.steps, length))
    spread = np.sqrt(np.mean(grown**2, axis=1))
    scale = np.where(spread > 1e-9 * (1 + np.abs(blocks).max(axis=1)), spread, np.inf)
    largest = np.abs(grown / scale[:, None]).max(axis=0)
    reached = largest[:, None] >= np.abs(observed / scale) * (1 - 1e-9)
    effect = after.mean(axis=1) - before.mean(axis=1)
    return GrowthTest(np.asarray(effect), (1 + reached.sum(axis=0)) / (1 + PERMUTATIONS))
