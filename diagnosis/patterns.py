"""Repeating patterns in a row of tokens, and how many repetitions make one step. Pure arithmetic, no words."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from diagnosis.evidence import Ints

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Stretch = tuple[int, int, int]
"""First token, last (exclusive), period."""

_SHORT_PERIODS = 512
"""Periods up to this are all tried; longer ones where some token comes back after so many."""
_LONG_PERIODS = 64
_LONGEST_REPEAT = 32
_SHORTEST_RUN = 20
"""Repetitions shorter than this are chance, or equal collectives in a row within one step."""
_MAX_PATTERNS = 8
_REGULARLY = 3
"""A pattern broken off and taken up again so often within a longer one is a part of that."""


def patterns(tokens: Ints) -> list[Stretch]:
    """Stretches in which the tokens repeat, in order.

    A period's stretch must repeat at least 3 times and over 20 tokens. The shortest period that covers
    nearly as much as the best wins; what it leaves is searched again.
    """
    found: list[Stretch] = []
    free = np.ones(len(tokens), np.bool_)
    for _ in range(_MAX_PATTERNS):
        chosen = _best_period(tokens, free)
        if not chosen:
            break
        found += chosen
        for first, last, _period in chosen:
            free[first:last] = False
    return sorted(found)


def _best_period(tokens: Ints, free: Bools) -> list[Stretch]:
    candidates: list[tuple[int, list[Stretch]]] = []
    best = 0
    for period in _periods(tokens):
        stretches = _stretches(tokens, free, period)
        covered = sum(last - first for first, last, _ in stretches)
        if covered:
            candidates.append((covered, stretches))
            best = max(best, covered)
        if covered >= 0.98 * int(free.sum()):
            break
    candidates = [
        (covered, stretches)
        for place, (covered, stretches) in enumerate(candidates)
        if not any(_inside(stretches, longer) for _, longer in candidates[place + 1 :])
    ]
    chosen = next((stretches for covered, stretches in candidates if covered >= 0.95 * best), [])
    # A multiple of two periods also fits where one pattern follows another: where a shorter one lasts for
    # three repetitions of the chosen one, it is a pattern of its own, not a row of equals within a step.
    for _, stretches in candidates:
        lasting = [s for s in stretches if chosen and s[2] < chosen[0][2] and s[1] - s[0] >= 3 * chosen[0][2]]
        if lasting:
            return lasting
    return chosen


def _periods(tokens: Ints) -> list[int]:
    """Candidates, the shortest first."""
    longest = len(tokens) // 3
    short = range(1, min(_SHORT_PERIODS, longest) + 1)
    if longest <= _SHORT_PERIODS:
        return list(short)
    order = np.argsort(tokens, kind="stable")
    distance, again = np.diff(order), np.diff(tokens[order]) == 0
    back, times = np.unique(distance[again], return_counts=True)
    long = back[(back > _SHORT_PERIODS) & (back <= longest) & (times > 1)]
    often = np.argsort(-times[np.isin(back, long)], kind="stable")[:_LONG_PERIODS]
    return [*short, *sorted(int(period) for period in long[often])]


def _stretches(tokens: Ints, free: Bools, period: int) -> list[Stretch]:
    same = (tokens[period:] == tokens[:-period]) & free[period:] & free[:-period]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    runs = edges.reshape(-1, 2)
    runs = runs[(runs[:, 1] - runs[:, 0]) >= max(2 * period, _SHORTEST_RUN)]
    stretches: list[Stretch] = []
    for start, stop in runs:  # overlapping ends of neighbouring runs go to the earlier one
        start = max(int(start), stretches[-1][1]) if stretches else int(start)
        if int(stop) + period - start >= 3 * period:
            stretches.append((start, int(stop) + period, period))
    return stretches


def _inside(short: list[Stretch], longer: list[Stretch]) -> bool:
    """Whether a pattern (micro-steps that accumulate gradients) only fills parts of each repetition of a longer
    one: in a stretch of that it ends and begins again and again, once or more per repetition."""
    if len(short) < _REGULARLY:
        return False
    inner = 0
    for first, last, period in longer:
        parts = [s for s in short if first <= s[0] and s[1] <= last]
        if len(parts) >= max(_REGULARLY, (last - first) // period - 1):
            inner += len(parts)
    return inner >= 0.9 * len(short)


def without_holes(seq: Ints, first: int, last: int, period: int) -> list[tuple[int, int]]:
    """Cut a stretch where sequence numbers are missing: no step may span collectives that nobody saw."""
    distance = np.diff(seq[first:last])
    usual = int(np.median(distance)) if len(distance) else 1
    # A period may hold regular holes (numbers spent on send and recv): only larger ones than usual cut.
    if period > 1 and len(distance) >= 2 * period:
        whole = len(distance) // period * period
        usual = int(np.median(distance[:whole].reshape(-1, period), axis=0).max())
    breaks = np.flatnonzero(distance > usual) + 1 + first
    bounds = [first, *(int(place) for place in breaks), last]
    return [(a, b) for a, b in itertools.pairwise(bounds) if b - a > period]


def repeats(gaps: Floats, period: int) -> int:
    """How many periods of equal tokens make one step: buckets of one size look alike, and only the time
    between their arrivals (short within a step, long between steps) tells them apart. 1 when it does not."""
    whole = len(gaps) // period
    if whole < 2 * _SHORTEST_RUN:
        return 1
    per_period = gaps[1 : 1 + (whole - 1) * period].reshape(-1, period).sum(axis=1)
    per_period = np.log(np.maximum(per_period, 1.0))
    total = _spread(per_period)
    if total == 0:
        return 1
    explained: dict[int, float] = {}
    for repeat in range(2, min(_LONGEST_REPEAT, len(per_period) // 10) + 1):
        rows = per_period[: len(per_period) // repeat * repeat].reshape(-1, repeat)
        levels = np.median(rows, axis=0)
        # Within a step the gaps are a fraction of the one between steps, else these are steps of their own.
        if levels.max() - levels.min() > np.log(4.0):
            explained[repeat] = 1.0 - _spread(rows - levels) / total
    best = max(explained.values(), default=0.0)
    if best < 0.5:
        return 1
    return next(repeat for repeat, share in explained.items() if share >= best - 0.05)


def _spread(values: Floats) -> float:
    """Mean absolute deviation from the median: a pause of a minute must not outweigh a thousand steps."""
    return float(np.mean(np.abs(values - np.median(values))))


def anchor_place(gaps: Floats, period: int) -> int:
    """The place in the period with the longest time before it: there the step's own work ends."""
    whole = (len(gaps) - 1) // period
    if period == 1 or whole < 1:
        return 0
    levels = np.median(gaps[1 : 1 + whole * period].reshape(whole, period), axis=0)
    return (int(np.argmax(levels)) + 1) % period
