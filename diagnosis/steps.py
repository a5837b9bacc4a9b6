"""Training steps, found from the repeating pattern of collectives, or taken from evidence that numbers them.

All members of a communicator see the same collectives under the same sequence numbers. So the pattern is
searched once per communicator, in what all its ranks saw together, and step k of one rank is step k of all:
from the arrival at an anchor collective to the arrival at the same place of the next repetition, each on the
rank's own clock. Ranks without a common communicator are paired in ``pairing.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from diagnosis.evidence import Ints, RankEvidence
from diagnosis.joined import Bools, Joined, Key, communicator_keys, join
from diagnosis.limits import MAX_PAUSES, PAUSE_MS, PAUSE_STEPS
from diagnosis.patterns import Floats, Stretch, anchor_place, patterns, repeats, without_holes
from probes.records import Op

__all__ = [
    "Bools",
    "Floats",
    "Joined",
    "Key",
    "Steps",
    "communicator_keys",
    "find_steps",
    "join",
    "median_where",
]

BULK_BYTES = 65_536
"""Gradients come in larger pieces than this, what is logged (a loss, a count) in smaller ones."""
REDUCTIONS = tuple(
    int(op)
    for op in (
        Op.ALLREDUCE,
        Op.ALLREDUCE_COALESCED,
        Op.REDUCE_SCATTER,
        Op.REDUCE_SCATTER_BASE,
        Op.REDUCE_SCATTER_COALESCED,
        Op.ALLREDUCE_SPARSE,
    )
)
"""What gradients are summed up with."""
_SHARDED = (int(Op.REDUCE_SCATTER), int(Op.REDUCE_SCATTER_BASE), int(Op.REDUCE_SCATTER_COALESCED))
_SMALL_BYTES = 4_096
_FEW_SMALL = 4
_AT_ONCE = 131_072
"""Arrivals worked on at a time: a MiB, which stays in a core's cache."""
_MOST_TIME = 0.4
"""Repetitions within a period are steps when all but the longest take this share of its time; buckets of one step
take little of it."""


@dataclass(frozen=True)
class Steps:
    """Steps of some ranks; rank r is ``ranks[r]``.

    ``start_ns`` and ``end_ns`` (ranks × steps) hold the rank's own instants, and 0 where ``seen`` is false.
    """

    communicator: Key
    """The anchor; of several, that of most ranks. ``("", 0, 0)`` where the evidence numbers steps."""
    ranks: tuple[int, ...]
    seq: Ints
    """Sequence number of the anchor that opens step k; −1 where another communicator does."""
    next_seq: Ints
    """… and of the one that ends it."""
    start_ns: Ints
    end_ns: Ints
    seen: Bools
    pauses: Steps | None = None
    """Stretches as long as many steps, without any collective: no steps, and left out of these."""
    whole: Steps | None = None
    """These with the pauses in their places; None where there are none."""
    paused: Bools | None = None
    """Which steps of ``whole`` are pauses."""
    other_ms: float = 0.0
    """Time between steps that other patterns (an evaluation) took."""
    others: int = 0
    """… in how many stretches."""
    by_time: bool = False
    """Repetitions of equal collectives, told apart by the time between them only."""
    given: bool = False
    """The evidence numbers its steps: ``seq`` holds these numbers."""

    @property
    def count(self) -> int:
        return len(self.seq)

    def wall_ms(self) -> Floats:
        """ranks × steps, ms; 0 where not seen."""
        return np.asarray((self.end_ns - self.start_ns) / 1e6, dtype=np.float64)

    @cached_property
    def series_ms(self) -> Floats:
        """Per step, the median over the ranks that saw it, ms; 0 where none did."""
        return median_where(self.wall_ms(), self.seen)

    @cached_property
    def row_of(self) -> dict[int, int]:
        """Rank → row."""
        return {rank: row for row, rank in enumerate(self.ranks)}

    @cached_property
    def spans(self) -> tuple[list[int], list[int]]:
        """Per rank, when the first step that it saw began, and when the last one ended, on its clock."""
        limits = np.iinfo(np.int64)
        return (
            np.where(self.seen, self.start_ns, limits.max).min(axis=1).tolist(),
            np.where(self.seen, self.end_ns, limits.min).max(axis=1).tolist(),
        )

    def columns(self, keep: Bools | Ints) -> Steps:
        """Some of the steps."""
        return replace(
            self,
            seq=self.seq[keep],
            next_seq=self.next_seq[keep],
            start_ns=self.start_ns[:, keep],
            end_ns=self.end_ns[:, keep],
            seen=self.seen[:, keep],
        )


def find_steps(joined: Mapping[Key, Joined], ranks: Mapping[int, RankEvidence] | None = None) -> Steps | None:
    """Steps of the most ranks that can be paired; None when nothing repeats. ``ranks`` tell steps that the
    evidence numbers itself, and sends and receives, which pair ranks too."""
    from diagnosis.pairing import all_steps  # it builds on this module

    found = all_steps(joined, ranks or {})
    return found[0] if found else None


def given_steps(ranks: Mapping[int, RankEvidence]) -> Steps | None:
    """Steps as operations number them: a step lasts from its first operation to the next step's first, or to its
    own last operation's end where the next number is missing. None where no rank numbers any."""
    starts: dict[int, tuple[Ints, Ints, Ints]] = {}
    for number in sorted(ranks):
        table = ranks[number].operations
        if table is None or not len(table.step):
            continue
        keep = (table.step >= 0) & (table.duration_ns >= 0)
        if not keep.any():
            continue
        order = np.lexsort((table.start_ns[keep], table.step[keep]))
        step, begin = table.step[keep][order], table.start_ns[keep][order]
        until = begin + table.duration_ns[keep][order]
        named, first = np.unique(step, return_index=True)
        end = np.maximum.reduceat(until, first)
        follows = np.concatenate([np.diff(named) == 1, [False]])
        begins = begin[first]
        end = np.where(follows & (np.roll(begins, -1) > begins), np.roll(begins, -1), end)
        starts[number] = named, begins, end
    if not starts:
        return None
    numbers = np.unique(np.concatenate([named for named, _, _ in starts.values()]))
    shape = (len(starts), len(numbers))
    start_ns, end_ns, seen = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    for row, (named, begins, end) in enumerate(starts.values()):
        place = np.searchsorted(numbers, named)
        start_ns[row, place], end_ns[row, place], seen[row, place] = begins, end, end > begins
    start_ns[~seen] = end_ns[~seen] = 0
    return Steps(("", 0, 0), tuple(starts), numbers, numbers + 1, start_ns, end_ns, seen, given=True)


def is_bulk(table: Joined) -> bool:
    """Whether gradients may be summed up on it."""
    return bool(np.any((table.bytes >= BULK_BYTES) & np.isin(table.op, REDUCTIONS)))


def steps_of(table: Joined) -> Steps | None:
    """The steps of one communicator's pattern, or patterns one after another; None when nothing repeats. Columns
    that are seen on no rank are no steps, but lie between two."""
    places = np.arange(len(table.seq), dtype=np.intp)
    tokens = _tokens(table, places)
    found = patterns(tokens)
    gaps = _gaps(table, places)
    sums = (table.bytes >= BULK_BYTES) & np.isin(table.op, REDUCTIONS)
    if sums.any() and _several_steps(table, tokens, sums, found, np.cumsum(gaps)):
        places = np.flatnonzero(sums)
        tokens = _tokens(table, places)
        found = patterns(tokens)
        gaps = _gaps(table, places)
    by_time = False
    opens: list[npt.NDArray[np.intp]] = []
    closes: list[npt.NDArray[np.intp]] = []
    missing = np.diff(table.seq[places], prepend=table.seq[places][:1]) - np.diff(places, prepend=places[:1])
    dense = np.cumsum(missing + 1)
    for first, last, length in _training(tokens, found, sums[places]):
        for begin, end in without_holes(dense, first, last, length):
            repeat = length * repeats(gaps[begin:end], length)
            by_time |= repeat > length
            anchor = begin + anchor_place(gaps[begin:end], repeat)
            at = np.arange(anchor, end, repeat, dtype=np.intp)
            if len(at) > 1:
                opens.append(places[at[:-1]])
                closes.append(places[at[1:]])
    if not opens:
        return None
    first_place, next_place = np.concatenate(opens), np.concatenate(closes)
    seen = table.seen[:, first_place] & table.seen[:, next_place]
    if not seen.any():
        return None
    # An unusual one keeps its place, so that the steps of two communicators stay side by side.
    seen &= _usual(table, first_place, next_place)
    first_place, next_place, seen = _with_between(table, first_place, next_place, seen)
    return Steps(
        communicator=table.key,
        ranks=table.ranks,
        seq=table.seq[first_place],
        next_seq=table.seq[next_place],
        start_ns=np.where(seen, table.enter_ns[:, first_place], 0),
        end_ns=np.where(seen, table.enter_ns[:, next_place], 0),
        seen=seen,
        by_time=by_time,
    )


def _with_between(
    table: Joined, first: npt.NDArray[np.intp], after: npt.NDArray[np.intp], seen: Bools
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Bools]:
    """With unseen columns for what lies between stretches: one for something else that was done within a step (an
    evaluation), and as many as fit into numbers that are missing."""
    apart = np.flatnonzero(after[:-1] != first[1:])
    if not len(apart):
        return first, after, seen
    length = max(1, int(np.median(table.seq[after] - table.seq[first])))
    missing = table.seq[first[apart + 1]] - table.seq[after[apart]] - (first[apart + 1] - after[apart])
    times = 1 + missing // length
    at = np.repeat(apart + 1, times)
    return (
        np.insert(first, at, after[np.repeat(apart, times)]),
        np.insert(after, at, first[np.repeat(apart + 1, times)]),
        np.insert(seen, at, False, axis=1),
    )


def _usual(table: Joined, first: npt.NDArray[np.intp], after: npt.NDArray[np.intp]) -> Bools:
    """Steps that hold no more collectives than their neighbours do, but for a few small ones: an evaluation within
    is not part of a step."""
    large = np.concatenate([[0], np.cumsum(table.bytes > _SMALL_BYTES)])
    held, all_held = large[after] - large[first], after - first
    apart = after[:-1] != first[1:] if len(first) > 1 else np.zeros(0, np.bool_)
    if len(np.unique(all_held)) == 1 or apart.mean() > 0.5:
        return np.ones(len(first), np.bool_)
    return np.asarray((held <= _around(held)) & (all_held <= _around(all_held) + _FEW_SMALL))


def _around(values: Ints) -> Ints:
    """Running median over 21 places."""
    padded = np.pad(values, 10, mode="edge")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, 21), axis=1))


def _tokens(table: Joined, places: npt.NDArray[np.intp]) -> Ints:
    kinds = np.stack([table.op[places], table.bytes[places]])
    return np.asarray(np.unique(kinds, axis=1, return_inverse=True)[1].reshape(-1), np.int64)


def _several_steps(table: Joined, tokens: Ints, sums: Bools, found: list[Stretch], instants: Floats) -> bool:
    """Whether a period is several steps: each sums up gradients, and something else (a loss that is logged every
    tenth step, an evaluation) ends the row of them. Where gradients are sharded they are summed up in micro-steps
    too; then only something large that sums up nothing, an evaluation, shows that these are steps.
    ``instants``: of the collectives, ns, on a clock of the job's own."""
    sharded = bool(np.isin(table.op, _SHARDED).any())
    for first, last, period in found:
        inside = sums[first : first + period]
        kept = tokens[first : first + period][inside]
        rest = ~inside & (table.bytes[first : first + period] > _SMALL_BYTES)
        if inside.all() or len(kept) < 2 or (sharded and rest.sum() < len(rest) / 4):
            continue
        unit = next((p for p in range(1, len(kept) // 2 + 1) if _repeats_itself(kept, p)), 0)
        if unit:
            at = first + np.flatnonzero(np.tile(inside, (last - first) // period))[::unit]
            length = np.diff(instants[at])
            times = len(kept) // unit
            rows = length[: len(length) // times * times].reshape(-1, times)
            # Of the quicker ones: a pause now and then is no part of the pattern.
            levels = np.quantile(rows, 0.25, axis=0) if len(rows) else length
            if len(levels) and levels.sum() - levels.max() >= _MOST_TIME * levels.sum():
                return True
    return False


def _repeats_itself(tokens: Ints, period: int) -> bool:
    return len(tokens) % period == 0 and bool(np.array_equal(tokens[period:], tokens[:-period]))


def _training(tokens: Ints, found: list[Stretch], bulk: Bools) -> list[Stretch]:
    """Without stretches that are no training: without gradients where others have some, or a pattern that comes
    only between stretches of one that covers more (an evaluation)."""
    if len(found) < 2:
        return found
    kinds = [tuple(sorted(Counter(tokens[first : first + period].tolist()))) for first, _, period in found]
    covered: Counter[tuple[int, ...]] = Counter()
    sums: set[tuple[int, ...]] = set()
    for kind, (first, last, _) in zip(kinds, found, strict=True):
        covered[kind] += last - first
        if bulk[first:last].any():
            sums.add(kind)
    kept = []
    for kind, stretch in zip(kinds, found, strict=True):
        around = {
            other
            for other in sums or covered
            if covered[other] > covered[kind]
            and any(k == other and s[1] <= stretch[0] for k, s in zip(kinds, found, strict=True))
            and any(k == other and s[0] >= stretch[1] for k, s in zip(kinds, found, strict=True))
        }
        if (sums and kind not in sums) or around:
            continue
        kept.append(stretch)
    return kept


def without_pauses(steps: Steps) -> Steps:
    """Steps as long as many others are pauses (a checkpoint), if they are rare; and what lies between the
    others is told apart from them."""
    series = steps.series_ms
    long = series > max(PAUSE_STEPS * float(np.median(series)), PAUSE_MS)
    if long.sum() > max(1, MAX_PAUSES * len(series)):
        long[:] = False
    if not long.any() and np.array_equal(steps.start_ns[:, 1:], steps.end_ns[:, :-1]):
        return steps
    between = steps.seen[:, 1:] & steps.seen[:, :-1]
    hole = median_where((steps.start_ns[:, 1:] - steps.end_ns[:, :-1]) / 1e6, between)
    hole = hole[hole > 0]
    kept = steps.columns(~long) if long.any() else steps
    return replace(
        kept,
        pauses=steps.columns(long) if long.any() else None,
        whole=steps if long.any() else None,
        paused=long if long.any() else None,
        other_ms=float(hole.sum()),
        others=len(hole),
    )


def _gaps(table: Joined, places: npt.NDArray[np.intp]) -> Floats:
    """Per collective of ``places``, the time since the same rank's arrival at the one before: the median over
    ranks, ns. 0 where no rank saw both."""
    enter, seen = table.enter_ns, table.seen
    if len(places) < enter.shape[1]:
        enter, seen = enter[:, places], seen[:, places]
    found = np.zeros(len(places))
    at_once = max(1, _AT_ONCE // len(table.ranks))
    for first in range(1, len(places), at_once):
        here, before = slice(first, first + at_once), slice(first - 1, first - 1 + at_once)
        # In whole numbers: instants are too large for floats.
        between = enter[:, here] - enter[:, before][:, : len(found[here])]
        both = seen[:, here] & seen[:, before][:, : len(found[here])]
        found[here] = median_where(between.astype(np.float64), both)
    return found


def median_where(values: Floats, known: Bools) -> Floats:
    """Median over the first axis of the values that are known; 0 where none is."""
    if known.all() and len(values):
        # As np.median, which searches for NaN besides.
        low, high = (len(values) - 1) // 2, len(values) // 2
        ordered = values.T.copy()
        ordered.partition(sorted({low, high}), axis=1)
        return np.asarray((ordered[:, low] + ordered[:, high]) / 2)
    count = known.sum(axis=0)
    ordered = np.sort(np.where(known, values, np.inf), axis=0)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0)[None] // 2, axis=0)[0]
    high = np.take_along_axis(ordered, np.minimum(count // 2, len(values) - 1)[None], axis=0)[0]
    return np.where(count > 0, (np.where(count > 0, low, 0.0) + np.where(count > 0, high, 0.0)) / 2, 0.0)
