"""What is in a store and how large it is, counted: for ``sysom store stats``."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
from sqlite_utils import Database

from diagnosis.store import Keep, StoreError, columns, integrity, measures, opening, packing, rows, seconds
from diagnosis.store.migrations import MIGRATIONS
from diagnosis.store.tidying import FULL_SHARE

WALKED_BYTES = 1 << 30
"""Up to this size each page of the file is looked at (a second or two); tables of larger files are estimated."""
SAMPLED_ROWS = 1000
"""Of each table, when it is estimated."""
DAY_NS = 86_400_000_000_000


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """A store at one moment. Instants are UTC nanoseconds, of arrival."""

    path: str
    schema: int
    size_bytes: int
    wal_bytes: int
    free_in_file_bytes: int
    """In the file and free: taken by what comes next."""
    shrinks: bool
    """Whether what is free in the file can be given back to the disk."""
    disk_free_bytes: int
    bytes_per_s: float
    """What was kept per second, from the oldest batch to the newest."""
    oldest_ns: int | None
    newest_ns: int | None
    batches: int
    events: int
    jobs: int
    nodes: int
    ranks: int
    """Pairs of job and rank."""
    rank_seconds: float
    """For how long ranks were watched, all together."""
    bytes_per_rank_second: float
    tables: dict[str, int]
    """Bytes per table, its indexes with it."""
    tables_estimated: bool
    keep_days: float
    keep_gb: float
    goes_next: str
    """For what the oldest minute will go: ``age``, or ``size`` at the rate so far; empty without batches."""
    goes_at_ns: int | None
    """When that will be."""
    integrity: str
    """``ok``, or ``unchecked`` for a file that takes long."""


def stats(path: Path, keep: Keep) -> Stats:
    """Counts a store that may be in use. Raises ``StoreError``, also for one that is damaged."""
    with opening.explained(path):
        opening.check_for_reading(path)
        size = path.stat().st_size
        log = Path(f"{path}-wal")
        with opening.for_reading(path) as db:
            problems = integrity.quick(db) if size <= integrity.AT_ONCE_BYTES else None
        if problems:  # counting would fail, or count what is not so, and in other words than these
            raise StoreError(integrity.damage(path, integrity.named(problems)))
        with opening.for_reading(path) as db:
            used = opening.used_bytes(db)
            first, last = rows.arrivals(db)
            rank_seconds = float(rows.value(db, "SELECT total(last_ns - first_ns) FROM watch")) / 1e9
            tables, estimated = _tables(db, used)
            disk = os.statvfs(path.parent)
            goes_next, goes_at_ns = _goes_next(first, last, used, keep)
            return Stats(
                path=str(path),
                schema=len(MIGRATIONS),
                size_bytes=size,
                wal_bytes=log.stat().st_size if log.exists() else 0,
                free_in_file_bytes=opening.free_bytes(db),
                shrinks=opening.shrinks(db),
                disk_free_bytes=disk.f_bavail * disk.f_frsize,
                bytes_per_s=used / ((last - first) / 1e9)
                if first is not None and last and last > first
                else 0.0,
                oldest_ns=first,
                newest_ns=last,
                batches=rows.value(db, "SELECT count(*) FROM batch"),
                events=rows.value(db, "SELECT count(*) FROM event"),
                jobs=rows.value(db, "SELECT count(DISTINCT job) FROM watch"),
                nodes=rows.value(
                    db,
                    "SELECT count(DISTINCT node) FROM boot JOIN sender ON sender.boot = boot.id"
                    " WHERE emptied_ns IS NULL AND node <> ''",
                ),
                ranks=rows.value(db, "SELECT count(*) FROM (SELECT DISTINCT job, rank FROM watch)"),
                rank_seconds=rank_seconds,
                bytes_per_rank_second=used / rank_seconds if rank_seconds else 0.0,
                tables=tables,
                tables_estimated=estimated,
                keep_days=keep.days,
                keep_gb=keep.gb,
                goes_next=goes_next,
                goes_at_ns=goes_at_ns,
                integrity=integrity.UNCHECKED if problems is None else integrity.SOUND,
            )


def _goes_next(first_ns: int | None, last_ns: int | None, used: int, keep: Keep) -> tuple[str, int | None]:
    """Which limit the oldest batch meets first, and when; at the rate so far, for the size."""
    if first_ns is None or last_ns is None:
        return "", None
    age_ns = first_ns + int(keep.days * DAY_NS)
    left = max(0.0, keep.gb * 1e9 * FULL_SHARE - used)
    if left and (last_ns <= first_ns or not used):
        return "age", age_ns
    size_ns = last_ns + int(left / used * (last_ns - first_ns))
    return ("size", size_ns) if size_ns < age_ns else ("age", age_ns)


def _tables(db: Database, used: int) -> tuple[dict[str, int], bool]:
    """Bytes per table, and whether they are estimated."""
    if used <= WALKED_BYTES:
        try:
            found = db.execute(
                "SELECT tbl_name, sum(pgsize) FROM dbstat JOIN sqlite_master USING (name)"
                " WHERE aggregate = TRUE GROUP BY tbl_name"
            ).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):  # a SQLite that was built without it
                raise
        else:
            return {table: int(size) for table, size in sorted(found, key=lambda row: -row[1])}, False
    sizes = {table: _estimated(db, table) for table in ("chunk", "tail")}
    return sizes | {"all others": max(0, used - sum(sizes.values()))}, True


def _estimated(db: Database, table: str) -> int:
    """Rows times the mean size of the newest ones' columns, which are nearly all of a row."""
    count = rows.value(db, f"SELECT count(*) FROM {table}")  # noqa: S608 - one of our own
    mean = rows.value(
        db,
        f"SELECT avg(length(columns)) FROM (SELECT columns FROM {table} ORDER BY id DESC LIMIT ?)",  # noqa: S608
        (SAMPLED_ROWS,),
    )
    return int(count * (mean or 0))


def check(path: Path) -> list[str]:
    """Whether the file, its indexes and all columns in it are sound: reads everything. Problems in words.

    Raises ``StoreError`` when it cannot be read at all.
    """
    with opening.explained(path):
        opening.check_for_reading(path)
        with opening.for_reading(path) as db:
            problems = integrity.full(db)
            if not problems:
                problems += _unreadable(db, "chunk", "id, columns", packing.unpack)
                problems += _unreadable(db, "tail", "id, columns", lambda blob: seconds.unpack([blob]))
                problems += _unreadable(db, "node_chunk", "rowid, columns", packing.unpack)
                problems += _unreadable(
                    db, "batch", "seq, metrics", lambda blob: measures.unpack_node([(0, 1, blob)])
                )
    return problems


def _unreadable(
    db: Database, table: str, number_and_bytes: str, unpack: Callable[[bytes], columns.Columns]
) -> list[str]:
    _, blobs = number_and_bytes.split(", ")
    found = []
    rows = db.execute(f"SELECT {number_and_bytes} FROM {table} WHERE {blobs} IS NOT NULL")  # noqa: S608 - our own
    for id_, blob in rows:
        try:
            unpack(blob).details()
        except columns.DamagedColumns as error:
            found.append(f"{table} {id_}: damaged {blobs} ({error})")
    return found
