"""How often each way of correcting for many tests accuses a rank of a healthy job, and finds a slow one.

Simulated jobs: own times of ranks, 30 ms a step, in one or more metrics. Four ways are compared on the same jobs:
what the engine does (blocks of steps relabelled, largest statistic over everything, studentized), the same with
single steps instead of blocks, and Benjamini–Yekutieli (2001) over signed-rank tests of every rank and metric, on
means of the same blocks and on single steps. A diagnosis is wrong when anything at all is found.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.signal import lfilter

from diagnosis import permutation
from diagnosis.limits import ALPHA
from diagnosis.outliers import own_outliers, rank_outliers
from diagnosis.permutation import Cut, TooFewBlocksError, block_means, cut, max_t
from diagnosis.shift import peer_difference

Floats = npt.NDArray[np.float64]
STEP_MS = 100.0
"""Ten steps a second: the shortest block is ten steps."""
DRAWN = 499
"""Relabellings: fewer than the engine's, for time; p-values stay exact."""
SHAPES = ((1, 2, 200), (1, 4, 60), (1, 8, 200), (8, 8, 200), (1, 64, 200))
LARGEST = (4, 1024, 600)


def main() -> None:
    engines, permutation.PERMUTATIONS = permutation.PERMUTATIONS, DRAWN
    try:
        _tables()
    finally:
        permutation.PERMUTATIONS = engines


def _tables() -> None:
    began = time.perf_counter()
    head = f"{'':12}{'metrics × ranks × steps':>24}{'jobs':>6}{'refused':>9}" + "".join(
        f"{name:>15}" for name in WAYS
    )
    print(
        f"Found in healthy jobs (nominal {ALPHA:.0%}), share of those not refused for too few blocks:\n{head}"
    )
    for name, noise in HEALTHY.items():
        for shape in SHAPES:
            _row(name, shape, 200 if shape[1] < 64 else 50, noise, 0.0)
    _row("AR 0.5", LARGEST, 15, HEALTHY["AR 0.5"], 0.0)
    print(f"\nRank found when it is slower by 5, 10, 20 % (noise: 10 % of the step, AR 0.5):\n{head}")
    for share in (0.05, 0.10, 0.20):
        for shape in SHAPES:
            _row(f"{share:.0%}", shape, 100 if shape[1] < 64 else 30, HEALTHY["AR 0.5"], share)
        _row(f"{share:.0%}", LARGEST, 5, HEALTHY["AR 0.5"], share)
    print(f"{time.perf_counter() - began:.0f} s")


def _row(name: str, shape: tuple[int, int, int], jobs: int, noise: Noise, share: float) -> None:
    refused, found = 0, dict.fromkeys(WAYS, 0)
    for job in range(jobs):
        values = 30 + 3 * noise(np.random.default_rng([job, *shape]), shape)
        values[0, 1] += share * 30
        try:
            difference = peer_difference(values)
            made = cut(difference, STEP_MS)
        except TooFewBlocksError:
            refused += 1
            continue
        for way, smallest in WAYS.items():
            q = smallest(values, difference, made)
            found[way] += bool((q[0, 1] if share else q.min()) <= ALPHA)
    done = jobs - refused
    shares = "".join(f"{found[way] / done if done else float('nan'):15.3f}" for way in WAYS)
    print(f"{name:12}{' × '.join(map(str, shape)):>24}{jobs:6}{refused / jobs:9.2f}{shares}", flush=True)


def _engine(values: Floats, difference: Floats, made: Cut) -> Floats:
    return rank_outliers(values, STEP_MS).q


def _own(values: Floats, difference: Floats, made: Cut) -> Floats:
    test = own_outliers(values[:1], STEP_MS)
    return np.minimum(np.minimum(test.q, test.rare_q), test.drift_q)


def _single_steps(values: Floats, difference: Floats, made: Cut) -> Floats:
    short = difference[..., :200]
    weights = np.full((len(values), short.shape[-1]), 1 / short.shape[-1])
    return max_t(short[:, None], weights, np.ones(len(values))).q[:, 0]


def _by_blocks(values: Floats, difference: Floats, made: Cut) -> Floats:
    return _yekutieli(_signed_rank(block_means(difference, made.length)[0]))


def _by_steps(values: Floats, difference: Floats, made: Cut) -> Floats:
    return _yekutieli(_signed_rank(difference))


WAYS: dict[str, Callable[[Floats, Floats, Cut], Floats]] = {
    "max-T, blocks": _engine,
    "… mean+rare+drift": _own,
    "max-T, steps": _single_steps,
    "BY, blocks": _by_blocks,
    "BY, steps": _by_steps,
}


def _signed_rank(values: Floats) -> Floats:
    """Two-sided p-values along the last axis: exact up to 50 values, else by the normal approximation."""
    count = values.shape[-1]
    ranks = stats.rankdata(np.abs(values), axis=-1)
    statistic = np.where(values > 0, ranks, np.where(values == 0, ranks / 2, 0.0)).sum(axis=-1)
    smaller = np.minimum(statistic, count * (count + 1) / 2 - statistic)
    if count > 50:
        spread = np.sqrt(count * (count + 1) * (2 * count + 1) / 24)
        return np.asarray(2 * stats.norm.cdf((smaller - count * (count + 1) / 4) / spread))
    chance = np.ones(1)
    for rank in range(1, count + 1):
        longer = np.zeros(len(chance) + rank)
        longer[: len(chance)] += chance / 2
        longer[rank:] += chance / 2
        chance = longer
    return np.asarray(np.minimum(1.0, 2 * np.cumsum(chance)[np.floor(smaller).astype(np.int64)]))


def _yekutieli(p: Floats) -> Floats:
    return np.asarray(stats.false_discovery_control(p.reshape(-1), method="by").reshape(p.shape))


Noise = Callable[[np.random.Generator, tuple[int, int, int]], Floats]


def autocorrelated(random: np.random.Generator, shape: tuple[int, ...], memory: float) -> Floats:
    """AR(1) noise of unit variance along the last axis, stationary from the first step on."""
    noise = random.normal(0.0, 1.0, shape)
    noise[..., 0] /= np.sqrt(1 - memory**2)
    return np.asarray(lfilter([np.sqrt(1 - memory**2)], [1, -memory], noise, axis=-1))


def _common(random: np.random.Generator, shape: tuple[int, int, int]) -> Floats:
    together = 5 * autocorrelated(random, (shape[0], 1, shape[2]), 0.9)
    return autocorrelated(random, shape, 0.5) + together


def _restless_rank(random: np.random.Generator, shape: tuple[int, int, int]) -> Floats:
    noise = autocorrelated(random, shape, 0.5)
    noise[:, 0] *= 5
    return noise


def _bursts(random: np.random.Generator, shape: tuple[int, int, int]) -> Floats:
    return autocorrelated(random, shape, 0.5) + (random.random(shape) < 0.01) * random.uniform(6, 30, shape)


def _uneven(random: np.random.Generator, shape: tuple[int, int, int]) -> Floats:
    return autocorrelated(random, shape, 0.5) * np.exp(random.normal(0, 0.4, (1, shape[1], 1)))


def _constant(random: np.random.Generator, shape: tuple[int, int, int]) -> Floats:
    noise = autocorrelated(random, shape, 0.5)
    noise[1:] = 1.0
    return noise


HEALTHY: dict[str, Noise] = {
    "white": lambda random, shape: autocorrelated(random, shape, 0.0),
    "AR 0.5": lambda random, shape: autocorrelated(random, shape, 0.5),
    "AR 0.9": lambda random, shape: autocorrelated(random, shape, 0.9),
    "common": _common,
    "heavy tails": lambda random, shape: random.standard_t(2, shape),
    "bursts": _bursts,
    "one restless": _restless_rank,
    "all uneven": _uneven,
    "ties": lambda random, shape: np.round(autocorrelated(random, shape, 0.5)),
    "constant": _constant,
}
