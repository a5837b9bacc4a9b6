"""What a trace of PyTorch's profiler becomes; small traces written as Kineto writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from probes.importers import PART_ROWS, Note, Part, Unusable
from probes.records import Lane, Op, TimedBy
from tests.probes.importers.kineto_traces import BASE_NS, all_reduce, document, event, imported, step, written


def _texts(notes: list[Note]) -> str:
    return " ".join(note.text for note in notes)


def _operations(part: Part) -> list[tuple[str, Lane, int, int, int]]:
    """(name, lane, step, start after the base in ns, duration in ns)."""
    table = part.rank_batch.operations
    return [
        (table.names[kind], Lane(lane), number, start - BASE_NS, duration)
        for kind, lane, number, start, duration in zip(
            table.kind, table.lane, table.step, table.start_ns, table.duration_ns, strict=True
        )
    ]


def test_microseconds_after_the_base_become_utc_nanoseconds(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json", [event("user_annotation", "## forward ##", 12.345, 6.789)])
    (part,), _ = imported(path)
    assert part.utc
    assert part.rank_batch.operations.start_ns == [BASE_NS + 12_345]
    assert part.rank_batch.operations.duration_ns == [6_789]


def test_microseconds_since_1970_are_utc_without_a_base(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    text = document([event("kernel", "k", 1682725898082228, 10)])
    del text["baseTimeNanoseconds"]
    path.write_text(json.dumps(text))
    (part,), _ = imported(path)
    assert part.utc
    assert part.start_ns == 1682725898082228000


def test_instants_since_boot_count_from_the_earliest_of_all_ranks(tmp_path: Path) -> None:
    paths = [
        written(tmp_path / f"{rank}.json", [event("kernel", "k", ts, 10)], rank, baseTimeNanoseconds=0)
        for rank, ts in ((0, 5_000_000), (1, 7_000_000))
    ]
    parts, _ = imported(*paths)
    assert [(part.utc, part.start_ns) for part in parts] == [(False, 0), (False, 2_000_000_000)]


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", Op.ALLREDUCE),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Op.ALLGATHER),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_SIMPLE(ncclDevComm*)", Op.REDUCE_SCATTER),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*)", Op.BROADCAST),
        ("ncclDevKernel_Reduce_Sum_f32_TREE_LL(ncclDevComm*)", Op.REDUCE),
        ("ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)", Op.UNKNOWN),
        ("ncclDevKernel_Generic(ncclDevComm*)", Op.UNKNOWN),
        ("nccl2:all_gather", Op.ALLGATHER),
    ],
)
def test_kernels_of_all_nccl_versions_are_collectives(tmp_path: Path, kernel: str, op: Op) -> None:
    path = written(
        tmp_path / "t.json", [event("kernel", kernel, 10, 20, stream=3), event("kernel", "gemm", 40, 5)]
    )
    (part,), _ = imported(path)
    rank = part.rank_batch
    assert rank.timed_by == TimedBy.DEVICE
    assert rank.collectives.op == [op]
    assert rank.collectives.duration_ns == [20_000]
    assert rank.collectives.bytes == [-1]
    assert [lane for _, lane, *_ in _operations(part)] == [Lane.COMMUNICATION, Lane.COMPUTE]


def test_what_the_kernel_tells_of_its_collective(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.json", [step(7, 0, 100), *all_reduce(10, 300, 1, elements=500, dtype="BFloat16")]
    )
    (part,), notes = imported(path)
    table = part.rank_batch.collectives
    (communicator,) = part.rank_batch.communicators
    assert (communicator.uid, communicator.desc, communicator.rank, communicator.size) == (
        "0",
        "default_pg",
        0,
        2,
    )
    assert (table.op, table.bytes, table.dtype) == ([Op.ALLREDUCE], [1000], ["bfloat16"])
    assert (table.enter_ns, table.duration_ns) == ([BASE_NS + 110_000], [300_000])
    assert notes == []


def test_a_kernel_s_number_comes_from_the_call_that_it_is_tied_to(tmp_path: Path) -> None:
    """Kineto copies the group onto the kernel, the sequence number only onto record_param_comms."""
    call = event(
        "cpu_op",
        "record_param_comms",
        5,
        10,
        **{"External id": 10_001, "Collective name": "allreduce", "Seq": 41, "Process Group Name": "0"},
        **{"Group size": 2, "dtype": "Float", "In msg nelems": 1000},
    )
    (part,), _ = imported(written(tmp_path / "t.json", [*all_reduce(50, 300, 1), call]))
    assert part.rank_batch.collectives.seq == [41]
    assert len(part.rank_batch.communicators) == 1


def test_kernels_of_a_graph_belong_to_the_step_of_its_launch(tmp_path: Path) -> None:
    """The kernels of a CUDA graph share the correlation id of the launch; they run after the host's step ended."""
    launch = event("cuda_runtime", "cudaGraphLaunch", 50, 10, correlation=9)
    kernels = [
        event("kernel", f"k{place}", 200 + 10 * place, 5, correlation=9, **{"graph id": 3})
        for place in (0, 1)
    ]
    events = [step(3, 0, 100), step(4, 100, 300), launch, *kernels]
    (part,), _ = imported(written(tmp_path / "t.json", events))
    assert [(name, number) for name, lane, number, *_ in _operations(part) if lane == Lane.COMPUTE] == [
        ("k0", 3),
        ("k1", 3),
    ]


def test_two_kernels_of_one_collective_are_one(tmp_path: Path) -> None:
    events = [*all_reduce(20, 30, 2, Seq=5), *all_reduce(0, 10, 1, Seq=5), *all_reduce(90, 1, 3, Seq=6)]
    (part,), _ = imported(written(tmp_path / "t.json", events))
    table = part.rank_batch.collectives
    assert (table.seq, table.duration_ns) == ([5, 6], [50_000, 1_000])
    assert table.enter_ns == [BASE_NS + 100_000, BASE_NS + 190_000]


def test_what_the_host_does_and_waits_for_is_kept(tmp_path: Path) -> None:
    events = [
        step(1, 0, 1000),
        event("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 1, 100),
        event("user_annotation", "Optimizer.step#AdamW.step", 500, 50),
        event("cuda_runtime", "cudaStreamSynchronize", 600, 30, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 650, 4, correlation=2),
        event("cuda_runtime", "cudaMemcpyAsync", 660, 1500, correlation=3),
        event("kernel", "gemm", 700, 10, correlation=2),
        event("cpu_op", "aten::mul", 640, 20),
    ]
    (part,), _ = imported(written(tmp_path / "t.json", events))
    assert [name for name, lane, *_ in _operations(part) if lane == Lane.HOST] == [
        "ProfilerStep",
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
        "Optimizer.step#AdamW.step",
        "cudaStreamSynchronize",
        "cudaMemcpyAsync",
    ]
    assert {number for *_, number, _, _ in [(0, *row[1:]) for row in _operations(part)]} == {1}


def test_without_a_gpu_the_outermost_operators_are_kept(tmp_path: Path) -> None:
    events = [
        event("cpu_op", "aten::linear", 10, 20),
        event("cpu_op", "aten::addmm", 12, 10),
        event("cpu_op", "aten::sum", 40, 5),
        {**event("cpu_op", "aten::add", 15, 5), "tid": 200},
    ]
    (part,), _ = imported(written(tmp_path / "t.json", events))
    assert [name for name, *_ in _operations(part)] == ["aten::linear", "aten::add", "aten::sum"]


def test_events_that_cannot_be_are_left_out_and_counted(tmp_path: Path) -> None:
    good = event("kernel", "good", 1000, 5, correlation=1)
    events: list[Any] = [
        good,
        good,
        event("kernel", "negative", 1000, -5),
        event("kernel", "nothing", float("nan"), 5),
        event("kernel", "endless", 1000, float("inf")),
        event("kernel", "yesterday", 1000 + 2 * 86_400e6, 5),
        event("kernel", "good too", 900, 5, correlation=2),
        event("kernel", "good as well", 1100, 5, correlation=3),
        {**event("kernel", "begun", 1, 1), "ph": "B"},
    ]
    (part,), notes = imported(written(tmp_path / "t.json", events))
    assert [name for name, *_ in _operations(part)] == ["good too", "good", "good as well"]
    assert "3 events have no instant or duration that could be" in _texts(notes)
    assert "1 events are there twice" in _texts(notes)
    assert "1 events lie more than a day from the others" in _texts(notes)
    assert "1 events begin without saying how long they last" in _texts(notes)


def test_kinds_of_operations_are_bounded(tmp_path: Path) -> None:
    events = [event("kernel", f"generated_kernel_{place}", place, 1) for place in range(5000)]
    (part,), _ = imported(written(tmp_path / "t.json", events))
    names = part.rank_batch.operations.names
    assert len(names) == 2049
    assert names[-1] == "others"


def test_a_long_trace_comes_in_parts_in_order_of_time(tmp_path: Path) -> None:
    kernels = [event("kernel", f"k{place % 3}", place * 10, 5) for place in range(20_000)]
    events = [
        *reversed(kernels),
        *(one for place in range(2_000) for one in all_reduce(place * 100, 5, place)),
    ]
    parts, _ = imported(written(tmp_path / "t.json", events))
    sizes = [len(part.rank_batch.operations.kind) + len(part.rank_batch.collectives.op) for part in parts]
    assert sizes == [PART_ROWS, PART_ROWS, 24_000 - 2 * PART_ROWS]  # an all-reduce is an operation as well
    starts = [start for part in parts for start in part.rank_batch.operations.start_ns]
    assert starts == sorted(starts)
    assert [number for part in parts for number in part.rank_batch.collectives.seq] == list(range(2_000))
    assert all(before.end_ns == after.start_ns for before, after in pairwise(parts))


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank3.json", 3), ("trace_rank-3.json", 3), ("RANK_03.pt.trace.json", 3), ("rank3/t.json", 3)],
)
def test_the_rank_may_be_in_the_file_s_name(tmp_path: Path, name: str, rank: int) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    (part,), notes = imported(written(path, all_reduce(0, 1, 1), None))
    assert part.rank_batch.rank == rank
    assert f"its name says {rank}" in _texts(notes)


@pytest.mark.parametrize(
    "name",
    ["host12_4037.1682725898.pt.trace.json", "t3.json", "rank3_of_rank4.json", "crank3.json", "rank3x.json"],
)
def test_numbers_in_names_that_do_not_say_rank_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(Unusable, match="does not record which rank it is of"):
        imported(written(tmp_path / name, all_reduce(0, 1, 1), None))


def test_the_recorded_rank_wins_over_the_name(tmp_path: Path) -> None:
    (part,), notes = imported(written(tmp_path / "rank5.json", all_reduce(0, 1, 1), 1))
    assert part.rank_batch.rank == 1
    assert "of rank 1, whatever its name says" in _texts(notes)


def test_a_trace_without_any_communication_is_a_job_of_one(tmp_path: Path) -> None:
    (part,), notes = imported(written(tmp_path / "t.json", [event("kernel", "k", 0, 1)], None))
    assert (part.rank_batch.rank, part.rank_batch.world_size) == (0, 1)
    assert "taken as a job of one rank" in _texts(notes)


def test_communicators_are_those_of_pg_config_too(tmp_path: Path) -> None:
    info = {
        "backend": "nccl",
        "rank": 5,
        "world_size": 8,
        "pg_config": [
            {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 8, "ranks": list(range(8))},
            {"pg_name": "3", "pg_desc": "mesh_tp", "pg_size": 2, "ranks": [5, 7]},
        ],
    }
    events = all_reduce(0, 1, 1, **{"Group size": 8, "Process Group Ranks": "[0, 1, ...]"})
    (part,), _ = imported(written(tmp_path / "t.json", events, distributedInfo=info))
    assert [(one.uid, one.desc, one.rank, one.size) for one in part.rank_batch.communicators] == [
        ("0", "default_pg", 5, 8),
        ("3", "mesh_tp", 0, 2),
    ]


def test_ranks_are_spooled_and_come_back_whole(tmp_path: Path) -> None:
    """Several files wait in a temporary file; each comes out as it does alone."""
    names: Callable[[int], list[dict[str, Any]]] = lambda rank: [  # noqa: E731
        step(1, rank, 900),
        *all_reduce(10 + rank, 50, 1, Seq=1),
        event("kernel", f"k<int>({rank})", 400 + rank, 7),
    ]
    paths = [written(tmp_path / f"{rank}.json", names(rank), rank) for rank in (0, 1)]
    together, _ = imported(*paths)
    alone = [imported(path)[0][0] for path in paths]
    assert together == alone
