"""Reading a trace in pieces: whatever the file holds, whole events come out, and the rest is said in words."""

from __future__ import annotations

import contextlib
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probes.importers import Unusable, kineto_stream
from probes.importers.kineto_stream import Args, Stream, TraceEvent
from tests.probes.importers.kineto_traces import all_reduce, document, event, imported, step

quickly = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TRICKY = 'a }, { "b": [ \\ } ], "traceEvents": [ é ☃'
EVENTS = [
    step(3, 100, 1000),
    *all_reduce(200, 50, 1),
    *all_reduce(500, 60, 2),
    event("user_annotation", TRICKY, 300, 5),
    event("cpu_op", "aten::mul", 310, 5, **{"Input Dims": [[1, 2], []], "nested": [{"a": [{}]}, {"b": 1}]}),
]
TEXT = json.dumps(document(EVENTS, traceName="x", tail=[{"a": 1}, {"b": 2}], ensure_ascii=False)).encode()


def _read(path: Path) -> tuple[list[str], Stream]:
    stream = Stream(path)
    return [str(one.name) for events in stream.events() for one in events], stream


def _file(folder: Path, text: bytes, name: str = "rank0.json") -> Path:
    path = folder / name
    path.write_bytes(text)
    return path


@pytest.mark.parametrize("piece", [2, 7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_pieces_of_any_size_give_the_same_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, pack: Any
) -> None:
    monkeypatch.setattr(kineto_stream, "PIECE_BYTES", piece)
    names, stream = _read(_file(tmp_path, pack(TEXT)))
    assert names == [one["name"] for one in EVENTS]
    assert (stream.cut, stream.broken) == ("", 0)
    assert stream.around["traceName"] == "x"
    assert stream.around["tail"] == [{"a": 1}, {"b": 2}]
    assert stream.around["distributedInfo"]["rank"] == 0


def test_what_stands_after_the_events_is_read_as_well(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": EVENTS, "distributedInfo": {"rank": 1, "world_size": 2}}).encode()
    (part,), _ = imported(_file(tmp_path, text, "trace.json"))
    assert part.rank_batch.rank == 1


def test_a_bare_array_of_events_is_a_trace(tmp_path: Path) -> None:
    names, _ = _read(_file(tmp_path, json.dumps(EVENTS).encode()))
    assert len(names) == len(EVENTS)


def test_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    """Kineto writes inf for the bandwidth of a copy that took no time."""
    text = TEXT.replace(b'"correlation": 2', b'"memory bandwidth (GB/s)": inf, "x": -nan, "correlation": 2')
    names, stream = _read(_file(tmp_path, text))
    assert (len(names), stream.broken, stream.cut) == (len(EVENTS), 0, "")


def test_an_event_that_is_broken_costs_only_itself(tmp_path: Path) -> None:
    text = TEXT.replace(b'"ts": 200', b'"ts": 2x0')
    names, stream = _read(_file(tmp_path, text))
    assert (len(names), stream.broken, stream.cut) == (len(EVENTS) - 1, 1, "")


def test_bytes_that_are_no_utf_8_are_replaced(tmp_path: Path) -> None:
    names, stream = _read(_file(tmp_path, TEXT.replace(b"aten::mul", b"aten\xff\xfemul")))
    assert "aten��mul" in names
    assert (len(names), stream.broken) == (len(EVENTS), 0)


def test_a_file_cut_anywhere_gives_the_events_before_the_cut(tmp_path: Path) -> None:
    ends = [TEXT.index(json.dumps(one).encode()) + len(json.dumps(one)) for one in EVENTS]
    begin = TEXT.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    for cut in range(len(TEXT)):
        path = _file(tmp_path, TEXT[:cut])
        if cut < begin:
            with pytest.raises(Unusable, match=r"rank0\.json"):
                _read(path)
        else:
            names, stream = _read(path)
            assert len(names) == sum(end <= cut for end in ends)
            assert "ends" in stream.cut


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "an empty file"),
        (b"  \n ", "an empty file"),
        (b"hello", "no JSON"),
        (b"{}", "JSON without traceEvents"),
        (b'{"traceEvents": 3}', "JSON without traceEvents"),
        (b'{"schemaVersion": 1, "deviceProperties": [', "ends within the value of 'deviceProperties'"),
        ('{"traceEvents": []}'.encode("utf-16"), "UTF-16"),
        (gzip.compress(TEXT)[:30], "before its events|nothing before"),
        (gzip.compress(TEXT)[:12] + b"damaged" * 9, "damaged"),
        (b'{"traceEvents": []}', "none of them is a kernel"),
        (b'{"traceEvents": [1, 2, "a"]}', "none of them is a kernel"),
    ],
)
def test_what_is_no_trace_is_refused_in_words(tmp_path: Path, content: bytes, why: str) -> None:
    path = _file(tmp_path, content)
    with pytest.raises(Unusable, match=why) as refused:
        imported(path)
    assert str(refused.value).startswith(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="cannot be read"):
        imported(tmp_path / "away.json")


def test_gzip_files_one_after_the_other_are_one(tmp_path: Path) -> None:
    names, stream = _read(_file(tmp_path, gzip.compress(TEXT[:300]) + gzip.compress(TEXT[300:])))
    assert (len(names), stream.cut) == (len(EVENTS), "")


def test_an_event_without_end_is_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto_stream, "EVENT_BYTES", 1 << 16)
    monkeypatch.setattr(kineto_stream, "PIECE_BYTES", 1 << 12)
    whole = json.dumps(EVENTS[0]).encode()
    path = _file(tmp_path, b'{"traceEvents": [' + whole + b', {"name": "' + b"a" * (8 << 20))
    tracemalloc.start()
    names, stream = _read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert names == ["ProfilerStep#3"]
    assert "an event of more than" in stream.cut
    assert peak < 1 << 20


def test_a_bomb_is_unpacked_in_pieces(tmp_path: Path) -> None:
    bomb = gzip.compress(b'{"traceEvents": [' + b" " * (64 << 20) + b"]}")
    path = _file(tmp_path, bomb)
    tracemalloc.start()
    with pytest.raises(Unusable):
        imported(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def _only_words(path: Path) -> None:
    with contextlib.suppress(Unusable):
        imported(path)


@quickly
@given(
    changes=st.lists(st.tuples(st.integers(0, len(TEXT) - 1), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, len(TEXT)),
    packed=st.booleans(),
    piece=st.sampled_from([16, 200, 1 << 20]),
)
def test_damage_never_ends_in_anything_but_words(
    tmp_path: Path, changes: list[tuple[int, int]], cut: int, packed: bool, piece: int
) -> None:
    text = bytearray(gzip.compress(TEXT, mtime=0) if packed else TEXT)
    for place, value in changes:
        text[place % len(text)] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kineto_stream, "PIECE_BYTES", piece)
        _only_words(_file(tmp_path, bytes(text[:cut]), "rank0.json"))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["X", "kernel", "cpu_op", "user_annotation", "nccl:all_reduce", "ProfilerStep#1", "[0, 1]"]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
keys = st.sampled_from(
    [one.encode_name for kind in (Args, TraceEvent) for one in msgspec.structs.fields(kind)]
)
likely = st.fixed_dictionaries(
    {
        "ph": st.just("X"),
        "cat": st.sampled_from(["kernel", "cpu_op", "user_annotation", "cuda_runtime", "gpu_memcpy"]),
        "name": st.sampled_from(
            [
                "ncclDevKernel_AllReduce(x)",
                "gloo:send",
                "nccl:wait",
                "record_param_comms",
                "ProfilerStep#2",
                "k<a>(b)",
            ]
        ),
        "ts": st.integers(0, 1 << 62) | st.floats(),
        "dur": st.integers(-5, 1 << 62) | st.floats(),
    },
    optional={"args": st.dictionaries(keys, json_values, max_size=6), "tid": json_values, "pid": json_values},
)


@quickly
@given(
    events=st.lists(likely | st.dictionaries(keys, json_values, max_size=6) | json_values, max_size=8),
    around=st.dictionaries(
        st.sampled_from(["distributedInfo", "baseTimeNanoseconds", "host_name", "traceName"]), json_values
    ),
    config=json_values
    | st.lists(st.dictionaries(st.sampled_from(["pg_name", "pg_size", "ranks"]), json_values)),
)
def test_any_json_ends_in_parts_or_words(
    tmp_path: Path, events: list[Any], around: dict[str, Any], config: Any
) -> None:
    info = around.get("distributedInfo")
    if isinstance(info, dict):
        info.update(rank=0, world_size=2, pg_config=config)
    text = json.dumps({**around, "traceEvents": events}).encode()
    _only_words(_file(tmp_path, text))
    _only_words(_file(tmp_path, text, "trace.json"))
