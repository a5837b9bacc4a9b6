"""The tables of the SQLite store, and how they came to be: one numbered step after the other.

A step that was released is never changed; a new one is appended. ``PRAGMA user_version`` says how many have
run, ``PRAGMA application_id`` that the file is ours.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlite_utils import Database

APPLICATION_ID = 0x7379736F  # "syso"


def _batches_and_columns(db: Database) -> None:
    """One ``watch`` is what one agent sees of one life (process) of one rank; its time series are ``tail``
    rows (one batch each, as it came) until the minute is over, then one ``chunk``. Instants named ``…_ns``
    are the node's CLOCK_MONOTONIC (``received_ns``: the server's UTC)."""
    for statement in (
        """CREATE TABLE boot (
            id INTEGER PRIMARY KEY,
            node TEXT NOT NULL,
            boot_id TEXT NOT NULL,
            newest_end_ns INTEGER NOT NULL,
            newest_offset_ns INTEGER NOT NULL,
            server_offset_ns INTEGER NOT NULL,
            probes BLOB NOT NULL,
            UNIQUE (node, boot_id))""",
        """CREATE TABLE sender (
            id INTEGER PRIMARY KEY,
            boot INTEGER NOT NULL REFERENCES boot,
            agent TEXT NOT NULL,
            UNIQUE (boot, agent))""",
        """CREATE TABLE batch (
            sender INTEGER NOT NULL REFERENCES sender,
            seq INTEGER NOT NULL,
            start_ns INTEGER NOT NULL,
            end_ns INTEGER NOT NULL,
            utc_offset_ns INTEGER NOT NULL,
            received_ns INTEGER NOT NULL,
            metrics BLOB,
            PRIMARY KEY (sender, seq)) WITHOUT ROWID""",
        "CREATE INDEX batch_time ON batch (sender, end_ns, seq, start_ns, utc_offset_ns)",
        """CREATE TABLE watch (
            id INTEGER PRIMARY KEY,
            job TEXT NOT NULL,
            rank INTEGER NOT NULL,
            sender INTEGER NOT NULL REFERENCES sender,
            pid INTEGER NOT NULL,
            life_ns INTEGER NOT NULL,
            world_size INTEGER NOT NULL,
            local_rank INTEGER NOT NULL,
            name TEXT NOT NULL,
            env BLOB NOT NULL,
            communicators BLOB NOT NULL,
            communicator_count INTEGER NOT NULL,
            communicators_ns INTEGER NOT NULL,
            first_ns INTEGER NOT NULL,
            last_ns INTEGER NOT NULL,
            ended INTEGER NOT NULL,
            UNIQUE (job, rank, sender, pid, life_ns))""",
        """CREATE TABLE tail (
            id INTEGER PRIMARY KEY,
            watch INTEGER NOT NULL REFERENCES watch,
            sender INTEGER NOT NULL,
            minute INTEGER NOT NULL,
            first_ns INTEGER NOT NULL,
            last_ns INTEGER NOT NULL,
            columns BLOB NOT NULL)""",
        "CREATE INDEX tail_watch ON tail (watch, last_ns, first_ns)",
        "CREATE INDEX tail_minute ON tail (sender, minute, watch)",
        """CREATE TABLE chunk (
            id INTEGER PRIMARY KEY,
            watch INTEGER NOT NULL REFERENCES watch,
            minute INTEGER NOT NULL,
            first_ns INTEGER NOT NULL,
            last_ns INTEGER NOT NULL,
            columns BLOB NOT NULL,
            UNIQUE (watch, minute))""",
        "CREATE INDEX chunk_watch ON chunk (watch, last_ns, first_ns)",
        """CREATE TABLE event (
            id INTEGER PRIMARY KEY,
            boot INTEGER NOT NULL REFERENCES boot,
            at_ns INTEGER NOT NULL,
            kind TEXT NOT NULL,
            detail TEXT NOT NULL,
            job TEXT NOT NULL,
            rank INTEGER NOT NULL)""",
        "CREATE INDEX event_time ON event (boot, at_ns)",
    ):
        db.execute(statement)


def _clocks_from_arrivals(db: Database) -> None:
    """How a node's clock stands is told by its newest batches: the smallest lag of a boot would outlive a
    change of the server's clock."""
    db.execute("ALTER TABLE boot DROP COLUMN server_offset_ns")


MIGRATIONS: tuple[Callable[[Database], None], ...] = (_batches_and_columns, _clocks_from_arrivals)
"""In order; the place in the tuple, counted from 1, is the version that the step leads to."""
