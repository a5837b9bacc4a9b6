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


def _runs_marks_and_commands(db: Database) -> None:
    """``watch.run`` tells apart the runs of one agent, each of which numbers communicators by itself.
    ``sender.forgotten_ns``: batches that begin before it were deleted, and are not stored again;
    ``emptied_ns``: when the last of its batches went (the server's UTC). ``command``: what was asked of
    agents."""
    for statement in (
        """CREATE TABLE watch_with_run (
            id INTEGER PRIMARY KEY,
            job TEXT NOT NULL,
            rank INTEGER NOT NULL,
            sender INTEGER NOT NULL REFERENCES sender,
            pid INTEGER NOT NULL,
            life_ns INTEGER NOT NULL,
            run INTEGER NOT NULL,
            world_size INTEGER NOT NULL,
            local_rank INTEGER NOT NULL,
            name TEXT NOT NULL,
            env BLOB NOT NULL,
            communicators BLOB NOT NULL,
            communicators_ns INTEGER NOT NULL,
            first_ns INTEGER NOT NULL,
            last_ns INTEGER NOT NULL,
            ended INTEGER NOT NULL,
            UNIQUE (job, rank, sender, pid, life_ns, run))""",
        """INSERT INTO watch_with_run
            SELECT id, job, rank, sender, pid, life_ns, 0, world_size, local_rank, name, env, communicators,
                communicators_ns, first_ns, last_ns, ended FROM watch""",
        "DROP TABLE watch",
        "ALTER TABLE watch_with_run RENAME TO watch",
        "CREATE INDEX watch_sender ON watch (sender)",
        "ALTER TABLE sender ADD COLUMN forgotten_ns INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sender ADD COLUMN emptied_ns INTEGER",
        """CREATE TABLE command (
            id TEXT PRIMARY KEY,
            node TEXT NOT NULL,
            command BLOB NOT NULL,
            asker TEXT NOT NULL,
            issued_ns INTEGER NOT NULL,
            expires_ns INTEGER NOT NULL,
            outcome TEXT NOT NULL DEFAULT '',
            words TEXT NOT NULL DEFAULT '',
            settled_ns INTEGER)""",
        "CREATE INDEX command_open ON command (expires_ns) WHERE settled_ns IS NULL",
        "CREATE INDEX command_time ON command (issued_ns)",
    ):
        db.execute(statement)


def _imports(db: Database) -> None:
    """``boot.imported`` is empty for agents; of an import it says which files, and there is one boot per node, or
    one with the node "" where the files name none. An import has one batch per boot; the ``minute`` of its chunks
    is a running number below 0, so that all go together. ``watch.standing`` (a rank's place and progress) is NULL
    where nothing tells."""
    for statement in (
        "ALTER TABLE boot ADD COLUMN imported TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE watch ADD COLUMN source TEXT NOT NULL DEFAULT 'agent'",
        "ALTER TABLE watch ADD COLUMN timed_by INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE watch ADD COLUMN standing BLOB",
    ):
        db.execute(statement)


def _tails_in_one_line(_: Database) -> None:
    """No table changes, and no row: what is in ``tail`` is read as before. New rows there are of another format
    (``seconds.FORMAT``), which older versions must not take for damaged ones."""


def _host_probes(db: Database) -> None:
    """``node_chunk`` is to ``batch.metrics`` what ``chunk`` is to ``tail``: a minute of what is measured of a node.
    No row changes; new ones of ``tail`` and ``chunk`` are of another format."""
    for statement in (
        """CREATE TABLE node_chunk (
            sender INTEGER NOT NULL REFERENCES sender,
            minute INTEGER NOT NULL,
            first_ns INTEGER NOT NULL,
            last_ns INTEGER NOT NULL,
            columns BLOB NOT NULL,
            PRIMARY KEY (sender, minute))""",
        "CREATE INDEX batch_metrics ON batch (sender, start_ns) WHERE metrics IS NOT NULL",
    ):
        db.execute(statement)


MIGRATIONS: tuple[Callable[[Database], None], ...] = (
    _batches_and_columns,
    _clocks_from_arrivals,
    _runs_marks_and_commands,
    _imports,
    _tails_in_one_line,
    _host_probes,
)
"""In order; the place in the tuple, counted from 1, is the version that the step leads to."""
