"""From stored columns to the evidence of one rank: cut to the window, turned to UTC, one life per rank.

Pure: no clock, no database. What comes in is in the node's monotonic nanoseconds, what goes out in UTC.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from diagnosis.evidence import (
    CollectiveTable,
    Ints,
    Listed,
    MetricRow,
    OccupantRow,
    OperationTable,
    RankEvidence,
    Row,
    Rows,
    ThreadSeries,
    WakerRow,
)
from diagnosis.later import Later, Once
from diagnosis.store.columns import Columns, Details, Table, ThreadKey, at_rows, merge
from diagnosis.store.oddities import Clock
from diagnosis.store.standing import Reached, Standing
from probes.records import Communicator, Progress, TimedBy


@dataclass(frozen=True)
class Watch:
    """What one agent saw of one life of one rank, without the time series."""

    id: int
    node: str
    boot: int
    clock: Clock
    """Of this node and boot."""
    rank: int
    pid: int
    life_ns: int
    """When the process started, monotonic."""
    world_size: int
    local_rank: int
    name: str
    communicators: list[Communicator]
    first_ns: int
    last_ns: int
    ended: bool
    timed_by: int
    source: str
    imported: str
    """Which files, of an import; empty for an agent's."""
    standing: Standing

    @property
    def life(self) -> tuple[int, int, int]:
        return self.boot, self.pid, self.life_ns

    @property
    def utc_offset_ns(self) -> int:
        """UTC minus monotonic time, for all instants of this watch."""
        return self.clock.offset_ns

    def overlaps(self, start_ns: int, end_ns: int) -> bool:
        """Whether this watch has batches between two UTC instants."""
        return self.first_ns + self.utc_offset_ns < end_ns and self.last_ns + self.utc_offset_ns >= start_ns


STANDING_NS = 5_000_000_000
"""A collective that lasts so long was told before it ended (``probes.nccl.gloo``)."""


def cut(columns: Columns, start_ns: int, end_ns: int) -> Columns:
    """The rows whose instant lies in [start, end), what stood still when it began, and the batches, occupants,
    wakers, metrics and stolen times that overlap it. Decided row by row: how rows were packed does not matter."""
    return replace(
        columns,
        batches=_overlap(columns.batches, start_ns, end_ns),
        collectives=_begun_within(columns.collectives, start_ns, end_ns),
        threads={key: _within(table, start_ns, end_ns) for key, table in columns.threads.items()},
        # A batch's stolen time is stamped with its end: it belongs to what came before.
        stolen={key: _within(table, start_ns + 1, end_ns + 1) for key, table in columns.stolen.items()},
        operations=_within(columns.operations, start_ns, end_ns),
        details=Once(_cut_details, columns.details, start_ns, end_ns),
    )


def _cut_details(read: Callable[[], Details], start_ns: int, end_ns: int) -> Details:
    details = read()
    return details._replace(
        occupants=_overlap(details.occupants, start_ns, end_ns),
        wakers=_overlap(details.wakers, start_ns, end_ns),
        metrics=_overlap(details.metrics, start_ns, end_ns),
    )


def _overlap(table: Table, start_ns: int, end_ns: int) -> Table:
    first, last = table["start_ns"], table["end_ns"]
    inside = (first < end_ns) & ((last > start_ns) | (first >= start_ns))
    return table if inside.all() else table.rows(inside)


def _within(table: Table, start_ns: int, end_ns: int) -> Table:
    low, high = np.searchsorted(table.values[0], [start_ns, end_ns])
    return table.rows(slice(low, high))


def _begun_within(table: Table, start_ns: int, end_ns: int) -> Table:
    """And what stood still at the start of the window: begun before it, and not ended, or only after seconds."""
    low, high = np.searchsorted(table.values[0], [start_ns, end_ns])
    enter, duration = table["enter_ns"][:low], table["duration_ns"][:low]
    standing = np.flatnonzero((duration < 0) | ((duration >= STANDING_NS) & (enter + duration >= start_ns)))
    if not len(standing):
        return table.rows(slice(low, high))
    return table.rows(np.concatenate([standing, np.arange(low, high)]))


def newest_lives(
    parts: Iterable[tuple[Watch, Columns]],
) -> tuple[dict[int, list[tuple[Watch, Columns]]], list[str]]:
    """Per rank the watches of its newest life, and a note for each rank that has several.

    ``parts`` are cut to the window; those without a batch in it count for nothing.
    """
    ranks: dict[int, dict[tuple[int, int, int], list[tuple[Watch, Columns]]]] = defaultdict(dict)
    for watch, columns in parts:
        if len(columns.batches):
            ranks[watch.rank].setdefault(watch.life, []).append((watch, columns))
    newest, notes = {}, []
    for rank, lives in sorted(ranks.items()):
        in_order = sorted(lives.values(), key=_born)
        newest[rank] = in_order[-1]
        if len(in_order) > 1:
            names = ", then ".join(_named(life[0][0]) for life in in_order)
            notes.append(
                f"rank {rank} ran as {len(in_order)} processes in this window ({names}); "
                "only the newest is used"
            )
    return newest, notes


def _named(watch: Watch) -> str:
    return f"pid {watch.pid} on {watch.node}" if watch.node else f"pid {watch.pid}"


def _born(life: list[tuple[Watch, Columns]]) -> tuple[int, str, int]:
    watch = life[0][0]
    return watch.life_ns + watch.utc_offset_ns, watch.node, watch.pid


def rank_evidence(parts: list[tuple[Watch, Columns]], end_ns: int) -> RankEvidence:
    """One life of one rank, from all agents that watched it, in UTC; ``end_ns`` is the window's end."""
    parts = sorted(parts, key=lambda part: (part[0].first_ns, part[0].id))
    newest = max((watch for watch, _ in parts), key=lambda watch: (watch.last_ns, watch.id))
    communicators: list[Communicator] = []
    renumbered, standing = [], Standing()
    for watch, columns in parts:
        places = _places(communicators, watch.communicators)
        standing = standing.joined(watch.standing.renumbered(places.tolist()))
        if len(columns.collectives) and not np.array_equal(places, np.arange(len(places))):
            index = columns.collectives["communicator"]
            collectives = columns.collectives.replaced("communicator", places[index])
            columns = replace(columns, collectives=collectives)
        renumbered.append(columns)
    columns = merge(renumbered)
    offset = newest.utc_offset_ns
    return RankEvidence(
        rank=newest.rank,
        node=newest.node,
        pid=newest.pid,
        local_rank=newest.local_rank,
        name=newest.name,
        communicators=communicators,
        collectives=_collective_table(columns, offset),
        threads=[_thread_series(key, columns, offset) for key in columns.threads if _has_rows(key, columns)],
        occupants=_rows(OccupantRow, columns, offset, lambda details: (details.occupants, details.who)),
        first_ns=int(columns.batches["start_ns"].min()) + offset,
        last_ns=int(columns.batches["end_ns"].max()) + offset,
        ended=newest.ended and newest.last_ns + offset <= end_ns,
        timed_by=TimedBy(newest.timed_by),
        operations=_operation_table(columns, offset) if columns.kinds else None,
        place=standing.place,
        progress=[_progress(reached) for reached in standing.reached],
        source=newest.source,
        dtypes=columns.dtypes,
        wakers=_rows(WakerRow, columns, offset, lambda details: (details.wakers, details.wakings)),
        metrics=metric_rows(columns, offset),
    )


def _progress(reached: Reached) -> Progress:
    return Progress(
        communicator=reached.communicator,
        enqueued=reached.enqueued,
        started=reached.started,
        completed=reached.completed,
    )


def _places(known: list[Communicator], of_watch: list[Communicator]) -> Ints:
    """Where each communicator of one agent's list stands in ``known``, which grows by those that are new.

    Each agent numbers communicators by itself. Two that one agent tells apart stay apart, even if they look
    alike (communicators whose name is unknown).
    """
    free = list(range(len(known)))
    places = []
    for communicator in of_watch:
        place = next((place for place in free if known[place] == communicator), None)
        if place is None:
            place = len(known)
            known.append(communicator)
        else:
            free.remove(place)
        places.append(place)
    return np.array(places, dtype=np.int64)


def _collective_table(columns: Columns, offset_ns: int) -> CollectiveTable:
    rows = columns.collectives
    state = rows["failed"] >> 1
    return CollectiveTable(
        communicator=rows["communicator"],
        seq=rows["seq"],
        op=rows["op"],
        bytes=rows["bytes"],
        enter_ns=rows["enter_ns"] + offset_ns,
        duration_ns=rows["duration_ns"],
        failed=(rows["failed"] & 1).astype(np.bool_),
        state=state if state.any() else state[:0],
        dtype=rows["dtype"],
    )


def _operation_table(columns: Columns, offset_ns: int) -> OperationTable:
    rows = columns.operations
    return OperationTable(
        names=columns.kinds,
        kind=rows["kind"],
        lane=rows["lane"],
        step=rows["step"],
        start_ns=rows["start_ns"] + offset_ns,
        duration_ns=rows["duration_ns"],
        seq=rows["seq"],
        micro_batch=rows["micro_batch"],
        chunk=rows["chunk"],
    )


def _has_rows(key: ThreadKey, columns: Columns) -> bool:
    return bool(len(columns.threads[key]) or len(columns.stolen[key]))


def _thread_series(key: ThreadKey, columns: Columns, offset_ns: int) -> ThreadSeries:
    rows, stolen = columns.threads[key], columns.stolen[key]
    return ThreadSeries(
        tid=key.tid,
        role=key.role,
        since_ns=key.since_ns + offset_ns,
        at_ns=rows["at_ns"] + offset_ns,
        running_ns=rows["running_ns"],
        runnable_ns=rows["runnable_ns"],
        blocked_ns=rows["blocked_ns"],
        uninterruptible_ns=rows["uninterruptible_ns"],
        interrupted_ns=rows["interrupted_ns"],
        stolen_at_ns=stolen["at_ns"] + offset_ns,
        stolen_ns=stolen["stolen_ns"],
        blocked_by=Later(_blocked_by, key, columns),
    )


def _blocked_by(key: ThreadKey, columns: Columns) -> dict[str, Ints]:
    blocked = columns.details().blocked.get(key)
    if blocked is None:
        return {}
    thread = columns.threads[key]
    told = _last_told(at_rows(blocked, thread["at_ns"]), thread["blocked_ns"])
    return {reason: column for reason, column in zip(blocked.names[1:], told, strict=True) if column.any()}


def _last_told(columns: Ints, blocked_ns: Ints) -> Ints:
    """Cumulative times, with what was told before in the place of each 0, which says that nothing was told. Ahead
    of the first that was told, the least that it can have been: the thread blocked no longer than it did."""
    told = columns != 0
    if told.all():
        return columns
    rows, first = np.arange(columns.shape[1]), told.argmax(axis=1)[:, None]
    filled = np.take_along_axis(columns, np.maximum.accumulate(np.where(told, rows, first), axis=1), axis=1)
    least = np.maximum(filled - (blocked_ns[first] - blocked_ns), 0)
    return np.where(rows < first, least, filled)


def _rows(
    make: Callable[..., Row],
    columns: Columns,
    offset_ns: int,
    pick: Callable[[Details], tuple[Table, Sequence[tuple[object, ...]]]],
) -> Rows[Row]:
    """Rows of the details' table that ``pick`` takes, with what they name, in UTC."""

    def listed() -> Listed:
        table, named = pick(columns.details())
        start_ns, end_ns, which, number = table.values
        return Listed(named, start_ns + offset_ns, end_ns + offset_ns, which, number)

    return Rows(make, listed)


def metric_rows(columns: Columns, offset_ns: int) -> Rows[MetricRow]:
    """In UTC."""
    rows = _rows(MetricRow, columns, offset_ns, lambda details: (details.metrics, details.measured))

    def listed() -> Listed:
        found = rows.listed()
        return found._replace(number=np.ascontiguousarray(found.number).view(np.float64))

    return Rows(MetricRow, listed)
