"""Columns as the bytes that are stored, and back: differences in the narrowest integers that hold them, in one line
for all tables, so that reading takes a few operations on arrays, not some for each column.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import zstandard

from diagnosis.evidence import Ints
from diagnosis.store.columns import (
    BATCHES,
    COLLECTIVES,
    METRICS,
    OCCUPANTS,
    OPERATIONS,
    STOLEN,
    THREAD,
    WAKERS,
    Columns,
    DamagedColumns,
    Measured,
    Table,
    ThreadKey,
    Waking,
    Who,
    no_rows,
    undamaged,
)

FORMAT = 3
"""Stands first in what :func:`pack` makes. Format 2 ends with ``steps`` and has neither wakers nor metrics; blobs
of format 1 begin with a list."""
WIDTHS = (1, 2, 4, 8)
"""Bytes of a difference."""
_MAX_VALUES = 1 << 27
"""1 GiB of numbers: no minute and no part of an import comes near it; a damaged length stops here."""


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """All values in one line: the tables of width 1 first, then those of width 2, and so on, within a width in the
    order of ``_names``, of each table one column after the other. A column begins with a jump from what stands
    before it."""

    format: int
    rows: list[int]
    """Of each table."""
    dtypes: list[str]
    keys: list[ThreadKey]
    who: list[Who]
    kinds: list[str]
    widths: bytes
    """Of each table: the narrowest that holds the differences within its columns."""
    jumps: list[int]
    """In the order of the line, of each column that has rows: its first value minus the value before it."""
    steps: list[bytes]
    """Per width the differences within columns, with a 0 in the place of each jump."""
    reasons: list[list[str]] = []
    """Of each of ``keys``."""
    wakings: list[Waking] = []
    measured: list[Measured] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


def _names(reasons: list[list[str]]) -> list[tuple[str, ...]]:
    """The columns of all tables, in the order in which they are packed."""
    threads = [(*THREAD, *told) for told in reasons]
    ahead = [BATCHES, COLLECTIVES, OCCUPANTS, OPERATIONS]
    return [*ahead, *threads, *[STOLEN] * len(threads), WAKERS, METRICS]


def pack(columns: Columns) -> bytes:
    """Msgpack in one zstd frame; :func:`unpack` gives the same back."""
    tables = [columns.batches, columns.collectives, columns.occupants, columns.operations]
    tables += [*columns.threads.values(), *columns.stolen.values(), columns.wakers, columns.metrics]
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
    packed = _Packed(
        format=FORMAT,
        rows=[block.shape[1] for block in values],
        dtypes=columns.dtypes,
        keys=list(columns.threads),
        who=columns.who,
        kinds=columns.kinds,
        widths=bytes(widths),
        jumps=jumps,
        steps=[
            np.concatenate(blocks).astype(f"<i{width}").tobytes() if blocks else b""
            for width, blocks in line.items()
        ],
        reasons=[list(table.names[len(THREAD) :]) for table in columns.threads.values()],
        wakings=columns.wakings,
        measured=columns.measured,
    )
    return zstandard.ZstdCompressor(level=3).compress(_encoder.encode(packed))


def _width(steps: Ints) -> int:
    low, high = (int(steps.min()), int(steps.max())) if steps.size else (0, 0)
    return next(w for w in WIDTHS if low >= -(1 << (8 * w - 1)) and high < 1 << (8 * w - 1))


def unpack(blob: bytes) -> Columns:
    """Raises :class:`DamagedColumns` when ``blob`` did not come from :func:`pack`, of this version or an older."""
    with undamaged():
        plain = _decompressor().decompress(blob)
        if plain[1:2] in (bytes([2]), bytes([FORMAT])):
            columns = _unpacked(_decoder.decode(plain))
        else:
            columns = _of_format_1(_decoder_1.decode(plain))
        _check_places(columns.collectives["dtype"], columns.dtypes)
        _check_places(columns.occupants["who"], columns.who)
        _check_places(columns.operations["kind"], columns.kinds)
        _check_places(columns.wakers["waking"], columns.wakings)
        _check_places(columns.metrics["measured"], columns.measured)
    return columns


_of_thread = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    """One per thread: it may not be shared, and making it takes longer than a minute of a rank."""
    if not hasattr(_of_thread, "decompressor"):
        _of_thread.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _of_thread.decompressor
    return decompressor


def _unpacked(packed: _Packed) -> Columns:
    """The columns are slices of one array. Raises :class:`DamagedColumns` or ``ValueError``."""
    keys = packed.keys
    if packed.format == FORMAT:
        names = _names(packed.reasons)
    else:
        names = _names([[]] * len(keys))[: -len((WAKERS, METRICS))]
    total = dict.fromkeys(WIDTHS, 0)
    shapes = list(zip(packed.widths, map(len, names), packed.rows, strict=True))
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
    tables: list[Table] = [
        Table(of, line[place : place + columns * rows].reshape(columns, rows))
        for of, place, (_, columns, rows) in zip(names, places, shapes, strict=True)
    ]
    last = 4 + 2 * len(keys)
    wakers, metrics = tables[last:] or (no_rows(WAKERS), no_rows(METRICS))
    return Columns(
        batches=tables[0],
        collectives=tables[1],
        dtypes=packed.dtypes,
        occupants=tables[2],
        who=packed.who,
        operations=tables[3],
        kinds=packed.kinds,
        threads=dict(zip(keys, tables[4 : 4 + len(keys)], strict=True)),
        stolen=dict(zip(keys, tables[4 + len(keys) : last], strict=True)),
        wakers=wakers,
        wakings=packed.wakings,
        metrics=metrics,
        measured=packed.measured,
    )


def _check_places(places: Ints, names: Sequence[object]) -> None:
    # Below 0 is far above as an unsigned number.
    if len(places) and int(places.view(np.uint64).max()) >= len(names):
        raise DamagedColumns("a row names something that is not listed")


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
        occupants=_table_1(OCCUPANTS, packed.occupants),
        who=packed.who,
        operations=no_rows(OPERATIONS),
        kinds=[],
        wakers=no_rows(WAKERS),
        wakings=[],
        metrics=no_rows(METRICS),
        measured=[],
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
