"""What if nobody had been slow? Recorded operations, replayed with other durations.

The method of "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv 2505.05713): the
operations of a step form a graph; replaying it with ideal durations gives the step without stragglers, and
replaying it with one worker's, one stage's or one kind's durations made ideal gives what that one costs.

Where several readings of the paper are possible, these are taken:

- *Graph* (§3.2). Compute runs in recorded order; each of forward-send, forward-recv, backward-send and
  backward-recv is a stream of its own; a receive precedes its compute and follows the compute of the same direction
  before that one, a send follows its compute (as the published analyser has it). Other collectives run in recorded
  order after the last compute that had ended when they began; parameter gathers precede the first forward of
  their chunk and wait for no compute.
- *Groups*. A send ends with its receive. Collectives meet the data-parallel group of the stage; those named
  ``embedding`` the first and last stage of one pipeline, ``clip`` all ranks (the gradient norm), ``layernorm`` the
  tensor-parallel group. A group starts when its last member is ready.
- *Transfer time*. The paper subtracts the latest start from the end. Members leave together, so that is the
  duration of the member that waited least: the shortest in the group, which needs no common clock.
- *Ideal* (§3.3). Compute (optimizer and gc too): mean over all ranks, stages and steps of the kind.
  Communication: median of its transfer times. So the ideal has equal stages: an uneven split of layers costs.
- *Slowdown* S: mean replayed step over mean ideal step. The replay leaves out delays before a launch
  (the paper does, too); :attr:`Replayed.error` says how far it is from the recorded steps.

Pure: arrays in, arrays out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.evidence import Ints
from diagnosis.steps import Bools, Floats
from diagnosis.trace import (
    BACKWARD,
    COLLECTIVE,
    FORWARD,
    OTHER,
    RECV,
    SEND,
    Trace,
    is_backward,
)

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


@dataclass(frozen=True)
class Replayed:
    """A trace's graph with its recorded and ideal durations, all in ms."""

    trace: Trace
    graph: Graph
    duration: Floats
    """Per row: compute as recorded, communication without waiting."""
    ideal: Floats
    wait: Floats
    """Per row: what communication waited for others of its group."""
    recorded_ms: float
    """Mean recorded step."""
    steps_ms: Floats
    """Per step, replayed as it was."""
    ideal_ms: float

    @property
    def replayed_ms(self) -> float:
        return float(self.steps_ms.mean())

    @property
    def slowdown(self) -> float:
        """S of the paper; 1 where the ideal step takes no time."""
        return self.replayed_ms / self.ideal_ms if self.ideal_ms > 0 else 1.0

    @property
    def error(self) -> float:
        """Replayed over recorded mean step, less one: what the graph does not know of, delays above all."""
        return self.replayed_ms / self.recorded_ms - 1 if self.recorded_ms > 0 else 0.0

    def run(self, duration: Floats) -> Floats:
        """Step times (ms) with these durations (per row of the trace)."""
        return replay(self.graph, duration, len(self.trace.steps))

    def fixed(self, chosen: Bools, other: Floats | None = None) -> Floats:
        """Step times if the chosen operations had taken their ideal (or ``other``) durations."""
        return self.run(np.where(chosen, self.ideal if other is None else other, self.duration))

    def explained(self, chosen: Bools) -> float:
        """Share of the slowdown that goes when the chosen operations become ideal: Mw for the slowest
        workers, Ms for the last stage. 0 where there is no slowdown."""
        lost = self.replayed_ms - self.ideal_ms
        return (self.replayed_ms - float(self.fixed(chosen).mean())) / lost if lost > 0 else 0.0

    def added(self, chosen: Bools) -> float:
        """Slowdown if only the chosen operations were as recorded (S_t, S_w of the paper)."""
        steps = self.run(np.where(chosen, self.duration, self.ideal))
        return float(steps.mean()) / self.ideal_ms if self.ideal_ms > 0 else 1.0


def what_if(trace: Trace) -> Replayed:
    """Build the graph and replay it as it was and as it would ideally be."""
    graph = build(trace)
    duration, wait = transfers(trace, graph)
    ideal = ideals(trace, duration, graph.members == graph.expected)
    count = len(trace.steps)
    longest = np.nanmax(trace.wall, axis=0)
    return Replayed(
        trace=trace,
        graph=graph,
        duration=duration,
        ideal=ideal,
        wait=wait,
        recorded_ms=float(longest.mean()),
        steps_ms=replay(graph, duration, count),
        ideal_ms=float(replay(graph, ideal, count).mean()),
    )


def transfers(trace: Trace, graph: Graph) -> tuple[Floats, Floats]:
    """Durations without waiting, and the waiting, per row. Computation does not wait."""
    groups = int(graph.of_row.max()) + 1
    least = np.full(groups, np.inf)
    np.minimum.at(least, graph.of_row, trace.duration)
    moved = least[graph.of_row]
    return moved, trace.duration - moved


def ideals(trace: Trace, duration: Floats, whole: Bools) -> Floats:
    """Ideal duration per row: mean of the kind for compute, median for communication.

    ``whole``: rows whose group is complete; where some are not, their durations may contain waiting for
    somebody who was not recorded, and count for the ideal only if there are no others.
    """
    ideal = duration.copy()
    for kind, role in enumerate(trace.role):
        of_kind = trace.kind == kind
        if not of_kind.any():
            continue
        known = of_kind & whole if (of_kind & whole).any() else of_kind
        typical = np.mean if role in (FORWARD, BACKWARD, OTHER) else np.median
        ideal[of_kind] = typical(duration[known])
    return ideal


def replay(graph: Graph, duration: Floats, steps: int) -> Floats:
    """Length of each step (ms): every group starts when all that its members wait for has ended."""
    takes = duration[graph.order]
    ends = np.zeros(len(takes))
    begin = np.zeros(len(graph.bounds))
    for op_a, op_b, group_a, group_b, edge_a, edge_b in graph.levels:
        if edge_b > edge_a:
            bounds = graph.bounds[group_a:group_b] - edge_a
            begin[group_a:group_b] = np.maximum.reduceat(ends[graph.source[edge_a:edge_b]], bounds)
        ends[op_a:op_b] = begin[graph.group[op_a:op_b]] + takes[op_a:op_b]
    longest = np.zeros(steps)
    np.maximum.at(longest, graph.step, ends)
    return longest


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
    pairs = np.unique(group[edges[0]] * groups + group[edges[1]])
    source, target = pairs // groups, pairs % groups
    first = np.searchsorted(source, np.arange(groups + 1))
    missing = np.bincount(target, minlength=groups)
    found = np.full(groups, -1, np.int64)
    front = np.flatnonzero(missing == 0)
    depth = 0
    while len(front):
        found[front] = depth
        counts = first[front + 1] - first[front]
        # All edges that leave the front: ranges of a sorted list, laid end to end.
        offsets = np.repeat(first[front] - np.cumsum(counts) + counts, counts)
        reached = target[offsets + np.arange(int(counts.sum()))]
        missing -= np.bincount(reached, minlength=groups)
        front = np.unique(reached[missing[reached] == 0])
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
    equal = np.bincount(cell, minlength=cells)[cell] == many[cell]
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
