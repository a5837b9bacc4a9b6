"""Whether the parts of an import fit together: one job, one world, one file per rank and time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from probes import codec
from probes.codec import RecordError
from probes.importers import Note, Part, Unusable
from probes.records import SCHEMA, Batch, RankBatch


@dataclass
class _Span:
    """What one file tells of one rank so far."""

    start_ns: int
    end_ns: int


def agreed(
    items: Iterable[Part | Note], *, job: str, same: Callable[[Path, Path], bool]
) -> Iterator[Part | Note]:
    """The items as they come, each part checked against those before it; what does not fit and does no harm is
    left out, with a :class:`Note`: a rank beyond the world, a file that is another's copy (``same`` compares the
    contents).

    The parts that come out are of ``job``, have a world size, and cover all their instants. Raises
    :class:`Unusable` for files that contradict each other: of two that claim one rank at one time, or of two world
    sizes, nobody knows which is right.
    """
    spans: dict[int, dict[Path, _Span]] = {}
    left_out: set[tuple[int, Path]] = set()
    said: set[Note] = set()
    world: tuple[int, Path] | None = None
    highest = (-1, Path())
    dateless: Path | None = None
    for item in items:
        if isinstance(item, Note):
            if item not in said:
                said.add(item)
                yield item
            continue
        told = item.rank_batch
        if told.world_size > 0:
            if world is None:
                world = told.world_size, item.path
            elif world[0] != told.world_size:
                raise Unusable(
                    f"{item.path} is of a job of {told.world_size} ranks, {world[1]} of one of {world[0]}: import "
                    "the files of one job only"
                )
        if (told.rank, item.path) in left_out:
            continue
        if world is not None and told.rank >= world[0]:
            left_out.add((told.rank, item.path))
            yield Note(
                f"{item.path.name} is of rank {told.rank}, beyond a job of {world[0]} ranks: it is left out"
            )
            continue
        part = _sound(item, job)
        copied = _copied(spans.setdefault(told.rank, {}), part, same)
        if copied is not None:
            left_out.add((told.rank, part.path))
            yield Note(f"{part.path.name} is the same as {copied.name}: read once", rank=told.rank)
            continue
        highest = max(highest, (told.rank, part.path))
        if not part.utc and dateless is None:
            dateless = part.path
            yield Note("the files tell no date: instants are counted from 1970-01-01")
        yield part
    if world is not None and highest[0] >= world[0]:
        raise Unusable(
            f"{highest[1]} is of rank {highest[0]}, beyond the job of {world[0]} ranks of {world[1]}: import the "
            "files of one job only"
        )


def _copied(of_rank: dict[Path, _Span], part: Part, same: Callable[[Path, Path], bool]) -> Path | None:
    """The file that this part's file is a copy of. Raises :class:`Unusable` when two files claim one rank."""
    mine = of_rank.get(part.path)
    start, end = part.start_ns, part.end_ns
    if mine is not None:
        start, end = min(start, mine.start_ns), max(end, mine.end_ns)
    for path, other in of_rank.items():
        if path != part.path and start <= other.end_ns and other.start_ns <= end:
            if mine is None and same(path, part.path):
                return path
            raise Unusable(
                f"{path} and {part.path} both tell what rank {part.rank_batch.rank} did at one time: leave out "
                "the one that is not of this job"
            )
    of_rank[part.path] = _Span(start, end)
    return None


def _sound(part: Part, job: str) -> Part:
    """The part as the store takes it. Raises :class:`Unusable` for what no batch may hold."""
    told = part.rank_batch
    told = msgspec.structs.replace(told, job=job, world_size=told.world_size or told.rank + 1)
    instants = [part.start_ns, part.end_ns, *told.collectives.enter_ns, *told.operations.start_ns]
    part = replace(part, rank_batch=told, start_ns=min(instants), end_ns=max(instants))
    try:
        codec.from_plain(codec.to_plain(_batch(told, part.start_ns, part.end_ns)))
    except (RecordError, OverflowError) as error:
        raise Unusable(
            f"{part.path}: what it says of rank {told.rank} cannot be used: {error}", part.path
        ) from error
    return part


def _batch(rank: RankBatch, start_ns: int, end_ns: int) -> Batch:
    return Batch(
        schema=SCHEMA,
        node="import",
        boot_id="import",
        agent="import",
        seq=0,
        start_ns=start_ns,
        end_ns=end_ns,
        utc_offset_ns=0,
        ranks=[rank],
    )
