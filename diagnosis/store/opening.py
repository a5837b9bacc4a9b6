"""The SQLite file: ours or not, of which version, made, brought up to date; and what SQLite says, in words."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from sqlite_utils import Database

from diagnosis.store import StoreError
from diagnosis.store.columns import DamagedColumns
from diagnosis.store.migrations import APPLICATION_ID, MIGRATIONS

BUSY_S = 10.0
"""How long to wait for another process that writes (an import) before giving up."""
PAGES_PER_STEP = 128
"""Pages moved at once to make the file shorter: 0.5 MB, some milliseconds."""
RESTART_MS = 50
"""How long batches wait while the write-ahead log is to start anew."""
WAL_KEPT_BYTES = 16 << 20
"""A write-ahead log that had to grow beyond this is cut back to it when it starts anew."""
VACUUM_BYTES = 256 << 20
"""Files of older versions up to this size are written anew at the first start (some seconds, and room for it), so
that they can shrink; others keep their size, and use again what becomes free in them."""


def for_writing(path: Path, check: Callable[[int], None] | None = None) -> Database:
    """The connection that writes, the file made or brought up to date. ``check`` gets the size of a file that
    was there, before anything is written to it.

    Raises :class:`StoreError`, what ``check`` raises, and ``sqlite3.Error`` for :func:`explained`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the folder of the store {path} cannot be made: {error}") from error
    _check_not_emptied(path)
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        db = _database(connection)
        version = _check_ours(db, path, may_be_empty=True)
        if check is not None:
            check(size_bytes(db))
        if version == 0:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before anything is in the file
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
        db.execute("PRAGMA secure_delete = OFF")  # zeros over what is deleted would be written, too
        _migrate(db)
        if version and not shrinks(db) and _may_vacuum(db, path):
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("VACUUM")
    except BaseException:
        connection.close()
        raise
    return db


@contextmanager
def for_reading(path: Path) -> Iterator[Database]:
    """A connection that reads one moment, whatever is written meanwhile."""
    address = f"{path.absolute().as_uri()}?mode=ro"
    # Closed, and interrupted, by whoever opened it, maybe from another thread.
    with closing(sqlite3.connect(address, uri=True, timeout=BUSY_S, check_same_thread=False)) as connection:
        db = _database(connection)
        db.execute("BEGIN")
        yield db


@contextmanager
def for_import(path: Path) -> Iterator[Database]:
    """A second connection that writes, beside the one that takes batches: it holds no lock until its
    transaction, and its temporary tables are its own."""
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    with closing(connection):
        db = _database(connection)
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
        db.execute("PRAGMA temp_store = FILE")  # where SQLite was built to keep it in memory
        yield db


def check_for_reading(path: Path) -> None:
    """Raises :class:`StoreError` unless there is a store of this version."""
    if not path.exists():
        raise StoreError(f"there is no store at {path} yet: start the server, which makes it")
    with for_reading(path) as db:
        version = _check_ours(db, path, may_be_empty=False)
    if version < len(MIGRATIONS):
        raise StoreError(
            f"the store {path} has schema {version}, older than {len(MIGRATIONS)}: start the "
            "server of this version once, it brings the file up to date"
        )


def size_bytes(db: Database) -> int:
    """The file, as far as it is in use or free within."""
    return _number(db, "PRAGMA page_count") * _number(db, "PRAGMA page_size")


def free_bytes(db: Database) -> int:
    """What is free within the file."""
    return _number(db, "PRAGMA freelist_count") * _number(db, "PRAGMA page_size")


def used_bytes(db: Database) -> int:
    """What of the file is in use."""
    return size_bytes(db) - free_bytes(db)


def shrinks(db: Database) -> bool:
    """Whether what becomes free at its end can be given back to the disk."""
    return _number(db, "PRAGMA auto_vacuum") != 0


def shrink_step(db: Database) -> None:
    """Give back to the disk some of what is free in the file."""
    db.execute(f"PRAGMA incremental_vacuum({PAGES_PER_STEP})").fetchall()  # each row fetched frees a page
    db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # only then the file gets shorter


def restart_wal(db: Database) -> None:
    """Have the write-ahead log start anew, unless somebody reads for longer than a moment."""
    db.execute(f"PRAGMA busy_timeout = {RESTART_MS}")
    try:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        db.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")


@contextmanager
def transaction(db: Database) -> Iterator[None]:
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


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """What the file, the disk and SQLite say, as :class:`StoreError` in words that tell what to do."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "") or ""
        raise StoreError(_words(path, name, error)) from error
    except OSError as error:
        raise StoreError(
            f"the store {path} cannot be opened ({error.strerror or error}): check that this user may "
            "read it and its folder"
        ) from error
    except (msgspec.DecodeError, DamagedColumns) as error:
        raise StoreError(
            f"the store {path} holds damaged columns ({error}): restore it from a copy, or start "
            "with a new file"
        ) from error


_BUSY = "another process is writing to the store {} for too long: wait for it, or end it"


def _words(path: Path, name: str, error: sqlite3.Error) -> str:
    for prefix, words in (
        ("SQLITE_FULL", "the disk under the store {} is full: free some space; agents keep what they have"),
        ("SQLITE_BUSY", _BUSY),
        ("SQLITE_LOCKED", _BUSY),
        ("SQLITE_READONLY", "the store {} cannot be written: give this user the right to write to it"),
        ("SQLITE_CANTOPEN", "the store {} cannot be opened: check that this user may read it and its folder"),
        ("SQLITE_NOTADB", "{} is not a store of sysom: give SYSOM_STORE another path"),
        (
            "SQLITE_CORRUPT",
            "the store {} is damaged: restore it from a copy, or move it away and start with a new file",
        ),
        (
            "SQLITE_IOERR_SHM",
            "no room for the index of the write-ahead log beside the store {}: free some space on its disk",
        ),
        ("SQLITE_IOERR", "the disk under the store {} does not answer as it should: check it"),
    ):
        if name.startswith(prefix):
            return f"{words.format(path)} ({error})"
    return f"the store {path} cannot be used: {error}"


def _database(connection: sqlite3.Connection) -> Database:
    return Database(connection, recursive_triggers=False, execute_plugins=False)


def _number(db: Database, sql: str) -> int:
    return int(db.execute(sql).fetchone()[0])


def _may_vacuum(db: Database, path: Path) -> bool:
    """The new file is made in the write-ahead log: for a while there are three."""
    size, disk = size_bytes(db), os.statvfs(path.parent)
    return size <= VACUUM_BYTES and disk.f_bavail * disk.f_frsize > 3 * size


def _check_not_emptied(path: Path) -> None:
    """SQLite takes an empty file for a new one, and deletes the log beside it."""
    log = Path(f"{path}-wal")
    if path.exists() and not path.stat().st_size and log.exists() and log.stat().st_size:
        raise StoreError(
            f"the store {path} is empty, and its write-ahead log is not: something cut the file off; restore both "
            "from a copy, or move both away and start with a new file"
        )


def _check_ours(db: Database, path: Path, *, may_be_empty: bool) -> int:
    tables = _number(db, "SELECT count(*) FROM sqlite_master")
    version = _number(db, "PRAGMA user_version")
    if not (may_be_empty and tables == 0) and _number(db, "PRAGMA application_id") != APPLICATION_ID:
        raise StoreError(f"{path} is not a store of sysom: give SYSOM_STORE another path")
    if version > len(MIGRATIONS):
        raise StoreError(
            f"the store {path} has schema {version}; this version knows up to {len(MIGRATIONS)}: "
            "upgrade sysom, or use another file"
        )
    return version


def _migrate(db: Database) -> None:
    for version, step in enumerate(MIGRATIONS, start=1):
        with transaction(db):
            # Asked within the transaction: another process may have come first.
            if _number(db, "PRAGMA user_version") < version:
                step(db)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {version}")
