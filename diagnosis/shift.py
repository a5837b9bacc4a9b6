"""How far apart: paired differences to the peers, and the Hodges–Lehmann shift with its interval."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnosis.limits import ALPHA

Numbers = npt.NDArray[np.floating[Any]]
"""float32 or float64; what comes out has the type of what went in."""


@dataclass(frozen=True)
class Shift:
    """A robust estimate of a difference, ms per step, with the interval that holds it with 99 %."""

    ms: float
    low: float
    high: float


def peer_difference(values: Numbers) -> Numbers:
    """Difference of each rank (axis −2) to the median of the others, step by step (axis −1).

    NaN where the rank's step is not known, or that of no other rank. Whatever slows all alike in a step cancels.
    """
    count = values.shape[-2]
    if np.isnan(values).any():
        return _with_gaps(values)
    # Sorting along the last axis, where values lie side by side, is several times faster.
    ordered = np.sort(np.ascontiguousarray(np.swapaxes(values, -1, -2)), axis=-1)

    def other(index: int) -> Numbers:
        # Leaving out a value up to the one at this place moves the next one there; equal values change nothing.
        below, above = (ordered[..., place].copy()[..., None, :] for place in (index, index + 1))
        return np.asarray(np.where(values > below, below, above))

    low, high = (count - 2) // 2, (count - 1) // 2
    middle = other(low) if low == high else (other(low) + other(high)) / 2
    return np.asarray(values - middle)


def _with_gaps(values: Numbers) -> Numbers:
    ordered = np.sort(values, axis=-2)  # NaN goes last
    count = (~np.isnan(values)).sum(axis=-2, keepdims=True)

    def other(index: npt.NDArray[np.intp]) -> Numbers:
        place = np.clip(index, 0, values.shape[-2] - 2)
        below = np.take_along_axis(ordered, place, axis=-2)
        above = np.take_along_axis(ordered, place + 1, axis=-2)
        return np.asarray(np.where(values > below, below, above))

    middle = (other((count - 2) // 2) + other((count - 1) // 2)) / 2
    return np.asarray(np.where(count > 1, values - middle, np.nan))


def median(values: Numbers, axis: int | tuple[int, ...]) -> Numbers:
    """Median of what is known; NaN where nothing is. The axes stay, with length 1."""
    if not np.isnan(values).any():
        return np.asarray(np.median(values, axis=axis, keepdims=True))  # much faster
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(values, axis=axis, keepdims=True))


def hodges_lehmann(differences: Numbers) -> Shift:
    """The shift of one rank against its peers from its differences (one per block of steps, so that they are
    nearly independent; NaN left out): the median of all pairwise means, with the interval that the signed-rank
    test gives (Hodges and Lehmann 1963; Hollander and Wolfe 1999, section 3.2 and 3.3).

    With so few differences that no interval reaches 99 %, the widest: from the smallest to the largest.
    """
    known = np.asarray(differences, np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return Shift(np.nan, np.nan, np.nan)
    first, second = np.triu_indices(len(known))
    means = np.sort((known[first] + known[second]) / 2)
    skip = max(0, _signed_rank_skip(len(known)))
    return Shift(float(np.median(means)), float(means[skip]), float(means[-1 - skip]))


@functools.cache
def _signed_rank_skip(count: int) -> int:
    """How many pairwise means lie outside the interval at either end: the largest k with P(W ≤ k) ≤ ALPHA / 2,
    W the signed-rank statistic of ``count`` values (its exact distribution); −1 when there is none."""
    chance = np.ones(1)
    for rank in range(1, count + 1):
        longer = np.zeros(len(chance) + rank)
        longer[: len(chance)] += chance / 2
        longer[rank:] += chance / 2
        chance = longer
    return int(np.searchsorted(np.cumsum(chance), ALPHA / 2, side="right")) - 1
