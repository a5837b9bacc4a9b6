"""One batch of one rank, in the bytes that stand in the store until its minute is over and packed.

Written for each rank each second and read sixty of a rank at once: all columns stand in one line, so that writing
one and reading many takes a few operations on arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec
import numpy as np

from diagnosis.later import Once
from diagnosis.store import details, lines
from diagnosis.store.columns import (
    BATCHES,
    COLLECTIVES,
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
    join,
    merge,
    undamaged,
)
from probes.records import Collectives, Metric, Occupant, Operations, RankBatch, State, ThreadTime, Waker

FORMAT = -3
"""Stands first in what :func:`pack` makes; blobs of format 1 begin with an instant, which is never below 0."""
_FORMAT_2_BYTE, _FORMAT_BYTE = [msgspec.msgpack.encode(number) for number in (-2, FORMAT)]
_STATES = frozenset(State)


class _Second(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Columns stand in the order of ``columns.COLLECTIVES``, then ``THREAD`` for each of ``keys``, then
    ``OPERATIONS``; empty ones are left out of ``first``."""

    format: int
    start_ns: int
    end_ns: int
    rows: list[int]
    """Of each of these tables."""
    dtypes: list[str]
    keys: list[ThreadKey]
    stolen_ns: list[int]
    """Of each of ``keys``."""
    kinds: list[str]
    first: bytes
    """This and the next: all columns, by :func:`lines.packed`."""
    rest: bytes
    details: msgspec.Raw
    """See ``diagnosis.store.details``."""


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
    return _joined([_of_rank(start_ns, end_ns, rank)])


def _of_rank(start_ns: int, end_ns: int, rank: RankBatch) -> _Second:
    return _second(
        start_ns,
        end_ns,
        rank.collectives,
        rank.threads,
        rank.occupants,
        rank.operations,
        rank.wakers,
        rank.metrics,
    )


def _second(
    start_ns: int,
    end_ns: int,
    collectives: Collectives,
    threads: list[ThreadTime],
    occupants: list[Occupant],
    operations: Operations,
    wakers: Sequence[Waker] = (),
    metrics: Sequence[Metric] = (),
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
    first, rest = lines.packed(columns)
    return _Second(
        format=FORMAT,
        start_ns=start_ns,
        end_ns=end_ns,
        rows=[
            len(collectives.enter_ns),
            *[len(thread.at_ns) for thread in threads],
            len(operations.start_ns),
        ],
        dtypes=dtypes,
        keys=[ThreadKey(thread.tid, thread.role, thread.since_ns) for thread in threads],
        stolen_ns=[thread.stolen_ns for thread in threads],
        kinds=kinds,
        first=first,
        rest=rest,
        details=details.packed(threads, occupants, wakers, metrics),
    )


def unpack(blobs: Iterable[bytes]) -> Columns:
    """The columns of several :func:`pack`, of this version or an older, in any order.

    Raises :class:`DamagedColumns`.
    """
    with undamaged():
        seconds = sorted(map(_decoded, blobs), key=lambda second: (second.start_ns, second.end_ns))
        # A rank's threads are the same for hours.
        return merge([_joined(list(alike)) for _, alike in groupby(seconds, lambda s: (s.keys, s.kinds))])


def _decoded(blob: bytes) -> _Second:
    if blob[1:2] == _FORMAT_BYTE:
        return _decoder.decode(blob)
    return _of_format_2(blob) if blob[1:2] == _FORMAT_2_BYTE else _of_format_1(blob)


def _joined(seconds: list[_Second]) -> Columns:
    """The columns of seconds that have the same threads. Raises :class:`DamagedColumns`."""
    keys = seconds[0].keys
    counts = np.array([second.rows for second in seconds], np.int64)
    collectives, *threads, operations = lines.tables(
        [COLLECTIVES, *[THREAD] * len(keys), OPERATIONS],
        counts,
        [second.first for second in seconds],
        [second.rest for second in seconds],
    )
    dtypes = _named(collectives, "dtype", [(second.dtypes, second.rows[0]) for second in seconds])
    _named(operations, "kind", [(second.kinds, second.rows[-1]) for second in seconds])
    starts, ends = [second.start_ns for second in seconds], [second.end_ns for second in seconds]
    stolen = np.array([second.stolen_ns for second in seconds], np.int64).reshape(len(seconds), len(keys))
    raw = [second.details for second in seconds]
    at_ns = [table["at_ns"] for table in threads]
    of_threads = counts[:, 1:-1]
    times: dict[ThreadKey, list[Table]] = {key: [] for key in sorted(keys)}
    of_steal: dict[ThreadKey, list[Table]] = {key: [] for key in times}
    for key, table, column in zip(keys, threads, stolen.T, strict=True):
        times[key].append(in_order(table))
        of_steal[key].append(in_order(Table(STOLEN, np.array([ends, column]))))
    return Columns(
        batches=in_order(Table(BATCHES, np.array([starts, ends], np.int64))),
        collectives=in_order(collectives),
        dtypes=dtypes,
        threads={key: join(THREAD, tables) for key, tables in times.items()},
        stolen={key: join(STOLEN, tables) for key, tables in of_steal.items()},
        operations=in_order(operations),
        kinds=seconds[0].kinds if len(operations) else [],
        details=Once(details.joined, starts, ends, keys, at_ns, of_threads, raw),
    )


def _named(table: Table, column: str, parts: list[tuple[list[str], int]]) -> list[str]:
    """Make the numbers in ``column``, which are places in the list of each part (with its number of rows), places
    in one list for all: that list. Raises :class:`DamagedColumns`."""
    filled = [(listed, rows) for listed, rows in parts if rows]
    if not filled:
        return []
    lengths, rows = [len(listed) for listed, _ in filled], [count for _, count in filled]
    places = table[column]
    if (places < 0).any() or (places >= np.repeat(lengths, rows)).any():
        raise DamagedColumns("a row names something that is not listed")
    known = filled[0][0]
    if any(listed != known for listed, _ in filled):
        known, of_all = indexed([name for listed, _ in filled for name in listed])
        before = np.cumsum([0, *lengths[:-1]])
        places[:] = np.array(of_all, np.int64)[places + np.repeat(before, rows)]
    return known


class _Second2(msgspec.Struct, frozen=True, array_like=True):
    """What stores of schema 5 and below hold."""

    format: int
    start_ns: int
    end_ns: int
    rows: list[int]
    dtypes: list[str]
    keys: list[ThreadKey]
    stolen_ns: list[int]
    who: list[Who]
    took_ns: list[int]
    kinds: list[str]
    first: bytes
    rest: bytes


_decoder_2 = msgspec.msgpack.Decoder(_Second2)


def _of_format_2(blob: bytes) -> _Second:
    old = _decoder_2.decode(blob)
    return _Second(
        format=FORMAT,
        start_ns=old.start_ns,
        end_ns=old.end_ns,
        rows=old.rows,
        dtypes=old.dtypes,
        keys=old.keys,
        stolen_ns=old.stolen_ns,
        kinds=old.kinds,
        first=old.first,
        rest=old.rest,
        details=details.only_occupants(old.who, old.took_ns),
    )


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
