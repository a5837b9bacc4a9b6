"""The store of one server: a SQLite file, through sqlite-utils.

Write-ahead log, one writer behind a lock, a fresh connection per read (so reads never wait for the writer and
see one moment). Commits are on the disk before :meth:`SqliteStore.add` returns (``synchronous = FULL``): an
agent deletes its copy then.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
from sqlite_utils import Database

from diagnosis.evidence import Evidence
from diagnosis.store import (
    Asked,
    JobInfo,
    Keep,
    StoreError,
    StoreHealth,
    UnknownJob,
    errands,
    health,
    imports,
    names_like,
    nodes,
    opening,
    retention,
    rows,
    tidying,
)
from diagnosis.store.assemble import Watch, newest_lives, rank_evidence
from diagnosis.store.columns import Columns, Details, undamaged
from diagnosis.store.integrity import Check
from diagnosis.store.opening import transaction
from probes.records import Batch, Command, Event, Probe

log = logging.getLogger(__name__)

PACKED_PER_CALL = 8
"""Minutes of a rank that one :meth:`SqliteStore.add` packs at most (about 3 ms each): a node of 16 ranks has
its minute packed two batches later."""
IMPORT_NOTE = "import-note"
"""Kind of the events that say what is missing or odd about imported files."""
TIDY_S = 10.0
"""Longest run of :meth:`SqliteStore.tidy`; what is left comes with the next."""
PAUSE_S = 0.002
"""Between two steps of tidying: a lock that is taken again at once is never had by those who wait for it."""
WAL_LONG_BYTES = 64 << 20
"""A write-ahead log beyond this is asked to start anew: by itself it does so only when nobody reads."""

_NEVER = 1 << 40
"""A minute after all others."""


class SqliteStore:
    """See :class:`diagnosis.store.Store`."""

    def __init__(self, path: str | Path, *, read_only: bool = False, keep: Keep | None = None) -> None:
        self._path = Path(path)
        self._keep = keep
        self._read_only = read_only
        self._lock = threading.Lock()
        self._writer: Database | None = None
        self._closed = False
        self._ending = threading.Event()
        self._growth = health.Growth()
        self._trouble = ""  # why the last batch could not be kept
        self._unpacked: dict[int, str] = {}  # sender → why minutes of it could not be packed
        self._check = Check(self._path)
        with opening.explained(self._path):
            if read_only:
                opening.check_for_reading(self._path)
            else:
                check = None if keep is None else self._check.start
                self._writer = opening.for_writing(self._path, check)

    def close(self) -> None:
        self._ending.set()
        self._check.close()
        with self._lock:
            self._closed = True
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    # --- writing

    def add(self, batch: Batch, received_ns: int) -> bool:
        try:
            with self._writing() as db:
                with transaction(db):
                    sender = rows.add_batch(db, batch, received_ns)
                if sender is not None:
                    self._pack(db, sender, batch.start_ns // nodes.MINUTE_NS)
        except StoreError as error:
            self._trouble = str(error)
            raise
        self._trouble = ""
        return sender is not None

    def add_import(
        self, job: str, imported: str, batches: Iterable[Batch], received_ns: int, *, replacing: bool = False
    ) -> None:
        with self._writing():  # may it be written to?
            pass
        with ExitStack() as stack:
            with opening.explained(self._path):
                db = stack.enter_context(opening.for_import(self._path))
                imports.check_free(db, job, replacing=replacing)
            # What `batches` raises is about their files, not about the store's.
            aside = imports.set_aside(db, job, imported, batches)
            if not aside.lives:
                raise ValueError(f"the import {job!r} holds no rank")
            with opening.explained(self._path):
                imports.put_in(db, aside, received_ns, replacing=replacing)

    def _pack(self, db: Database, sender: int, minute: int) -> None:
        """Turn tails of minutes before ``minute`` into chunks. Not in the batch's transaction: the batch is
        stored, whatever happens here; what cannot be packed is read as it is."""
        try:
            with opening.explained(self._path):
                over = rows.minutes_over(db, sender, minute, PACKED_PER_CALL)
                of_node = nodes.minutes_over(db, sender, minute, PACKED_PER_CALL)
                if over or of_node:
                    with transaction(db):
                        for watch, past in over:
                            rows.pack_minute(db, watch, past)
                        for one in of_node:
                            nodes.pack_minute(db, one)
        except StoreError as error:
            if sender not in self._unpacked:
                log.warning("minutes are kept as they came, not packed: %s", error)
            self._unpacked[sender] = str(error)
        else:
            self._unpacked.pop(sender, None)

    # --- tidying

    def tidy(self, now_ns: int) -> int:
        if self._keep is None:
            return 0
        until = time.monotonic() + TIDY_S

        def go_on() -> bool:
            return time.monotonic() < until and not self._ending.wait(PAUSE_S)

        with self._writing() as db:
            self._growth.measured(now_ns, opening.used_bytes(db))
        batches = tidying.forget(self._reading, self._writing, self._keep, now_ns, go_on)
        with self._writing() as db:
            self._growth.deleted(opening.used_bytes(db))
            with transaction(db):
                retention.forget_senders(db, now_ns)
                errands.forget(db, now_ns - int(self._keep.days * 86_400e9))
        for sender in list(self._unpacked):  # it may never send again
            with self._writing() as db:
                self._pack(db, sender, _NEVER)
        tidying.give_back(self._writing, self._keep, go_on)
        if self._wal_bytes() > WAL_LONG_BYTES:
            with self._writing() as db:
                opening.restart_wal(db)
        return batches

    # --- what is asked of agents

    def add_command(self, node: str, command: Command, issued_ns: int, expires_ns: int, by: str = "") -> None:
        with self._writing() as db, transaction(db):
            errands.add(db, node, command, issued_ns, expires_ns, by)

    def settle_command(self, id: str, outcome: str, words: str, at_ns: int) -> None:
        with self._writing() as db, transaction(db):
            errands.settle(db, id, outcome, words, at_ns)

    def pending_commands(self, now_ns: int) -> dict[str, list[Command]]:
        with self._reading() as db:
            return errands.pending(db, now_ns)

    def commands(self, limit: int) -> list[Asked]:
        with self._reading() as db:
            return errands.newest(db, limit)

    # --- reading

    def jobs(self) -> list[JobInfo]:
        with self._reading() as db:
            return rows.job_infos(db)

    def probes(self) -> dict[str, list[Probe]]:
        with self._reading() as db:
            return rows.probes_of_nodes(db)

    def nodes_of(self, job: str) -> dict[str, int]:
        with self._reading() as db:
            watches = _watches(db, job)
        nodes: dict[str, int] = {}
        for watch in watches:
            if not watch.ended and not watch.imported:
                nodes[watch.node] = max(
                    nodes.get(watch.node, watch.first_ns), watch.last_ns + watch.utc_offset_ns
                )
        return nodes

    def evidence(self, job: str, start_ns: int, end_ns: int) -> Evidence:
        with self._reading() as db:
            watches = _watches(db, job)
            present = [watch for watch in watches if watch.overlaps(start_ns, end_ns)]
            boots = {watch.boot: watch for watch in present}
            parts = [(watch, rows.columns_of(db, watch, start_ns, end_ns)) for watch in present]
            probes = rows.probes_of(db, list(boots))
            of_nodes = nodes.columns_of(db, boots.values(), start_ns, end_ns)
            events = [
                event for boot in boots.values() for event in rows.events_of(db, boot, job, start_ns, end_ns)
            ]
            notes = [note for boot in boots.values() for note in rows.node_notes(db, boot, start_ns, end_ns)]
        lives, restarts = newest_lives(self._explaining(parts))
        with opening.explained(self._path), undamaged():
            ranks = {rank: rank_evidence(life, end_ns) for rank, life in lives.items()}
        newest = max(
            present or watches, key=lambda watch: (watch.last_ns + watch.utc_offset_ns, watch.world_size)
        )
        return Evidence(
            job=job,
            world_size=newest.world_size,
            start_ns=start_ns,
            end_ns=end_ns,
            watched_since_ns=min(watch.first_ns + watch.utc_offset_ns for watch in watches),
            ranks=ranks,
            probes=probes,
            events=sorted(events, key=msgspec.structs.astuple),
            notes=[*sorted(notes), *restarts, *_told_at_import(watches, events)],
            metrics=nodes.metrics(self._explaining(of_nodes)),
        )

    def _explaining(self, parts: list[tuple[Watch, Columns]]) -> list[tuple[Watch, Columns]]:
        """Details are read later: what is wrong with them is said in the same words."""

        def explaining(details: Callable[[], Details]) -> Callable[[], Details]:
            def read() -> Details:
                with opening.explained(self._path):
                    return details()

            return read

        return [(watch, replace(columns, details=explaining(columns.details))) for watch, columns in parts]

    def health(self) -> StoreHealth:
        warnings: list[str | None] = [self._trouble, *self._unpacked.values()]
        oldest = newest = None
        try:
            with self._reading() as db:
                oldest, newest = rows.arrivals(db)
        except StoreError as error:
            warnings.append(str(error))
        size, wal, free = _size(self._path), self._wal_bytes(), _free(self._path.parent)
        if free is not None:
            warnings.append(
                health.disk_warning(
                    str(self._path.parent), free, size + wal, self._growth.bytes_per_s, self._keep
                )
            )
        warnings.append(health.wal_warning(str(self._path), wal))
        return StoreHealth(
            path=str(self._path),
            size_bytes=size,
            wal_bytes=wal,
            free_bytes=free or 0,
            bytes_per_s=self._growth.bytes_per_s,
            oldest_ns=oldest,
            newest_ns=newest,
            integrity=self._check.result,
            warnings=list(dict.fromkeys(words for words in warnings if words)),
        )

    def _wal_bytes(self) -> int:
        return _size(Path(f"{self._path}-wal"))

    # --- connections

    @contextmanager
    def _writing(self) -> Iterator[Database]:
        """The one connection that writes, for as long as the lock is held."""
        if self._read_only:
            raise StoreError(f"the store {self._path} was opened for reading only")
        with self._lock, opening.explained(self._path):
            if self._writer is None:
                raise StoreError(f"the store {self._path} is closed")
            if self._check.damage:
                raise StoreError(self._check.damage)
            yield self._writer

    @contextmanager
    def _reading(self) -> Iterator[Database]:
        if self._closed:
            raise StoreError(f"the store {self._path} is closed")
        with opening.explained(self._path), opening.for_reading(self._path) as db:
            yield db


def _watches(db: Database, job: str) -> list[Watch]:
    """All watches of a job. Raises :class:`UnknownJob`."""
    watches = rows.watches(db, job)
    if not watches:
        known = [info.job for info in rows.job_infos(db)]
        raise UnknownJob(job, names_like(known, job), known[:3])
    return watches


def _told_at_import(watches: list[Watch], events: list[Event]) -> list[str]:
    """What an import said was missing or odd about its files."""
    if not watches[0].imported:
        return []
    return sorted(event.detail for event in events if event.kind == IMPORT_NOTE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # not there (yet), or not to be looked at
        return 0


def _free(folder: Path) -> int | None:
    """What this user may still write there; None when the file system does not tell."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize
