"""Timed operations of all ranks as flat arrays: what each operation is, where it ran, in which step.

Times are milliseconds from the rank's own start of the step: clocks of different nodes are never compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from diagnosis.evidence import Evidence, Ints, OperationTable, RankEvidence
from diagnosis.steps import Bools, Floats

SOURCE = "operations"
"""Importer whose operations are whole steps. Profilers sample kernels, and name them as they please."""

FORWARD, BACKWARD, OTHER, SEND, RECV, COLLECTIVE = range(6)
"""What an operation does: computes forward, backward or something else; sends to, or receives from, another
stage; or meets a group of ranks."""

_SEND = re.compile(r"send")
_RECV = re.compile(r"recv|receive")
_COLLECTIVE = re.compile(r"reduce|gather|scatter|broadcast|all-?to-?all|barrier|sync|clip")
_FORWARD = re.compile(r"forward|fwd")
_BACKWARD = re.compile(r"backward|bwd")


def role_of(name: str) -> int:
    """What an operation of this name does, by the words that training frameworks use."""
    lower = name.lower().replace("_", "-")
    for role, words in ((SEND, _SEND), (RECV, _RECV), (COLLECTIVE, _COLLECTIVE)):
        if words.search(lower):
            return role
    if _BACKWARD.search(lower):
        return BACKWARD
    return FORWARD if _FORWARD.search(lower) else OTHER


def is_backward(name: str) -> bool:
    """Whether a transfer carries gradients (backward) and not activations (forward)."""
    return _BACKWARD.search(name.lower()) is not None


@dataclass(frozen=True)
class Trace:
    """Operations sorted by rank, step and start. All of the lower columns have one length.

    ``row`` counts ranks in the order of ``ranks``; ``column`` counts steps in the order of ``steps``.
    """

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    data: Ints
    """Per rank; ranks of one data-parallel place and one stage do the same work."""
    stage: Ints
    """Per rank, counted from 0 without gaps."""
    stages: int
    replica: Ints
    """Per rank: which pipeline it belongs to (data, tensor, context and expert rank together)."""
    steps: Ints
    names: tuple[str, ...]
    role: Ints
    """Per name."""
    wall: Floats
    """Ranks × steps: first start to last end; NaN where the rank has no operation."""
    row: Ints
    column: Ints
    kind: Ints
    start: Floats
    duration: Floats
    seq: Ints
    micro_batch: Ints
    chunk: Ints

    @cached_property
    def roles(self) -> Ints:
        """Per operation."""
        return np.asarray(self.role[self.kind])

    @cached_property
    def cell(self) -> Ints:
        """Per operation: the rank and step that it belongs to, as one number that never falls."""
        return np.asarray(self.row * len(self.steps) + self.column)

    def sums(self, chosen: Bools, weights: Floats | None = None) -> Floats:
        """Ranks × steps: sum of durations (or ``weights``) of the chosen operations; NaN where the rank has no
        operation in the step at all."""
        values = self.duration if weights is None else weights
        size = len(self.ranks) * len(self.steps)
        total = np.bincount(self.cell[chosen], weights=values[chosen], minlength=size)
        return np.where(np.isnan(self.wall), np.nan, total.reshape(self.wall.shape))

    def select(self, columns: Ints) -> Trace:
        """The same trace with some of its steps only."""
        place = np.full(len(self.steps), -1, np.int64)
        place[columns] = np.arange(len(columns))
        keep = place[self.column] >= 0
        kept = {name: getattr(self, name)[keep] for name in _COLUMNS}
        kept["column"] = place[kept["column"]]
        return Trace(
            ranks=self.ranks,
            nodes=self.nodes,
            data=self.data,
            stage=self.stage,
            stages=self.stages,
            replica=self.replica,
            steps=self.steps[columns],
            names=self.names,
            role=self.role,
            wall=self.wall[:, columns],
            **kept,
        )


_COLUMNS = ("row", "column", "kind", "start", "duration", "seq", "micro_batch", "chunk")


def trace_of(evidence: Evidence) -> Trace | None:
    """All operations of operation tables that belong to a step, or None where no rank has forward or backward ones.

    Rows with a negative duration, or without a step, are left out. Only a rank's newest life counts.
    """
    chosen = [
        (rank, table)
        for _, rank in sorted(evidence.ranks.items())
        if (table := rank.operations) is not None and rank.source == SOURCE and _usable(table)
    ]
    if not chosen:
        return None
    names: dict[str, int] = {}
    parts: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for name in (*_COLUMNS, "step")}
    for row, (_, table) in enumerate(chosen):
        new = np.array([names.setdefault(name, len(names)) for name in table.names], np.int64)
        keep = (table.step >= 0) & (table.duration_ns >= 0)
        parts["row"].append(np.full(int(keep.sum()), row, np.int64))
        parts["kind"].append(new[table.kind[keep]])
        for name, values in (
            ("step", table.step),
            ("start", table.start_ns),
            ("duration", table.duration_ns),
            ("seq", table.seq),
            ("micro_batch", table.micro_batch),
            ("chunk", table.chunk),
        ):
            parts[name].append(np.asarray(values[keep], np.int64))
    flat = {name: np.concatenate(arrays) for name, arrays in parts.items() if name != "column"}
    return _assemble([rank for rank, _ in chosen], tuple(names), flat)


def _usable(table: OperationTable) -> bool:
    if not len(table.step):
        return False
    computes = np.array([role_of(name) in (FORWARD, BACKWARD) for name in table.names], np.bool_)
    keep = (table.step >= 0) & (table.duration_ns >= 0)
    return bool(computes[table.kind[keep]].any())


def _assemble(ranks: list[RankEvidence], names: tuple[str, ...], flat: dict[str, Ints]) -> Trace:
    keys = (flat["start"] + flat["duration"], flat["start"], flat["step"], flat["row"])
    if not _sorted(keys):
        order = np.lexsort(keys)
        flat = {name: values[order] for name, values in flat.items()}
    steps, column = np.unique(flat["step"], return_inverse=True)
    cell = flat["row"] * len(steps) + column
    first = np.full(len(ranks) * len(steps), -1, np.int64)
    seen, where = np.unique(cell, return_index=True)
    first[seen] = flat["start"][where]
    last = np.zeros(len(first), np.int64)
    np.maximum.at(last, cell, flat["start"] + flat["duration"])
    wall = np.where(first < 0, np.nan, (last - first) / 1e6)
    role = np.array([role_of(name) for name in names], np.int64)
    inner = ~_encloses(role, cell, flat)
    flat, cell, column = {k: v[inner] for k, v in flat.items()}, cell[inner], column[inner]
    stage = _counted([rank.place.stage for rank in ranks])
    data = np.array([rank.place.data for rank in ranks], np.int64)
    return Trace(
        ranks=tuple(rank.rank for rank in ranks),
        nodes=tuple(rank.node for rank in ranks),
        data=data,
        stage=stage,
        stages=int(stage.max()) + 1,
        replica=_replicas(ranks, stage),
        steps=steps,
        names=names,
        role=role,
        wall=wall.reshape(len(ranks), len(steps)),
        row=flat["row"],
        column=np.asarray(column, np.int64),
        kind=flat["kind"],
        start=(flat["start"] - first[cell]) / 1e6,
        duration=flat["duration"] / 1e6,
        seq=flat["seq"],
        micro_batch=flat["micro_batch"],
        chunk=flat["chunk"],
    )


def _encloses(role: Ints, cell: Ints, flat: dict[str, Ints]) -> Bools:
    """Rows of kinds that hold others within them ("step", "iteration"): they are no work of their own."""
    computes = np.isin(role[flat["kind"]], (FORWARD, BACKWARD))
    other = np.flatnonzero(role[flat["kind"]] == OTHER)
    start, end = flat["start"], flat["start"] + flat["duration"]
    # Rows are in order of cell and start: computations that begin within an operation follow it closely.
    begun = np.concatenate([[0], np.cumsum(computes)])
    span = int(end.max() - start.min()) + 1 if len(start) else 1
    rank_of_cell = np.unique(cell, return_inverse=True)[1].astype(np.float64)
    key = rank_of_cell * span + (start - start.min())
    until = np.searchsorted(key, rank_of_cell[other] * span + (end[other] - start.min()))
    holds = begun[np.maximum(until, other + 1)] > begun[other + 1]
    return np.isin(flat["kind"], flat["kind"][other[holds]])


def _sorted(keys: tuple[Ints, ...]) -> bool:
    """Whether rows are in order already, the last key first: sorting millions of rows takes seconds."""
    fine = np.ones(max(len(keys[0]) - 1, 0), np.bool_)
    for key in keys:
        step = np.diff(key)
        fine = (step > 0) | ((step == 0) & fine)
    return bool(fine.all())


def _counted(stages: list[int]) -> Ints:
    """Stages as told; where one is not told, none is: all ranks then count as one stage."""
    told = np.array(stages, np.int64)
    return np.zeros(len(told), np.int64) if (told < 0).any() else told


def _replicas(ranks: list[RankEvidence], stage: Ints) -> Ints:
    """Which pipeline each rank belongs to. Ranks that the layout does not tell apart get one each."""
    keys = [(r.place.data, r.place.tensor, r.place.context, r.place.expert) for r in ranks]
    number: dict[tuple[object, ...], int] = {}
    taken: set[tuple[int, tuple[object, ...]]] = set()
    replicas = []
    for rank, key, at in zip(ranks, keys, stage.tolist(), strict=True):
        known: tuple[object, ...] = key if key[0] >= 0 and (at, key) not in taken else (*key, rank.rank)
        taken.add((at, known))
        replicas.append(number.setdefault(known, len(number)))
    return np.array(replicas, np.int64)
