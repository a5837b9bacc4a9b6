"""When the steps turned slow: levels of the job's step times, robust against single slow steps.

Levels are found on medians of blocks of steps (least squares with a penalty per change, by dynamic
programming), then merged unless they differ by a share of the step, by several robust standard errors
(k · 1.4826 · MAD of the blocks, for a median of so many), and in nearly all pairs of their blocks. A slow drift
has its own test (:mod:`diagnosis.drift`), and is told where a line fits better than these levels.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from diagnosis.drift import Drift, block_length, blocks_of_time, drift, error_of_levels
from diagnosis.limits import (
    BLOCK_STEPS,
    CHANGE_MADS,
    CHANGE_ORDERED,
    CHANGE_SHARE,
    DRIFT_NEWEST,
    DRIFT_NEWEST_STEPS,
    MIN_BLOCKS,
    ONSET_STEPS,
)
from diagnosis.shift import peer_difference
from diagnosis.steps import Floats

MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median of n normal values: this times their standard deviation / √n."""

_ENOUGH_STEPS = MIN_BLOCKS * BLOCK_STEPS
"""Steps since a rank changed: with fewer, those before are compared too."""
_LOOKED_AT = 8
"""Of many ranks that changed, those that changed most."""


@dataclass(frozen=True)
class Level:
    """Steps ``first`` to ``last`` (exclusive) with their median, ms."""

    first: int
    last: int
    ms: float


@dataclass(frozen=True)
class History:
    """The newest level and, when it is slower than an earlier one, that one."""

    current: Level
    """All steps since they became as slow as they are now; the newest level when they did not; the newest steps
    where they drift."""
    baseline: Level | None
    recovered: Level | None
    """A slow stretch after a faster one, that ended before the newest level began."""
    drift: Drift | None = None
    """Where steps become slower little by little; ``first`` as the other numbers of steps."""

    @property
    def slowed_by(self) -> float:
        """How much slower steps are now than before, as a share of that; 0 where they are not."""
        if self.drift is not None:
            return self.drift.ms / self.drift.before_ms
        return self.current.ms / self.baseline.ms - 1 if self.baseline else 0.0

    @property
    def since(self) -> int | None:
        """The step at which steps began to be slower; None where they are not."""
        if self.baseline is None:
            return None
        return self.current.first if self.drift is None else self.drift.first


def history(step_ms: Floats) -> History:
    """What the series of step times (ms, in the order of time) says about now and before."""
    found = levels(step_ms)
    if (rising := _drifting(step_ms, found)) is not None:
        return rising
    current = found[-1]
    earlier = found[:-1]
    baseline = min(earlier, key=lambda level: level.ms, default=None)
    if baseline is not None and _apart(baseline.ms, current.ms):
        # Slow since the first of the unbroken row of levels that were about as slow, or slower: a mild slowdown
        # before it has its own reason, and mixed with it ranks would be compared over two different faults.
        first = len(found) - 1
        while first > 0 and not _apart(found[first - 1].ms, current.ms):
            first -= 1
        return History(Level(found[first].first, current.last, current.ms), baseline, None)
    recovered = None
    for place, level in enumerate(earlier):
        before = min((other.ms for other in found[:place]), default=math.inf)
        if _apart(before, level.ms) and _apart(current.ms, level.ms):
            recovered = level
    return History(current, None, recovered)


def _drifting(step_ms: Floats, found: list[Level]) -> History | None:
    """The history of steps that drift, from the fastest level on (a job is slow while it warms up); None where they
    do not, or where levels fit as well."""
    past = found[min(range(len(found)), key=lambda place: found[place].ms) :]
    begin = past[0].first
    steps = step_ms[begin:]
    rising = drift(steps)
    if rising is None:
        return None
    bounds = [level.first - begin for level in past] + [len(steps)]
    if len(past) > 1 and error_of_levels(steps, bounds) <= rising.error:
        return None
    newest = min(max(round(DRIFT_NEWEST * len(steps)), DRIFT_NEWEST_STEPS), len(steps) // 2)
    before = rising.first if rising.first >= DRIFT_NEWEST_STEPS else newest
    return History(
        Level(len(step_ms) - newest, len(step_ms), float(np.median(steps[-newest:]))),
        Level(begin, begin + before, float(np.median(steps[:before]))),
        None,
        replace(rising, first=begin + rising.first),
    )


def since_as_now(step_ms: float, own_ms: Floats) -> int:
    """From which step on the same ranks are slower than their peers as are now: within a slow stretch one rank may
    have handed over to another, and the mean over both would blame who has recovered. 0 when nothing changed, or
    less than ``_ENOUGH_STEPS`` ago. ``own_ms``: peers × steps, ``step_ms`` the job's median step."""
    peers, count = own_ms.shape
    length = block_length(np.full(count, step_ms))
    if peers < 2 or count < 2 * MIN_BLOCKS * length:
        return 0
    # A change that lasts shows in medians of blocks.
    parts = own_ms[:, count % length :].reshape(peers, -1, length)
    spread = np.ptp(peer_difference(np.median(parts, axis=2)), axis=1)
    # Most ranks stay as they are, and there may be a thousand of them.
    least = max(CHANGE_SHARE * step_ms / 2, float(np.sort(spread)[-_LOOKED_AT:][0]))
    looked_at = np.flatnonzero(spread >= least)
    if not len(looked_at):
        return 0
    first = 0
    for apart in step_ms + peer_difference(own_ms)[looked_at]:
        found = levels(apart)
        # Who is slow still, only less so than before, handed over to nobody.
        turned = [
            after.first
            for before, after in itertools.pairwise(found)
            if _apart(step_ms, before.ms) != _apart(step_ms, after.ms)
            and count - after.first >= _ENOUGH_STEPS
        ]
        if max(turned, default=0) > first and _drifting(apart, found) is None:
            first = max(turned)
    return first


def _apart(fast_ms: float, slow_ms: float) -> bool:
    return slow_ms >= fast_ms * (1 + CHANGE_SHARE)


def levels(step_ms: Floats) -> list[Level]:
    """Stretches of steps with a level of their own, in order; one when nothing changed."""
    count = len(step_ms)
    length = block_length(step_ms)
    found = _levels(step_ms, [*range(0, count // length * length, length), count])
    # Steps that turned much longer just now fill few blocks of so many steps, and more of so much time.
    return found if len(found) > 1 else _levels(step_ms, blocks_of_time(step_ms))


def _levels(step_ms: Floats, bounds: list[int]) -> list[Level]:
    """``bounds``: where blocks begin, then the number of steps."""
    if len(bounds) <= 2 * MIN_BLOCKS:
        return [Level(0, len(step_ms), float(np.median(step_ms)))]
    medians = np.array([np.median(step_ms[a:b]) for a, b in itertools.pairwise(bounds)])
    cuts = _merge(medians, _segments(medians))
    inner = [_sharpen(step_ms, bounds, a, b, c) for a, b, c in zip(cuts, cuts[1:], cuts[2:], strict=False)]
    edges = [0, *inner, len(step_ms)]
    return [Level(a, b, float(np.median(step_ms[a:b]))) for a, b in itertools.pairwise(edges)]


def _segments(medians: Floats) -> list[int]:
    """Bounds of segments of at least ``MIN_BLOCKS`` blocks with the least squared error plus a penalty."""
    count = len(medians)
    noise = 1.4826 * float(np.median(np.abs(np.diff(medians)))) / math.sqrt(2)
    penalty = 3 * math.log(count) * max(noise, 1e-3 * float(np.median(medians))) ** 2
    centred = medians - medians.mean()
    ones = np.concatenate([[0.0], np.cumsum(centred)])
    squares = np.concatenate([[0.0], np.cumsum(centred**2)])
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    came_from = np.zeros(count + 1, np.int64)
    for end in range(MIN_BLOCKS, count + 1):
        begin = np.arange(0, end - MIN_BLOCKS + 1)
        error = squares[end] - squares[begin] - (ones[end] - ones[begin]) ** 2 / (end - begin)
        total = best[begin] + error + penalty
        came_from[end] = int(np.argmin(total))
        best[end] = float(total[came_from[end]])
    cuts = [count]
    while cuts[-1] > 0:
        cuts.append(int(came_from[cuts[-1]]))
    return cuts[::-1]


def _merge(medians: Floats, cuts: list[int]) -> list[int]:
    """Drop the weakest cut until all that are left separate levels that differ."""
    cuts = list(cuts)
    while len(cuts) > 2:
        strength = [
            _strength(medians[a:b], medians[b:c]) for a, b, c in zip(cuts, cuts[1:], cuts[2:], strict=False)
        ]
        weakest = int(np.argmin(strength))
        if strength[weakest] >= 1.0:
            break
        del cuts[weakest + 1]
    return cuts


def _strength(before: Floats, after: Floats) -> float:
    """How far two levels are apart, in units of what is needed: a share of the step, several standard errors
    of the difference of two medians, and nearly all pairs of blocks in the same order (Mann–Whitney's U as a
    share). The spread of single blocks alone is no measure: a contended job is slow and restless at once."""
    low, high = sorted((float(np.median(before)), float(np.median(after))))
    error = math.sqrt(sum(_spread(part) ** 2 / len(part) for part in (before, after)))
    later = np.sign(after[:, None] - before[None, :]).mean() / 2 + 0.5
    return min(
        (high - low) / (CHANGE_SHARE * low),
        (high - low) / max(CHANGE_MADS * MEDIAN_ERROR * error, 1e-9),
        float(max(later, 1 - later)) / CHANGE_ORDERED,
    )


def _spread(values: Floats) -> float:
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _sharpen(step_ms: Floats, bounds: list[int], previous: int, begin: int, following: int) -> int:
    """The step at which a level begins: the first of ``ONSET_STEPS`` in a row beyond the middle of the two
    levels, searched one block to either side; the block's bound when the steps are too noisy for that."""
    before = float(np.median(step_ms[bounds[previous] : bounds[begin]]))
    after = float(np.median(step_ms[bounds[begin] : bounds[following]]))
    low = bounds[max(begin - 1, previous)]
    high = bounds[min(begin + 1, following)]
    beyond = (step_ms[low : high + ONSET_STEPS] - (before + after) / 2) * (after - before) > 0
    rows = np.convolve(beyond, np.ones(ONSET_STEPS), mode="valid") >= ONSET_STEPS - 0.5
    found = np.flatnonzero(rows)
    return low + int(found[0]) if len(found) else bounds[begin]
