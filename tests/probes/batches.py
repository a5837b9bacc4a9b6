"""Batches as an agent would send them, small and made by hand, for tests of the wire and the store."""

from __future__ import annotations

from typing import Any

from probes.records import (
    SCHEMA,
    Batch,
    Collectives,
    Communicator,
    Occupant,
    Probe,
    RankBatch,
    Role,
    ThreadTime,
)

SECOND = 1_000_000_000
OFFSET = 1_700_000_000 * SECOND
"""UTC minus monotonic of every node, unless a test says otherwise."""
WORLD = Communicator(uid="0", desc="default_pg", rank=0, size=4)


def a_rank(second: int, **changes: Any) -> RankBatch:
    """Second ``second`` of rank 0: two all-reduces at .25 and .75 s that take 0.1 s, one thread that runs
    half of the time, cut at the same instants, and one process that took 30 ms of its CPU."""
    at = [second * SECOND + SECOND // 4, second * SECOND + 3 * SECOND // 4]
    fields: dict[str, Any] = {
        "job": "job-1",
        "rank": 0,
        "world_size": 4,
        "local_rank": 0,
        "pid": 100,
        "start_ns": 0,
        "name": "python",
        "env": {"RANK": "0"},
        "communicators": [WORLD],
        "collectives": Collectives(
            communicator=[0, 0],
            seq=[2 * second, 2 * second + 1],
            op=[1, 1],
            bytes=[4096, 8192],
            dtype=["f32", "f32"],
            enter_ns=at,
            duration_ns=[SECOND // 10, SECOND // 10],
            failed=[False, False],
        ),
        "threads": [
            ThreadTime(
                tid=101,
                role=Role.DRIVING,
                since_ns=0,
                at_ns=at,
                running_ns=[one // 2 for one in at],
                runnable_ns=[one // 4 for one in at],
                blocked_ns=[one - one // 2 - one // 4 for one in at],
                uninterruptible_ns=[0, 0],
                interrupted_ns=[one // 100 for one in at],
                stolen_ns=1000 + second,
            )
        ],
        "occupants": [Occupant(role=Role.DRIVING, pid=7, name="stress", cgroup="/user", took_ns=30_000_000)],
    }
    return RankBatch(**fields | changes)


def a_batch(second: int, **changes: Any) -> Batch:
    """Second ``second`` after boot of ``node-a``, with :func:`a_rank`, as batch number ``second``."""
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "node": "node-a",
        "boot_id": "boot-1",
        "agent": "agent-1",
        "seq": second,
        "start_ns": second * SECOND,
        "end_ns": (second + 1) * SECOND,
        "utc_offset_ns": OFFSET,
        "ranks": [a_rank(second)],
        "probes": [Probe(name="gloo", state="on", hits=second)],
    }
    return Batch(**fields | changes)


def utc(second: float) -> int:
    """The UTC instant of a second after boot."""
    return OFFSET + int(second * SECOND)
