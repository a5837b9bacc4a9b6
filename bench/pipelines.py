"""Simulated training jobs of several communicators, with the truth about them: data, tensor and pipeline parallel,
gradient accumulation, evaluations, slow ranks and slow links, seen as timed collectives (a profiler's or NCCL
Inspector's), as driving threads that nobody watched.

A discrete simulation: each rank runs its program in order; a collective begins on a member when it comes, and ends
on all of them together, its transfer after the last has come; a send and its receive are a collective of two. So
the durations hold who was late, and nothing else is put in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from diagnosis.evidence import CollectiveTable, Evidence, OperationTable, RankEvidence
from probes.records import Communicator, Op, Place, TimedBy

Floats = npt.NDArray[np.float64]
T0 = 1_790_000_000_000_000_000
ACTIVATIONS = 4_194_304
GRADIENTS = 50_331_648


@dataclass
class Layout:
    """Sizes of the parallel layout; rank = (stage · data + d) · tensor + t."""

    data: int = 2
    stages: int = 1
    tensor: int = 1
    micro_batches: int = 4
    steps: int = 120
    world_norm: bool = True
    """A gradient norm over all ranks ends each step."""
    pairs: bool = True
    """Each two neighbours in a pipeline have a communicator of their own; else one for the whole pipeline."""
    evaluate_every: int = 0
    """After so many steps, 30 batches are evaluated, each with a small collective of another kind."""
    pause_every: int = 0
    """After so many steps, a pause of ``pause_ms``."""
    pause_ms: float = 6_000.0
    seed: int = 0
    noise: float = 0.03
    numbered: bool = False
    """The evidence numbers its steps, as a profiler does."""
    log_every: int = 0
    """After so many steps, a loss is averaged over all ranks of the data-parallel group."""

    @property
    def ranks(self) -> int:
        return self.data * self.stages * self.tensor

    def rank(self, stage: int, d: int, t: int = 0) -> int:
        return (stage * self.data + d) * self.tensor + t

    def place(self, rank: int) -> tuple[int, int, int]:
        """(stage, data, tensor)."""
        return rank // (self.data * self.tensor), rank // self.tensor % self.data, rank % self.tensor


@dataclass
class Faults:
    """Arrays are ranks × steps. Change them before :func:`simulate`."""

    compute: Floats
    """Factor on all that a rank computes."""
    transfer: Callable[[int, int, int], float] = lambda sender, receiver, step: 1.0
    """Factor on a transfer between two neighbours of a pipeline."""
    group: Callable[[tuple[int, ...], int], float] = lambda members, step: 1.0
    """Factor on a collective's transfer."""


def healthy(layout: Layout) -> Faults:
    random = np.random.default_rng(layout.seed)
    return Faults(random.lognormal(0.0, layout.noise, (layout.ranks, layout.steps)))


@dataclass
class _Rank:
    now: float = 0.0
    own: float = 0.0
    names: list[str] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)
    seq: dict[str, int] = field(default_factory=dict)
    rows: list[tuple[int, int, int, int, float, float]] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    """When each step began."""


@dataclass(frozen=True)
class Truth:
    own_ms: Floats
    """Ranks × steps: what each rank computed."""
    step_ms: Floats
    """From the end of one step to the end of the next, of the first rank."""


class _Job:
    """The state of the simulation."""

    def __init__(self, layout: Layout, faults: Faults) -> None:
        self.layout, self.faults = layout, faults
        self.ranks = [_Rank() for _ in range(layout.ranks)]
        self.step = 0

    def compute(self, rank: int, ms: float) -> None:
        took = ms * float(self.faults.compute[rank, self.step])
        self.ranks[rank].now += took
        self.ranks[rank].own += took

    def meet(self, members: tuple[int, ...], name: str, op: Op, size: int, ms: float) -> None:
        """A collective: all leave together, ``ms`` after the last has come."""
        if len(members) < 2:
            return
        end = max(self.ranks[rank].now for rank in members) + ms * self.faults.group(members, self.step)
        for rank in members:
            self._row(rank, members, name, op, size, end)

    def pass_on(self, sender: int, receiver: int, name: str, members: tuple[int, ...], ms: float) -> None:
        """A send that ends with its receive."""
        both = max(self.ranks[sender].now, self.ranks[receiver].now)
        end = both + ms * self.faults.transfer(sender, receiver, self.step)
        self._row(sender, members, name, Op.SEND, ACTIVATIONS, end)
        self._row(receiver, members, name, Op.RECV, ACTIVATIONS, end)

    def _row(self, rank: int, members: tuple[int, ...], name: str, op: Op, size: int, end: float) -> None:
        me = self.ranks[rank]
        if name not in me.names:
            me.names.append(name)
            me.communicators.append(
                Communicator(uid=name, desc="", rank=members.index(rank), size=len(members))
            )
        seq = me.seq.get(name, 0)
        me.seq[name] = seq + 1
        me.rows.append((me.names.index(name), seq, int(op), size, me.now, end - me.now))
        me.now = end


def simulate(layout: Layout, faults: Faults, **of_rank: object) -> tuple[Evidence, Truth]:
    """The evidence of the whole job; ``of_rank`` replaces fields of every rank's evidence."""
    job = _Job(layout, faults)
    everyone = tuple(range(layout.ranks))
    own, ends = np.zeros((layout.ranks, layout.steps)), np.zeros(layout.steps)
    for step in range(layout.steps):
        job.step = step
        for state in job.ranks:
            state.own = 0.0
            state.begun.append(state.now)
        _micro_batches(job)
        for stage in range(layout.stages):
            for t in range(layout.tensor):
                group = tuple(layout.rank(stage, d, t) for d in range(layout.data))
                job.meet(group, f"data-{stage}-{t}", Op.ALLREDUCE, GRADIENTS, 4.0)
        if layout.world_norm:
            job.meet(everyone, "world", Op.ALLREDUCE, 4, 0.2)
        for rank in everyone:
            job.compute(rank, 2.0)
            own[rank, step] = job.ranks[rank].own
        if layout.log_every and step % layout.log_every == layout.log_every - 1:
            for stage in range(layout.stages):
                group = tuple(layout.rank(stage, d) for d in range(layout.data))
                job.meet(group, f"data-{stage}-0", Op.ALLREDUCE, 8, 0.1)
        _between(job, step, everyone)
        ends[step] = job.ranks[0].now
    ranks = {rank: _evidence(layout, rank, job.ranks[rank], of_rank) for rank in everyone}
    evidence = Evidence(
        job="job-123",
        world_size=layout.ranks,
        start_ns=T0,
        end_ns=max(rank.last_ns for rank in ranks.values()) + 1,
        watched_since_ns=T0,
        ranks=ranks,
    )
    return evidence, Truth(own, np.diff(ends, prepend=0.0))


def _micro_batches(job: _Job) -> None:
    layout = job.layout
    if layout.stages == 1:
        for _ in range(layout.micro_batches):
            for d in range(layout.data):
                _layers(job, 0, d, 4.0)
                _layers(job, 0, d, 6.0)
        return
    for forward in (True, False):
        stages = range(layout.stages) if forward else range(layout.stages - 1, -1, -1)
        for _ in range(layout.micro_batches):
            for stage in stages:
                for d in range(layout.data):
                    _layers(job, stage, d, 4.0 if forward else 6.0)
                    there = stage + 1 if forward else stage - 1
                    if 0 <= there < layout.stages:
                        for t in range(layout.tensor):
                            _to(job, stage, there, d, t)


def _layers(job: _Job, stage: int, d: int, ms: float) -> None:
    layout = job.layout
    group = tuple(layout.rank(stage, d, t) for t in range(layout.tensor))
    for _ in range(2):
        for rank in group:
            job.compute(rank, ms / 2)
        job.meet(group, f"tensor-{stage}-{d}", Op.ALLREDUCE, ACTIVATIONS, 0.3)


def _to(job: _Job, stage: int, there: int, d: int, t: int) -> None:
    layout = job.layout
    sender, receiver = layout.rank(stage, d, t), layout.rank(there, d, t)
    if layout.pairs:
        low = min(stage, there)
        members = tuple(sorted((sender, receiver)))
        job.pass_on(sender, receiver, f"pair-{low}-{d}-{t}", members, 0.5)
    else:
        members = tuple(layout.rank(s, d, t) for s in range(layout.stages))
        job.pass_on(sender, receiver, f"pipe-{d}-{t}", members, 0.5)


def _between(job: _Job, step: int, everyone: tuple[int, ...]) -> None:
    layout = job.layout
    if layout.evaluate_every and step % layout.evaluate_every == layout.evaluate_every - 1:
        for _ in range(30):
            for stage in range(layout.stages):
                for d in range(layout.data):
                    for t in range(layout.tensor):
                        job.ranks[layout.rank(stage, d, t)].now += 25.0
                for t in range(layout.tensor):
                    group = tuple(layout.rank(stage, d, t) for d in range(layout.data))
                    job.meet(group, f"data-{stage}-{t}", Op.ALLGATHER, 65_536, 0.5)
    if layout.pause_every and step % layout.pause_every == layout.pause_every - 1:
        for rank in everyone:
            job.ranks[rank].now += layout.pause_ms


def _numbered(state: _Rank) -> OperationTable:
    """One operation per step: its mark in a profile."""
    begun = T0 + np.rint(np.array(state.begun) * 1e6).astype(np.int64)
    count = len(begun)
    none = np.full(count, -1, np.int64)
    return OperationTable(
        names=["ProfilerStep"],
        kind=np.zeros(count, np.int64),
        lane=np.zeros(count, np.int64),
        step=np.arange(count) + 550,
        start_ns=begun,
        duration_ns=np.diff(begun, append=T0 + round(state.now * 1e6)),
        seq=none,
        micro_batch=none,
        chunk=none,
    )


def _evidence(layout: Layout, rank: int, state: _Rank, of_rank: dict[str, object]) -> RankEvidence:
    columns = np.array(state.rows, np.float64).reshape(-1, 6)
    enter = T0 + np.rint(columns[:, 4] * 1e6).astype(np.int64)
    whole = {
        name: columns[:, place].astype(np.int64)
        for place, name in enumerate(("communicator", "seq", "op", "bytes"))
    }
    made = RankEvidence(
        rank=rank,
        node=f"node-{rank // 4}",
        pid=1000 + rank,
        local_rank=rank % 4,
        name="python3",
        communicators=state.communicators,
        collectives=CollectiveTable(
            **whole,
            enter_ns=enter,
            duration_ns=np.rint(columns[:, 5] * 1e6).astype(np.int64),
            failed=np.zeros(len(columns), np.bool_),
        ),
        threads=[],
        occupants=[],
        first_ns=T0,
        last_ns=T0 + int(state.now * 1e6),
        timed_by=TimedBy.DEVICE,
        source="inspector",
        place=Place(),
        operations=_numbered(state) if layout.numbered else None,
    )
    return replace(made, **of_rank)  # type: ignore[arg-type]
