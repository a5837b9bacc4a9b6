"""Where batches are kept: one protocol, opened by URL.

``sqlite:///path/to/file.db`` is the store of one server. :func:`open_store` is the only way in.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from diagnosis.evidence import Evidence
from probes.records import Batch, Command, Probe


@dataclass(frozen=True)
class JobInfo:
    """One line of ``sysom jobs``. Instants are UTC nanoseconds."""

    job: str
    world_size: int
    ranks_seen: int
    nodes: int
    first_ns: int
    last_ns: int
    source: str = "agent"
    """``agent``, or the importer's name."""
    imported: str = ""
    """Which files were imported (a digest); empty for what agents saw."""


@dataclass(frozen=True)
class Keep:
    """How much is kept: batches that arrived in the last ``days``, in a file of at most ``gb`` (10⁹ bytes)."""

    days: float
    gb: float


@dataclass(frozen=True)
class StoreHealth:
    """How the store stands, now. Instants are UTC nanoseconds."""

    path: str
    size_bytes: int
    """The file, with what is free in it."""
    wal_bytes: int
    """The write-ahead log beside it."""
    free_bytes: int
    """What its disk has left for this user."""
    bytes_per_s: float
    """How fast it grows at present; 0 until that was measured."""
    oldest_ns: int | None
    newest_ns: int | None
    """Arrival of the oldest and newest batch; None when there is none."""
    integrity: str
    """``ok``, ``unchecked``, ``checking``, or what is damaged, in SQLite's words: then nothing is written."""
    warnings: list[str] = field(default_factory=list)
    """What else needs a person, in words; empty when nothing does."""


@dataclass(frozen=True)
class Asked:
    """One command that was asked of one node's agent. Instants are UTC nanoseconds."""

    node: str
    command: Command
    by: str
    """Who asked."""
    issued_ns: int
    expires_ns: int
    outcome: str
    """``done``, ``refused``; empty while the agent has not told."""
    words: str
    """What the agent said."""
    settled_ns: int | None


class StoreError(RuntimeError):
    """The store cannot be used; the message says why and what to do."""


class UnknownJob(LookupError):
    """No batch of this job was ever stored. ``nearest`` holds up to three names that look alike, ``known`` the
    three jobs with the newest data."""

    def __init__(self, job: str, nearest: Sequence[str] = (), known: Sequence[str] = ()) -> None:
        self.job = job
        self.nearest = list(nearest)
        self.known = list(known)
        if nearest:
            hint = f"did you mean {', '.join(nearest)}?"
        elif known:
            hint = f"known jobs: {', '.join(known)}"
        else:
            hint = "no job has been seen yet"
        super().__init__(f"no job named {job!r} is known; {hint}")

    def __reduce__(self) -> tuple[type[UnknownJob], tuple[str, list[str], list[str]]]:
        """Sent between processes with its parts: the words are made anew."""
        return (UnknownJob, (self.job, self.nearest, self.known))


class JobExists(LookupError):
    """Something is stored under the name that an import was to have. ``imported`` says which files it was imported
    from (:attr:`JobInfo.imported`); empty when agents saw it."""

    def __init__(self, job: str, imported: str) -> None:
        self.job = job
        self.imported = imported
        if imported:
            hint = "--replace puts this import in its place; or take another name"
        else:
            hint = "it was seen by agents, whose data an import never replaces: take another name"
        super().__init__(f"there is a job named {job!r} already; {hint}")

    def __reduce__(self) -> tuple[type[JobExists], tuple[str, str]]:
        return (JobExists, (self.job, self.imported))


def names_like(names: Sequence[str], wanted: str) -> list[str]:
    """Up to three of ``names`` that look like ``wanted``, the likest first."""
    folded = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(wanted.casefold(), list(folded), n=3, cutoff=0.5)
    return [folded[name] for name in close]


class Store(Protocol):
    """Keeps batches; gives evidence. Safe to use from several threads; every call blocks: keep it off the
    event loop."""

    def add(self, batch: Batch, received_ns: int) -> bool:
        """Store a batch, durably and whole, or not at all. False when it was there already.

        ``received_ns``: the server's UTC time of arrival. Raises :class:`StoreError`.
        """

    def add_import(
        self, job: str, imported: str, batches: Iterable[Batch], received_ns: int, *, replacing: bool = False
    ) -> None:
        """Store all of ``batches`` as ``job``, durably, or nothing; agents' batches are stored meanwhile.

        The instants of ``batches`` are UTC, each may be of any length, and of ``node`` "" where that is not known;
        their names (boot, agent, number) are not used. One world size holds for all, the largest. Memory is that of
        one batch. ``imported`` names the files; ``replacing``: an earlier import of the job goes when this one
        comes. It is deleted for age by ``received_ns``, all of it together.

        Raises what ``batches`` raises, :class:`JobExists`, ``ValueError`` when there is no rank in them, and
        :class:`StoreError`; then nothing has changed.
        """

    def jobs(self) -> list[JobInfo]:
        """All jobs, the one with the newest data first."""

    def evidence(self, job: str, start_ns: int, end_ns: int) -> Evidence:
        """What is known of a job between two UTC instants (start included, end not).

        Raises :class:`UnknownJob` and :class:`StoreError`, the latter also later: what threads blocked for, who
        woke them, who had their CPUs and metrics may be read when somebody looks. A known job without data in
        the window gives an :class:`Evidence` without ranks.
        """

    def add_command(self, node: str, command: Command, issued_ns: int, expires_ns: int, by: str = "") -> None:
        """Ask something of a node's agent, until ``expires_ns``. Durable. Raises :class:`StoreError`, also for
        an id that was used before."""

    def pending_commands(self, now_ns: int) -> dict[str, list[Command]]:
        """Per node what is to be asked of its agent: neither settled nor expired, the oldest first."""

    def settle_command(self, id: str, outcome: str, words: str, at_ns: int) -> None:
        """Keep what became of a command; the first word about it stays. An unknown id changes nothing."""

    def commands(self, limit: int) -> list[Asked]:
        """The ``limit`` commands that were asked last, the newest first."""

    def nodes_of(self, job: str) -> dict[str, int]:
        """Node → arrival of its newest batch with a rank of this job (UTC ns), of ranks that have not ended.

        Raises :class:`UnknownJob`."""

    def probes(self) -> dict[str, list[Probe]]:
        """Per node that ever sent anything, its probes as its newest batch said."""

    def tidy(self, now_ns: int) -> int:
        """Delete what is older than what is kept, the oldest first, in steps of some milliseconds between which
        batches are added; how many batches went. Returns within about ten seconds, and does nothing where the
        store was opened without ``keep``: call it every minute, in a thread of its own. Raises
        :class:`StoreError`."""

    def health(self) -> StoreHealth:
        """How the store stands. Raises nothing: what cannot be read is a warning."""

    def close(self) -> None: ...


def open_store(url: str, *, read_only: bool = False, keep: Keep | None = None) -> Store:
    """Open the store that ``url`` names, creating and migrating it unless ``read_only``.

    ``keep`` is the server's: what :meth:`Store.tidy` keeps; the file is then also checked.

    Raises :class:`StoreError` for a scheme that does not exist, a file that is not ours or is of a newer
    version, a folder that cannot be written.
    """
    from diagnosis.store.sqlite import SqliteStore

    return SqliteStore(file_of(url), read_only=read_only, keep=keep)


def file_of(url: str) -> Path:
    """The file of a ``sqlite:///`` URL. Raises :class:`StoreError` for any other."""
    scheme, separator, path = url.partition(":///")
    if scheme == "sqlite" and separator and path:
        return Path("/" + path.lstrip("/"))
    if url.startswith("clickhouse://"):
        raise StoreError("the ClickHouse store is not in this version; use sqlite:///path/to/file.db")
    raise StoreError(f"SYSOM_STORE is {url!r}; it must look like sqlite:///path/to/file.db")
