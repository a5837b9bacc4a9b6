"""One batch of one rank, in the bytes that stand in the store until its minute is over and packed.

Written for each rank each second and read sixty of a rank at once: all columns stand in one line, so that writing
one and reading many takes a few operations on arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import msgspec
import numpy as np

from diagnosis.evidence import Ints
from diagnosis.store import measures
from diagnosis.store.columns import (
    BATCHES,
    COLLECTIVES,
    OCCUPANTS,
    OPERATIONS,
    STOLEN,
    THREAD,
    WAKERS,
    Columns,
    DamagedColumns,
    Table,
    ThreadKey,
    Waking,
    Who,
    in_order,
    indexed,
    join,
    listed_rows,
    merge,
    no_rows,
    undamaged,
)
from probes.records import Collectives, Metric, Occupant, Operations, RankBatch, State, ThreadTime, Waker

FORMAT = -3
"""Stands first in what :func:`pack` makes. In format -2 it ends with ``rest``; blobs of format 1 begin with an
instant, which is never below 0."""
_FORMAT_BYTES = [msgspec.msgpack.encode(number) for number in (-2, FORMAT)]
NARROW, WIDE = 4, 8
"""Bytes of a number. What happens within two seconds takes four, in ns."""

_STATES = frozenset(State)


class _Second(msgspec.Struct, frozen=True, array_like=True):
    """Columns stand in the order of ``columns.COLLECTIVES``, then ``THREAD`` and its reasons for each of ``keys``,
    then ``OPERATIONS``; empty ones are left out of ``first``."""

    format: int
    start_ns: int
    end_ns: int
    rows: list[int]
    """Of each of these tables."""
    dtypes: list[str]
    keys: list[ThreadKey]
    stolen_ns: list[int]
    """Of each of ``keys``."""
    who: list[Who]
    took_ns: list[int]
    kinds: list[str]
    first: bytes
    """The first number of each column, 8 bytes each; all little-endian."""
    rest: bytes
    """All numbers of all columns, each less its column's first (beyond 64 bits it wraps around, and back), each
    ``NARROW`` or ``WIDE`` bytes."""
    reasons: list[list[str]] = []
    """Of each of ``keys``; none at all where no thread has any."""
    wakers: tuple[list[bytes], list[int]] = ([], [])
    """Each ``Waking`` in msgpack, as it is only compared until it is known which are the same; what they slept."""
    metrics: measures.Packed = measures.NONE


class Packed(NamedTuple):
    """A second to be stored, with the first and last instant in it: a window between others needs none of it."""

    columns: bytes
    first_ns: int
    last_ns: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Second)
_waking = msgspec.msgpack.Decoder(Waking)
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
    reasons = []
    for thread in threads:
        told = sorted(thread.blocked_by) if thread.at_ns else []
        reasons.append(told)
        if thread.at_ns:
            columns += [getattr(thread, name) for name in THREAD]
            columns += [thread.blocked_by[reason] for reason in told]
    kinds: list[str] = []
    if operations.start_ns:
        kinds, kind = indexed([operations.names[kind] for kind in operations.kind])
        columns += [kind if name == "kind" else getattr(operations, name) for name in OPERATIONS]
    first, rest = _packed(columns)
    woken = sorted(
        (Waking(one.tid, one.reason, one.pid, one.waker_tid, one.name), one.slept_ns) for one in wakers
    )
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
        keys=[ThreadKey(thread.tid, int(thread.role), thread.since_ns) for thread in threads],
        stolen_ns=[thread.stolen_ns for thread in threads],
        who=[
            Who(int(one.role), one.pid, one.name, one.cgroup, one.rank_job, one.rank, one.kernel)
            for one in occupants
        ],
        took_ns=[one.took_ns for one in occupants],
        kinds=kinds,
        first=first,
        rest=rest,
        reasons=reasons if any(reasons) else [],
        wakers=(
            [_encoder.encode(waking) for waking, _ in woken],
            [slept_ns for _, slept_ns in woken],
        ),
        metrics=measures.packed(metrics),
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
        seconds = sorted(map(_decoded, blobs), key=lambda second: (second.start_ns, second.end_ns))
        # A rank's threads are the same for hours, and so is what they block for.
        return merge(
            [_joined(list(alike)) for _, alike in groupby(seconds, lambda s: (s.keys, s.kinds, s.reasons))]
        )


def _decoded(blob: bytes) -> _Second:
    return _decoder.decode(blob) if blob[1:2] in _FORMAT_BYTES else _of_format_1(blob)


def _joined(seconds: list[_Second]) -> Columns:
    """The columns of seconds that have the same threads and reasons. Raises :class:`DamagedColumns`."""
    keys = seconds[0].keys
    reasons = seconds[0].reasons or [[]] * len(keys)
    of_threads = [(*THREAD, *told) for _, told in zip(keys, reasons, strict=True)]
    names = [COLLECTIVES, *of_threads, OPERATIONS]
    collectives, *threads, operations = _tables(seconds, names)
    dtypes = _named(collectives, "dtype", [(second.dtypes, second.rows[0]) for second in seconds])
    _named(operations, "kind", [(second.kinds, second.rows[-1]) for second in seconds])
    starts, ends = [second.start_ns for second in seconds], [second.end_ns for second in seconds]
    stolen = np.array([second.stolen_ns for second in seconds], np.int64).reshape(len(seconds), len(keys))
    took = _in_line(second.took_ns for second in seconds)
    who, occupants = listed_rows(
        OCCUPANTS, starts, ends, [second.who for second in seconds], took, lambda one: one
    )
    slept = _in_line(second.wakers[1] for second in seconds)
    named = [second.wakers[0] for second in seconds]
    wakings, wakers = listed_rows(WAKERS, starts, ends, named, slept, _waking.decode)
    measured, metrics = measures.unpacked(starts, ends, [second.metrics for second in seconds])
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
        occupants=in_order(occupants),
        who=who,
        operations=in_order(operations),
        kinds=seconds[0].kinds if len(operations) else [],
        wakers=in_order(wakers),
        wakings=wakings,
        metrics=metrics,
        measured=measured,
    )


def _in_line(numbers: Iterable[list[int]]) -> Ints:
    return np.array(list(chain.from_iterable(numbers)), np.int64)


def _tables(seconds: list[_Second], names: list[tuple[str, ...]]) -> list[Table]:
    """The rows of all seconds, one second after the other. Raises :class:`DamagedColumns`."""
    rows = np.array([second.rows for second in seconds], np.int64)
    bytes_of_rest = np.array([len(second.rest) for second in seconds])
    if rows.shape[1] != len(names) or (rows < 0).any() or (rows > bytes_of_rest.max()).any():
        raise DamagedColumns("a table that cannot be")
    widths = [len(of) for of in names]
    sizes = rows * widths
    narrow = bytes_of_rest == NARROW * sizes.sum(axis=1)
    wide = bytes_of_rest == WIDE * sizes.sum(axis=1)
    lengths = np.repeat(rows, widths, axis=1)
    firsts = [len(second.first) for second in seconds]
    if not (narrow | wide).all() or (np.count_nonzero(lengths, axis=1) * 8 != firsts).any():
        raise DamagedColumns("columns of different lengths")
    line = np.repeat(
        np.frombuffer(b"".join([second.first for second in seconds]), "<i8"), lengths[lengths > 0]
    )
    if narrow.all():
        line += np.frombuffer(b"".join([second.rest for second in seconds]), f"<i{NARROW}")
    else:
        line += np.concatenate(
            [
                np.frombuffer(second.rest, f"<i{NARROW if is_narrow else WIDE}")
                for second, is_narrow in zip(seconds, narrow, strict=True)
            ]
        )
    begins = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape)
    tables = []
    for place, of in enumerate(names):
        blocks = [
            line[begin : begin + len(of) * count].reshape(len(of), count)
            for begin, count in zip(begins[:, place].tolist(), rows[:, place].tolist(), strict=True)
            if count
        ]
        tables.append(Table(of, np.concatenate(blocks, axis=1)) if blocks else no_rows(of))
    return tables


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
