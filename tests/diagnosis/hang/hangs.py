"""Evidence for the tests of hangs: from importers' parts, and made up, collective by collective; and whom a hang
names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from diagnosis.evidence import CollectiveTable, Evidence, RankEvidence
from diagnosis.hang.find import Hang
from probes.importers import Note, Part
from probes.records import Collectives, Communicator, Op, Progress, State

T0 = 1_790_000_000_000_000_000
S = 1_000_000_000


def of_parts(parts: Iterable[Part | Note], *, world: int | None = None) -> Evidence:
    """What the store makes of an importer's parts, without a store."""
    ranks: dict[int, list[Part]] = {}
    for part in parts:
        if isinstance(part, Part):
            ranks.setdefault(part.rank_batch.rank, []).append(part)
    evidence = {rank: _of_rank(rank, own) for rank, own in ranks.items()}
    return _evidence(
        evidence, world or max(one.rank_batch.world_size for own in ranks.values() for one in own)
    )


def _of_rank(rank: int, parts: list[Part]) -> RankEvidence:
    batches = [part.rank_batch for part in parts]
    columns = {
        name: [value for batch in batches for value in getattr(batch.collectives, name)]
        for name in Collectives.__struct_fields__
    }
    progress = [batch.progress for batch in batches if batch.progress]
    dtypes = sorted(set(columns["dtype"]))
    columns["dtype"] = [dtypes.index(name) for name in columns["dtype"]]
    return RankEvidence(
        rank=rank,
        node=parts[-1].node,
        pid=batches[-1].pid,
        local_rank=0,
        name="",
        communicators=batches[-1].communicators,
        collectives=_table(columns),
        threads=[],
        occupants=[],
        first_ns=min(part.start_ns for part in parts),
        last_ns=max(part.end_ns for part in parts),
        timed_by=batches[-1].timed_by,
        progress=progress[-1] if progress else [],
        source=batches[-1].source,
        dtypes=dtypes,
    )


def _table(columns: Mapping[str, Sequence[object]]) -> CollectiveTable:
    numbers = {
        name: np.array(columns[name], np.int64)
        for name in ("communicator", "seq", "op", "bytes", "enter_ns", "duration_ns", "state", "dtype")
    }
    return CollectiveTable(failed=np.array(columns["failed"], np.bool_), **numbers)


def _evidence(ranks: dict[int, RankEvidence], world: int) -> Evidence:
    return Evidence(
        job="job-123",
        world_size=world,
        start_ns=min((one.first_ns for one in ranks.values()), default=T0),
        end_ns=max((one.last_ns for one in ranks.values()), default=T0) + 1,
        watched_since_ns=min((one.first_ns for one in ranks.values()), default=T0),
        ranks=ranks,
    )


Call = tuple[str, int, Op, float, float | None]
"""Group, number, op, when entered, and when ended (None: not), in seconds since ``T0``."""
AR = Op.ALLREDUCE
WORLD = {"world": [0, 1, 2, 3]}


def calls(last: int, pending: int = 0, *, group: str = "world", step: float = 0.1, op: Op = AR) -> list[Call]:
    """Numbers 1 … ``last``, each after ``step`` s and ended 10 ms later, but for the newest ``pending``."""
    return [
        (group, seq, op, seq * step, seq * step + 0.01 if seq <= last - pending else None)
        for seq in range(1, last + 1)
    ]


def made(
    groups: Mapping[str, Sequence[int]],
    calls: Mapping[int, Sequence[Call]],
    *,
    source: str = "agent",
    until: float = 100.0,
    size: Mapping[int, int] | None = None,
    dtype: Mapping[int, str] | None = None,
    enqueued: Mapping[int, Mapping[str, tuple[int, int]]] | None = None,
    started: Mapping[int, set[tuple[str, int]]] | None = None,
    world: int | None = None,
) -> Evidence:
    """Evidence of ranks that made these calls. ``enqueued``: counters (enqueued, completed) where dumps tell them;
    ``size``: bytes, ``dtype``: element type, by rank; ``started``: calls whose kernels run."""
    ranks = {}
    for rank, own in calls.items():
        mine = [name for name, members in groups.items() if rank in members]
        columns: dict[str, list[object]] = {name: [] for name in Collectives.__struct_fields__}
        for name, seq, op, entered, ended in own:
            state = State.COMPLETED if ended is not None else State.SCHEDULED
            if (name, seq) in (started or {}).get(rank, ()):
                state = State.STARTED
            columns["communicator"].append(mine.index(name))
            columns["seq"].append(seq)
            columns["op"].append(int(op))
            columns["bytes"].append((size or {}).get(rank, 4096))
            columns["enter_ns"].append(T0 + int(entered * S))
            columns["duration_ns"].append(int((ended - entered) * S) if ended is not None else -1)
            columns["failed"].append(False)
            columns["state"].append(int(state))
            columns["dtype"].append(0)
        if source == "agent":
            columns["state"] = []
        counters = (enqueued or {}).get(rank, {})
        ranks[rank] = RankEvidence(
            rank=rank,
            node=f"node-{rank // 8}",
            pid=100 + rank,
            local_rank=rank % 8,
            name="python",
            communicators=[
                Communicator(
                    uid=name, desc=name.upper(), rank=groups[name].index(rank), size=len(groups[name])
                )
                for name in mine
            ],
            collectives=_table(columns),
            threads=[],
            occupants=[],
            first_ns=T0,
            last_ns=T0 + int(until * S),
            progress=[
                Progress(communicator=mine.index(name), enqueued=pair[0], started=-1, completed=pair[1])
                for name, pair in counters.items()
            ],
            source=source,
            dtypes=[dtype.get(rank, "float32") if dtype else ""],
        )
    return _evidence(ranks, world or 1 + max(rank for members in groups.values() for rank in members))


def running(seed: int, *, skew: float, ranks: int = 8, steps: int = 30, lag: float = 0.1) -> Evidence:
    """Dumps of a job that runs: six all-reduces per step in pairs, one of all, hosts ahead of their GPUs. Each dump
    is written up to ``skew`` s late, and its watchdog noticed ends up to ``lag`` s late."""
    random = Random(seed)
    pairs = {f"tp{pair}": [2 * pair, 2 * pair + 1] for pair in range(ranks // 2)}
    groups = {"world": list(range(ranks))} | pairs
    host, gpu, seq = [0.0] * ranks, [0.0] * ranks, dict.fromkeys(groups, 0)
    calls: dict[int, list[Call]] = {rank: [] for rank in range(ranks)}
    for name in ([*pairs] * 6 + ["world"]) * steps:
        seq[name] += 1
        for rank in groups[name]:
            host[rank] += random.uniform(0.001, 0.003)
        begun = max(max(gpu[rank], host[rank]) + random.uniform(0.003, 0.006) for rank in groups[name])
        for rank in groups[name]:
            gpu[rank] = begun + 0.001
            calls[rank].append((name, seq[name], Op.ALLREDUCE, host[rank], gpu[rank]))
            host[rank] = gpu[rank] if name == "world" else host[rank]
    moment = random.uniform(0.4, 0.9) * max(gpu)
    seen: dict[int, list[Call]] = {}
    for rank, own in calls.items():
        written = moment + random.uniform(0, skew)
        noticed = written - random.uniform(0, lag)
        seen[rank] = [
            (name, number, op, entered, ended if ended is not None and ended <= noticed else None)
            for name, number, op, entered, ended in own
            if entered <= written
        ]
    newest = max(call[4] or call[3] for own in seen.values() for call in own)
    return made(groups, seen, source="flight-recorder", until=newest)


def permuted(evidence: Evidence, places: Mapping[int, int]) -> Evidence:
    """The same job with its ranks numbered anew."""
    ranks = {places[rank]: replace(one, rank=places[rank]) for rank, one in evidence.ranks.items()}
    return replace(evidence, ranks=ranks)


def without(evidence: Evidence, *gone: int) -> Evidence:
    return replace(evidence, ranks={rank: one for rank, one in evidence.ranks.items() if rank not in gone})


def with_rank(evidence: Evidence, rank: int, **changes: object) -> Evidence:
    return replace(evidence, ranks=evidence.ranks | {rank: replace(evidence.ranks[rank], **changes)})  # type: ignore[arg-type]


def held(hang: Hang | None) -> list[int]:
    return [] if hang is None else [holder.rank for holder in hang.holders]


def kinds(hang: Hang | None) -> set[str]:
    return set() if hang is None else {holder.kind for holder in hang.holders}
