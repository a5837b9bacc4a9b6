"""A pipeline-parallel job, played out event by event in plain Python, and recorded as operations.

One forward, one backward (1F1B), rendezvous transfers, data-parallel collectives at both ends of the step. It knows
nothing of the replay under test: what it injects is the truth that verdicts are held against.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from diagnosis import verdict as out
from diagnosis.evidence import CollectiveTable, Evidence, OperationTable, RankEvidence
from diagnosis.verdict import Verdict
from probes.importers import Note, Part
from probes.records import Lane, Place

T0 = 1_790_000_000_000_000_000
NAMES = [
    "forward-compute",
    "backward-compute",
    "forward-send",
    "forward-recv",
    "backward-send",
    "backward-recv",
    "params-all-gather",
    "grads-reduce-scatter",
    "embedding-grads-all-reduce",
    "optimizer-clip-main-grad",
    "optimizer",
]
COMPUTE = (0, 1, 10)

Row = tuple[int, int, float, float, int, int, int]
"""Kind, step, start and duration in ms from the step's start, seq, micro batch, chunk."""


@dataclass
class Job:
    """What the job is, and what is wrong with it."""

    data: int = 4
    stages: int = 4
    micro_batches: int = 8
    steps: int = 20
    chunks: int = 1
    forward_ms: float = 50.0
    noise: float = 0.003
    uneven: float = 0.0
    """Spread (log-normal) of a micro batch's length, for both directions and all stages."""
    pauses: float = 0.0
    """Mean ms of a pause that hits one random rank's forward in each step."""
    stage_factor: dict[int, float] = field(default_factory=dict)
    slow: dict[tuple[int, int], Callable[[int], float]] = field(default_factory=dict)
    """(stage, data) → factor on its computation in a step."""
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    """(stage, data) → factor on transfers between this stage and the next."""
    everybody: Callable[[int], float] = lambda step: 1.0
    transfer_ms: float = 1.0
    seed: int = 1
    number: Callable[[int, int, int], int] = lambda stage, data, width: stage * width + data
    """(stage, data, data-parallel size) → rank."""
    skew_ms: float = 0.0
    """Each rank's clock is off by up to so much."""


def evidence_of(job: Job, without: tuple[int, ...] = (), world_size: int | None = None) -> Evidence:
    random = np.random.default_rng(job.seed)
    recorded: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for step in range(job.steps):
        _play(job, step, random, recorded)
    ranks = {}
    for (stage, data), rows in recorded.items():
        rank = job.number(stage, data, job.data)
        if rank not in without:
            skew = float(random.uniform(-1, 1)) * job.skew_ms
            ranks[rank] = _recorded(rank, stage, data, rows, skew)
    total = job.data * job.stages if world_size is None else world_size
    return Evidence("job-1", total, T0, T0 + job.steps * 10**11, T0, dict(sorted(ranks.items())))


def of_parts(parts: Iterable[Part | Note]) -> Evidence:
    """What a store makes of an importer's operations, without a store."""
    own: dict[int, list[Part]] = defaultdict(list)
    for part in parts:
        if isinstance(part, Part):
            own[part.rank_batch.rank].append(part)
    ranks = {rank: _of_rank(rank, of_rank) for rank, of_rank in sorted(own.items())}
    world = max(part.rank_batch.world_size for of_rank in own.values() for part in of_rank)
    return Evidence("job-1", world, T0, T0 + 10**15, T0, ranks)


def _of_rank(rank: int, parts: list[Part]) -> RankEvidence:
    names: dict[str, int] = {}
    columns: dict[str, list[int]] = defaultdict(list)
    for part in parts:
        table = part.rank_batch.operations
        numbers = [names.setdefault(name, len(names)) for name in table.names]
        columns["kind"] += [numbers[kind] for kind in table.kind]
        for name in ("lane", "step", "start_ns", "duration_ns", "seq", "micro_batch", "chunk"):
            columns[name] += getattr(table, name)
    arrays = {name: np.array(values, np.int64) for name, values in columns.items()}
    operations = OperationTable(names=list(names), **arrays)
    batch = parts[-1].rank_batch
    return _evidence(rank, f"node-{rank}", operations, batch.place)


def bare(evidence: Evidence) -> Verdict:
    return Verdict(
        job=evidence.job,
        window=out.Window(start="2026-09-21T00:00:00.000Z", end="2026-09-21T01:00:00.000Z"),
        status="insufficient",
        world_size=evidence.world_size,
        ranks_seen=len(evidence.ranks),
    )


def _recorded(rank: int, stage: int, data: int, rows: list[Row], skew_ms: float) -> RankEvidence:
    ordered = sorted(rows, key=lambda row: (row[1], row[2], row[2] + row[3]))
    kind, step, start, duration, seq, micro_batch, chunk = (
        np.array(column) for column in zip(*ordered, strict=True)
    )
    start_ns = T0 + step.astype(np.int64) * 10**11 + np.round((start + skew_ms) * 1e6).astype(np.int64)
    operations = OperationTable(
        names=list(NAMES),
        kind=kind.astype(np.int64),
        lane=np.where(np.isin(kind, COMPUTE), int(Lane.COMPUTE), int(Lane.COMMUNICATION)).astype(np.int64),
        step=step.astype(np.int64),
        start_ns=start_ns,
        duration_ns=np.round(duration * 1e6).astype(np.int64),
        seq=seq.astype(np.int64),
        micro_batch=micro_batch.astype(np.int64),
        chunk=chunk.astype(np.int64),
    )
    return _evidence(rank, f"node-{rank}", operations, Place(data=data, stage=stage))


def _evidence(rank: int, node: str, operations: OperationTable, place: Place) -> RankEvidence:
    empty = np.zeros(0, np.int64)
    return RankEvidence(
        rank=rank,
        node=node,
        pid=100 + rank,
        local_rank=0,
        name="python",
        communicators=[],
        collectives=CollectiveTable(empty, empty, empty, empty, empty, empty, empty.astype(bool)),
        threads=[],
        occupants=[],
        first_ns=int(operations.start_ns.min()),
        last_ns=int(operations.start_ns.max()),
        operations=operations,
        place=place,
        source="operations",
    )


def schedule(job: Job, stage: int) -> list[tuple[str, int, int]]:
    """(direction, micro batch, chunk) in the order in which a stage computes them."""
    if job.chunks > 1:
        # All forwards chunk by chunk, then all backwards: plain, and legal for any number of stages.
        forwards = [("forward", m, c) for c in range(job.chunks) for m in range(job.micro_batches)]
        return forwards + [("backward", m, c) for _, m, c in reversed(forwards)]
    ahead = min(job.stages - stage - 1, job.micro_batches)
    order = [("forward", m, 0) for m in range(ahead)]
    for m in range(job.micro_batches):
        if m + ahead < job.micro_batches:
            order.append(("forward", m + ahead, 0))
        order.append(("backward", m, 0))
    return order


def _play(
    job: Job, step: int, random: np.random.Generator, recorded: dict[tuple[int, int], list[Row]]
) -> None:
    places = [(stage, data) for stage in range(job.stages) for data in range(job.data)]
    lengths = np.exp(random.normal(0, job.uneven, (job.data, job.micro_batches))) if job.uneven else None
    victim = places[int(random.integers(len(places)))]
    free: dict[tuple[int, int], float] = {}
    begun = {place: float(random.uniform(0, 5)) for place in places}
    for stage in range(job.stages):
        group = [place for place in places if place[0] == stage]
        end = max(begun[place] for place in group) + 10.0
        for place in group:
            recorded[place].append((6, step, begun[place], end - begun[place], 0, -1, 0))
            free[place] = end
    programs = {place: schedule(job, place[0]) for place in places}
    at = dict.fromkeys(places, 0)
    sent: dict[tuple[str, int, int, int], float] = {}
    count: dict[tuple[tuple[int, int], int], int] = defaultdict(int)
    pending: dict[tuple[str, int, int, int], tuple[tuple[int, int], int]] = {}
    boundaries = job.stages * job.chunks - 1

    def note(place: tuple[int, int], kind: int, start: float, duration: float, mb: int, chunk: int) -> int:
        rows = recorded[place]
        rows.append((kind, step, start, duration, count[place, kind], mb, chunk))
        count[place, kind] += 1
        return len(rows) - 1

    moved = True
    while moved:
        moved = False
        for place in places:
            while at[place] < len(programs[place]):
                stage, data = place
                way, mb, chunk = programs[place][at[place]]
                forward = way == "forward"
                here = chunk * job.stages + stage
                gate = here - 1 if forward else here
                start = free[place]
                if 0 <= gate < boundaries:
                    key = (way, data, mb, gate)
                    if key not in sent:
                        break
                    factor = job.links.get((gate % job.stages, data), 1.0)
                    arrived = max(sent[key], start) + job.transfer_ms * factor
                    note(place, 3 if forward else 5, start, arrived - start, -1, -1)
                    sender, index = pending[key]
                    kind, s, begin, _, seq, m, c = recorded[sender][index]
                    recorded[sender][index] = (kind, s, begin, arrived - begin, seq, m, c)
                    start = arrived
                takes = job.forward_ms * (1.0 if forward else 2.0) * job.stage_factor.get(stage, 1.0)
                takes *= (1 + job.noise * float(random.normal())) * job.everybody(step)
                takes *= job.slow[place](step) if place in job.slow else 1.0
                takes *= float(lengths[data, mb]) if lengths is not None else 1.0
                if forward and mb == 0 and place == victim and job.pauses:
                    takes += job.pauses * float(random.exponential())
                note(place, 0 if forward else 1, start, takes, mb, chunk)
                free[place] = start + takes
                gate = here if forward else here - 1
                if 0 <= gate < boundaries:
                    key = (way, data, mb, gate)
                    sent[key] = free[place]
                    pending[key] = (place, note(place, 2 if forward else 4, free[place], 0.0, -1, -1))
                at[place] += 1
                moved = True
    assert all(at[place] == len(programs[place]) for place in places), "the schedule has a circle"
    ends = dict(free)
    if job.stages > 1:
        for data in range(job.data):
            pair = [(0, data), (job.stages - 1, data)]
            end = max(ends[place] for place in pair) + 2.0
            for place in pair:
                note(place, 8, ends[place], end - ends[place], -1, -1)
                ends[place] = end
    for stage in range(job.stages):
        group = [place for place in places if place[0] == stage]
        end = max(ends[place] for place in group) + 20.0
        for place in group:
            note(place, 7, ends[place], end - ends[place], -1, 0)
            ends[place] = end
    end = max(ends.values()) + 1.0
    for place in places:
        note(place, 9, ends[place], end - ends[place], -1, -1)
        note(place, 10, end, 3.0, -1, -1)


def step_ms(evidence: Evidence) -> float:
    """Mean length of a step: the longest rank's first start to last end."""
    longest: dict[int, float] = defaultdict(float)
    for rank in evidence.ranks.values():
        table = rank.operations
        assert table is not None
        for step in np.unique(table.step):
            mine = table.step == step
            ends = table.start_ns[mine] + table.duration_ns[mine]
            longest[int(step)] = max(longest[int(step)], float(ends.max() - table.start_ns[mine].min()) / 1e6)
    return float(np.mean(list(longest.values())))
