"""The importer on traces that others recorded; what is expected is counted here by other means."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from probes.importers import Unusable
from probes.records import Lane, Op, TimedBy
from tests.probes.importers.kineto_traces import imported, needs_recorded, recorded

pytestmark = needs_recorded


def _events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_one_rank_of_two_on_a_gpu() -> None:
    path = recorded("a100-rank0-of-2.json.gz")
    kernels = [event for event in _events(path) if event["cat"] == "kernel"]
    copies = [event for event in _events(path) if event["cat"] in ("gpu_memcpy", "gpu_memset")]
    nccl = sorted((event for event in kernels if "nccl" in event["name"]), key=lambda event: event["ts"])

    parts, notes = imported(path)

    (part,) = parts
    assert notes == []
    rank = part.rank_batch
    assert (rank.rank, rank.world_size, rank.pid, part.utc) == (0, 2, 2910249, True)
    assert rank.timed_by == TimedBy.DEVICE
    lanes = Counter(rank.operations.lane)
    assert lanes[Lane.COMMUNICATION] == len(nccl) == 21
    assert lanes[Lane.COMPUTE] == len(kernels) - len(nccl) + len(copies) == 2700 - 21 + 1074
    (communicator,) = rank.communicators
    assert (communicator.uid, communicator.desc, communicator.rank, communicator.size) == (
        "0",
        "default_pg",
        0,
        2,
    )
    table = rank.collectives
    ops = {"allreduce": Op.ALLREDUCE, "broadcast": Op.BROADCAST}
    assert table.op == [ops[event["args"]["Collective name"]] for event in nccl]
    width = {"Float": 4, "Long": 8}
    assert table.bytes == [event["args"]["In msg nelems"] * width[event["args"]["dtype"]] for event in nccl]
    assert table.duration_ns == [round(event["dur"] * 1000) for event in nccl]
    base = 1711964646000000000
    assert table.enter_ns == [base + round(event["ts"] * 1000) for event in nccl]
    assert table.seq == list(range(21))


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    path = recorded("a100-rank0-of-2.json.gz")
    events = _events(path)
    steps = {
        int(event["name"].partition("#")[2]): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"].startswith("ProfilerStep#")
    }
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event["cat"] == "cuda_runtime" and ("Launch" in event["name"] or "Mem" in event["name"])
    }
    expected = Counter(
        next((number for number, (start, end) in steps.items() if start <= at <= end), -1)
        for event in events
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
        for at in [launched[event["args"]["correlation"]]]
    )

    (part,), _ = imported(path)

    table = part.rank_batch.operations
    found = Counter(step for step, lane in zip(table.step, table.lane, strict=True) if lane != Lane.HOST)
    assert found == expected
    assert set(found) == {4, 5, 6}
    named = [table.names[kind] for kind in table.kind]
    assert named.count("ProfilerStep") == 3
    assert named.count("Optimizer.step#SGD.step") == 3
    assert named.count("cudaDeviceSynchronize") == 1
    assert not any("<" in name or len(name) > 120 for name in table.names)


def test_sampled_kernels_of_two_ranks_are_not_paired() -> None:
    paths = [recorded(f"two-of-128-ranks/sampled_rank-{rank}.json.gz") for rank in (0, 1)]

    parts, notes = imported(*paths)

    assert [(part.rank_batch.rank, part.rank_batch.world_size) for part in parts] == [(0, 128), (1, 128)]
    uids = [
        {rank.communicators[index].uid for index in rank.collectives.communicator}
        for rank in (part.rank_batch for part in parts)
    ]
    assert uids[0].isdisjoint(uids[1])
    assert all(len(mine) == 2 for mine in uids)  # streams 84 and 203
    said = " ".join(note.text for note in notes)
    assert "20 collectives name no process group" in said
    assert "not compared across ranks" in said


def test_what_the_launch_lies_in_tells_an_old_kernel_s_collective() -> None:
    """The kernels are called SendRecv; the annotation around each launch says what it was."""
    (part,), _ = imported(recorded("two-of-128-ranks/sampled_rank-0.json.gz"))
    table = part.rank_batch.collectives
    counted = Counter(Op(op).name for op in table.op)
    assert counted == {"ALLTOALL": 4, "ALLREDUCE": 4, "ALLGATHER_BASE": 2}
    # 384 numbers of 8 bytes, from the annotation's shapes
    assert (table.op[0], table.bytes[0], table.dtype[0]) == (Op.ALLTOALL, 3072, "int64")


def test_calls_of_gloo_on_a_cpu() -> None:
    (part,), notes = imported(recorded("cpu-only-rank-34-of-300.json.gz"))
    rank = part.rank_batch
    assert (rank.rank, rank.world_size, rank.timed_by) == (34, 300, TimedBy.HOST)
    assert len([communicator for communicator in rank.communicators if communicator.uid]) == 11
    assert all((one.rank, one.size) == (34, 300) for one in rank.communicators)
    assert rank.collectives.op == [Op.ALLREDUCE] * 10
    assert rank.collectives.bytes[:2] == [321271 * 4, 2082411 * 4]
    assert rank.collectives.duration_ns[0] == 173209713
    assert "do not say which process group" in notes[0].text


@pytest.mark.parametrize(
    ("name", "why"),
    [("rank-not-found", "distributedInfo has no rank"), ("no-distributed-info", "no distributedInfo")],
)
def test_a_trace_that_does_not_tell_its_rank_is_refused_in_words(name: str, why: str) -> None:
    path = recorded(f"malformed/{name}.json.gz")
    with pytest.raises(Unusable) as refused:
        imported(path)
    assert why in str(refused.value)
    assert str(path) in str(refused.value)
    assert "rank3.json" in str(refused.value)
    assert refused.value.path == path


def test_named_after_its_rank_it_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "trace_rank-7.json.gz"
    path.write_bytes(recorded("malformed/no-distributed-info.json.gz").read_bytes())
    (part,), notes = imported(path)
    assert part.rank_batch.rank == 7
    assert part.rank_batch.world_size == 8
    assert part.rank_batch.collectives.op == [Op.ALLTOALL] * 6
    said = " ".join(note.text for note in notes)
    assert "its name says 7" in said
    assert "no trace records the job's size" in said
    assert "NCCL calls but no GPU kernels" in said


@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_of_a_gzip_cut_short_what_is_whole_is_used(tmp_path: Path, share: float) -> None:
    whole = recorded("a100-rank0-of-2.json.gz").read_bytes()
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(whole[: int(len(whole) * share)])
    parts, notes = imported(path)
    assert "gzip file is cut short" in notes[0].text
    rows = sum(len(part.rank_batch.operations.kind) for part in parts)
    assert 0 < rows < 3821
