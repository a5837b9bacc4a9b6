"""Flight Recorder dumps become parts: rings, counters, groups, pairs; and what is wrong with a dump is said."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probes import importers
from probes.codec import from_plain, to_plain
from probes.importers import Note, Part, Unusable, flight_recorder, gather
from probes.records import Batch, Op, State, TimedBy
from tests.recorded import DUMPS

T0 = 1_758_610_505_000_000_000
RANKS = "[0, 1, 2, 3]"


def entry(number: int, **changes: Any) -> dict[str, Any]:
    """One entry as version 2.9 has it: all-reduce ``number`` of the world, pending."""
    return {
        "record_id": 100 + number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": T0 + number * 1_000_000,
        "input_sizes": [[3, 4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[3, 4]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        "timeout_ms": 600000,
        "is_p2p": False,
    } | changes


def dump(*entries: Any, **changes: Any) -> dict[str, Any]:
    return {
        "version": "2.9",
        "nccl_version": "2.27.3",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": RANKS}},
        "pg_status": {
            "0": {
                "last_enqueued_collective": 7,
                "last_started_collective": -1,
                "last_completed_collective": 5,
            }
        },
        "entries": list(entries),
    } | changes


def write(folder: Path, rank: int | str, content: dict[str, Any]) -> Path:
    path = folder / (f"_dump_{rank}" if isinstance(rank, int) else rank)
    path.write_bytes(pickle.dumps(content, 2))
    return path


def read(*paths: Path) -> tuple[list[Part], list[str]]:
    found = list(flight_recorder.read(sorted(paths), job="job-123"))
    return [one for one in found if isinstance(one, Part)], [
        one.text for one in found if isinstance(one, Note)
    ]


def test_an_entry_becomes_a_collective(tmp_path: Path):
    done = entry(6, state="completed", time_discovered_completed_ns=T0 + 6_000_000 + 2_500_000, retired=True)
    parts, notes = read(write(tmp_path, 3, dump(done, entry(7))))
    batch = parts[0].rank_batch
    assert (batch.rank, batch.world_size, batch.source, batch.timed_by) == (
        3,
        4,
        "flight-recorder",
        TimedBy.HOST,
    )
    assert [(one.uid, one.desc, one.rank, one.size) for one in batch.communicators] == [
        ("0", "default_pg", 3, 4)
    ]
    rows = batch.collectives
    assert (rows.seq, rows.op, rows.bytes, rows.dtype) == (
        [6, 7],
        [Op.ALLREDUCE] * 2,
        [48, 48],
        ["float32"] * 2,
    )
    assert (rows.enter_ns, rows.duration_ns) == ([T0 + 6_000_000, T0 + 7_000_000], [2_500_000, -1])
    assert rows.state == [State.COMPLETED, State.SCHEDULED]
    assert (parts[0].start_ns, parts[0].end_ns, parts[0].utc) == (T0 + 6_000_000, T0 + 8_500_000, True)
    assert any("watchdog" in note for note in notes)


def test_the_last_part_of_a_rank_tells_how_far_it_is(tmp_path: Path):
    parts, notes = read(write(tmp_path, 0, dump(entry(7))))
    (progress,) = parts[-1].rank_batch.progress
    assert (progress.communicator, progress.enqueued, progress.started, progress.completed) == (0, 7, -1, 5)
    assert parts[-1].rank_batch.collectives.seq == []
    assert notes == []


def test_a_rank_with_an_empty_ring_is_there_at_the_time_of_the_others(tmp_path: Path):
    parts, _ = read(write(tmp_path, 0, dump(entry(7))), write(tmp_path, 1, dump()))
    (empty,) = [part for part in parts if part.rank_batch.rank == 1]
    assert (empty.start_ns, empty.end_ns, empty.utc) == (T0 + 7_000_000, T0 + 7_000_000, True)
    assert empty.rank_batch.progress[0].enqueued == 7


def test_counters_are_named_by_the_order_in_which_groups_were_made(tmp_path: Path):
    config = {name: {"name": name, "desc": f"D{name}", "ranks": "[0, 1]"} for name in ("0", "112", "33")}
    counters = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    status = {number: dict.fromkeys(counters, int(number)) for number in ("0", "17", "4")}
    parts, notes = read(write(tmp_path, 0, dump(pg_config=config, pg_status=status)))
    names = [one.uid for one in parts[-1].rank_batch.communicators]
    assert {names[one.communicator]: one.enqueued for one in parts[-1].rank_batch.progress} == {
        "0": 0,
        "33": 4,
        "112": 17,
    }
    assert notes == []


def test_counters_of_groups_with_hashed_names_are_named_by_entries_only(tmp_path: Path):
    config = {name: {"name": name, "desc": "", "ranks": "[0, 1]"} for name in ("ab12", "cd34")}
    status = {n: {"last_enqueued_collective": 9, "last_completed_collective": 9} for n in ("0", "1")}
    ring = entry(9, pg_id=1, process_group=("cd34", ""))
    parts, notes = read(write(tmp_path, 0, dump(ring, pg_config=config, pg_status=status)))
    assert [one.communicator for one in parts[-1].rank_batch.progress] == [1]
    assert "how far 1 groups are cannot be told" in notes[0]


def test_a_receive_is_on_a_communicator_of_two_that_both_sides_know(tmp_path: Path):
    config = {"43": {"name": "43", "desc": "PIPELINE", "ranks": "[0, 4, 8, 12]"}}
    wanted = entry(
        9, process_group=("43", "PIPELINE"), p2p_seq_id=41, profiling_name="nccl:recv 0<-3", is_p2p=True
    )
    parts, _ = read(
        write(tmp_path, 0, dump(wanted, pg_config=config)), write(tmp_path, 12, dump(pg_config=config))
    )
    first, twelve = parts[0].rank_batch, parts[-1].rank_batch
    assert (first.collectives.op, first.collectives.seq) == ([Op.RECV], [41])
    assert [(one.uid, one.rank, one.size) for one in first.communicators[1:]] == [("43/0:3", 0, 2)]
    assert [(one.uid, one.rank, one.size) for one in twelve.communicators[1:]] == [("43/0:3", 1, 2)]
    assert twelve.progress == []  # its counters mix sends with collectives


def test_json_dumps_say_the_same_as_pickles(tmp_path: Path):
    content = dump(entry(6), entry(7))
    path = tmp_path / "_dump_1"
    quoted = copy.deepcopy(content)  # as dump_json in FlightRecorderDetail.hpp writes it
    quoted["pg_status"]["0"] = {key: str(value) for key, value in content["pg_status"]["0"].items()}
    for one in quoted["entries"]:
        one |= {"time_discovered_started_ns": 0, "time_discovered_completed_ns": 0}
    path.write_text(json.dumps(quoted))
    (tmp_path / "b").mkdir()
    same = write(tmp_path / "b", 1, content)
    assert [part.rank_batch for part in read(path)[0]] == [part.rank_batch for part in read(same)[0]]
    assert gather([path]).kind == "flight-recorder"


def test_gzipped_dumps_are_read(tmp_path: Path):
    path = tmp_path / "_dump_2.gz"
    path.write_bytes(gzip.compress(pickle.dumps(dump(entry(7)), 2)))
    assert read(path)[0][0].rank_batch.rank == 2


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("_dump_3", 3),
        ("nccl_trace_rank_2", 2),
        ("host7_rank_1.pkl", 1),
        ("rank3-node12", 3),
        ("dump-2.json", 2),
    ],
)
def test_the_rank_is_in_the_name(tmp_path: Path, name: str, rank: int):
    assert read(write(tmp_path, name, dump(entry(7))))[0][0].rank_batch.rank == rank


def test_a_rank_that_no_name_tells_is_the_one_that_all_groups_share(tmp_path: Path):
    config = dump()["pg_config"] | {"9": {"name": "9", "desc": "TP", "ranks": [2]}}
    assert read(write(tmp_path, "trace", dump(entry(7), pg_config=config)))[0][0].rank_batch.rank == 2
    with pytest.raises(Unusable, match="whose dump is this"):
        read(write(tmp_path, "trace", dump(entry(7))))


def test_a_name_that_contradicts_the_groups_is_refused(tmp_path: Path):
    with pytest.raises(Unusable, match=r"named as rank 9, .*those have 0, 1, 2, 3 in common"):
        read(write(tmp_path, 9, dump(entry(7))))


def test_rows_that_cannot_be_used_are_left_out_and_counted(tmp_path: Path):
    bad = [
        entry(1, time_created_ns=None),
        entry(2, time_created_ns=-5),
        entry(3, collective_seq_id="x"),
        entry(4, process_group=None, pg_id=None),
        entry(5, state="completed", time_discovered_completed_ns=T0),
        "no entry",
    ]
    parts, notes = read(write(tmp_path, 0, dump(entry(0), *bad, entry(7), entry(7))))
    assert parts[0].rank_batch.collectives.seq == [0, 7]
    assert "6 of 9 entries left out, first [1]" in notes[0]
    assert "1 entries are there twice" in notes[1]


def test_sizes_and_types_that_are_not_known_are_said_to_be_so(tmp_path: Path):
    odd = [
        entry(1, input_dtypes=["Float6"]),
        entry(2, input_sizes=[[-1]]),
        entry(3, input_sizes=[[2**40, 2**40]]),
        entry(4, input_sizes=None),
        entry(5, input_sizes=[[2], [3]], input_dtypes=["Half", "Half"]),
        entry(6, input_sizes=[]),
    ]
    assert read(write(tmp_path, 0, dump(*odd)))[0][0].rank_batch.collectives.bytes == [-1, -1, -1, -1, 10, 0]


def test_older_versions_are_read_as_far_as_they_tell(tmp_path: Path):
    old = {key: value for key, value in entry(7).items() if key not in ("process_group", "collective_seq_id")}
    parts, notes = read(write(tmp_path, 1, {"version": "1.5", "entries": [old | {"seq_id": 7}]}))
    assert parts[0].rank_batch.collectives.seq == [7]
    assert parts[0].rank_batch.communicators[0].uid == "0"
    assert any("version 1.5" in note for note in notes)
    assert any("names no groups" in note for note in notes)


def test_a_long_ring_comes_in_parts(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(flight_recorder, "PART_ROWS", 4)
    parts, _ = read(write(tmp_path, 0, dump(*(entry(number) for number in range(10)))))
    assert [part.rank_batch.collectives.seq for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]
    assert [part.start_ns for part in parts] == sorted(part.start_ns for part in parts)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00x\x85R.", "asks for a class or function"),
        (pickle.dumps(dump(entry(7)), 2)[:-40], "cut short at byte"),
        (b'{"entries": [', "not JSON"),
        (b'{"entries": 5}', "entries must be a list"),
        (b"[1, 2]", "no Flight Recorder dump"),
        (b"{}", "neither entries nor pg_status"),
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_dump_is_refused_in_words(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "_dump_0"
    path.write_bytes(content)
    with pytest.raises(Unusable, match=words) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert refused.value.path == path


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(flight_recorder, "MAX_BYTES", 100)
    with pytest.raises(Unusable, match="more than 100 bytes"):
        read(write(tmp_path, 0, dump(entry(7))))


JUNK = st.one_of(
    st.none(),
    st.integers(-(2**65), 2**65),
    st.text(max_size=5),
    st.floats(),
    st.lists(st.integers(), max_size=3),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.data())
def test_whatever_stands_in_a_field_the_parts_can_be_sent(tmp_path: Path, data: st.DataObject):
    content = copy.deepcopy(dump(entry(6), entry(7, profiling_name="nccl:send 0->3", is_p2p=True)))
    places = [content, content["pg_config"], content["pg_config"]["0"], *content["entries"]]
    for _ in range(data.draw(st.integers(1, 4))):
        target = data.draw(st.sampled_from(places))
        target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JUNK)
    path = tmp_path / "_dump_0"
    path.write_text(json.dumps(content, default=str))
    with suppress(Unusable):
        for part in read(path)[0]:
            batch = Batch(
                schema=1, node="n", boot_id="b", agent="a", seq=0, start_ns=0, end_ns=1, utc_offset_ns=0,
                ranks=[part.rank_batch],
            )  # fmt: skip
            assert from_plain(to_plain(batch)) == batch
            assert part.start_ns <= part.end_ns


@pytest.mark.parametrize("case", ["gpu_error_1st", "lock_gil_1st"])
def test_recorded_dumps_are_read_whole(case: str):
    folder = DUMPS / case
    if not folder.is_dir():
        pytest.skip(f"the recorded dumps are not at {folder}")
    found = list(importers.read(gather([folder]), job="job-123"))
    parts = [one for one in found if isinstance(one, Part)]
    assert [one for one in found if isinstance(one, Note)] == []
    assert {part.rank_batch.rank for part in parts} == set(range(16))
    assert {part.rank_batch.world_size for part in parts} == {16}
    entries = sum(len(pickle.loads(path.read_bytes())["entries"]) for path in folder.glob("_dump_*"))
    assert sum(len(part.rank_batch.collectives.seq) for part in parts) == entries
    assert all(size >= 0 for part in parts for size in part.rank_batch.collectives.bytes)


def test_batched_sends_end_when_the_whole_batch_does(tmp_path: Path):
    batch = {"collective_seq_id": 0, "p2p_seq_id": 5, "is_p2p": True}
    ended = {"state": "completed", "time_discovered_completed_ns": T0 + 9_000_000}
    ring = [
        entry(1, profiling_name="nccl:send 0->1", **batch),
        entry(2, profiling_name="nccl:recv 0<-1", **batch),
        entry(3, profiling_name="nccl:coalesced", input_sizes=[], **batch | ended),
        entry(4, profiling_name="nccl:send 0->1", **batch | {"p2p_seq_id": 6}),
        entry(5, profiling_name="nccl:coalesced", input_sizes=[], **batch | {"p2p_seq_id": 6}),
    ]
    rows = read(write(tmp_path, 0, dump(*ring)))[0][0].rank_batch.collectives
    assert rows.op == [Op.SEND, Op.RECV, Op.SEND]
    assert rows.state == [State.COMPLETED, State.COMPLETED, State.SCHEDULED]
    assert rows.duration_ns == [8_000_000, 7_000_000, -1]


def test_of_coalesced_collectives_the_whole_call_counts(tmp_path: Path):
    ended = {"state": "completed", "time_discovered_completed_ns": T0 + 12_000_000, "collective_seq_id": 8}
    ring = [
        entry(8, profiling_name="nccl:_all_gather_base"),
        entry(9, profiling_name="nccl:_all_gather_base", collective_seq_id=8),
        entry(10, profiling_name="nccl:all_gather_into_tensor_coalesced", **ended),
    ]
    rows = read(write(tmp_path, 0, dump(*ring)))[0][0].rank_batch.collectives
    assert (rows.op, rows.seq, rows.state) == ([Op.ALLGATHER_COALESCED], [8], [State.COMPLETED])
