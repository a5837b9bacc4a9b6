"""Operation tables become operations, step after step; what is wrong with a table is said with row and column."""

from __future__ import annotations

import gzip
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probes.codec import from_plain, to_plain
from probes.importers import Note, Part, Unusable, gather, operations
from probes.records import Batch, Lane
from tests.recorded import WHAT_IF

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id")


def row(**changes: Any) -> dict[str, Any]:
    whole = (0, 0, 0, 16, "forward-compute", 0.0, 0.5, 0, 0, 0)
    return dict(zip(COLUMNS, whole, strict=True)) | changes


def parquet(path: Path, rows: list[dict[str, Any]], **types: pa.DataType) -> Path:
    table = pa.Table.from_pylist(rows)
    for name, kind in types.items():
        place = table.column_names.index(name)
        table = table.set_column(place, name, table[name].cast(kind))
    pq.write_table(table, path)
    return path


def read(*paths: Path) -> tuple[list[Part], list[str]]:
    found = list(operations.read(sorted(paths), job="job-123"))
    return [one for one in found if isinstance(one, Part)], [
        one.text for one in found if isinstance(one, Note)
    ]


def test_a_row_becomes_an_operation(tmp_path: Path):
    rows = [
        row(optype="forward-recv", start_ts=0.25, duration=0.125, seq_id=4, mb_id=3, mc=1),
        row(optype="gc", start_ts=1.0, duration=0.0, seq_id=0, mb_id=-1, mc=-1),
    ]
    (part,), notes = read(parquet(tmp_path / "t.parquet", rows))
    table = part.rank_batch.operations
    assert [table.names[kind] for kind in table.kind] == ["forward-recv", "gc"]
    assert (table.lane, table.step) == ([Lane.COMMUNICATION, Lane.HOST], [16, 16])
    assert (table.start_ns, table.duration_ns) == ([250_000_000, 1_000_000_000], [125_000_000, 0])
    assert (table.seq, table.micro_batch, table.chunk) == ([4, 0], [3, -1], [1, -1])
    assert (part.rank_batch.source, part.rank_batch.world_size, part.utc) == ("operations", 1, False)
    assert part.start_ns == 250_000_000
    assert len(notes) == 1
    assert "laid out one after the other" in notes[0]


@pytest.mark.parametrize(
    ("name", "lane"),
    [
        ("backward-compute", Lane.COMPUTE),
        ("forward-send", Lane.COMMUNICATION),
        ("grads-reduce-scatter", Lane.COMMUNICATION),
        ("params-all-gather", Lane.COMMUNICATION),
        ("embedding-grads-all-reduce", Lane.COMMUNICATION),
        ("optimizer", Lane.COMPUTE),
        ("optimizer-clip-main-grad", Lane.COMPUTE),
        ("gc", Lane.HOST),
    ],
)
def test_the_lane_follows_from_the_kind(tmp_path: Path, name: str, lane: Lane):
    (part,), _ = read(parquet(tmp_path / "t.parquet", [row(optype=name)]))
    assert part.rank_batch.operations.lane == [lane]


def test_steps_follow_each_other_and_ranks_stay_aligned_within_one(tmp_path: Path):
    rows = [
        row(rank=0, step=16, start_ts=0.0, duration=2.0),
        row(rank=1, step=16, start_ts=1.5, duration=3.0),
        row(rank=0, step=40, start_ts=-0.5, duration=1.0),
        row(rank=1, step=40, start_ts=0.25, duration=1.0),
    ]
    parts, _ = read(parquet(tmp_path / "t.parquet", rows))
    first, second = (part.rank_batch.operations for part in parts)
    assert (first.step, second.step) == ([16, 40], [16, 40])
    assert first.start_ns[0] == 0
    assert second.start_ns[0] == 1_500_000_000
    assert first.start_ns[1] > 4_500_000_000  # when the slower rank has ended step 16
    assert second.start_ns[1] - first.start_ns[1] == 750_000_000


def test_places_are_taken_over(tmp_path: Path):
    rows = [row(rank=0), row(rank=9, dp_rank=2, stage=1)]
    parts, notes = read(parquet(tmp_path / "t.parquet", rows))
    assert [(one.rank_batch.place.data, one.rank_batch.place.stage) for one in parts] == [(0, 0), (2, 1)]
    assert any("2 of 10 ranks are in the table" in note for note in notes)


def test_optional_columns_may_be_missing(tmp_path: Path):
    bare = [{key: value for key, value in row().items() if key in operations._NEEDED}]
    (part,), _ = read(parquet(tmp_path / "t.parquet", bare))
    table = part.rank_batch.operations
    assert (table.seq, table.micro_batch, table.chunk) == ([-1], [-1], [-1])
    assert (part.rank_batch.place.data, part.rank_batch.place.stage) == (-1, -1)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_says_the_same_as_parquet(tmp_path: Path, delimiter: str):
    rows = [row(rank=rank, step=step) for rank in (0, 1) for step in (3, 5)]
    lines = [delimiter.join(map(str, one.values())) for one in rows]
    plain, packed = tmp_path / "t.csv", tmp_path / "t2.csv.gz"
    plain.write_text("\n".join([delimiter.join(COLUMNS), *lines]) + "\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    expected = [part.rank_batch for part in read(parquet(tmp_path / "t.parquet", rows))[0]]
    assert [part.rank_batch for part in read(plain)[0]] == expected
    assert [part.rank_batch for part in read(packed)[0]] == expected
    assert gather([plain, packed]).kind == "operations"


def test_the_meta_file_beside_it_gives_the_size_of_the_job(tmp_path: Path):
    path = parquet(tmp_path / "trace-X.parquet", [row(rank=3)])
    (tmp_path / "meta-X.yaml").write_text("trial_name: X\nworld_size: 64  # GPUs\ntp_size: 4\nodd: [1, 2]\n")
    assert read(path)[0][0].rank_batch.world_size == 64
    (tmp_path / "meta-X.yaml").write_text("world_size: 3\n")
    with pytest.raises(Unusable, match=r"world_size 3, but .* has rank 3"):
        read(path)


def test_several_files_are_one_job(tmp_path: Path):
    first = parquet(tmp_path / "a.parquet", [row(step=20, optype="gc"), row(step=30)])
    second = parquet(tmp_path / "b.parquet", [row(step=10)])
    parts, _ = read(first, second)
    assert [step for part in parts for step in part.rank_batch.operations.step] == [10, 20, 30]
    (tmp_path / "c.parquet").write_bytes(first.read_bytes())
    with pytest.raises(Unusable, match=r"c\.parquet row 1: stands in an earlier file too"):
        read(first, tmp_path / "c.parquet")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"duration": math.nan}, "duration is not finite, first in row 2"),
        ({"start_ts": math.inf}, "start_ts is not finite, first in row 2"),
        ({"duration": -0.1}, "duration is negative, first in row 2"),
        ({"duration": 1e12}, "duration is beyond"),
        ({"duration": None}, "no duration"),
        ({"rank": -1}, "rank is negative or too large"),
        ({"rank": None}, "no rank"),
        ({"step": -4}, "step is negative"),
        ({"optype": None}, "no optype"),
        ({}, "the same as an earlier row, first in row 2"),
    ],
)
def test_rows_that_cannot_be_used_are_left_out_and_counted(tmp_path: Path, bad: dict[str, Any], words: str):
    parts, notes = read(parquet(tmp_path / "t.parquet", [row(), row(**bad), row(seq_id=1)]))
    assert sum(len(part.rank_batch.operations.kind) for part in parts) == 2
    assert words in notes[0]
    assert "1 of 3 rows left out" in notes[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"rank,step,optype,duration\n0,1,gc,1\n", "no column start_ts"),
        (b"rank,step,optype,start_ts,duration\n", "a table without rows"),
        (
            b"rank,step,optype,start_ts,duration\n0,1,gc,0,1\n0,1,gc,0,slow\n",
            r"column duration holds string.*row 2: 'slow'",
        ),
        (b"rank,step,optype,start_ts,duration\n0,1,7,0,1\n", "column optype holds int64, not text"),
        (b"rank,step,optype,start_ts,duration\n0,1,gc,0\n", "not a readable table"),
        (b"rank,rank,step,optype,start_ts,duration\n0,0,1,gc,0,1\n", "column rank is there twice"),
        (
            b"rank,step,optype,start_ts,duration\n-1,1,gc,0,1\n",
            r"none of 1 rows can be used \(1 of 1 rows left out",
        ),
        (b"PAR1 and then nothing PAR1", "not a readable table"),
    ],
)
def test_what_is_no_table_is_refused_in_words(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(Unusable, match=words) as refused:
        read(path)
    assert str(path) in str(refused.value)


def test_a_parquet_file_that_is_cut_short_is_refused(tmp_path: Path):
    path = parquet(tmp_path / "t.parquet", [row(seq_id=number) for number in range(100)])
    whole = path.read_bytes()
    for length in range(4, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(Unusable, match="not a readable table"):
            read(path)


def test_one_rank_in_two_places_is_refused(tmp_path: Path):
    rows = [row(rank=1), row(rank=1, stage=2, seq_id=1)]
    with pytest.raises(
        Unusable, match=r"row 2: rank 1 has dp_rank 0 and stage 2, but dp_rank 0 and stage 0 in .*row 1"
    ):
        read(parquet(tmp_path / "t.parquet", rows))


def test_a_table_with_too_many_rows_is_refused_before_it_is_read(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(operations, "MAX_ROWS", 1)
    with pytest.raises(Unusable, match="2 rows of"):
        read(parquet(tmp_path / "t.parquet", [row(), row(seq_id=1)]))


def test_a_long_table_comes_in_parts_in_order_of_time(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(operations, "PART_ROWS", 3)
    rows = [row(step=step, start_ts=0.1 * n, seq_id=n) for step in (9, 5) for n in (1, 0)]
    parts, _ = read(parquet(tmp_path / "t.parquet", rows))
    assert [part.rank_batch.operations.step for part in parts] == [[5, 5, 9], [9]]
    assert [part.rank_batch.operations.seq for part in parts] == [[0, 1, 0], [1]]


CELL = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.sampled_from(["", "gc", "forward-send", "x,y", "-1"]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(COLUMNS, CELL)), min_size=1, max_size=5))
def test_whatever_stands_in_a_csv_the_parts_can_be_sent(tmp_path: Path, changes: list[dict[str, Any]]):
    rows = [row(seq_id=n) | change for n, change in enumerate(changes)]
    lines = [",".join("" if value is None else str(value) for value in one.values()) for one in rows]
    path = tmp_path / "t.csv"
    path.write_text("\n".join([",".join(COLUMNS), *lines]))
    with suppress(Unusable):
        for part in read(path)[0]:
            assert sent(part)


def sent(part: Part) -> bool:
    batch = Batch(
        schema=1, node="n", boot_id="b", agent="a", seq=0, start_ns=0, end_ns=1, utc_offset_ns=0,
        ranks=[part.rank_batch],
    )  # fmt: skip
    return from_plain(to_plain(batch)) == batch and 0 <= part.start_ns <= part.end_ns


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
def test_a_parquet_file_with_bytes_changed_is_read_or_refused(tmp_path: Path, at: int, change: bytes):
    path = parquet(tmp_path / "t.parquet", [row(seq_id=number) for number in range(20)])
    whole = path.read_bytes()
    at %= len(whole)
    path.write_bytes(whole[:at] + change + whole[at + len(change) :])
    with suppress(Unusable):
        assert all(map(sent, read(path)[0]))


@pytest.mark.parametrize(
    ("name", "ranks", "world", "steps", "rows"), [("AR", 16, 64, 44, 117_216), ("SE", 64, 128, 43, 107_328)]
)
def test_recorded_tables_are_read_whole(name: str, ranks: int, world: int, steps: int, rows: int):
    path = WHAT_IF / f"trace-{name}.parquet"
    if not path.is_file():
        pytest.skip(f"the recorded table is not at {path}")
    parts, notes = read(path)
    tables = [part.rank_batch.operations for part in parts]
    assert len({part.rank_batch.rank for part in parts}) == ranks
    assert {part.rank_batch.world_size for part in parts} == {world}
    assert len({step for table in tables for step in table.step}) == steps
    assert sum(len(table.kind) for table in tables) == rows
    assert len(notes) == 2
    # Of one rank all instants rise, and no step begins before the one before it has ended.
    ends = {}
    for part in parts:
        table = part.rank_batch.operations
        if part.rank_batch.rank == 0:
            for step, start, duration in zip(table.step, table.start_ns, table.duration_ns, strict=True):
                assert start >= max((end for other, end in ends.items() if other < step), default=0)
                ends[step] = max(ends.get(step, 0), start + duration)
