"""Operation tables: one row per operation that a trace timed (Parquet or CSV), with its training step.

The columns are those of ByteDance's straggler traces (arXiv 2505.05713, ByteDance-Seed/StragglerAnalysis):
``rank``, ``step``, ``optype``, ``start_ts`` (seconds from the step's start) and ``duration`` (seconds) must be
there; ``dp_rank``, ``stage``, ``seq_id``, ``mb_id`` (micro-batch) and ``mc`` (model chunk) may be. A
``meta-*.yaml`` beside the table, where there is one, gives the job's size.

Tables give no time of day and only some steps, so steps are laid out one after the other: within a step all
instants are as the table says, between steps they say nothing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from probes.importers import PART_ROWS, Note, Part, Unusable
from probes.importers.files import open_plain
from probes.importers.job_size import world_size
from probes.records import Lane, Operations, Place, RankBatch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_BYTES = 1 << 30
"""Largest table, after gzip."""
MAX_ROWS = 20_000_000
"""Most rows: columns of 11 numbers take 1.8 GB then."""
MAX_KINDS = 4_096
"""Most kinds of operations: more are names of something else."""
MAX_SECONDS = 1e8
"""Longest instant or duration within a step, three years: beyond, a column has another unit."""

_NEEDED = ("rank", "step", "optype", "start_ts", "duration")
_WHOLE = {"dp_rank": -1, "stage": -1, "seq_id": -1, "mb_id": -1, "mc": -1}
"""Columns that may be missing, and what stands for "not known" then."""
_COMMUNICATION = re.compile(r".*-(send|recv|reduce-scatter|all-gather|all-reduce|all-to-all|broadcast)")


@dataclass(frozen=True)
class _Table:
    """Usable rows, of one file or of all. ``line`` is a row's number in its file, from 0."""

    paths: list[Path]
    file: Ints
    """Index into ``paths``."""
    kinds: list[str]
    kind: Ints
    numbers: dict[str, Ints]
    start: Floats
    duration: Floats
    line: Ints

    def where(self, row: int) -> str:
        return f"{self.paths[int(self.file[row])]} row {int(self.line[row]) + 1}"


def read(paths: Sequence[Path], *, job: str) -> Iterator[Part | Note]:
    """See :mod:`probes.importers`. Raises :class:`probes.importers.Unusable`."""
    tables = []
    for path in paths:
        table, notes = _usable(path, _load(path))
        yield from map(Note, notes)
        tables.append(table)
    table = _merged(tables)
    places = _places(table)
    world = world_size(paths, max(places))
    bases, ends = _layout(table)
    yield Note(
        "operation tables tell no time of day and not every step: steps are laid out one after the other, and only "
        "durations and order within a step mean something"
    )
    if len(places) < world:
        yield Note(f"{len(places)} of {world} ranks are in the table; nothing is known of the others")
    for rank in sorted(places):
        yield from _parts(table, rank, places[rank], world, bases, ends, job)


def _load(path: Path) -> pa.Table:
    with open_plain(path) as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise Unusable(f"{path}: more than {MAX_BYTES:,} bytes: split it by ranks, or keep fewer steps", path)
    try:
        if data.startswith(b"PAR1"):
            table = _parquet(path, data)
        else:
            first = data.partition(b"\n")[0]
            parse = pyarrow.csv.ParseOptions(delimiter=max(",;\t", key=lambda one: first.count(one.encode())))
            table = pyarrow.csv.read_csv(io.BytesIO(data), parse_options=parse)
    except Unusable:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Unusable(f"{path}: not a readable table ({_first_line(error)}): get it again", path) from error
    names = [name.strip().lower() for name in table.column_names]
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise Unusable(
            f"{path}: no column {', '.join(missing)} (it has {', '.join(names[:20])}); "
            f"needed are {', '.join(_NEEDED)}",
            path,
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Unusable(f"{path}: column {', '.join(twice)} is there twice: name each column once", path)
    if not table.num_rows:
        raise Unusable(f"{path}: a table without rows", path)
    if table.num_rows > MAX_ROWS:
        raise Unusable(
            f"{path}: {table.num_rows:,} rows; at most {MAX_ROWS:,} are read: split it by ranks", path
        )
    return table.rename_columns(names)


def _parquet(path: Path, data: bytes) -> pa.Table:
    file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
    found = file.metadata
    size = sum(found.row_group(group).total_byte_size for group in range(found.num_row_groups))
    if found.num_rows > MAX_ROWS or size > 4 * MAX_BYTES:
        raise Unusable(
            f"{path}: {found.num_rows:,} rows of {size:,} bytes; at most {MAX_ROWS:,} rows are read: "
            "split it by ranks, or keep fewer steps",
            path,
        )
    wanted = {*_NEEDED, *_WHOLE}
    return file.read([name for name in file.schema_arrow.names if name.strip().lower() in wanted])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


def _usable(path: Path, table: pa.Table) -> tuple[_Table, list[str]]:
    """The rows that can be used, and in words how many cannot, and where the first is."""
    rows = table.num_rows
    bad = np.zeros(rows, np.bool_)
    notes = []

    def leave_out(which: npt.NDArray[np.bool_], what: str) -> None:
        fresh = which & ~bad
        if fresh.any():
            row = int(np.flatnonzero(fresh)[0])
            notes.append(
                f"{path}: {int(fresh.sum()):,} of {rows:,} rows left out: {what}, first in row {row + 1}"
            )
            bad[fresh] = True

    kinds, kind = _names(path, table["optype"])
    leave_out(kind < 0, "no optype")
    numbers = {}
    for name in ("rank", "step", *_WHOLE):
        if name in table.column_names:
            values, empty = _numbers(path, name, table[name])
            leave_out(empty & (name in ("rank", "step")), f"no {name}")
            leave_out(values != np.floor(values), f"{name} is no whole number")
            leave_out(np.abs(values) > 2**53, f"{name} is too large")
            values = np.where(bad | empty, -1, values)
            numbers[name] = values.astype(np.int64)
        else:
            numbers[name] = np.full(rows, _WHOLE[name], np.int64)
    leave_out((numbers["rank"] < 0) | (numbers["rank"] >= 1 << 31), "rank is negative or too large")
    leave_out(numbers["step"] < 0, "step is negative")
    times = {}
    for name in ("start_ts", "duration"):
        values, empty = _numbers(path, name, table[name])
        leave_out(empty, f"no {name}")
        leave_out(~np.isfinite(values), f"{name} is not finite")
        leave_out(np.abs(values) > MAX_SECONDS, f"{name} is beyond {MAX_SECONDS:,.0f} s")
        times[name] = values
    leave_out(times["duration"] < 0, "duration is negative")
    twice = _twice(np.stack([kind, *numbers.values(), *map(_bits, times.values())]), bad)
    leave_out(twice, "the same as an earlier row")
    keep = np.flatnonzero(~bad)
    if not len(keep):
        raise Unusable(f"{path}: none of {rows:,} rows can be used ({notes[0].partition(': ')[2]})", path)
    return (
        _Table(
            [path],
            np.zeros(len(keep), np.int64),
            kinds,
            kind[keep],
            {name: values[keep] for name, values in numbers.items()},
            times["start_ts"][keep],
            times["duration"][keep],
            keep.astype(np.int64),
        ),
        notes,
    )


def _names(path: Path, column: pa.ChunkedArray) -> tuple[list[str], Ints]:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise Unusable(f"{path}: column optype holds {kind}, not text", path)
    try:
        encoded = column.cast(pa.string()).combine_chunks().dictionary_encode()
        names = [str(name)[:256] for name in encoded.dictionary.to_pylist()]
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise Unusable(f"{path}: column optype is not text ({_first_line(error)})", path) from error
    if len(names) > MAX_KINDS:
        raise Unusable(
            f"{path}: column optype holds {len(names):,} kinds of operations; at most {MAX_KINDS:,}", path
        )
    return names, pc.fill_null(encoded.indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)


def _numbers(path: Path, name: str, column: pa.ChunkedArray) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """A column as numbers, and where it is empty (NaN there). Whole numbers stay exact up to 2^53."""
    kind = column.type
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan), np.ones(len(column), np.bool_)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise Unusable(f"{path}: column {name} holds {kind}, not numbers{_where(column)}", path)
    array = column.combine_chunks()
    empty = array.is_null().to_numpy(zero_copy_only=False)
    values = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.where(empty, 0.0, values), empty


def _where(column: pa.ChunkedArray) -> str:
    """The first row of a text column that is no number, in words."""
    if not pa.types.is_string(column.type):
        return ""
    for row, value in enumerate(column.to_pylist()):
        try:
            float(value or 0)
        except ValueError:
            return f" (row {row + 1}: {value[:40]!r})"
    return ""


def _bits(values: Floats) -> Ints:
    return np.ascontiguousarray(values).view(np.int64)


def _twice(columns: Ints, bad: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which rows are equal to an earlier one in all columns; ``columns`` × rows."""
    order = np.lexsort(columns)
    same = np.zeros(len(bad), np.bool_)
    # lexsort is stable: of equal rows the earliest comes first.
    same[order[1:]] = (columns[:, order[1:]] == columns[:, order[:-1]]).all(axis=0)
    return same & ~bad


def _merged(tables: list[_Table]) -> _Table:
    """All files' rows as one table, those that stand in two files once."""
    kinds = sorted({name for table in tables for name in table.kinds})
    place = {name: number for number, name in enumerate(kinds)}
    merged = _Table(
        [path for table in tables for path in table.paths],
        np.concatenate([np.full(len(table.line), number, np.int64) for number, table in enumerate(tables)]),
        kinds,
        np.concatenate([np.array([place[name] for name in t.kinds], np.int64)[t.kind] for t in tables]),
        {name: np.concatenate([t.numbers[name] for t in tables]) for name in ("rank", "step", *_WHOLE)},
        np.concatenate([table.start for table in tables]),
        np.concatenate([table.duration for table in tables]),
        np.concatenate([table.line for table in tables]),
    )
    if len(tables) > 1 and (twice := _twice(_columns(merged), np.zeros(len(merged.line), np.bool_))).any():
        row = int(np.flatnonzero(twice)[0])
        raise Unusable(
            f"{merged.where(row)}: stands in an earlier file too: import each operation once",
            merged.paths[-1],
        )
    return merged


def _columns(table: _Table) -> Ints:
    return np.stack([table.kind, *table.numbers.values(), _bits(table.start), _bits(table.duration)])


def _places(table: _Table) -> dict[int, Place]:
    """Rank → where it stands. Raises for a rank that stands in two places."""
    known: dict[int, tuple[int, int, int]] = {}
    columns = np.stack([table.numbers[name] for name in ("rank", "dp_rank", "stage")])
    found, first = np.unique(columns, axis=1, return_index=True)
    for (rank, data, stage), row in sorted(
        zip(found.T.tolist(), first.tolist(), strict=True), key=lambda f: f[1]
    ):
        before = known.setdefault(rank, (data, stage, row))
        if before[:2] != (data, stage):
            raise Unusable(
                f"{table.where(row)}: rank {rank} has dp_rank {data} and stage {stage}, but dp_rank {before[0]} "
                f"and stage {before[1]} in {table.where(before[2])}: import each job's table by itself",
                table.paths[int(table.file[row])],
            )
    return {
        rank: Place(data=max(d, -1), stage=max(stage, -1)) for rank, (d, stage, _) in sorted(known.items())
    }


def _layout(table: _Table) -> tuple[dict[int, int], dict[int, int]]:
    """Step → nanosecond at which its second 0 is put, and at which it ends; steps do not overlap."""
    steps, row = np.unique(table.numbers["step"], return_inverse=True)
    first, last = np.zeros(len(steps)), np.zeros(len(steps))
    np.minimum.at(first, row, table.start)
    np.maximum.at(last, row, table.start + table.duration)
    bases, ends, at = {}, {}, 0
    for step, begins, stops in zip(steps.tolist(), first.tolist(), last.tolist(), strict=True):
        bases[step] = at - int(np.floor(begins * 1e9))
        at = ends[step] = bases[step] + int(np.ceil(stops * 1e9)) + 2  # two roundings
    if at >= 1 << 62:
        raise Unusable(f"{table.paths[0]}: its steps last over 146 years: start_ts and duration are seconds")
    return bases, ends


def _parts(
    table: _Table,
    rank: int,
    place: Place,
    world: int,
    bases: dict[int, int],
    ends: dict[int, int],
    job: str,
) -> Iterator[Part]:
    mine = np.flatnonzero(table.numbers["rank"] == rank)
    steps = table.numbers["step"][mine]
    start = np.array([bases[step] for step in steps.tolist()], np.int64) + _ns(table.start[mine])
    order = np.lexsort((table.numbers["seq_id"][mine], table.kind[mine], start))
    for low in range(0, len(mine), PART_ROWS):
        chosen = order[low : low + PART_ROWS]
        rows, instants = mine[chosen], start[chosen]
        batch = _batch(table, rows, instants, rank, place, world, job)
        end = max(int(instants[-1]), ends[int(table.numbers["step"][rows[-1]])])
        yield Part(batch, int(instants[0]), end, table.paths[int(table.file[rows[0]])], utc=False)


def _ns(seconds: Floats) -> Ints:
    return np.rint(seconds * 1e9).astype(np.int64)


def _batch(
    table: _Table, rows: Ints, start: Ints, rank: int, place: Place, world: int, job: str
) -> RankBatch:
    lanes = np.array([_lane(name) for name in table.kinds], np.int64)
    kind = table.kind[rows]

    def column(name: str) -> list[int]:
        numbers: list[Any] = np.maximum(table.numbers[name][rows], -1).tolist()
        return numbers

    return RankBatch(
        job=job,
        rank=rank,
        world_size=world,
        local_rank=0,
        pid=0,
        start_ns=0,
        name="",
        env={},
        operations=Operations(
            names=table.kinds,
            kind=kind.tolist(),
            lane=lanes[kind].tolist(),
            step=column("step"),
            start_ns=start.tolist(),
            duration_ns=_ns(table.duration[rows]).tolist(),
            seq=column("seq_id"),
            micro_batch=column("mb_id"),
            chunk=column("mc"),
        ),
        place=place,
        source="operations",
    )


def _lane(name: str) -> int:
    if name == "gc":
        return int(Lane.HOST)
    return int(Lane.COMMUNICATION if _COMMUNICATION.fullmatch(name) else Lane.COMPUTE)
