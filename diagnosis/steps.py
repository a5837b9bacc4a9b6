"""Training steps, found from the repeating pattern of collectives.

All members of a communicator see the same collectives under the same sequence numbers. So the pattern is
searched once per communicator, in what all its ranks saw together, and step k of one rank is step k of all:
from the arrival at an anchor collective to the arrival at the same place of the next repetition, each on the
rank's own clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosis.evidence import Ints, RankEvidence
from probes.records import Communicator, Op

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Key = tuple[str, int, int]
"""Identity of a communicator across ranks: (uid, size, 0), or ("", size, place in the order of first use)."""

_POINT_TO_POINT = (int(Op.SEND), int(Op.RECV), int(Op.RECV_ANY_SOURCE))
_LONGEST_PERIOD = 512
_LONGEST_REPEAT = 32
_SHORTEST_RUN = 20
"""Repetitions shorter than this are chance, or equal collectives in a row within one step."""
_MAX_PATTERNS = 8


@dataclass(frozen=True)
class Steps:
    """Steps of the ranks that are members of the anchor communicator; rank r is ``ranks[r]``.

    ``start_ns`` and ``end_ns`` (ranks × steps) hold the rank's own instants, and 0 where ``seen`` is false.
    """

    communicator: Key
    ranks: tuple[int, ...]
    seq: Ints
    """Sequence number of the anchor that opens step k."""
    next_seq: Ints
    """… and of the one that ends it."""
    start_ns: Ints
    end_ns: Ints
    seen: Bools

    @property
    def count(self) -> int:
        return len(self.seq)

    def wall_ms(self) -> Floats:
        """ranks × steps, ms; 0 where not seen."""
        return np.asarray((self.end_ns - self.start_ns) / 1e6, dtype=np.float64)


@dataclass(frozen=True)
class Joined:
    """All collectives of one communicator: one column per sequence number, one row per rank."""

    key: Key
    ranks: tuple[int, ...]
    seq: Ints
    op: Ints
    bytes: Ints
    enter_ns: Ints
    duration_ns: Ints
    """−1 where it has not ended or was not seen."""
    seen: Bools


def communicator_keys(communicators: list[Communicator]) -> list[Key]:
    """Key of each communicator of one rank, by index."""
    unknown: dict[int, int] = {}
    keys: list[Key] = []
    for communicator in communicators:
        if communicator.uid:
            keys.append((communicator.uid, communicator.size, 0))
        else:
            keys.append(("", communicator.size, unknown.get(communicator.size, 0)))
            unknown[communicator.size] = unknown.get(communicator.size, 0) + 1
    return keys


def join(ranks: Mapping[int, RankEvidence]) -> dict[Key, Joined]:
    """The collectives of all ranks side by side, per communicator; without send and recv, whose numbers
    differ between ranks."""
    rows: dict[Key, dict[int, npt.NDArray[np.intp]]] = {}
    for rank in sorted(ranks):
        table = ranks[rank].collectives
        collective = ~np.isin(table.op, _POINT_TO_POINT)
        for index, key in enumerate(communicator_keys(ranks[rank].communicators)):
            found = np.flatnonzero(collective & (table.communicator == index))
            if len(found):
                rows.setdefault(key, {})[rank] = found
    return {key: _join_one(key, ranks, members) for key, members in rows.items()}


def _join_one(
    key: Key, ranks: Mapping[int, RankEvidence], members: dict[int, npt.NDArray[np.intp]]
) -> Joined:
    names = tuple(sorted(members))
    seq = np.unique(np.concatenate([ranks[rank].collectives.seq[members[rank]] for rank in names]))
    shape = (len(names), len(seq))
    enter, duration = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    seen = np.zeros(shape, np.bool_)
    # Where ranks disagree (or one could not read the size) the largest is taken: the same whoever is rank 0.
    op, size = np.full(len(seq), -1, np.int64), np.full(len(seq), -1, np.int64)
    for row, rank in enumerate(names):
        table, found = ranks[rank].collectives, members[rank]
        column = np.searchsorted(seq, table.seq[found])
        enter[row, column], duration[row, column], seen[row, column] = (
            table.enter_ns[found],
            table.duration_ns[found],
            True,
        )
        op[column] = np.maximum(op[column], table.op[found])
        size[column] = np.maximum(size[column], table.bytes[found])
    return Joined(key, names, seq, op, size, enter, duration, seen)


def find_steps(joined: Mapping[Key, Joined]) -> Steps | None:
    """Steps on the largest communicator that shows a repeating pattern; None when none does.

    Of two communicators of one size, the one with more steps; of several patterns (a bucket rebuild, a
    changed batch), all of them, in the order of time.
    """
    best: Steps | None = None
    for key in sorted(joined, key=lambda key: (-key[1], key)):
        if best is not None and key[1] < best.communicator[1]:
            break
        if len(joined[key].ranks) < 2 and len(joined) > 1 and best is not None:
            continue
        steps = _steps_of(joined[key])
        if steps is not None and (best is None or steps.count > best.count):
            best = steps
    return best


def _steps_of(table: Joined) -> Steps | None:
    tokens = np.unique(np.stack([table.op, table.bytes]), axis=1, return_inverse=True)[1].reshape(-1)
    gaps = _gaps(table)
    opens: list[npt.NDArray[np.intp]] = []
    closes: list[npt.NDArray[np.intp]] = []
    for first, last, length in sorted(_patterns(tokens)):
        for begin, end in _without_holes(table.seq, first, last, length):
            repeat = length * _repeats(gaps[begin:end], length)
            anchor = begin + _anchor_place(gaps[begin:end], repeat)
            places = np.arange(anchor, end, repeat, dtype=np.intp)
            if len(places) > 1:
                opens.append(places[:-1])
                closes.append(places[1:])
    if not opens:
        return None
    first_place, next_place = np.concatenate(opens), np.concatenate(closes)
    seen = table.seen[:, first_place] & table.seen[:, next_place]
    used = seen.any(axis=0)
    first_place, next_place, seen = first_place[used], next_place[used], seen[:, used]
    if not len(first_place):
        return None
    return Steps(
        communicator=table.key,
        ranks=table.ranks,
        seq=table.seq[first_place],
        next_seq=table.seq[next_place],
        start_ns=np.where(seen, table.enter_ns[:, first_place], 0),
        end_ns=np.where(seen, table.enter_ns[:, next_place], 0),
        seen=seen,
    )


def _gaps(table: Joined) -> Floats:
    """Per collective, the time since the same rank's arrival at the one before: the median over ranks, ns.
    0 where no rank saw both."""
    between = np.diff(table.enter_ns, axis=1).astype(np.float64)
    both = table.seen[:, 1:] & table.seen[:, :-1]
    return np.concatenate([[0.0], median_where(between, both)])


def median_where(values: Floats, known: Bools) -> Floats:
    """Median over the first axis of the values that are known; 0 where none is."""
    count = known.sum(axis=0)
    ordered = np.sort(np.where(known, values, np.inf), axis=0)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0)[None] // 2, axis=0)[0]
    high = np.take_along_axis(ordered, np.minimum(count // 2, len(values) - 1)[None], axis=0)[0]
    return np.where(count > 0, (np.where(count > 0, low, 0.0) + np.where(count > 0, high, 0.0)) / 2, 0.0)


def _patterns(tokens: Ints) -> list[tuple[int, int, int]]:
    """Stretches (first, last exclusive, period) in which the tokens repeat, longest coverage first.

    A period's stretch must repeat at least 3 times and over 20 tokens. The shortest period that covers
    nearly as much as the best wins; what it leaves is searched again.
    """
    found: list[tuple[int, int, int]] = []
    free = np.ones(len(tokens), np.bool_)
    for _ in range(_MAX_PATTERNS):
        chosen = _best_period(tokens, free)
        if not chosen:
            break
        found += chosen
        for first, last, _period in chosen:
            free[first:last] = False
    return found


def _best_period(tokens: Ints, free: Bools) -> list[tuple[int, int, int]]:
    candidates: list[tuple[int, list[tuple[int, int, int]]]] = []
    best = 0
    for period in range(1, min(_LONGEST_PERIOD, len(tokens) // 3) + 1):
        same = (tokens[period:] == tokens[:-period]) & free[period:] & free[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        runs = edges.reshape(-1, 2)
        runs = runs[(runs[:, 1] - runs[:, 0]) >= max(2 * period, _SHORTEST_RUN)]
        stretches: list[tuple[int, int, int]] = []
        for start, stop in runs:  # overlapping ends of neighbouring runs go to the earlier one
            start = max(int(start), stretches[-1][1]) if stretches else int(start)
            if int(stop) + period - start >= 3 * period:
                stretches.append((start, int(stop) + period, period))
        covered = sum(last - first for first, last, _ in stretches)
        if covered:
            candidates.append((covered, stretches))
            best = max(best, covered)
        if covered >= 0.98 * int(free.sum()):
            break
    chosen = next((stretches for covered, stretches in candidates if covered >= 0.95 * best), [])
    # A multiple of two periods also fits where one pattern follows another: where a shorter one lasts for
    # three repetitions of the chosen one, it is a pattern of its own, not a row of equals within a step.
    for _, stretches in candidates:
        lasting = [s for s in stretches if s[2] < chosen[0][2] and s[1] - s[0] >= 3 * chosen[0][2]]
        if lasting:
            return lasting
    return chosen


def _without_holes(seq: Ints, first: int, last: int, period: int) -> list[tuple[int, int]]:
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


def _repeats(gaps: Floats, period: int) -> int:
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


def _anchor_place(gaps: Floats, period: int) -> int:
    """The place in the period with the longest time before it: there the step's own work ends."""
    whole = (len(gaps) - 1) // period
    if period == 1 or whole < 1:
        return 0
    levels = np.median(gaps[1 : 1 + whole * period].reshape(whole, period), axis=0)
    return (int(np.argmax(levels)) + 1) % period
