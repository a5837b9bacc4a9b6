"""How long reading a job's evidence from the SQLite store takes, and its diagnosis, with the memory.

A simulated job of 600 steps goes in as agents send it: one batch per node of 16 ranks and second, encoded as on the
wire, through the intake, with what probes tell of a busy host (reasons, wakers, metrics). Half of it is packed in
minutes when it is read, half is as it came: the job runs and the minute is not over. Each reading has a process of
its own; the file is in the page cache. Other sizes by argument: `python -m bench.reading 4096`.
"""

from __future__ import annotations

import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from diagnosis.evidence import Evidence, Ints, RankEvidence
from probes import codec
from probes.records import SCHEMA, Batch, Collectives, Metric, Occupant, RankBatch, ThreadTime, Waker

RANKS = (64, 256, 1_024)
STEPS, STEP_MS = 600, 100.0
"""A minute, of which each node sends 60 batches."""
NODE = 16
NODE_METRICS, METRICS, WAKERS = 40, 12, 6
"""Of a node and of a rank, per second."""
REASONS = {
    "futex": 0.6,
    "poll": 0.2,
    "network-receive": 0.1,
    "page-fault": 0.05,
    "storage-read": 0.03,
    "sleep": 0.01,
}
"""Shares of the time for which a thread blocks."""
ROUNDS = 5
SECOND = 1_000_000_000
BOOTED_NS = 1_000 * 60 * SECOND + 30 * SECOND
"""The nodes' clock when the job begins: in the middle of a minute."""


def main(sizes: tuple[int, ...] = RANKS) -> None:
    for ranks in sizes:
        with tempfile.TemporaryDirectory(prefix="sysom-bench-") as folder:
            path = Path(folder) / "sysom.db"
            window = fill(path, ranks)
            subprocess.run(
                [sys.executable, "-m", "bench.reading", "read", str(path), *map(str, window)], check=True
            )


def fill(path: Path, ranks: int) -> tuple[int, int]:
    """Make a store with such a job; its window (UTC ns)."""
    from bench.synthetic import build, plan, scaled
    from diagnosis.ingest import Ingest
    from diagnosis.store import open_store

    made = plan(ranks=ranks, steps=STEPS)
    made = scaled(made, STEP_MS / float((made.asleep + made.runnable + made.running).max(axis=0).mean()))
    for rank in range(ranks):
        made.taken_by[rank] = [(50 + rank, "kworker/u8:1", "", 0.3), (0, "swapper/0", "", 0.4)]
    evidence = build(made, nodes=[f"node-{rank // NODE}" for rank in range(ranks)])[0]
    store = open_store(f"sqlite://{path.absolute()}")
    now_ns = 0
    intake = Ingest(store, {}, clock_ns=lambda: now_ns)
    count, took = 0, 0.0
    for batch in batches(evidence):
        wire = codec.encode(batch)
        now_ns = batch.end_ns + batch.utc_offset_ns
        begin = time.process_time()
        intake.accept(batch.node, wire)
        took += time.process_time() - begin
        count += 1
    store.close()
    rank_seconds = count * min(NODE, ranks)
    print(
        f"{ranks:5} ranks × {STEPS} steps: {count} batches stored, {took / rank_seconds * 1e3:.2f} ms CPU and "
        f"{path.stat().st_size / rank_seconds / 1e3:.2f} kB per rank and second",
        flush=True,
    )
    return evidence.start_ns, evidence.end_ns


def batches(evidence: Evidence) -> Iterator[Batch]:
    """The batches of all nodes, second by second."""
    offset = evidence.start_ns - BOOTED_NS
    count = -((evidence.start_ns - evidence.end_ns) // SECOND)
    nodes: dict[str, list[list[RankBatch]]] = {}
    for rank in evidence.ranks.values():
        nodes.setdefault(rank.node, []).append(_seconds(rank, evidence, offset, count))
    for second in range(count):
        for node, ranks in nodes.items():
            yield Batch(
                schema=SCHEMA,
                node=node,
                boot_id="boot",
                agent="agent",
                seq=second,
                start_ns=BOOTED_NS + second * SECOND,
                end_ns=BOOTED_NS + (second + 1) * SECOND,
                utc_offset_ns=offset,
                ranks=[seconds[second] for seconds in ranks],
                metrics=_metrics(NODE_METRICS, second, ranks[0][second].rank),
            )


def _metrics(count: int, second: int, salt: int) -> list[Metric]:
    """Some of them with labels, a quarter ratios, others left out now and then, as zeros are."""
    metrics = []
    for place in range(count):
        mixed = (place * 2_654_435_761 + second * 40_503 + salt * 97) % 1_000_003
        if mixed % 10 == 0:
            continue
        labels = {"device": f"nvme{place % 3}n1", "cpu": str(place % 16)} if place % 2 else {}
        if place % 4 == 0:
            metrics.append(
                Metric(name=f"pressure_{place}_ratio", value=mixed / 1e6, unit="ratio", labels=labels)
            )
        else:
            metrics.append(
                Metric(name=f"softirq_net_rx_{place}_ns", value=float(mixed * 37), unit="ns", labels=labels)
            )
    return metrics


def _reasons(blocked_ns: Ints) -> dict[str, Ints]:
    """Each stretch between two cuts was slept for one reason."""
    growth = np.diff(blocked_ns, prepend=0)
    which = np.searchsorted(np.cumsum(list(REASONS.values())), np.arange(len(growth)) * 0.618 % 0.99)
    return {name: np.cumsum(np.where(which == place, growth, 0)) for place, name in enumerate(REASONS)}


def _wakers(thread: int, second: int) -> list[Waker]:
    return [
        Waker(
            tid=thread,
            reason=reason,
            pid=4_000 + place,
            waker_tid=4_100 + place,
            name=f"pt_gloo_runloop{place}",
            slept_ns=pow(3, 7_919 * place + 104_729 * second + thread, 400_000_009),
        )
        for place, reason in zip(range(WAKERS), REASONS, strict=False)
    ]


def _seconds(rank: RankEvidence, evidence: Evidence, offset: int, count: int) -> list[RankBatch]:
    """One rank's part of each batch. What is before the first second goes with it."""
    edges = evidence.start_ns + np.arange(1, count, dtype=np.int64) * SECOND

    def parts(columns: dict[str, Ints], instant: str) -> list[dict[str, list[int]]]:
        cuts = [0, *np.searchsorted(columns[instant], edges), len(columns[instant])]
        columns = columns | {instant: columns[instant] - offset}
        return [{name: column[a:b].tolist() for name, column in columns.items()} for a, b in pairwise(cuts)]

    collectives = parts({n: c for n, c in vars(rank.collectives).items() if len(c)}, "enter_ns")
    names = ("at_ns", "running_ns", "runnable_ns", "blocked_ns", "uninterruptible_ns", "interrupted_ns")
    threads = [parts({name: getattr(thread, name) for name in names}, "at_ns") for thread in rank.threads]
    blocked = [
        parts(
            {"at_ns": thread.at_ns} | _reasons(thread.blocked_ns),
            "at_ns",
        )
        for thread in rank.threads
    ]
    occupants: list[list[Occupant]] = [[] for _ in range(count)]
    for one in rank.occupants:
        occupants[(one.start_ns - evidence.start_ns) // SECOND].append(
            Occupant(role=one.role, pid=one.pid, name=one.name, cgroup=one.cgroup, took_ns=one.took_ns)
        )
    return [
        RankBatch(
            job=evidence.job,
            rank=rank.rank,
            world_size=evidence.world_size,
            local_rank=rank.rank % NODE,
            pid=rank.pid,
            start_ns=0,
            name=rank.name,
            env={"RANK": str(rank.rank)},
            communicators=rank.communicators,
            collectives=Collectives(dtype=["f32"] * len(of_collectives["seq"]), **of_collectives),  # type: ignore[arg-type]
            threads=[
                ThreadTime(
                    tid=thread.tid,
                    role=thread.role,
                    since_ns=thread.since_ns - offset,
                    blocked_by={name: column for name, column in reasons[second].items() if name in REASONS},
                    **of_thread[second],
                )
                for thread, of_thread, reasons in zip(rank.threads, threads, blocked, strict=True)
            ],
            occupants=occupants[second],
            wakers=_wakers(rank.threads[0].tid, second) if rank.threads else [],
            metrics=_metrics(METRICS, second, rank.rank),
        )
        for second, of_collectives in enumerate(collectives)
    ]


def read(path: str, start_ns: int, end_ns: int) -> None:
    """Print what reading and diagnosing takes, from a process that has done neither."""
    from diagnosis.engine import diagnose
    from diagnosis.store import open_store

    with sqlite3.connect(path) as db:
        size = sum(
            db.execute(f"SELECT sum(length(columns)) FROM {table}").fetchone()[0]
            for table in ("chunk", "tail")
        )
    store = open_store(f"sqlite://{path}", read_only=True)
    reading, both = [], []
    before = _peak_mib()
    for _ in range(ROUNDS):
        begin, cpu = time.perf_counter(), time.process_time()
        store.jobs()  # the window is the newest data's
        evidence = store.evidence("job-123", start_ns, end_ns)
        reading.append((time.perf_counter() - begin, time.process_time() - cpu))
        held = _peak_mib()
        verdict = diagnose(evidence)
        both.append((time.perf_counter() - begin, time.process_time() - cpu))
        del evidence
    store.close()
    print(
        f"{'':6}read in {_figures(reading)}; {size / 2**20:.0f} MiB of columns, peak +{held - before:.0f} MiB\n"
        f"{'':6}read and diagnosed in {_figures(both)}; peak +{_peak_mib() - before:.0f} MiB; {verdict.status}",
        flush=True,
    )


def _figures(rounds: list[tuple[float, float]]) -> str:
    wall, cpu = zip(*rounds, strict=True)
    return (
        f"{statistics.median(wall):.2f} s ({min(wall):.2f} to {max(wall):.2f}), "
        f"CPU {statistics.median(cpu):.2f} s ({min(cpu):.2f} to {max(cpu):.2f})"
    )


def _peak_mib() -> float:
    """Of this program: what ``getrusage`` says begins with the peak of the one that started it."""
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["read"]:
        read(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(tuple(map(int, sys.argv[1:])) or RANKS)
