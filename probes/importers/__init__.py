"""Importers: files that others wrote (traces, dumps, logs, tables), read as the records that agents send.

**The contract.** Each importer is one module with one function::

    def read(paths: Sequence[Path], *, job: str) -> Iterator[Part | Note]

* ``paths``: the files of one job that were recognised as this importer's (:func:`gather`), sorted by name, not
  empty, maybe gzipped (:func:`probes.importers.files.open_plain` undoes that, and puts what is wrong with a file
  into words). Nothing is read before the first ``next``; no file stays open longer than it is read.
* It yields a :class:`Part` per rank and stretch of time, in any order of ranks, each rank's in order of time, of at
  most ``PART_ROWS`` rows (collectives and operations together): so a file of gigabytes needs bounded memory, and
  the store takes part after part. A rank of which nothing is known but that it is there has one part without rows.
* It raises :class:`Unusable` for a file that cannot be used; whoever called stores nothing then. A single row that
  cannot be used (non-finite, negative duration) is left out, counted, and told in a :class:`Note`.
* What is missing, odd or assumed goes into a :class:`Note`, one sentence a user understands, at most once per
  matter and file. Notes are printed by ``sysom import``, kept with the job, and stand in a verdict's ``not_seen``.

**What a part's** ``rank_batch`` **holds.** ``source`` is the importer's name; ``job`` the ``job`` that was given;
``pid`` and ``start_ns`` what the trace tells of the process, else 0 (the same in all parts of a rank);
``local_rank`` 0, ``name`` "" and ``env`` {} where not told. ``communicators`` is the list so far: a later part's
list begins with the earlier one's. ``operations.kind`` indexes the same part's ``names``. ``progress`` and
``place`` count as the newest part that has them says. ``timed_by`` is one for the whole rank. World sizes, ranks
beyond the world, and two files that claim one rank need no check in an importer: ``sysom import`` compares all
parts. A ``world_size`` that no file tells is 0 in all parts: it becomes the highest rank + 1.

**Time.** All instants of one rank are by one clock. ``Part.utc`` says whether that is UTC (nanoseconds since 1970);
if not, instants count from whatever the trace counts from, the earliest near 0, never negative, the same for all
ranks of a job when the trace allows that.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from probes.importers.recognition import KINDS, recognise, unrecognised
from probes.records import Event, RankBatch

PART_ROWS = 8_192
"""Rows of one part: about 1 MB in Python's lists."""
MODULES = {
    "kineto": "probes.importers.kineto",
    "flight-recorder": "probes.importers.flight_recorder",
    "inspector": "probes.importers.inspector",
    "operations": "probes.importers.operations",
}
"""Importer's name (``RankBatch.source``) → its module."""


class Unusable(ValueError):
    """A file that cannot be used. The message names the file and the place (line, byte, key), says what is wrong
    there and what to do; ``path`` is the file, when it is one file's fault."""

    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class Part:
    """A stretch of time of one rank, as one file tells it."""

    rank_batch: RankBatch
    start_ns: int
    """The stretch that this part covers; all its instants lie in it (an operation may end after it)."""
    end_ns: int
    path: Path
    """The file that tells it, for words about it."""
    utc: bool = True
    """Whether the instants are UTC; see the module."""
    node: str = ""
    """The machine that the rank ran on; "" when the trace does not tell."""


@dataclass(frozen=True)
class Note:
    """What a user should know about what was imported: missing, odd, or assumed."""

    text: str
    rank: int = -1
    """The rank that it is about; −1 when it is about all."""


@dataclass(frozen=True)
class Gathered:
    """The files of one job, all of one kind."""

    kind: str
    """The importer's name."""
    files: list[Path]
    left_out: list[str] = field(default_factory=list)
    """Files that are no traces, each with what it looks like, in words."""


def gather(paths: Sequence[Path]) -> Gathered:
    """The traces among ``paths``; of a folder all files in it and below, without hidden ones.

    Raises :class:`Unusable` when there is none, when a file that was named itself is none, when a path is not
    there, or when several kinds of traces are mixed.
    """
    kinds: dict[str, list[Path]] = {}
    left_out: list[str] = []
    for named in paths:
        for path in _files(named):
            kind = _recognised(path)
            if kind is not None:
                if path not in kinds.setdefault(kind, []):
                    kinds[kind].append(path)
            elif path == named:
                raise Unusable(f"{path}: {unrecognised(path)}; sysom reads {KINDS}", path)
            else:
                left_out.append(f"{path}: {unrecognised(path)}")
    if not kinds:
        among = f" ({'; '.join(left_out[:3])})" if left_out else ""
        raise Unusable(
            f"no trace among {', '.join(map(str, paths)) or 'nothing'}{among}; sysom reads {KINDS}"
        )
    if len(kinds) > 1:
        mixed = "; ".join(f"{kind}: {files[0]}" for kind, files in sorted(kinds.items()))
        raise Unusable(f"several kinds of traces at once ({mixed}): import each kind as a job of its own")
    ((kind, files),) = kinds.items()
    return Gathered(kind, sorted(files), left_out)


def read(gathered: Gathered, *, job: str) -> Iterator[Part | Note]:
    """What the files tell, by the importer of their kind. Raises :class:`Unusable`, also while it is iterated."""
    found: Iterator[Part | Note] = importlib.import_module(MODULES[gathered.kind]).read(
        gathered.files, job=job
    )
    return found


def event_of(note: Note, job: str, at_ns: int) -> Event:
    """The note as it is kept with the job."""
    return Event(kind="import-note", at_ns=at_ns, detail=note.text, job=job, rank=note.rank)


def _files(named: Path) -> list[Path]:
    if not named.is_dir():
        return [named]
    found = []
    for folder, folders, files in os.walk(named):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(folder, name) for name in sorted(files) if not name.startswith(".")]
    return found


def _recognised(path: Path) -> str | None:
    try:
        return recognise(path)
    except OSError as error:
        raise Unusable(f"{path} cannot be read: {error.strerror or error}", path) from error
