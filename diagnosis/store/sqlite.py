"""The store of one server: a SQLite file, through sqlite-utils.

Write-ahead log, one writer behind a lock, a fresh connection per read (so reads never wait for the writer and
see one moment). Commits are on the disk before :meth:`SqliteStore.add` returns (``synchronous = FULL``): an
agent deletes its copy then.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from sqlite_utils import Database

from diagnosis.evidence import Evidence
from diagnosis.store import JobInfo, StoreError, UnknownJob, rows
from diagnosis.store.assemble import newest_lives, rank_evidence
from diagnosis.store.columns import DamagedColumns
from diagnosis.store.migrations import APPLICATION_ID, MIGRATIONS
from probes.records import Batch

PACKED_PER_CALL = 8
"""Minutes of a rank that one :meth:`SqliteStore.add` packs at most (about 3 ms each): a node of 16 ranks has
its minute packed two batches later."""
BUSY_S = 10.0
"""How long to wait for another process that writes (an import) before giving up."""


class SqliteStore:
    """See :class:`diagnosis.store.Store`."""

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self._path = Path(path)
        self._read_only = read_only
        self._lock = threading.Lock()
        self._writer: Database | None = None
        self._closed = False
        with self._explained():
            if read_only:
                self._open_for_reading()
            else:
                self._open_for_writing()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    # --- writing

    def add(self, batch: Batch, received_ns: int) -> bool:
        with self._lock, self._explained():
            db = self._writing()
            with _transaction(db):
                sender = rows.add_batch(db, batch, received_ns)
            if sender is None:
                return False
            self._pack(db, sender, batch.start_ns // rows.MINUTE_NS)
        return True

    def _pack(self, db: Database, sender: int, minute: int) -> None:
        """Turn tails of minutes before ``minute`` into chunks. Not in the batch's transaction: the batch is
        stored, whatever happens here."""
        over = rows.minutes_over(db, sender, minute, PACKED_PER_CALL)
        if over:
            with _transaction(db):
                for watch, past in over:
                    rows.pack_minute(db, watch, past)

    # --- reading

    def jobs(self) -> list[JobInfo]:
        with self._explained(), self._reading() as db:
            return rows.job_infos(db)

    def evidence(self, job: str, start_ns: int, end_ns: int) -> Evidence:
        with self._explained(), self._reading() as db:
            watches = rows.watches(db, job)
            if not watches:
                known = [info.job for info in rows.job_infos(db)]
                raise UnknownJob(job, rows.names_like(known, job), known[:3])
            present = [watch for watch in watches if watch.overlaps(start_ns, end_ns)]
            boots = {watch.boot: watch for watch in present}
            parts = [(watch, rows.columns_of(db, watch, start_ns, end_ns)) for watch in present]
            probes = rows.probes_of(db, list(boots))
            events = [
                event for boot in boots.values() for event in rows.events_of(db, boot, job, start_ns, end_ns)
            ]
            notes = [note for boot in boots.values() for note in rows.node_notes(db, boot, start_ns, end_ns)]
        lives, restarts = newest_lives(parts)
        newest = max(
            present or watches, key=lambda watch: (watch.last_ns + watch.utc_offset_ns, watch.world_size)
        )
        return Evidence(
            job=job,
            world_size=newest.world_size,
            start_ns=start_ns,
            end_ns=end_ns,
            watched_since_ns=min(watch.first_ns + watch.utc_offset_ns for watch in watches),
            ranks={rank: rank_evidence(life, end_ns) for rank, life in lives.items()},
            probes=probes,
            events=sorted(events, key=msgspec.structs.astuple),
            notes=[*sorted(notes), *restarts],
        )

    # --- the file

    def _open_for_writing(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"the folder of the store {self._path} cannot be made: {error}") from error
        connection = sqlite3.connect(self._path, timeout=BUSY_S, check_same_thread=False)
        try:
            db = Database(connection, recursive_triggers=False, execute_plugins=False)
            self._check_ours(db, may_be_empty=True)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            _migrate(db)
        except BaseException:
            connection.close()
            raise
        self._writer = db

    def _open_for_reading(self) -> None:
        if not self._path.exists():
            raise StoreError(f"there is no store at {self._path} yet: start the server, which makes it")
        with self._reading() as db:
            version = self._check_ours(db, may_be_empty=False)
        if version < len(MIGRATIONS):
            raise StoreError(
                f"the store {self._path} has schema {version}, older than {len(MIGRATIONS)}: start the "
                "server of this version once, it brings the file up to date"
            )

    def _check_ours(self, db: Database, *, may_be_empty: bool) -> int:
        tables = rows.value(db, "SELECT count(*) FROM sqlite_master")
        version = rows.value(db, "PRAGMA user_version")
        if not (may_be_empty and tables == 0) and rows.value(db, "PRAGMA application_id") != APPLICATION_ID:
            raise StoreError(f"{self._path} is not a store of sysom: give SYSOM_STORE another path")
        if version > len(MIGRATIONS):
            raise StoreError(
                f"the store {self._path} has schema {version}; this version knows up to {len(MIGRATIONS)}: "
                "upgrade sysom, or use another file"
            )
        return int(version)

    def _writing(self) -> Database:
        if self._read_only:
            raise StoreError(f"the store {self._path} was opened for reading only")
        if self._writer is None:
            raise StoreError(f"the store {self._path} is closed")
        return self._writer

    @contextmanager
    def _reading(self) -> Iterator[Database]:
        if self._closed:
            raise StoreError(f"the store {self._path} is closed")
        address = f"{self._path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=BUSY_S)) as connection:
            db = Database(connection, recursive_triggers=False, execute_plugins=False)
            db.execute("BEGIN")  # one moment for all that is read
            yield db

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What the file, the disk and SQLite say, in words that tell what to do."""
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "") or ""
            raise StoreError(_words(self._path, name, error)) from error
        except OSError as error:
            raise StoreError(
                f"the store {self._path} cannot be opened ({error.strerror or error}): check that this user may "
                "read it and its folder"
            ) from error
        except (msgspec.DecodeError, DamagedColumns) as error:
            raise StoreError(
                f"the store {self._path} holds damaged columns ({error}): restore it from a copy, or start "
                "with a new file"
            ) from error


def _words(path: Path, name: str, error: sqlite3.Error) -> str:
    for prefix, words in (
        ("SQLITE_FULL", "the disk under the store {} is full: free some space; agents keep what they have"),
        ("SQLITE_BUSY", "another process is writing to the store {} for too long: wait for it, or end it"),
        ("SQLITE_LOCKED", "another process is writing to the store {} for too long: wait for it, or end it"),
        ("SQLITE_READONLY", "the store {} cannot be written: give this user the right to write to it"),
        ("SQLITE_CANTOPEN", "the store {} cannot be opened: check that this user may read it and its folder"),
        ("SQLITE_NOTADB", "{} is not a store of sysom: give SYSOM_STORE another path"),
        ("SQLITE_CORRUPT", "the store {} is damaged: restore it from a copy, or start with a new file"),
        ("SQLITE_IOERR", "the disk under the store {} does not answer as it should: check it"),
    ):
        if name.startswith(prefix):
            return f"{words.format(path)} ({error})"
    return f"the store {path} cannot be used: {error}"


@contextmanager
def _transaction(db: Database) -> Iterator[None]:
    """All or nothing. IMMEDIATE, because a transaction that reads first and writes later fails when another
    process wrote in between."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.conn.in_transaction:  # some errors have rolled back already
            db.execute("ROLLBACK")
        raise


def _migrate(db: Database) -> None:
    for version, step in enumerate(MIGRATIONS, start=1):
        with _transaction(db):
            # Asked within the transaction: another process may have come first.
            if rows.value(db, "PRAGMA user_version") < version:
                step(db)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {version}")
