"""Where batches are kept: one protocol, opened by URL.

``sqlite:///path/to/file.db`` is the store of one server. :func:`open_store` is the only way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diagnosis.evidence import Evidence
from probes.records import Batch


@dataclass(frozen=True)
class JobInfo:
    """One line of ``sysom jobs``. Instants are UTC nanoseconds."""

    job: str
    world_size: int
    ranks_seen: int
    nodes: int
    first_ns: int
    last_ns: int


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


class Store(Protocol):
    """Keeps batches; gives evidence. Safe to use from several threads; every call blocks: keep it off the
    event loop."""

    def add(self, batch: Batch, received_ns: int) -> bool:
        """Store a batch, durably and whole, or not at all. False when it was there already.

        ``received_ns``: the server's UTC time of arrival. Raises :class:`StoreError`.
        """

    def jobs(self) -> list[JobInfo]:
        """All jobs, the one with the newest data first."""

    def evidence(self, job: str, start_ns: int, end_ns: int) -> Evidence:
        """What is known of a job between two UTC instants (start included, end not).

        Raises :class:`UnknownJob`. A known job without data in the window gives an :class:`Evidence`
        without ranks.
        """

    def close(self) -> None: ...


def open_store(url: str, *, read_only: bool = False) -> Store:
    """Open the store that ``url`` names, creating and migrating it unless ``read_only``.

    Raises :class:`StoreError` for a scheme that does not exist, a file that is not ours or is of a newer
    version, a folder that cannot be written.
    """
    from diagnosis.store.sqlite import SqliteStore

    scheme, separator, path = url.partition(":///")
    if scheme == "sqlite" and separator and path:
        return SqliteStore("/" + path.lstrip("/"), read_only=read_only)
    if url.startswith("clickhouse://"):
        raise StoreError("the ClickHouse store is not in this version; use sqlite:///path/to/file.db")
    raise StoreError(f"SYSOM_STORE is {url!r}; it must look like sqlite:///path/to/file.db")
