"""One batch of one rank, in the bytes that stand in the store until its minute is over and packed.

Written for each rank each second and read sixty of a rank at once: all columns stand in one line, so that writing
one and reading many takes a few operations on arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

from diagnosis.evidence import Ints
from diagnosis.store.columns import (
    BATCHES,
    COLLECTIVES,
    OCCUPANTS,
    OPERATIONS,
    STOLEN,
    THREAD,
    Columns,
    DamagedColumns,
    Table,
    ThreadKey,
    Who,
    in_order,
    indexed,
    undamaged,
)
from probes.records import Collectives, Occupant, Operations, RankBatch, State, ThreadTime

FORMAT = -2
"""Stands first in what :func:`pack` makes; blobs of format 1 begin with an instant, which is never below 0."""
_FORMAT_BYTE = msgspec.msgpack.encode(FORMAT)
NARROW, WIDE = 4, 8
"""Bytes of a number. What happens within two seconds takes four, in ns."""

_STATES = frozenset(State)


class _Thread(msgspec.Struct, frozen=True, array_like=True, gc=False):
    tid: int
    role: int
    since_ns: int
    stolen_ns: int
    rows: int


class _Second(msgspec.Struct, frozen=True, array_like=True):
    """Columns stand in the order of ``columns.COLLECTIVES``, then ``THREAD`` for each of ``threads``, then
    ``OPERATIONS``; empty ones are left out."""

    format: int
    start_ns: int
    end_ns: int
    collectives: int
    """Rows."""
    dtypes: list[str]
    threads: list[_Thread]
    who: list[Who]
    took_ns: list[int]
    operations: int
    """Rows."""
    kinds: list[str]
    first: bytes
    """The first number of each column, 8 bytes each; all little-endian."""
    rest: bytes
    """All numbers of all columns, each less its column's first (beyond 64 bits it wraps around, and back), each
    ``NARROW`` or ``WIDE`` bytes."""

    def lengths(self) -> list[int]:
        """Rows of each column that has any."""
        rows = [self.collectives] * len(COLLECTIVES) if self.collectives else []
        for thread in self.threads:
            if thread.rows:
                rows += [thread.rows] * len(THREAD)
        return rows + [self.operations] * len(OPERATIONS) if self.operations else rows

    def width(self, lengths: list[int]) -> int:
        """Bytes of a number in ``rest``. Raises :class:`DamagedColumns`."""
        numbers = sum(lengths)
        if min(lengths, default=0) >= 0 and len(self.first) == 8 * len(lengths):
            for width in (NARROW, WIDE):
                if len(self.rest) == width * numbers:
                    return width
        raise DamagedColumns("columns of different lengths")


class Packed(NamedTuple):
    """A second to be stored, with the first and last instant in it: a window between others needs none of it."""

    columns: bytes
    first_ns: int
    last_ns: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Second)
_NO_OPERATIONS = Operations()


def pack(start_ns: int, end_ns: int, rank: RankBatch) -> Packed:
    """One batch of one rank, to be read by :func:`unpack`."""
    instants = [start_ns, end_ns, *rank.collectives.enter_ns, *rank.operations.start_ns]
    for thread in rank.threads:
        instants += thread.at_ns
    return Packed(_encoder.encode(_of_rank(start_ns, end_ns, rank)), min(instants), max(instants))


def of_rank(start_ns: int, end_ns: int, rank: RankBatch) -> Columns:
    """The columns of one batch of one rank, not packed."""
    return _put_together([_of_rank(start_ns, end_ns, rank)])


def _of_rank(start_ns: int, end_ns: int, rank: RankBatch) -> _Second:
    return _second(start_ns, end_ns, rank.collectives, rank.threads, rank.occupants, rank.operations)


def _second(
    start_ns: int,
    end_ns: int,
    collectives: Collectives,
    threads: list[ThreadTime],
    occupants: list[Occupant],
    operations: Operations,
) -> _Second:
    dtypes, dtype = indexed(collectives.dtype)
    outcome: Sequence[int] = collectives.failed
    if collectives.state:
        both = zip(collectives.failed, collectives.state, strict=True)
        outcome = [failed + 2 * (state if state in _STATES else 0) for failed, state in both]
    columns: list[Sequence[int]] = []
    if collectives.enter_ns:
        own = {"failed": outcome, "dtype": dtype}
        columns += [own.get(name) or getattr(collectives, name) for name in COLLECTIVES]
    for thread in threads:
        if thread.at_ns:
            columns += [getattr(thread, name) for name in THREAD]
    kinds: list[str] = []
    if operations.start_ns:
        kinds, kind = indexed([operations.names[kind] for kind in operations.kind])
        columns += [kind if name == "kind" else getattr(operations, name) for name in OPERATIONS]
    first, rest = _packed(columns)
    return _Second(
        format=FORMAT,
        start_ns=start_ns,
        end_ns=end_ns,
        collectives=len(collectives.enter_ns),
        dtypes=dtypes,
        threads=[
            _Thread(one.tid, int(one.role), one.since_ns, one.stolen_ns, len(one.at_ns)) for one in threads
        ],
        who=[
            Who(int(one.role), one.pid, one.name, one.cgroup, one.rank_job, one.rank, one.kernel)
            for one in occupants
        ],
        took_ns=[one.took_ns for one in occupants],
        operations=len(operations.start_ns),
        kinds=kinds,
        first=first,
        rest=rest,
    )


def _packed(columns: list[Sequence[int]]) -> tuple[bytes, bytes]:
    """``_Second.first`` and ``rest``. No column is empty."""
    lengths = [len(column) for column in columns]
    values = np.fromiter(chain.from_iterable(columns), np.int64, sum(lengths))
    first = np.array([column[0] for column in columns], np.int64)
    rest = values - np.repeat(first, lengths)
    narrow = rest.astype(f"<i{NARROW}")
    fits = bool((narrow == rest).all())
    return first.astype("<i8").tobytes(), (narrow if fits else rest.astype(f"<i{WIDE}")).tobytes()


def unpack(blobs: Iterable[bytes]) -> Columns:
    """The columns of several :func:`pack`, of this version or an older, in any order.

    Raises :class:`DamagedColumns`.
    """
    with undamaged():
        return _put_together(
            sorted(map(_decoded, blobs), key=lambda second: (second.start_ns, second.end_ns))
        )


def _decoded(blob: bytes) -> _Second:
    return _decoder.decode(blob) if blob[1:2] == _FORMAT_BYTE else _of_format_1(blob)


def _put_together(seconds: list[_Second]) -> Columns:
    line, at = _line(seconds), 0

    def block(names: tuple[str, ...], rows: int) -> Ints:
        nonlocal at
        begin, at = at, at + len(names) * rows
        return line[begin:at].reshape(len(names), rows)

    collectives, operations = [], []
    times: dict[ThreadKey, list[Ints]] = {}
    stolen: dict[ThreadKey, list[tuple[int, int]]] = {}
    for second in seconds:
        collectives.append((block(COLLECTIVES, second.collectives), second.dtypes))
        for thread in second.threads:
            key = ThreadKey(thread.tid, thread.role, thread.since_ns)
            if key not in times:
                times[key], stolen[key] = [], []
            times[key].append(block(THREAD, thread.rows))
            stolen[key].append((second.end_ns, thread.stolen_ns))
        operations.append((block(OPERATIONS, second.operations), second.kinds))
    of_collectives, dtypes = _named(COLLECTIVES, "dtype", collectives)
    of_operations, kinds = _named(OPERATIONS, "kind", operations)
    who, places = indexed([who for second in seconds for who in second.who])
    took = [(second.start_ns, second.end_ns, took) for second in seconds for took in second.took_ns]
    return Columns(
        batches=_of_rows(BATCHES, [(second.start_ns, second.end_ns) for second in seconds]),
        collectives=of_collectives,
        dtypes=dtypes,
        threads={key: _joined(THREAD, times[key]) for key in sorted(times)},
        stolen={key: _of_rows(STOLEN, stolen[key]) for key in sorted(times)},
        occupants=_of_rows(
            OCCUPANTS, [(start, end, place, ns) for (start, end, ns), place in zip(took, places, strict=True)]
        ),
        who=who,
        operations=of_operations,
        kinds=kinds,
    )


def _line(seconds: list[_Second]) -> Ints:
    """All columns of all seconds, one after the other. Raises :class:`DamagedColumns`."""
    lengths = [second.lengths() for second in seconds]
    rests = [
        np.frombuffer(second.rest, f"<i{second.width(of_second)}")
        for second, of_second in zip(seconds, lengths, strict=True)
    ]
    first = np.frombuffer(b"".join([second.first for second in seconds]), "<i8")
    line = np.repeat(first, list(chain.from_iterable(lengths)))
    line += np.concatenate(rests)
    return line


def _of_rows(names: tuple[str, ...], rows: Sequence[tuple[int, ...]]) -> Table:
    values = np.array(rows, np.int64).reshape(len(rows), len(names)).T
    return in_order(names, dict(zip(names, np.ascontiguousarray(values), strict=True)))


def _joined(names: tuple[str, ...], blocks: list[Ints]) -> Table:
    return in_order(names, dict(zip(names, np.concatenate(blocks, axis=1), strict=True)))


def _named(
    names: tuple[str, ...], column: str, parts: list[tuple[Ints, list[str]]]
) -> tuple[Table, list[str]]:
    """The rows of several blocks, in each of which ``column`` holds places in a list that comes with it, and one
    list for all of them. Raises :class:`DamagedColumns`."""
    filled = [(block, listed) for block, listed in parts if block.size]
    if not filled:
        return {name: np.empty(0, np.int64) for name in names}, []
    rows = [block.shape[1] for block, _ in filled]
    lengths = [len(listed) for _, listed in filled]
    table: Table = dict(zip(names, np.concatenate([block for block, _ in filled], axis=1), strict=True))
    places = table[column]
    if (places < 0).any() or (places >= np.repeat(lengths, rows)).any():
        raise DamagedColumns("a row names something that is not listed")
    known = filled[0][1]
    if any(listed != known for _, listed in filled):
        known, of_all = indexed([name for _, listed in filled for name in listed])
        before = np.cumsum([0, *lengths[:-1]])
        table[column] = np.array(of_all, np.int64)[places + np.repeat(before, rows)]
    return in_order(names, table), known


class _Second1(msgspec.Struct, frozen=True, array_like=True):
    """What stores of schema 4 and below hold: the records as they came."""

    start_ns: int
    end_ns: int
    collectives: Collectives
    threads: list[ThreadTime]
    occupants: list[Occupant]
    operations: Operations | None = None


_decoder_1 = msgspec.msgpack.Decoder(_Second1)


def _of_format_1(blob: bytes) -> _Second:
    old = _decoder_1.decode(blob)
    return _second(
        old.start_ns,
        old.end_ns,
        old.collectives,
        old.threads,
        old.occupants,
        old.operations or _NO_OPERATIONS,
    )
