"""Logs of NCCL's inspector become timed collectives of the job's ranks."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probes.codec import from_plain, to_plain
from probes.importers import Note, Part, Unusable, gather, inspector
from probes.records import Batch, Op, TimedBy

US = 1_748_030_377_748_202
"""When lines were dumped, microseconds."""


def line(rank: int = 0, number: int = 1, /, *, pid: int | None = None, **changes: Any) -> dict[str, Any]:
    """A line of version 4.0 (ext-profiler/inspector/README.md)."""
    told: dict[str, Any] = {
        "header": {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": 2, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "rec_mechanism": "profiler_plugin",
            "dump_timestamp_us": US,
            "hostname": "node-a",
            "pid": 1000 + rank if pid is None else pid,
        },
        "coll_perf": {
            "coll": "AllReduce",
            "coll_sn": number,
            "coll_msg_size_bytes": 4096,
            "coll_exec_time_us": 62,
            "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": 277.210914,
            "coll_busbw_gbs": 485.119099,
        },
    }
    for key, value in changes.items():
        for part in ("header", "metadata", "coll_perf"):
            if key in told[part]:
                told[part][key] = value
    return told


def begun(at_us: int) -> dict[str, Any]:
    events = [{"channel_id": 0, "kernel_start_ts": at_us + 3}, {"channel_id": 1, "kernel_start_ts": at_us}]
    return {"event_trace_ts": {"coll_start_ts": at_us - 50, "kernel_events": events}}


def verbose(told: dict[str, Any], at_us: int) -> dict[str, Any]:
    told["coll_perf"] |= begun(at_us)
    return told


def p2p(rank: int, name: str, peer: int, number: int) -> dict[str, Any]:
    told = line(rank)
    del told["coll_perf"]
    return told | {
        "p2p_perf": {
            "p2p": name,
            "p2p_sn": number,
            "p2p_peer": peer,
            "p2p_msg_size_bytes": 512,
            "p2p_exec_time_us": 50.5,
            "p2p_timing_source": "kernel_gpu",
        }
    }


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def read(*paths: Path) -> tuple[list[Part], list[str]]:
    found = list(inspector.read(sorted(paths), job="job-123"))
    return [one for one in found if isinstance(one, Part)], [
        one.text for one in found if isinstance(one, Note)
    ]


def test_a_line_becomes_a_collective_that_the_gpu_timed(tmp_path: Path):
    path = write(tmp_path / "a.log", verbose(line(1, 1407), US - 500), line(0))
    (zero, one), _ = read(path)
    batch = one.rank_batch
    assert (zero.rank_batch.rank, batch.rank, batch.world_size, batch.pid, one.node) == (
        0,
        1,
        2,
        1001,
        "node-a",
    )
    assert (batch.source, batch.timed_by) == ("inspector", TimedBy.DEVICE)
    assert [(c.uid, c.rank, c.size) for c in batch.communicators] == [("0x7f8c496ae9f661/AllReduce", 1, 2)]
    rows = batch.collectives
    assert (rows.seq, rows.op, rows.bytes) == ([1407], [Op.ALLREDUCE], [4096])
    assert (rows.enter_ns, rows.duration_ns) == ([(US - 500) * 1000], [62_000])
    assert (one.start_ns, one.end_ns, one.utc) == ((US - 500) * 1000, (US - 438) * 1000, True)
    assert gather([path]).kind == "inspector"


def test_each_kind_of_collective_is_numbered_by_itself(tmp_path: Path):
    lines = [
        line(rank, number, coll=kind)
        for rank in (0, 1)
        for kind in ("AllReduce", "AllGather")
        for number in (1, 2)
    ]
    parts, _ = read(write(tmp_path / "a.log", *lines))
    batch = parts[0].rank_batch
    uids = [batch.communicators[place].uid.rpartition("/")[2] for place in batch.collectives.communicator]
    assert sorted(zip(uids, batch.collectives.seq, strict=True)) == [
        ("AllGather", 1),
        ("AllGather", 2),
        ("AllReduce", 1),
        ("AllReduce", 2),
    ]


def test_a_marker_tells_whose_the_lines_after_it_are(tmp_path: Path):
    lines: list[Any] = []
    for rank in (0, 1):
        whole = line(rank, 7)
        stats = {"coll_records": 1, "coll_dropped_since_last_dump": 512 * rank}
        lines += [{"header": whole["header"], "metadata": whole["metadata"], "dump_stats": stats}]
        lines += [{"coll_perf": whole["coll_perf"]}, {"proxy_trace": {}}]
    parts, notes = read(write(tmp_path / "a.log", *lines))
    assert [(part.rank_batch.rank, part.rank_batch.collectives.seq) for part in parts] == [(0, [7]), (1, [7])]
    assert any("NCCL overwrote 512 collectives" in note for note in notes)


def test_flat_lines_are_read(tmp_path: Path):
    flat = [
        line(rank)["header"] | line(rank)["metadata"] | {"coll_perf": line(rank)["coll_perf"]}
        for rank in (0, 1)
    ]
    parts, _ = read(write(tmp_path / "a.log", *flat))
    assert [part.rank_batch.rank for part in parts] == [0, 1]


def test_the_largest_communicator_of_all_tells_ranks(tmp_path: Path):
    lines = []
    for rank in range(4):  # two tensor-parallel pairs in a world of four
        lines.append(line(rank, 1, id="0xworld", n_ranks=4))
        lines.append(line(rank % 2, 1, pid=1000 + rank, id=f"0xpair{rank // 2}"))
    parts, notes = read(write(tmp_path / "a.log", *lines))
    found = {part.rank_batch.pid: part.rank_batch for part in parts}
    assert {pid: batch.rank for pid, batch in found.items()} == {1000: 0, 1001: 1, 1002: 2, 1003: 3}
    assert {batch.world_size for batch in found.values()} == {4}
    assert not any("ranks" in note for note in notes)


def test_without_a_communicator_of_all_ranks_are_numbered_and_that_is_said(tmp_path: Path):
    lines = [line(rank % 2, 1, pid=1000 + rank, id=f"0xpair{rank // 2}") for rank in range(4)]
    parts, notes = read(write(tmp_path / "a.log", *lines))
    assert {part.rank_batch.pid: part.rank_batch.rank for part in parts} == {
        1000: 0,
        1001: 1,
        1002: 2,
        1003: 3,
    }
    assert any("do not tell ranks" in note for note in notes)


def test_sends_and_receives_are_on_a_communicator_of_two(tmp_path: Path):
    lines = [line(0), line(1), p2p(0, "Send", 1, 3), p2p(1, "Recv", 0, 8), p2p(0, "Recv", 1, 1)]
    parts, _ = read(write(tmp_path / "a.log", *lines))
    first, second = (part.rank_batch for part in parts)
    assert [(c.uid, c.rank) for c in first.communicators[1:]] == [("0x7f8c496ae9f661/0:1", 0)]
    assert [(c.uid, c.rank) for c in second.communicators[1:]] == [("0x7f8c496ae9f661/0:1", 1)]
    assert sorted(first.collectives.op) == [Op.ALLREDUCE, Op.SEND, Op.RECV]
    assert 50_500 in second.collectives.duration_ns


def test_rotated_and_gzipped_files_are_read_in_order_of_time(tmp_path: Path):
    later = [verbose(line(rank, 2, dump_timestamp_us=US + 900), US + 800) for rank in (0, 1)]
    earlier = [verbose(line(rank, 1), US - 100) for rank in (0, 1)]
    write(tmp_path / "a.log", *later)
    (tmp_path / "a.log.1.gz").write_bytes(gzip.compress(write(tmp_path / "x", *earlier).read_bytes()))
    parts, notes = read(tmp_path / "a.log", tmp_path / "a.log.1.gz")
    assert [part.rank_batch.collectives.seq for part in parts] == [[1, 2], [1, 2]]
    assert notes == []


def test_lines_that_are_there_twice_count_once(tmp_path: Path):
    lines = [line(rank, number) for rank in (0, 1) for number in (1, 2)]
    parts, notes = read(write(tmp_path / "a.log", *lines), write(tmp_path / "b.log", *lines))
    assert [part.rank_batch.collectives.seq for part in parts] == [[1, 2], [1, 2]]
    assert any("4 lines tell of a collective that was told before" in note for note in notes)


def test_collectives_without_instants_are_laid_out_and_that_is_said(tmp_path: Path):
    parts, notes = read(write(tmp_path / "a.log", *(line(rank, n) for rank in (0, 1) for n in (1, 2, 3))))
    enter = parts[0].rank_batch.collectives.enter_ns
    assert [after - before for before, after in pairwise(enter)] == [62_000, 62_000]
    assert any("not when they began" in note for note in notes)


def test_times_of_the_cpu_are_not_called_the_gpus(tmp_path: Path):
    lines = [line(0), line(1, coll_timing_source="collective_cpu")]
    parts, notes = read(write(tmp_path / "a.log", *lines))
    assert [part.rank_batch.timed_by for part in parts] == [TimedBy.DEVICE, TimedBy.HOST]
    assert any("1 processes have collectives that the CPU timed" in note for note in notes)


@pytest.mark.parametrize(
    "bad",
    [
        {"coll_exec_time_us": -1},
        {"coll_exec_time_us": None},
        {"coll_sn": -3},
        {"coll_sn": "x"},
        {"rank": 2},
        {"n_ranks": 0},
        {"id": ""},
        {"coll": None},
        {"dump_timestamp_us": "now"},
        {"dump_timestamp_us": 2**70},
    ],
)
def test_lines_that_cannot_be_used_are_left_out_and_counted(tmp_path: Path, bad: dict[str, Any]):
    parts, notes = read(write(tmp_path / "a.log", line(0), line(1), line(0, 2, **bad)))
    assert sum(len(part.rank_batch.collectives.seq) for part in parts) == 2
    assert "1 of 3 lines left out: line 3 lacks" in notes[0]


def test_a_log_that_is_cut_short_is_used_up_to_there(tmp_path: Path):
    path = write(tmp_path / "a.log", line(0), line(1), line(0, 2))
    path.write_bytes(path.read_bytes()[:-30])
    parts, notes = read(path)
    assert [part.rank_batch.collectives.seq for part in parts] == [[1], [1]]
    assert "line 3 is no JSON object, cut short" in notes[0]


@pytest.mark.parametrize(
    "content", [b"", b"nothing\n", b'{"coll_perf": {}}\n', b"[" * 100_000, b"\xff\xfe\n"]
)
def test_what_is_no_log_is_refused_in_words(tmp_path: Path, content: bytes):
    path = tmp_path / "a.log"
    path.write_bytes(content)
    with pytest.raises(Unusable, match="nothing can be used") as refused:
        read(path)
    assert str(path) in str(refused.value)


def test_half_a_gzip_file_is_refused_in_words(tmp_path: Path):
    path = tmp_path / "a.log.gz"
    packed = gzip.compress(write(tmp_path / "x", *(line(0, number) for number in range(500))).read_bytes())
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(Unusable, match="cut short"):
        read(path)


def test_a_process_with_several_gpus_is_refused_in_words(tmp_path: Path):
    with pytest.raises(Unusable, match="several GPUs cannot be told apart"):
        read(write(tmp_path / "a.log", line(0, pid=7), line(1, pid=7)))


def test_a_long_log_comes_in_parts(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(inspector, "PART_ROWS", 4)
    lines = [verbose(line(rank, n), US + 100 * n) for n in range(11) for rank in (0, 1)]
    parts, _ = read(write(tmp_path / "a.log", *lines))
    mine = [part for part in parts if part.rank_batch.rank == 0]
    assert [part.rank_batch.collectives.seq for part in mine] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


JUNK = st.one_of(
    st.none(), st.integers(-(2**65), 2**65), st.floats(), st.text(max_size=4), st.just({}), st.just([{}, 1])
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
@given(
    st.lists(
        st.tuples(st.sampled_from(["header", "metadata", "coll_perf"]), st.integers(0, 9), JUNK), max_size=5
    )
)
def test_whatever_stands_in_a_line_the_parts_can_be_sent(tmp_path: Path, changes: list[tuple[str, int, Any]]):
    lines = [line(0), line(1), verbose(line(0, 2), US), verbose(line(1, 2), US)]
    for number, (part, place, value) in enumerate(changes):
        target = lines[number % 4][part]
        if isinstance(target, dict):
            target[sorted(target)[place % len(target)]] = value
    with suppress(Unusable):
        for found in read(write(tmp_path / "a.log", *lines))[0]:
            batch = Batch(
                schema=1, node="n", boot_id="b", agent="a", seq=0, start_ns=0, end_ns=1, utc_offset_ns=0,
                ranks=[found.rank_batch],
            )  # fmt: skip
            assert from_plain(to_plain(batch)) == batch
            assert 0 <= found.start_ns <= found.end_ns


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path: Path, noise: bytes):
    path = tmp_path / "a.log"
    path.write_bytes(json.dumps(line(0)).encode() + b"\n" + noise)
    with suppress(Unusable):
        read(path)
