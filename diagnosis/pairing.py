"""Whose step is whose: steps of several communicators put on one axis.

Ranks of different pipeline stages share no communicator that shows their steps. Another one that has members
of both (a gradient norm over all ranks, a pair that sends and receives) bridges them: a collective of it lies in
step i of the one and in step j of the other, and j − i is the same for all. What nothing bridges is a piece
of its own. Clocks of different ranks are never compared.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from diagnosis.evidence import Ints, RankEvidence
from diagnosis.joined import Bools, Joined, Key, join_pairs
from diagnosis.steps import Steps, given_steps, is_bulk, steps_of, without_pauses

_ALIKE = 1.5
"""Steps of two communicators whose medians are closer than this factor are the same steps."""
_COVERS = 0.5
"""A pattern that fills less than this share of the time of the one that fills most is not the job's."""
_AGREE = 0.4
"""Share of a bridge's collectives that must agree on j − i. Where a stage's steps begin in the middle of another's,
half of what they exchange lies in the one before."""
_GIVEN: Key = ("", 0, 0)


@dataclass(frozen=True)
class _Pattern:
    """What one communicator shows, and how far it can be trusted to show steps."""

    steps: Steps
    bulk: bool
    step_ms: float
    fills_ms: float


def all_steps(
    joined: Mapping[Key, Joined],
    ranks: Mapping[int, RankEvidence],
    pairs: Mapping[Key, Joined] | None = None,
) -> list[Steps]:
    """Steps of all pieces of the job, that of most ranks first. Within a piece column k is one step of the job.
    ``pairs``: of :func:`join_pairs`, where they were joined already."""
    found = {key: pattern for key in sorted(joined) if (pattern := _pattern(joined[key]))}
    given = given_steps(ranks)
    told = set(given.ranks) if given else set()
    chosen: dict[int, Key] = dict.fromkeys(told, _GIVEN)
    members = {rank for table in joined.values() for rank in table.ranks} | set(ranks)
    of_rank: dict[int, list[Key]] = defaultdict(list)
    for key, pattern in found.items():
        seen = np.asarray(pattern.steps.seen.any(axis=1))
        for row, rank in enumerate(pattern.steps.ranks):
            if seen[row]:
                of_rank[rank].append(key)
    choices: dict[tuple[Key, ...], Key] = {}
    for rank in sorted(members - told):
        if keys := tuple(of_rank[rank]):
            if keys not in choices:
                choices[keys] = _choose(found, list(keys))
            chosen[rank] = choices[keys]
        elif (alone := _alone(ranks.get(rank))) is not None:
            chosen[rank] = alone.communicator
            found[alone.communicator] = _Pattern(alone, False, 0.0, 0.0)
    if given:
        found[_GIVEN] = _Pattern(given, True, 0.0, 0.0)
    segments = _segments(found, chosen, of_rank)
    tables: list[Joined] = []
    if len(segments) > 1:
        tables = [*joined.values(), *(join_pairs(ranks) if pairs is None else pairs).values()]
    pieces = []
    for piece in _pieces(segments, _bridges(segments, tables)):
        merged = _merged(piece)
        if not (seen_by_any := merged.seen.any(axis=0)).all():
            merged = merged.columns(np.flatnonzero(seen_by_any))
        if merged.count:
            pieces.append(without_pauses(merged))
    return sorted(pieces, key=lambda steps: (-len(steps.ranks), -steps.count, steps.ranks))


def _pattern(table: Joined) -> _Pattern | None:
    steps = steps_of(table)
    if steps is None:
        return None
    series = steps.series_ms[steps.seen.any(axis=0)]
    usual = float(np.median(series))
    # Not their sum, in which pauses would count.
    return _Pattern(steps, is_bulk(table), usual, usual * len(series))


def _choose(found: Mapping[Key, _Pattern], keys: list[Key]) -> Key:
    """The communicator that shows a rank's steps: that in which gradients are summed up and whose repetitions are
    the longest (within a step, tensor-parallel ones repeat by themselves); of several, the largest."""
    fills = max(found[key].fills_ms for key in keys)
    keys = [key for key in keys if found[key].fills_ms >= _COVERS * fills]
    keys = [key for key in keys if found[key].bulk] or keys
    sure = [key for key in keys if not found[key].steps.by_time]
    keys = [
        key
        for key in keys
        if not found[key].steps.by_time
        or not any(found[key].step_ms / 4 <= found[other].step_ms <= found[key].step_ms for other in sure)
    ]
    longest = max(found[key].step_ms for key in keys)
    if found[keys[0]].bulk:
        keys = [key for key in keys if found[key].step_ms >= longest / _ALIKE]
    return min(keys, key=lambda key: (-key[1], -found[key].steps.count, key))


def _alone(rank: RankEvidence | None) -> Steps | None:
    """The steps of a rank that only sends and receives, from the order of what it does."""
    if rank is None or len(rank.collectives.seq) < 3:
        return None
    table = rank.collectives
    order = np.argsort(table.enter_ns, kind="stable")
    kinds = np.stack([table.communicator, table.op, table.bytes])[:, order]
    token = np.unique(kinds, axis=1, return_inverse=True)[1].reshape(-1)
    count = len(order)
    return steps_of(
        Joined(
            key=("alone", -1, rank.rank),
            ranks=(rank.rank,),
            seq=np.arange(count),
            op=-2 - token,
            bytes=np.zeros(count, np.int64),
            enter_ns=table.enter_ns[order][None],
            duration_ns=table.duration_ns[order][None],
            seen=np.ones((1, count), np.bool_),
        )
    )


def _segments(
    found: Mapping[Key, _Pattern], chosen: Mapping[int, Key], of_rank: Mapping[int, list[Key]]
) -> list[Steps]:
    """The chosen communicators, and those that came before or after them on the same ranks (a job that was
    resized, groups that were made anew), each with the ranks for which it counts."""
    used = set(chosen.values())
    primary = {key: found[key] for key in used}
    rows: dict[Key, list[int]] = defaultdict(list)
    for rank, first in sorted(chosen.items()):
        rows[first].append(rank)
        spans = [_span(found[first].steps, rank)]
        others = [key for key in of_rank.get(rank, []) if key != first]
        for key in sorted(others, key=lambda key: (-found[key].fills_ms, key)):
            span = _span(found[key].steps, rank)
            apart = all(span[1] <= a or span[0] >= b for a, b in spans)
            alike = found[key].bulk == primary[first].bulk and (
                key in used or _within(found[key].step_ms, primary[first].step_ms, 4.0)
            )
            if apart and alike and first != _GIVEN:
                rows[key].append(rank)
                spans.append(span)
    return [_of_ranks(found[key].steps, tuple(mine)) for key, mine in sorted(rows.items())]


def _within(one: float, other: float, factor: float) -> bool:
    return other / factor <= one <= other * factor


def _span(steps: Steps, rank: int) -> tuple[int, int]:
    row = steps.row_of[rank]
    first, last = steps.spans
    return first[row], last[row]


def _of_ranks(steps: Steps, ranks: tuple[int, ...]) -> Steps:
    if ranks == steps.ranks:
        return steps
    rows = [steps.row_of[rank] for rank in ranks]
    return Steps(
        steps.communicator,
        ranks,
        steps.seq,
        steps.next_seq,
        steps.start_ns[rows],
        steps.end_ns[rows],
        steps.seen[rows],
        given=steps.given,
    )


def step_index(start_ns: Ints, end_ns: Ints, seen: Bools, at_ns: Ints, *, closing: bool = False) -> Ints:
    """In which of one rank's steps instants lie; −1 in none. Steps are [start, end), or (start, end] when
    ``closing``."""
    place = np.flatnonzero(seen)
    if not len(place):
        return np.full(at_ns.shape, -1, np.int64)
    found = np.searchsorted(start_ns[place], at_ns, side="left" if closing else "right") - 1
    step = place[np.maximum(found, 0)]
    inside = at_ns <= end_ns[step] if closing else at_ns < end_ns[step]
    return np.where((found >= 0) & inside, step, -1)


def _bridges(segments: list[Steps], tables: Iterable[Joined]) -> dict[tuple[int, int], int]:
    """(segment, segment) → column of the second's first step on the axis of the first's."""
    edges: dict[tuple[int, int], int] = {}
    belongs: dict[int, list[int]] = defaultdict(list)
    for number, segment in enumerate(segments):
        for rank in segment.ranks:
            belongs[rank].append(number)
    for rank, numbers in belongs.items():  # one after the other on one rank
        if len(numbers) < 2:
            continue
        in_order = sorted(numbers, key=lambda number: _span(segments[number], rank))
        for first, then in itertools.pairwise(in_order):
            edges.setdefault((first, then), segments[first].count)
    votes: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for table in tables:
        there: dict[int, Ints] = {}
        for row, rank in enumerate(table.ranks):
            for number in belongs.get(rank, []):
                segment = segments[number]
                mine = segment.row_of[rank]
                step = step_index(
                    segment.start_ns[mine], segment.end_ns[mine], segment.seen[mine], table.enter_ns[row]
                )
                step = np.where(table.seen[row], step, -1)
                there[number] = np.maximum(there[number], step) if number in there else step
        numbers = sorted(there)
        for place, one in enumerate(numbers):
            for other in numbers[place + 1 :]:
                both = (there[one] >= 0) & (there[other] >= 0)
                apart, times = np.unique((there[one] - there[other])[both], return_counts=True)
                votes[one, other].update(dict(zip(apart.tolist(), times.tolist(), strict=True)))
    for pair, counted in votes.items():
        if counted and pair not in edges and pair[::-1] not in edges:
            apart, times = min(counted.items(), key=lambda item: (-item[1], item[0]))
            if times >= _AGREE * sum(counted.values()):
                edges[pair] = apart
    return edges


def _pieces(segments: list[Steps], edges: Mapping[tuple[int, int], int]) -> list[list[tuple[Steps, int]]]:
    """Segments that hang together, each with its place on the piece's axis."""
    near: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for (one, other), apart in sorted(edges.items()):
        near[one].append((other, apart))
        near[other].append((one, -apart))
    placed: dict[int, int] = {}
    pieces = []
    for first in range(len(segments)):
        if first in placed:
            continue
        placed[first] = 0
        piece, reach = [first], [first]
        while reach:
            here = reach.pop()
            for there, apart in near[here]:
                if there not in placed:
                    placed[there] = placed[here] + apart
                    piece.append(there)
                    reach.append(there)
        pieces.append([(segments[number], placed[number]) for number in piece])
    return pieces


def _merged(piece: list[tuple[Steps, int]]) -> Steps:
    if len(piece) == 1:
        return piece[0][0]
    begin = min(place for _, place in piece)
    count = max(place + segment.count for segment, place in piece) - begin
    ranks = tuple(sorted({rank for segment, _ in piece for rank in segment.ranks}))
    row_of = {rank: row for row, rank in enumerate(ranks)}
    shape = (len(ranks), count)
    start_ns, end_ns, seen = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    seq, next_seq = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    main = max((segment for segment, _ in piece), key=lambda s: (len(s.ranks), s.count))
    for segment, place in piece:
        at = np.arange(place - begin, place - begin + segment.count)
        for mine, rank in enumerate(segment.ranks):
            columns = at[segment.seen[mine]]
            start_ns[row_of[rank], columns] = segment.start_ns[mine, segment.seen[mine]]
            end_ns[row_of[rank], columns] = segment.end_ns[mine, segment.seen[mine]]
            seen[row_of[rank], columns] = True
        if segment is main:
            seq[at], next_seq[at] = segment.seq, segment.next_seq
    return Steps(
        main.communicator,
        ranks,
        seq,
        next_seq,
        start_ns,
        end_ns,
        seen,
        given=all(segment.given for segment, _ in piece),
    )
