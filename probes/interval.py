"""One interval as records: lives of ranks, and cuts as columns. Pure but for the clocks' offset."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from probes.discovery import RankProcess
from probes.host.reasons import REASONS
from probes.host.thread_time import Cut
from probes.nccl.gloo import Call, Traffic
from probes.records import Collectives, Event, Metric, Occupant, Probe, RankBatch, Role, ThreadTime


@dataclass(frozen=True)
class Interval:
    """What was seen between two instants (CLOCK_MONOTONIC nanoseconds)."""

    start_ns: int
    end_ns: int
    utc_offset_ns: int
    ranks: list[RankBatch]
    metrics: list[Metric]
    events: list[Event]
    probes: list[Probe]


def utc_offset_ns() -> int:
    """UTC minus CLOCK_MONOTONIC, read between two looks at the latter."""
    before = time.monotonic_ns()
    utc = time.time_ns()
    return utc - (before + time.monotonic_ns()) // 2


def life(rank: RankProcess) -> tuple[int, int, int, str, int]:
    """What names one life of a rank. Its name and its parent may change while it lives."""
    return rank.process.pid, rank.process.start_ticks, rank.process.image, rank.job, rank.rank


def rank_batch(
    rank: RankProcess,
    traffic: Traffic,
    calls: list[Call],
    threads: list[ThreadTime],
    occupants: list[Occupant],
    ended: bool,
) -> RankBatch:
    """What one interval brought of one rank; ``ended``: the process is gone."""
    calls = sorted(calls, key=lambda call: call.enter_ns)
    return RankBatch(
        job=rank.job,
        rank=rank.rank,
        world_size=rank.world_size,
        local_rank=rank.local_rank,
        pid=rank.process.pid,
        start_ns=rank.process.start_ticks * (1_000_000_000 // os.sysconf("SC_CLK_TCK")),
        name=rank.process.name,
        env=rank.env,
        communicators=list(traffic.communicators),
        collectives=Collectives(
            communicator=[call.communicator for call in calls],
            seq=[call.seq for call in calls],
            op=[call.op for call in calls],
            bytes=[call.bytes for call in calls],
            dtype=[call.dtype for call in calls],
            enter_ns=[call.enter_ns for call in calls],
            duration_ns=[call.duration_ns for call in calls],
            failed=[call.failed for call in calls],
        ),
        threads=threads,
        occupants=occupants,
        ended=ended,
    )


def thread_columns(cuts: list[Cut], stolen: dict[int, int]) -> list[ThreadTime]:
    """One :class:`ThreadTime` per thread and life, its cuts in time order."""
    lives: dict[tuple[Role, int, int], list[Cut]] = {}
    for cut in cuts:
        lives.setdefault((cut.role, cut.tid, cut.since_ns), []).append(cut)
    columns = []
    for (role, tid, since), rows in sorted(lives.items()):
        rows.sort(key=lambda cut: cut.at_ns)
        columns.append(
            ThreadTime(
                tid=tid,
                role=role,
                since_ns=since,
                at_ns=[cut.at_ns for cut in rows],
                running_ns=[cut.running_ns for cut in rows],
                runnable_ns=[cut.runnable_ns for cut in rows],
                blocked_ns=[cut.blocked_ns for cut in rows],
                uninterruptible_ns=[cut.uninterruptible_ns for cut in rows],
                interrupted_ns=[cut.interrupted_ns for cut in rows],
                stolen_ns=stolen.get(tid, 0) if role == Role.DRIVING else 0,
                blocked_by=_blocked_by(rows),
            )
        )
    return columns


def _blocked_by(rows: list[Cut]) -> dict[str, list[int]]:
    """Reason → column; without reasons that took nothing, and none where not every row tells."""
    if not all(cut.blocked_by for cut in rows):
        return {}
    columns = zip(REASONS, zip(*(cut.blocked_by for cut in rows), strict=True), strict=True)
    return {reason: list(column) for reason, column in columns if reason and any(column)}
