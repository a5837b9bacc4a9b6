"""The operation graph of a traced job: what must have ended before each operation can start, and who meets whom.

The readings of arXiv 2505.05713 that are taken here are listed in ``whatif``. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.evidence import Ints
from diagnosis.replay.trace import BACKWARD, COLLECTIVE, FORWARD, OTHER, RECV, SEND, Trace, is_backward

_TOLERANCE_MS = 0.05
"""Two instants of one rank closer than this are one: traces keep 32-bit floats of seconds."""


@dataclass(frozen=True)
class Graph:
    """Operations and what each waits for, levelled: everything in a level waits only for lower levels.

    Operations are renumbered by level and group; ``order`` leads back to the trace's rows.
    """

    order: Ints
    group: Ints
    """Per operation in ``order``: its group, numbered by level."""
    levels: list[tuple[int, int, int, int, int, int]]
    """Per level: first and last+1 of its operations, groups, edges."""
    source: Ints
    """Per edge, sorted by group: the operation (in ``order``) that must have ended."""
    bounds: Ints
    """Per group: its first edge."""
    step: Ints
    """Per operation in ``order``: its step's column."""
    members: Ints
    """Per row of the trace: how many operations its group has."""
    expected: Ints
    """Per row of the trace: how many it would have if nothing were missing; equal to ``members`` then."""
    of_row: Ints
    """Per row of the trace: number of its group."""


def build(trace: Trace) -> Graph:
    """The graph of a trace. Edges lead forward in each rank's recorded order; a pairing that would close a
    circle is dissolved, its members then stand alone."""
    edges = _edges(trace)
    group, expected = _groups(trace)
    level = _levels(group, edges)
    while (level < 0).any():
        stuck = np.flatnonzero(level < 0)
        group[stuck] = group.max() + 1 + np.arange(len(stuck))
        group = np.unique(group, return_inverse=True)[1]
        level = _levels(group, edges)
    return _level(trace, group, expected, edges, level)


def _level(trace: Trace, group: Ints, expected: Ints, edges: Ints, level: Ints) -> Graph:
    order = np.lexsort((group, level))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    # Groups renumbered in that order.
    changed = np.diff(group[order], prepend=-1) != 0
    number = np.cumsum(changed) - 1
    of_row = number[place]
    source, target = place[edges[0]], of_row[edges[1]]
    by_group = np.argsort(target, kind="stable")
    source, target = source[by_group], target[by_group]
    groups = int(number[-1]) + 1
    bounds = np.searchsorted(target, np.arange(groups))
    deepest = int(level.max()) + 1
    op_at = np.searchsorted(level[order], np.arange(deepest + 1))
    group_at = np.append(number, groups)[op_at]
    edge_at = np.append(bounds, len(source))[group_at]
    rows = zip(op_at, op_at[1:], group_at, group_at[1:], edge_at, edge_at[1:], strict=False)
    members = np.bincount(of_row)[of_row]
    return Graph(
        order=order,
        group=number,
        levels=[(int(a), int(b), int(c), int(d), int(e), int(f)) for a, b, c, d, e, f in rows],
        source=source,
        bounds=bounds,
        step=trace.column[order],
        members=members,
        expected=np.maximum(expected, members),
        of_row=of_row,
    )


def _levels(group: Ints, edges: Ints) -> Ints:
    """Level per row: the longest chain of groups before it; −1 for what lies in or behind a circle."""
    groups = int(group.max()) + 1
    source, target = group[edges[0]], group[edges[1]]
    by_source = np.argsort(source, kind="stable")
    source, target = source[by_source], target[by_source]
    first = np.searchsorted(source, np.arange(groups + 1))
    missing = np.bincount(target, minlength=groups)
    found = np.full(groups, -1, np.int64)
    front = np.flatnonzero(missing == 0)
    place = np.empty(groups, np.int64)
    depth = 0
    while len(front):
        found[front] = depth
        counts = first[front + 1] - first[front]
        # All edges that leave the front: ranges of a sorted list, laid end to end.
        offsets = np.repeat(first[front] - np.cumsum(counts) + counts, counts)
        reached = target[offsets + np.arange(int(counts.sum()))]
        np.subtract.at(missing, reached, 1)
        ready = reached[missing[reached] == 0]
        # Each once: the last to write its place keeps it.
        place[ready] = np.arange(len(ready))
        front = ready[place[ready] == np.arange(len(ready))]
        depth += 1
    return found[group]


def _edges(trace: Trace) -> Ints:
    """2 × edges: rows of the trace, (must have ended, then starts)."""
    roles = trace.roles
    computes = roles <= OTHER
    chain = np.flatnonzero(computes)
    lane = np.flatnonzero(roles == COLLECTIVE)
    found = [_chain(trace, chain), _chain(trace, lane)]
    for backward in (False, True):
        found += _pipeline(trace, backward, chain)
    gathers = np.array(["param" in name and "gather" in name for name in trace.names], np.bool_)[trace.kind]
    found.append(_after(trace, lane[~gathers[lane]], chain))
    found.append(_after(trace, np.flatnonzero(roles == OTHER), lane))
    found.append(_first_forward(trace, np.flatnonzero(gathers)))
    edges = np.concatenate(found, axis=1)
    return np.asarray(edges[:, edges[0] < edges[1]])


def _chain(trace: Trace, rows: Ints) -> Ints:
    """Each after the one before it in the same rank and step."""
    same = trace.cell[rows[1:]] == trace.cell[rows[:-1]]
    return np.stack([rows[:-1][same], rows[1:][same]])


def _after(trace: Trace, later: Ints, earlier: Ints) -> Ints:
    """Each of ``later`` after the last of ``earlier`` that had ended when it began."""
    found = _last_ended(trace, later, earlier)
    return np.stack([found[found >= 0], later[found >= 0]])


def _last_ended(trace: Trace, later: Ints, earlier: Ints) -> Ints:
    if not len(earlier):
        return np.full(len(later), -1, np.int64)
    span = float((trace.start + trace.duration).max()) + 1.0
    ends = trace.cell[earlier] * span + trace.start[earlier] + trace.duration[earlier]
    by_end = np.argsort(ends, kind="stable")
    at = np.searchsorted(
        ends[by_end], trace.cell[later] * span + trace.start[later] + _TOLERANCE_MS, side="right"
    )
    found = earlier[by_end[np.maximum(at - 1, 0)]]
    return np.where((at > 0) & (trace.cell[found] == trace.cell[later]), found, -1)


def _first_forward(trace: Trace, gathers: Ints) -> Ints:
    """A chunk's first forward after the last gather of its parameters (of no chunk: of all)."""
    forward = np.flatnonzero(trace.roles == FORWARD)
    if not len(gathers) or not len(forward):
        return np.zeros((2, 0), np.int64)
    width = int(trace.chunk.max()) + 2

    def key(rows: Ints) -> Ints:
        return np.asarray(trace.cell[rows] * width + trace.chunk[rows] + 1)

    wanted, first = np.unique(key(forward), return_index=True)
    from_end, last = np.unique(key(gathers)[::-1], return_index=True)
    at = np.clip(np.searchsorted(from_end, wanted), 0, len(from_end) - 1)
    hit = from_end[at] == wanted
    return np.stack([gathers[::-1][last[at[hit]]], forward[first[hit]]])


def _ordinal(key: Ints) -> Ints:
    """How many rows with the same key come before each row."""
    by_key = np.argsort(key, kind="stable")
    ordered = key[by_key]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1)) if len(key) else np.zeros(0, np.int64)
    run = np.repeat(starts, np.diff(np.append(starts, len(key))))
    ordinal = np.empty(len(key), np.int64)
    ordinal[by_key] = np.arange(len(key)) - run
    return ordinal


def _directed(trace: Trace, role: int, backward: bool) -> Ints:
    kinds = [r == role and is_backward(n) == backward for r, n in zip(trace.role, trace.names, strict=True)]
    return np.flatnonzero(np.array(kinds, np.bool_)[trace.kind])


def matched(trace: Trace, role: int, backward: bool) -> tuple[Ints, Ints]:
    """Sends (or receives) of one direction, and for each the compute that makes (or needs) what it carries, −1
    where none does. The n-th belongs to the n-th where a rank has as many of both in the step, else the last
    compute that had ended (the first that had not begun)."""
    moves = _directed(trace, role, backward)
    computes = np.flatnonzero(trace.roles == (BACKWARD if backward else FORWARD))
    if not len(moves) or not len(computes):
        return moves, np.full(len(moves), -1, np.int64)
    cells = len(trace.ranks) * len(trace.steps)
    many = np.bincount(trace.cell[computes], minlength=cells)
    first = np.cumsum(many) - many
    cell = trace.cell[moves]
    nth = np.minimum(first[cell] + _ordinal(cell), len(computes) - 1)
    fewer = many[cell] - np.bincount(cell, minlength=cells)[cell]
    if role == RECV and int(trace.chunk.max()) > 0:
        # Interleaved schedules often do not record the very first receive, which brings nothing.
        nth = np.minimum(nth + (fewer == 1), len(computes) - 1)
        fewer = np.where(fewer == 1, 0, fewer)
    equal = fewer == 0
    if role == SEND:
        by_time = _last_ended(trace, moves, computes)
    else:
        span = float((trace.start + trace.duration).max()) + 1.0
        begins = trace.cell[computes] * span + trace.start[computes]
        ends = cell * span + trace.start[moves] + trace.duration[moves] - _TOLERANCE_MS
        at = np.searchsorted(begins, ends)
        found = computes[np.minimum(at, len(computes) - 1)]
        by_time = np.where((at < len(computes)) & (trace.cell[found] == cell), found, -1)
    return moves, np.where(equal, computes[nth], by_time)


def _pipeline(trace: Trace, backward: bool, chain: Ints) -> list[Ints]:
    sends, made = matched(trace, SEND, backward)
    receives, needed = matched(trace, RECV, backward)
    computes = np.flatnonzero(trace.roles == (BACKWARD if backward else FORWARD))
    found = [_chain(trace, sends), _chain(trace, receives)]
    found.append(np.stack([made[made >= 0], sends[made >= 0]]))
    hit = needed >= 0
    found.append(np.stack([receives[hit], needed[hit]]))
    # The receive itself follows the compute before the one that needs it; the first one, what ran last.
    before = np.searchsorted(computes, needed[hit]) - 1
    previous = computes[np.maximum(before, 0)]
    same = (before >= 0) & (trace.cell[previous] == trace.cell[needed[hit]])
    found.append(np.stack([previous[same], receives[hit][same]]))
    found.append(_after(trace, receives[hit][~same], chain))
    return found


def _groups(trace: Trace) -> tuple[Ints, Ints]:
    """Group per row (rows that meet have one), and how many rows should meet there."""
    group = np.arange(len(trace.row))
    expected = np.ones(len(trace.row), np.int64)
    for backward in (False, True):
        rows, key = _links(trace, backward)
        _join(group, rows, key)
        expected[rows] = 2
    for kind, (name, role) in enumerate(zip(trace.names, trace.role, strict=True)):
        rows = np.flatnonzero(trace.kind == kind)
        if role != COLLECTIVE or not len(rows):
            continue
        span = _span(trace, name.lower())
        cell = trace.cell[rows]
        told = trace.seq[rows]
        unique = (told >= 0).all() and len(np.unique(cell * (told.max() + 1) + told)) == len(rows)
        nth = told if unique else _ordinal(cell)
        spans = span[trace.row[rows]]
        key = (nth * len(trace.steps) + trace.column[rows]) * (int(span.max()) + 1) + spans
        _join(group, rows, key)
        # As many as the fullest of its kind and span has over the steps.
        meet, size = np.unique(key, return_counts=True)
        fullest = np.zeros(int(span.max()) + 1, np.int64)
        np.maximum.at(fullest, meet % (int(span.max()) + 1), size)
        expected[rows] = np.maximum(fullest[spans], _told_size(trace, name.lower())[trace.row[rows]])
    return np.unique(group, return_inverse=True)[1], expected


def _join(group: Ints, rows: Ints, key: Ints) -> None:
    if len(rows):
        _, first, of_row = np.unique(key, return_index=True, return_inverse=True)
        group[rows] = rows[first][of_row]


def _span(trace: Trace, name: str) -> Ints:
    """Per rank: which group of ranks it meets in a collective of this name."""
    if "clip" in name or "norm" in name.replace("layernorm", ""):
        return np.zeros(len(trace.ranks), np.int64)
    if "embedding" in name:
        return trace.replica
    if "layernorm" in name:
        return np.asarray(
            trace.data * trace.stages + trace.stage if (trace.data >= 0).all() else trace.replica
        )
    return trace.stage


def _told_size(trace: Trace, name: str) -> Ints:
    """Per rank: how many ranks of the layout it meets there, counted over all stages: the fullest stage tells
    how many data-parallel ranks there are."""
    per_stage = np.bincount(trace.stage, minlength=trace.stages)
    if "clip" in name or "embedding" in name or "norm" in name:
        return np.ones(len(trace.ranks), np.int64)
    return np.full(len(trace.ranks), int(per_stage.max()), np.int64)


def _links(trace: Trace, backward: bool) -> tuple[Ints, Ints]:
    """Sends and receives of one direction that have a partner in the layout, and what pairs them: pipeline,
    step, micro batch (or order), and the boundary between chunks that they cross."""
    chunks = int(trace.chunk.max()) + 1 if len(trace.chunk) else 1
    total = max(chunks, 1) * trace.stages
    rows, keys = [], []
    unique = _micro_batches_tell(trace, backward)
    for role in (SEND, RECV):
        moves, compute = matched(trace, role, backward)
        moves, compute = moves[compute >= 0], compute[compute >= 0]
        place = np.maximum(trace.chunk[compute], 0) * trace.stages + trace.stage[trace.row[compute]]
        # Boundary b lies between global chunk b and b + 1, whichever way the data goes.
        boundary = place - 1 if (role == RECV) != backward else place
        real = (boundary >= 0) & (boundary < total - 1)
        moves, compute, boundary = moves[real], compute[real], boundary[real]
        nth = trace.micro_batch[compute] if unique else _ordinal(trace.cell[moves] * total + boundary)
        pipeline = trace.replica[trace.row[moves]] * len(trace.steps) + trace.column[moves]
        rows.append(moves)
        keys.append((pipeline * total + boundary) * (1 << 20) + nth)
    return np.concatenate(rows), np.concatenate(keys)


def _micro_batches_tell(trace: Trace, backward: bool) -> bool:
    """Whether micro batch and chunk name each compute of a rank's step."""
    rows = np.flatnonzero(trace.roles == (BACKWARD if backward else FORWARD))
    if not len(rows) or (trace.micro_batch[rows] < 0).any():
        return False
    width = int(trace.chunk.max()) + 2
    key = (trace.cell[rows] * width + trace.chunk[rows] + 1) * (1 << 20) + trace.micro_batch[rows]
    return len(np.unique(key)) == len(rows)
