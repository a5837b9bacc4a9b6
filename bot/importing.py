"""One import: files to parts, parts to the store, all or nothing; and what was found, in a few lines."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from diagnosis.store import Store
from diagnosis.wording import instant, ranks
from probes.importers import Gathered, Note, Part, Unusable, event_of, read
from probes.importers.agreement import agreed
from probes.records import SCHEMA, Batch, Event, RankBatch

SHOWN_NOTES = 20
"""Notes and files that are listed; of more the rest is counted."""


@dataclass
class Found:
    """What an import holds, counted while it is read."""

    ranks: set[int] = field(default_factory=set)
    world_size: int = 0
    nodes: set[str] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)
    collectives: int = 0
    operations: int = 0
    progress: set[int] = field(default_factory=set)
    """Ranks that tell how far they are on their communicators."""
    first_ns: int = 0
    last_ns: int = 0
    dated: bool = False
    notes: dict[str, set[int]] = field(default_factory=dict)
    """Sentence → the ranks that it is about; empty for all."""

    def count(self, part: Part) -> None:
        told = part.rank_batch
        self.first_ns = min(self.first_ns, part.start_ns) if self.ranks else part.start_ns
        self.last_ns = max(self.last_ns, part.end_ns)
        self.ranks.add(told.rank)
        self.world_size = max(self.world_size, told.world_size)
        self.nodes |= {part.node} - {""}
        self.steps |= set(told.operations.step) - {-1}
        self.collectives += len(told.collectives.seq)
        self.operations += len(told.operations.start_ns)
        self.progress |= {told.rank} if told.progress else set()
        self.dated = self.dated or part.utc

    def events(self, job: str) -> list[Event]:
        """The notes, those of several ranks as one sentence."""
        return [
            event_of(
                Note(_about(text, about), next(iter(about)) if len(about) == 1 else -1), job, self.first_ns
            )
            for text, about in self.notes.items()
        ]


def imported_as(gathered: Gathered, digests: Mapping[Path, str], nodes: Mapping[int, str]) -> str:
    """What tells this import from others: the same files with the same names, on the same nodes, are the same."""
    whole = hashlib.blake2b(digest_size=16)
    for name, digest in sorted((path.name, digests[path]) for path in gathered.files):
        whole.update(f"{name}\0{digest}\0".encode())
    whole.update(repr((gathered.kind, sorted(nodes.items()))).encode())
    return whole.hexdigest()


def digests_of(files: Iterable[Path]) -> dict[Path, str]:
    """Per file the digest of its bytes. Raises :class:`Unusable`."""
    digests = {}
    for path in files:
        try:
            with path.open("rb") as file:
                digests[path] = hashlib.file_digest(file, "blake2b").hexdigest()
        except OSError as error:
            raise Unusable(f"{path} cannot be read: {error.strerror or error}", path) from error
    return digests


def store_import(
    store: Store,
    gathered: Gathered,
    *,
    job: str,
    digests: Mapping[Path, str],
    nodes: Mapping[int, str],
    partial: bool = False,
    replacing: bool = False,
) -> Found:
    """Read all files and store what they tell as ``job``, or nothing.

    ``nodes``: rank → node, where the files do not tell or are wrong. ``partial``: files that cannot be used are
    left out, with a note. Raises :class:`probes.importers.Unusable`, :class:`diagnosis.store.JobExists`,
    :class:`diagnosis.store.StoreError`; then nothing has changed.
    """
    files, unusable = list(gathered.files), list[Note]()
    while True:
        found = Found()
        rest = replace(gathered, files=files)
        items = agreed(read(rest, job=job), job=job, same=lambda one, other: digests[one] == digests[other])
        try:
            store.add_import(
                job,
                imported_as(gathered, digests, nodes),
                _batches(unusable, items, found, job, nodes),
                time.time_ns(),
                replacing=replacing,
            )
        except Unusable as error:
            if not partial or error.path not in files or len(files) == 1:
                raise
            files.remove(error.path)
            unusable.append(Note(f"left out: {error}"))
        else:
            return found


def _batches(
    before: list[Note], items: Iterator[Part | Note], found: Found, job: str, nodes: Mapping[int, str]
) -> Iterator[Batch]:
    """A batch per part, and one with the notes at the end."""
    for note in before:
        found.notes[note.text] = set()
    for item in items:
        if isinstance(item, Note):
            found.notes.setdefault(item.text, set()).update({item.rank} - {-1})
            continue
        part = replace(item, node=nodes.get(item.rank_batch.rank, item.node))
        found.count(part)
        yield _batch(part.node, part.start_ns, part.end_ns, ranks=[part.rank_batch])
    missing = sorted(set(nodes) - found.ranks)
    if missing:
        raise Unusable(f"--node names {ranks(missing)}, of which these files tell nothing")
    if not found.ranks:
        raise Unusable("there is no rank in these files that could be used")
    yield _batch("", found.first_ns, found.last_ns, events=found.events(job))


def _batch(
    node: str, start_ns: int, end_ns: int, *, ranks: Sequence[RankBatch] = (), events: Sequence[Event] = ()
) -> Batch:
    """As ``Store.add_import`` takes it, in UTC."""
    return Batch(
        schema=SCHEMA,
        node=node,
        boot_id="import",
        agent="import",
        seq=0,
        start_ns=start_ns,
        end_ns=end_ns,
        utc_offset_ns=0,
        ranks=list(ranks),
        events=list(events),
    )


def found_text(found: Found, gathered: Gathered, job: str) -> str:
    """What was found, what is missing, what comes next; plain text."""
    files = "1 file" if len(gathered.files) == 1 else f"{len(gathered.files):,} files"
    of = f" of {found.world_size:,}" if len(found.ranks) < found.world_size else ""
    nodes = f" on {len(found.nodes):,} node{'s' if len(found.nodes) > 1 else ''}" if found.nodes else ""
    lines = [
        f"{gathered.kind}, {files}: {ranks(sorted(found.ranks))}{of}{nodes}",
        f"  {_rows(found)}",
        f"  {_span(found)}",
    ]
    odd = [_about(text, about) for text, about in found.notes.items()] + [
        f"left out: {words}" for words in gathered.left_out
    ]
    if odd:
        lines += ["Missing or odd:", *(f"  - {words}" for words in odd[:SHOWN_NOTES])]
        lines += [f"  - and {len(odd) - SHOWN_NOTES:,} more"] if len(odd) > SHOWN_NOTES else []
    return "\n".join([*lines, f"Stored as {job}. Now: sysom diagnose {shlex.quote(job)}"])


def _rows(found: Found) -> str:
    words = []
    if found.steps:
        first, last = min(found.steps), max(found.steps)
        gaps = f", with gaps ({len(found.steps):,} steps)" if len(found.steps) < last - first + 1 else ""
        words.append(f"step {first}" if first == last else f"steps {first:,} to {last:,}{gaps}")
    words += [
        f"{count:,} {name}{'s' if count != 1 else ''}"
        for name, count in (("collective", found.collectives), ("operation", found.operations))
        if count
    ]
    if found.progress:
        words.append(f"how far {ranks(sorted(found.progress))} came on their communicators")
    return "; ".join(words) or "nothing but that they are there"


def _span(found: Found) -> str:
    seconds = f"{(found.last_ns - found.first_ns) / 1e9:,.3f} s"
    if not found.dated:
        return f"{seconds}, without a date"
    return f"{seconds}, from {instant(found.first_ns)} to {instant(found.last_ns)}"


def _about(text: str, about: set[int]) -> str:
    return f"{ranks(sorted(about))}: {text}" if about else text
