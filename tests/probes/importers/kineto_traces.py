"""Traces for the tests: the recorded ones, where they are, and small ones written as Kineto writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from probes.codec import decode, encode
from probes.importers import Note, Part, kineto
from probes.records import SCHEMA, Batch
from tests.recorded import DATA

RECORDED = DATA / "kineto"
BASE_NS = 1_711_964_646_000_000_000

needs_recorded = pytest.mark.skipif(
    not RECORDED.is_dir(), reason="the recorded traces are not beside this checkout"
)


def recorded(name: str) -> Path:
    return RECORDED / name


def imported(*paths: Path) -> tuple[list[Part], list[Note]]:
    """What the importer gives, each part held to what a store takes."""
    parts, notes = [], []
    for one in kineto.read(paths, job="job"):
        if isinstance(one, Note):
            notes.append(one)
            continue
        assert one.start_ns <= one.end_ns
        starts = one.rank_batch.operations.start_ns + one.rank_batch.collectives.enter_ns
        assert all(one.start_ns <= start <= one.end_ns for start in starts)
        batch = Batch(
            schema=SCHEMA,
            node="n",
            boot_id="b",
            agent="a",
            seq=0,
            start_ns=one.start_ns,
            end_ns=one.end_ns,
            utc_offset_ns=0,
            ranks=[one.rank_batch],
        )
        assert decode(encode(batch)) == batch
        parts.append(one)
    return parts, notes


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    """A complete event; microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": 100, "ts": ts, "dur": dur, "args": args}


def step(number: int, ts: float, dur: float) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur)


def all_reduce(
    ts: float, dur: float, correlation: int, elements: int = 1000, **more: Any
) -> list[dict[str, Any]]:
    """A launch, and 100 µs later the kernel, with what Kineto copies onto it."""
    launch = event("cuda_runtime", "cudaLaunchKernelExC", ts, 5, correlation=correlation)
    told = {
        "correlation": correlation,
        "External id": 10_000 + correlation,
        "stream": 40,
        "Collective name": "allreduce",
        "In msg nelems": elements,
        "Group size": 2,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1]",
        **more,
    }
    kernel = event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", ts + 100, dur, **told)
    return [launch, kernel]


def document(events: list[Any], rank: int | None = 0, **more: Any) -> dict[str, Any]:
    info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
    return {"schemaVersion": 1, **info, "baseTimeNanoseconds": BASE_NS, **more, "traceEvents": events}


def written(path: Path, events: list[Any], rank: int | None = 0, **more: Any) -> Path:
    path.write_text(json.dumps(document(events, rank, **more)))
    return path
