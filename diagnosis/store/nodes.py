"""The SQL of what is measured of nodes: with each batch as it came, and packed once the minute is over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sqlite_utils import Database

from diagnosis.evidence import MetricRow
from diagnosis.store import measures, packing
from diagnosis.store.assemble import Watch, cut, metric_rows
from diagnosis.store.columns import Columns, merge
from probes.records import Batch

MINUTE_NS = 60_000_000_000
LAST_NS = (1 << 63) - 1


class Minute(NamedTuple):
    """Of one sender. Instants of the batches that begin in it, monotonic."""

    sender: int
    minute: int


def as_it_came(batch: Batch) -> bytes | None:
    """What goes into ``batch.metrics``."""
    return measures.pack_node(batch.metrics) if batch.metrics else None


def minutes_over(db: Database, sender: int, minute: int, limit: int) -> list[Minute]:
    """Up to ``limit`` minutes of a sender before ``minute`` that have metrics as they came."""
    found = db.execute(
        "SELECT DISTINCT start_ns / ? FROM batch WHERE sender = ? AND start_ns < ? AND metrics IS NOT NULL"
        " ORDER BY start_ns LIMIT ?",
        (MINUTE_NS, sender, min(minute * MINUTE_NS, LAST_NS), limit),
    )
    return [Minute(sender, past) for (past,) in found.fetchall()]


def pack_minute(db: Database, which: Minute) -> None:
    """Merge the metrics of one minute's batches, and the chunk if there is one already, into one chunk."""
    of_batches = (
        "sender = ? AND start_ns >= ? AND start_ns < ? AND metrics IS NOT NULL",
        (which.sender, which.minute * MINUTE_NS, (which.minute + 1) * MINUTE_NS),
    )
    parts = [_as_they_came(db, *of_batches)]
    for (blob,) in db.execute("SELECT columns FROM node_chunk WHERE sender = ? AND minute = ?", which):
        parts.append(packing.unpack(blob))
    merged = merge(parts)
    db.execute(
        "INSERT OR REPLACE INTO node_chunk (sender, minute, first_ns, last_ns, columns) VALUES (?, ?, ?, ?, ?)",
        (*which, *merged.span(), packing.pack(merged)),
    )
    db.execute(f"UPDATE batch SET metrics = NULL WHERE {of_batches[0]}", of_batches[1])  # noqa: S608


def _as_they_came(db: Database, condition: str, values: tuple[int, ...]) -> Columns:
    rows = db.execute(f"SELECT start_ns, end_ns, metrics FROM batch WHERE {condition}", values)  # noqa: S608
    return measures.unpack_node(rows)


def columns_of(
    db: Database, boots: Iterable[Watch], start_ns: int, end_ns: int
) -> list[tuple[Watch, Columns]]:
    """Of each boot between two UTC instants (still in the node's monotonic time). ``boots``: one watch of each; an
    import's tell nothing."""
    found = []
    for watch in boots:
        if watch.imported:
            continue
        start, end = start_ns - watch.utc_offset_ns, end_ns - watch.utc_offset_ns
        parts = []
        for (sender,) in db.execute("SELECT id FROM sender WHERE boot = ?", (watch.boot,)).fetchall():
            came = "sender = ? AND end_ns >= ? AND start_ns < ? AND metrics IS NOT NULL"
            parts.append(_as_they_came(db, came, (sender, start, end)))
            chunks = "SELECT columns FROM node_chunk WHERE sender = ? AND last_ns >= ? AND first_ns < ?"
            parts += [packing.unpack(blob) for (blob,) in db.execute(chunks, (sender, start, end))]
        columns = cut(merge(parts), start, end)
        if len(columns.batches):
            found.append((watch, columns))
    return found


def metrics(boots: Iterable[tuple[Watch, Columns]]) -> dict[str, Sequence[MetricRow]]:
    """Per node, in UTC."""
    found: dict[str, list[Sequence[MetricRow]]] = {}
    for watch, columns in boots:
        found.setdefault(watch.node, []).append(metric_rows(columns, watch.utc_offset_ns))
    return {
        node: rows[0] if len(rows) == 1 else [row for of_boot in rows for row in of_boot]
        for node, rows in found.items()
    }


def forget(db: Database, sender: int, minute: int, limit: int) -> int:
    """Delete up to ``limit`` chunks of a sender before ``minute``; how many."""
    gone = db.execute(
        "DELETE FROM node_chunk WHERE (sender, minute) IN"
        " (SELECT sender, minute FROM node_chunk WHERE sender = ? AND minute < ? LIMIT ?)",
        (sender, minute, limit),
    )
    return int(gone.rowcount)
