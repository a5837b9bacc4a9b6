"""Columns: what one agent saw of one life of one rank, as arrays; how they are put together and merged.

Instants are CLOCK_MONOTONIC nanoseconds of the node. All tables are kept in time order and without double
rows, so that two batches can be merged in any order and give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from diagnosis.evidence import Ints
from diagnosis.later import Once
from probes.records import Role

_S = TypeVar("_S")
_T = TypeVar("_T")

BATCHES = ("start_ns", "end_ns")
COLLECTIVES = ("enter_ns", "communicator", "seq", "op", "duration_ns", "failed", "bytes", "dtype")
"""``failed`` holds 1 for a failure, plus twice the state (``probes.records.State``)."""
OPERATIONS = ("start_ns", "lane", "kind", "step", "duration_ns", "seq", "micro_batch", "chunk")
THREAD = (
    "at_ns",
    "running_ns",
    "runnable_ns",
    "blocked_ns",
    "uninterruptible_ns",
    "interrupted_ns",
)
BLOCKED = ("at_ns",)
"""After it a column per reason for which a thread blocked, in the order of their names: its cumulative time, 0
where a batch did not tell it."""
STOLEN = ("at_ns", "stolen_ns")
OCCUPANTS = ("start_ns", "end_ns", "who", "took_ns")
WAKERS = ("start_ns", "end_ns", "waking", "slept_ns")
METRICS = ("start_ns", "end_ns", "measured", "value")
"""``value`` holds the bits of a 64-bit float."""

_ROW_KEY = {COLLECTIVES: 4, BATCHES: 2, OCCUPANTS: 4, WAKERS: 4, METRICS: 4, OPERATIONS: 0}
"""How many of the leading columns name a row (one, of threads); of two with one name the one that sorts last stays:
for a collective that was reported open (duration −1) and again when it ended, the ended one. Of operations two
alike are two: kernels of two streams that began at once."""


class DamagedColumns(ValueError):
    """Stored bytes that are not what ``seconds.pack`` or ``packing.pack`` made."""


class ThreadKey(NamedTuple):
    """One series of thread times; a new ``since_ns`` is a new series."""

    tid: int
    role: Role
    since_ns: int


class Who(NamedTuple):
    """The identity of an occupant (``probes.records.Occupant`` without its time)."""

    role: Role
    pid: int
    name: str
    cgroup: str
    rank_job: str
    rank: int
    kernel: bool


class Waking(NamedTuple):
    """Who woke what (``probes.records.Waker`` without its time)."""

    tid: int
    reason: str
    pid: int
    waker_tid: int
    name: str


class Measured(NamedTuple):
    """What a metric is of (``probes.records.Metric`` without its value); labels in the order of their names."""

    name: str
    unit: str
    labels: tuple[tuple[str, str], ...]


class Table:
    """Columns of one length, in one array of columns × rows: what is done to all of them is done at once."""

    __slots__ = ("names", "values")

    def __init__(self, names: tuple[str, ...], values: Ints) -> None:
        self.names = names
        self.values = values

    def __getitem__(self, name: str) -> Ints:
        column: Ints = self.values[self.names.index(name)]
        return column

    def __len__(self) -> int:
        """Rows."""
        return int(self.values.shape[1])

    def rows(self, which: slice | Ints | npt.NDArray[np.bool_]) -> Table:
        return Table(self.names, self.values[:, which])

    def replaced(self, name: str, column: Ints) -> Table:
        values = self.values.copy()
        values[self.names.index(name)] = column
        return Table(self.names, values)


def no_rows(names: tuple[str, ...]) -> Table:
    return Table(names, np.empty((len(names), 0), np.int64))


class Details(NamedTuple):
    """What a diagnosis looks at of few ranks: left as it is stored until somebody asks. ``occupants["who"]``
    indexes ``who``, ``wakers["waking"]`` indexes ``wakings``, ``metrics["measured"]`` indexes ``measured``."""

    occupants: Table
    who: list[Who]
    wakers: Table
    wakings: list[Waking]
    metrics: Table
    measured: list[Measured]
    blocked: dict[ThreadKey, Table]
    """Of threads that told for what they blocked, in the rows in which they did."""


@cache
def no_details() -> Details:
    return Details(no_rows(OCCUPANTS), [], no_rows(WAKERS), [], no_rows(METRICS), [], {})


@dataclass(frozen=True)
class Columns:
    """See the module. ``collectives["dtype"]`` indexes ``dtypes``, ``operations["kind"]`` indexes ``kinds``. A
    node's have batches and details alone."""

    batches: Table
    collectives: Table
    dtypes: list[str]
    threads: dict[ThreadKey, Table]
    stolen: dict[ThreadKey, Table]
    operations: Table
    kinds: list[str]
    details: Callable[[], Details] = no_details
    """Raises :class:`DamagedColumns`. Asked again, it answers at once."""

    def span(self) -> tuple[int, int]:
        """First and last instant of any row: a window that touches neither side of it needs none of it."""
        tables = [self.batches, self.collectives, self.operations, *self.threads.values()]
        instants = [table.values[0] for table in tables if len(table)] + [self.batches["end_ns"]]
        return min(int(column.min()) for column in instants), max(int(column.max()) for column in instants)


def of_node(batches: Table, details: Callable[[], Details] = no_details) -> Columns:
    """What is known of a node, as columns."""
    return Columns(
        batches=batches,
        collectives=no_rows(COLLECTIVES),
        dtypes=[],
        threads={},
        stolen={},
        operations=no_rows(OPERATIONS),
        kinds=[],
        details=details,
    )


def indexed(values: list[_T]) -> tuple[list[_T], list[int]]:
    """The different values, in order, and the place of each among them."""
    names = sorted(set(values))  # type: ignore[type-var]  # strings or tuples
    place = {name: index for index, name in enumerate(names)}
    return names, [place[value] for value in values]


def listed_rows(
    names: tuple[str, ...],
    starts: list[int],
    ends: list[int],
    named: list[list[_S]],
    numbers: Ints,
    read: Callable[[_S], _T],
) -> tuple[list[_T], Table]:
    """What is named in any of these intervals, in order, and a row with a number for each name in each of them.
    Raises :class:`DamagedColumns`."""
    in_line = list(chain.from_iterable(named))
    meant = {one: read(one) for one in set(in_line)}
    listed, places = indexed(list(meant.values()))
    place = dict(zip(meant, places, strict=True))
    counts = [len(of_interval) for of_interval in named]
    if len(numbers) != sum(counts):
        raise DamagedColumns(f"{len(numbers)} numbers for {sum(counts)} names")
    which = np.fromiter(map(place.__getitem__, in_line), np.int64, len(in_line))
    rows = [np.repeat(starts, counts), np.repeat(ends, counts), which, numbers]
    return listed, Table(names, np.array(rows, np.int64))


def merge(parts: Sequence[Columns]) -> Columns:
    """All rows of ``parts``, in time order, without double rows. The order of ``parts`` does not matter."""
    if len(parts) == 1:
        return parts[0]
    dtypes = sorted({name for part in parts for name in part.dtypes})
    kinds = sorted({name for part in parts for name in part.kinds})
    return Columns(
        batches=join(BATCHES, [part.batches for part in parts]),
        collectives=join(
            COLLECTIVES, [_reindexed(part.collectives, "dtype", part.dtypes, dtypes) for part in parts]
        ),
        dtypes=dtypes,
        threads=_join_series(THREAD, [part.threads for part in parts]),
        stolen=_join_series(STOLEN, [part.stolen for part in parts]),
        operations=join(
            OPERATIONS, [_reindexed(part.operations, "kind", part.kinds, kinds) for part in parts]
        ),
        kinds=kinds,
        details=Once(_merged, [part.details for part in parts]),
    )


def _merged(read: list[Callable[[], Details]]) -> Details:
    parts = [details() for details in read]
    who = sorted({one for part in parts for one in part.who})
    wakings = sorted({one for part in parts for one in part.wakings})
    measured = sorted({one for part in parts for one in part.measured})
    return Details(
        occupants=join(OCCUPANTS, [_reindexed(part.occupants, "who", part.who, who) for part in parts]),
        who=who,
        wakers=join(WAKERS, [_reindexed(part.wakers, "waking", part.wakings, wakings) for part in parts]),
        wakings=wakings,
        metrics=join(
            METRICS, [_reindexed(part.metrics, "measured", part.measured, measured) for part in parts]
        ),
        measured=measured,
        blocked=_join_series(BLOCKED, [part.blocked for part in parts]),
    )


def _reindexed(table: Table, column: str, old: Sequence[object], new: Sequence[object]) -> Table:
    if old == new or not len(table):
        return table
    place = {value: index for index, value in enumerate(new)}
    return table.replaced(column, np.array([place[value] for value in old], dtype=np.int64)[table[column]])


def _join_series(names: tuple[str, ...], parts: list[dict[ThreadKey, Table]]) -> dict[ThreadKey, Table]:
    keys = sorted({key for part in parts for key in part})
    return {key: join(names, [part[key] for part in parts if key in part]) for key in keys}


def join(names: tuple[str, ...], tables: list[Table]) -> Table:
    """The rows of all ``tables``, each of which is in time order: in time order, without double ones. ``names``
    are the columns that all have; those of ``BLOCKED`` have more."""
    filled = [table for table in tables if len(table)]
    if names == BLOCKED:
        filled = _alike(filled)
    if not filled:
        return no_rows(names)
    if len(filled) == 1:
        return filled[0]
    # Each is in order: sorted by their first instant, they usually follow each other.
    filled.sort(key=lambda table: int(table.values[0, 0]))
    joined = Table(filled[0].names, np.concatenate([table.values for table in filled], axis=1))
    follow = all(before.values[0, -1] < after.values[0, 0] for before, after in pairwise(filled))
    return joined if follow else in_order(joined)


def _alike(tables: list[Table]) -> list[Table]:
    """With the columns of all reasons, zeros where a table has none."""
    if all(table.names == tables[0].names for table in tables):
        return tables
    reasons = sorted({reason for table in tables for reason in table.names[1:]})
    place = {reason: index for index, reason in enumerate(reasons, start=1)}
    alike = []
    for table in tables:
        values = np.zeros((1 + len(reasons), len(table)), np.int64)
        values[[0, *map(place.__getitem__, table.names[1:])]] = table.values
        alike.append(Table((*BLOCKED, *reasons), values))
    return alike


def at_rows(blocked: Table, at_ns: Ints) -> Ints:
    """The reasons' columns of ``blocked`` in rows at these instants, in order; zeros where it has none."""
    values = np.zeros((len(blocked.names) - 1, len(at_ns)), np.int64)
    if len(blocked) and len(at_ns):
        rows = np.minimum(np.searchsorted(at_ns, blocked["at_ns"]), len(at_ns) - 1)
        there = at_ns[rows] == blocked["at_ns"]
        values[:, rows[there]] = blocked.values[1:, there]
    return values


def in_order(table: Table) -> Table:
    """The rows of ``table`` in time order, without double ones."""
    values = table.values
    time = values[0]
    if len(time) < 2 or (time[1:] > time[:-1]).all():
        return table
    leading = _ROW_KEY.get(table.names, 1)
    if leading and _rise(values[:leading]):
        return table
    order = np.argsort(time, kind="stable")
    same = time[order][1:] == time[order][:-1]
    if same.any():
        tied = np.zeros(len(time), np.bool_)
        tied[1:] |= same
        tied[:-1] |= same
        rows = order[tied]
        # lexsort takes its first key last; the time comes first, so each group of ties keeps its place.
        order[tied] = rows[np.lexsort(values[::-1, rows])]
    values = values[:, order]
    if not leading:
        return Table(table.names, values)
    key = values[:leading]
    double = (key[:, 1:] == key[:, :-1]).all(axis=0)
    if double.any():
        values = values[:, np.append(~double, True)]
    return Table(table.names, values)


def _rise(columns: Ints) -> bool:
    """Whether each row is above the one before it, by its first column in which they differ."""
    open_ = np.ones(columns.shape[1] - 1, np.bool_)
    for column in columns:
        before, after = column[:-1], column[1:]
        if (open_ & (after < before)).any():
            return False
        open_ &= after == before
        if not open_.any():
            return True
    return False


@contextmanager
def undamaged() -> Iterator[None]:
    """Whatever is wrong with stored bytes, as :class:`DamagedColumns`."""
    try:
        yield
    except (msgspec.MsgspecError, zstandard.ZstdError, ValueError, OverflowError, MemoryError) as error:
        raise DamagedColumns(str(error) or type(error).__name__) from error
