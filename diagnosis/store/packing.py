"""Columns as the bytes that are stored, and back: differences in the narrowest integers that hold them, in one line
for all tables, so that reading takes a few operations on arrays, not some for each column.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import zstandard

from diagnosis.evidence import Ints
from diagnosis.later import Once
from diagnosis.store.columns import (
    BATCHES,
    BLOCKED,
    COLLECTIVES,
    METRICS,
    OCCUPANTS,
    OPERATIONS,
    STOLEN,
    THREAD,
    WAKERS,
    Columns,
    DamagedColumns,
    Details,
    Measured,
    Table,
    ThreadKey,
    Waking,
    Who,
    at_rows,
    no_details,
    no_rows,
    undamaged,
)

FORMAT = 3
"""Stands first in what :func:`pack` makes; blobs of format 1 begin with a list."""
WIDTHS = (1, 2, 4, 8)
"""Bytes of a difference."""
_MAX_VALUES = 1 << 27
"""1 GiB of numbers: no minute and no part of an import comes near it; a damaged length stops here."""


class _Line(NamedTuple):
    """All values of some tables in one line: the tables of width 1 first, then those of width 2, and so on, within
    a width in their own order, of each table one column after the other. A column begins with a jump from what
    stands before it."""

    widths: bytes
    """Of each table: the narrowest that holds the differences within its columns."""
    jumps: list[int]
    """In the order of the line, of each column that has rows: its first value minus the value before it."""
    steps: list[bytes]
    """Per width the differences within columns, with a 0 in the place of each jump."""


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    format: int
    rows: list[int]
    """Of each table, in the order of ``_names``."""
    dtypes: list[str]
    keys: list[ThreadKey]
    kinds: list[str]
    line: _Line


class _Details(msgspec.Struct, frozen=True, array_like=True):
    rows: list[int]
    """Of occupants, wakers and metrics, and for each of ``_Packed.keys`` of what it blocked for: there without
    instants, as these are its thread's, or 0 for nothing."""
    line: _Line
    who: list[Who]
    wakings: list[Waking]
    measured: list[Measured]
    reasons: list[list[str]]
    """Of each of ``_Packed.keys``."""


class _Whole(_Packed, frozen=True, array_like=True):
    """What is stored. Read as :class:`_Packed`, the details are skipped."""

    details: _Details


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)
_whole_decoder = msgspec.msgpack.Decoder(_Whole)


def _names(threads: int) -> list[tuple[str, ...]]:
    """The columns of all tables but the details, in the order in which they are packed."""
    return [BATCHES, COLLECTIVES, OPERATIONS, *[THREAD] * threads, *[STOLEN] * threads]


def pack(columns: Columns) -> bytes:
    """Msgpack in one zstd frame; :func:`unpack` gives the same back. Raises :class:`DamagedColumns` where details
    were read from stored bytes and are damaged."""
    tables = [columns.batches, columns.collectives, columns.operations]
    tables += [*columns.threads.values(), *columns.stolen.values()]
    packed = _Whole(
        format=FORMAT,
        rows=[len(table) for table in tables],
        dtypes=columns.dtypes,
        keys=list(columns.threads),
        kinds=columns.kinds,
        line=_in_line(tables),
        details=_packed_details(columns.details(), columns.threads),
    )
    return zstandard.ZstdCompressor(level=3).compress(_encoder.encode(packed))


def _packed_details(details: Details, threads: dict[ThreadKey, Table]) -> _Details:
    tables, reasons = [details.occupants, details.wakers, details.metrics], []
    for key, table in threads.items():
        blocked = details.blocked.get(key, no_rows(BLOCKED))
        told = blocked.names[1:]
        values = at_rows(blocked, table["at_ns"])
        tables.append(Table(told, values if told else values[:, :0]))
        reasons.append(list(told))
    rows = [len(table) for table in tables]
    return _Details(rows, _in_line(tables), details.who, details.wakings, details.measured, reasons)


def _in_line(tables: Sequence[Table]) -> _Line:
    values = [table.values for table in tables]
    # Differences beyond 64 bits wrap around, and wrap back in the sum.
    steps = [np.diff(block, axis=1, prepend=block[:, :1]) for block in values]
    widths = [_width(block) for block in steps]
    jumps: list[int] = []
    line: dict[int, list[Ints]] = {width: [] for width in WIDTHS}
    before = np.int64(0)
    with np.errstate(over="ignore"):
        for place in sorted(range(len(tables)), key=lambda place: widths[place]):
            line[widths[place]].append(steps[place].ravel())
            for column in values[place] if values[place].size else ():
                jumps.append(int(column[0] - before))
                before = column[-1]
    steps_of_width = [
        np.concatenate(blocks).astype(f"<i{width}").tobytes() if blocks else b""
        for width, blocks in line.items()
    ]
    return _Line(bytes(widths), jumps, steps_of_width)


def _width(steps: Ints) -> int:
    low, high = (int(steps.min()), int(steps.max())) if steps.size else (0, 0)
    return next(w for w in WIDTHS if low >= -(1 << (8 * w - 1)) and high < 1 << (8 * w - 1))


def unpack(blob: bytes) -> Columns:
    """Raises :class:`DamagedColumns` when ``blob`` did not come from :func:`pack`, of this version or an older."""
    with undamaged():
        plain = _decompressor().decompress(blob)
        if plain[1:2] == bytes([FORMAT]):
            columns = _unpacked(_decoder.decode(plain), blob)
        elif plain[1:2] == bytes([2]):
            columns = _of_format_2(_decoder_2.decode(plain))
        else:
            columns = _of_format_1(_decoder_1.decode(plain))
        _check_places(columns.collectives["dtype"], columns.dtypes)
        _check_places(columns.operations["kind"], columns.kinds)
    return columns


_of_thread = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    """One per thread: it may not be shared, and making it takes longer than a minute of a rank."""
    if not hasattr(_of_thread, "decompressor"):
        _of_thread.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _of_thread.decompressor
    return decompressor


def _unpacked(packed: _Packed, blob: bytes) -> Columns:
    """Raises :class:`DamagedColumns` or ``ValueError``."""
    keys = packed.keys
    batches, collectives, operations, *of_threads = _tables(_names(len(keys)), packed.rows, packed.line)
    threads = dict(zip(keys, of_threads[: len(keys)], strict=True))
    return Columns(
        batches=batches,
        collectives=collectives,
        dtypes=packed.dtypes,
        operations=operations,
        kinds=packed.kinds,
        threads=threads,
        stolen=dict(zip(keys, of_threads[len(keys) :], strict=True)),
        details=Once(_unpacked_details, blob, threads),
    )


def _unpacked_details(blob: bytes, threads: dict[ThreadKey, Table]) -> Details:
    """Raises :class:`DamagedColumns`."""
    with undamaged():
        packed = _whole_decoder.decode(_decompressor().decompress(blob)).details
        names = [OCCUPANTS, WAKERS, METRICS, *map(tuple, packed.reasons)]
        occupants, wakers, metrics, *blocked = _tables(names, packed.rows, packed.line)
        _check_places(occupants["who"], packed.who)
        _check_places(wakers["waking"], packed.wakings)
        _check_places(metrics["measured"], packed.measured)
        return Details(
            occupants,
            packed.who,
            wakers,
            packed.wakings,
            metrics,
            packed.measured,
            {
                key: Table((*BLOCKED, *table.names), np.concatenate([threads[key].values[:1], table.values]))
                for key, table in zip(threads, blocked, strict=True)
                if len(table)
            },
        )


def _tables(names: Sequence[tuple[str, ...]], rows_of: list[int], packed: _Line) -> list[Table]:
    """Slices of one array. Raises :class:`DamagedColumns` or ``ValueError``."""
    total = dict.fromkeys(WIDTHS, 0)
    shapes = list(zip(packed.widths, map(len, names), rows_of, strict=True))
    for width, columns, rows in shapes:
        if rows < 0 or width not in total:
            raise DamagedColumns("a table that cannot be")
        total[width] += columns * rows
    values = sum(total.values())
    if values > _MAX_VALUES:
        raise DamagedColumns(f"{values} numbers in one piece")
    line = np.empty(values, np.int64)
    at, end = {}, 0
    for (width, count), steps in zip(total.items(), packed.steps, strict=True):
        if len(steps) != count * width:
            raise DamagedColumns("columns of different lengths")
        at[width] = end
        line[end : end + count] = np.frombuffer(steps, f"<i{width}")
        end += count
    places = []
    for width, columns, rows in shapes:
        places.append(at[width])
        at[width] += columns * rows
    starts = [
        start
        for place, (_, columns, rows) in sorted(zip(places, shapes, strict=True))
        if rows
        for start in range(place, place + columns * rows, rows)
    ]
    line[starts] = packed.jumps
    np.add.accumulate(line, out=line)
    return [
        Table(of, line[place : place + columns * rows].reshape(columns, rows))
        for of, place, (_, columns, rows) in zip(names, places, shapes, strict=True)
    ]


def _check_places(places: Ints, names: Sequence[object]) -> None:
    # Below 0 is far above as an unsigned number.
    if len(places) and int(places.view(np.uint64).max()) >= len(names):
        raise DamagedColumns("a row names something that is not listed")


class _Packed2(msgspec.Struct, frozen=True, array_like=True):
    """What stores of schema 5 and below hold."""

    format: int
    rows: list[int]
    dtypes: list[str]
    keys: list[ThreadKey]
    who: list[Who]
    kinds: list[str]
    widths: bytes
    jumps: list[int]
    steps: list[bytes]


_decoder_2 = msgspec.msgpack.Decoder(_Packed2)


def _of_format_2(packed: _Packed2) -> Columns:
    keys = packed.keys
    batches, collectives, *others = _names(len(keys))
    names = [batches, collectives, OCCUPANTS, *others]
    tables = _tables(names, packed.rows, _Line(packed.widths, packed.jumps, packed.steps))
    return Columns(
        batches=tables[0],
        collectives=tables[1],
        dtypes=packed.dtypes,
        operations=tables[3],
        kinds=packed.kinds,
        threads=dict(zip(keys, tables[4 : 4 + len(keys)], strict=True)),
        stolen=dict(zip(keys, tables[4 + len(keys) :], strict=True)),
        details=_only_occupants(tables[2], packed.who),
    )


def _only_occupants(occupants: Table, who: list[Who]) -> Callable[[], Details]:
    _check_places(occupants["who"], who)
    return lambda: no_details()._replace(occupants=occupants, who=who)


class _Column1(msgspec.Struct, frozen=True, array_like=True):
    rows: int
    first: int
    width: int
    steps: bytes


class _Packed1(msgspec.Struct, frozen=True, array_like=True):
    """What stores of schema 3 and below hold: each column by itself."""

    batches: list[_Column1]
    collectives: list[_Column1]
    dtypes: list[str]
    keys: list[ThreadKey]
    threads: list[list[_Column1]]
    stolen: list[list[_Column1]]
    occupants: list[_Column1]
    who: list[Who]


_decoder_1 = msgspec.msgpack.Decoder(_Packed1)


def _of_format_1(packed: _Packed1) -> Columns:
    keys = packed.keys
    return Columns(
        batches=_table_1(BATCHES, packed.batches),
        collectives=_table_1(COLLECTIVES, packed.collectives),
        dtypes=packed.dtypes,
        threads={key: _table_1(THREAD, table) for key, table in zip(keys, packed.threads, strict=True)},
        stolen={key: _table_1(STOLEN, table) for key, table in zip(keys, packed.stolen, strict=True)},
        operations=no_rows(OPERATIONS),
        kinds=[],
        details=_only_occupants(_table_1(OCCUPANTS, packed.occupants), packed.who),
    )


def _table_1(names: tuple[str, ...], columns: list[_Column1]) -> Table:
    if len(columns) != len(names) or len({column.rows for column in columns}) > 1:
        raise DamagedColumns("columns of different lengths")
    return Table(names, np.array([_column_1(column) for column in columns]))


def _column_1(column: _Column1) -> Ints:
    values = np.empty(column.rows, np.int64)
    if column.rows:
        values[0] = column.first
        values[1:] = np.frombuffer(column.steps, f"<i{column.width}")
        np.cumsum(values, out=values)
    return values
