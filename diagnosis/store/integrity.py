"""Whether the file is sound: at once for a small one, beside the work for a large one."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from sqlite_utils import Database

from diagnosis.store import StoreError, opening

AT_ONCE_BYTES = 256 << 20
"""Files up to this size are checked before the store is used: about a second."""
PROBLEMS = 5
"""So many problems are named; the first says what to do already."""
STEPS_BETWEEN = 10_000
"""Virtual machine steps of SQLite between two looks at whether to go on: well below 0.1 s."""
UNCHECKED, CHECKING, SOUND = "unchecked", "checking", "ok"


class Check:
    """``PRAGMA quick_check`` of one file, over a connection of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.result = UNCHECKED
        """``unchecked``, ``checking``, ``ok``, or what is damaged, in words."""

    @property
    def damage(self) -> str:
        """What is to be done about a damaged file, in words; empty when none was found."""
        return "" if self.result in (UNCHECKED, CHECKING, SOUND) else damage(self._path, self.result)

    def start(self, size_bytes: int) -> None:
        """Check a small file now, a large one in a thread. Raises :class:`StoreError` for a damaged one."""
        if size_bytes <= AT_ONCE_BYTES:
            self._run()
            if self.damage:
                raise StoreError(self.damage)
            return
        self.result = CHECKING
        self._thread = threading.Thread(target=self._run, name="store-check", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End a check that runs."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with opening.explained(self._path), opening.for_reading(self._path) as db:
                db.conn.set_progress_handler(self._ending.is_set, STEPS_BETWEEN)
                problems = quick(db)
        except StoreError as error:
            if self._ending.is_set():
                self.result = UNCHECKED
                return
            problems = [str(error)]
        self.result = named(problems) if problems else SOUND


def quick(db: Database) -> list[str]:
    """Whether all pages hang together. Problems in SQLite's words; empty when it is sound."""
    return _problems(db, "PRAGMA quick_check")


def full(db: Database) -> list[str]:
    """As :func:`quick`, and whether each index says what its table says."""
    return _problems(db, "PRAGMA integrity_check")


def named(problems: list[str]) -> str:
    """The first few of them."""
    more = f" and {len(problems) - PROBLEMS} more" if len(problems) > PROBLEMS else ""
    return "; ".join(problems[:PROBLEMS]) + more


def damage(path: Path, problems: str) -> str:
    """What is to be done about it."""
    return (
        f"the store {path} is damaged ({problems}): nothing is written to it; restore it from a copy, or move it "
        "away and start with a new file"
    )


def _problems(db: Database, sql: str) -> list[str]:
    try:
        rows = [str(row[0]) for row in db.execute(sql)]
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return [str(error)]
        raise
    lines = [line for row in rows for line in row.splitlines() if not line.startswith("*** in database")]
    return [] if lines == ["ok"] else lines
