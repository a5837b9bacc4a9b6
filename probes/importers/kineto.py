"""Kineto traces (what ``torch.profiler`` exports) as records: one file per rank, JSON, gzipped or not.

A file is read once, in pieces. What it tells is kept in compact columns, so a gigabyte of JSON needs some 100 MB.
Of several files all but the collectives wait in a temporary file, because which collective of one rank is which of
another is only known when all are there (:mod:`probes.importers.kineto_pairing`).
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from operator import add
from pathlib import Path
from typing import IO

from probes.importers import PART_ROWS, Note, Part
from probes.importers.kineto_files import recorded
from probes.importers.kineto_pairing import number
from probes.importers.kineto_rows import Rows, rows_of
from probes.importers.kineto_trace import gather
from probes.records import Collectives, Communicator, Operations, RankBatch

_COLUMNS = ("start", "duration", "kind", "lane", "step")


def read(paths: Sequence[Path], *, job: str) -> Iterator[Part | Note]:
    """The ranks that ``paths`` tell of; the contract is in :mod:`probes.importers`.

    Raises :class:`probes.importers.Unusable` for a file that is no trace, that is cut before its first event, or
    that does not tell its rank.
    """
    with tempfile.TemporaryFile(prefix="sysom-import-") as spool:
        files, places = [], {}
        for path in paths:
            rows = rows_of(gather(path))
            files.append(rows)
            places[path] = spool.tell(), len(rows.start)
            rows.first_ns, rows.last_ns = _first(rows), _last(rows)
            if len(paths) > 1:
                _put(spool, rows)
        files.sort(key=lambda rows: (rows.rank, rows.first_ns))
        of_all = [*number(recorded(files)), *_sizes(files)]
        for rows in files:
            yield from (Note(text, rows.rank) for text in rows.notes)
        yield from map(Note, of_all)
        zero = min((rows.first_ns for rows in files if not rows.utc), default=0)
        for rows in files:
            if len(paths) > 1:
                spool.seek(places[rows.path][0])
                _get(spool, rows, places[rows.path][1])
            yield from _parts(rows, job, zero)
            _forget(rows)


def _put(spool: IO[bytes], rows: Rows) -> None:
    """Move the operations out of memory."""
    for name in _COLUMNS:
        spool.write(getattr(rows, name).tobytes())
    _forget(rows)


def _get(spool: IO[bytes], rows: Rows, length: int) -> None:
    for name in _COLUMNS:
        column = array(getattr(rows, name).typecode)
        column.frombytes(spool.read(length * column.itemsize))
        setattr(rows, name, column)


def _forget(rows: Rows) -> None:
    for name in _COLUMNS:
        setattr(rows, name, array(getattr(rows, name).typecode))


def _first(rows: Rows) -> int:
    return min([*rows.start[:1], *(row.enter_ns for row in rows.collectives[:1])], default=0)


def _last(rows: Rows) -> int:
    """When the last of a file's rows has ended."""
    operations = map(add, rows.start, rows.duration)
    collectives = (row.enter_ns + row.duration_ns for row in rows.collectives)
    return max(chain(operations, collectives), default=0)


def _sizes(ranks: Sequence[Rows]) -> list[str]:
    """Set the world sizes that are not recorded: what other files say, else the least that it can be."""
    without = [rows for rows in ranks if not rows.world_size]
    if not without:
        return []
    told = [rows.world_size for rows in ranks if rows.world_size]
    size = max(told) if told else 1 + max(rows.rank for rows in ranks)
    for rows in without:
        rows.world_size = size
    return [] if told else [f"no trace records the job's size: {size} ranks are taken for it"]


def _parts(rows: Rows, job: str, zero: int) -> Iterator[Part]:
    shift = 0 if rows.utc else zero
    communicators = [
        Communicator(
            uid=group.name,
            desc=group.desc,
            rank=group.ranks.index(rows.rank) if rows.rank in group.ranks else -1,
            size=group.size,
        )
        for group in rows.groups
    ]
    collectives, start = rows.collectives, rows.start
    places = [*_places(rows), (len(start), len(collectives))]
    for (first, first_collective), (last, last_collective) in pairwise(places):
        chosen = collectives[first_collective:last_collective]
        kinds = list(dict.fromkeys(rows.kind[first:last]))
        at = {kind: place for place, kind in enumerate(kinds)}
        count = last - first
        instants = [*start[first : first + 1], *(row.enter_ns for row in chosen[:1])]
        following = [*start[last : last + 1], *(row.enter_ns for row in collectives[last_collective:][:1])]
        begin = min(instants, default=shift) - shift
        end = (min(following) if following else rows.last_ns) - shift
        yield Part(
            rank_batch=RankBatch(
                job=job,
                rank=rows.rank,
                world_size=rows.world_size,
                local_rank=0,
                pid=rows.pid,
                start_ns=0,
                name="",
                env={},
                source="kineto",
                timed_by=rows.timed_by,
                communicators=communicators,
                collectives=Collectives(
                    communicator=[row.group for row in chosen],
                    seq=[row.seq for row in chosen],
                    op=[row.op for row in chosen],
                    bytes=[row.bytes for row in chosen],
                    dtype=[row.dtype for row in chosen],
                    enter_ns=[row.enter_ns - shift for row in chosen],
                    duration_ns=[row.duration_ns for row in chosen],
                    failed=[False] * len(chosen),
                ),
                operations=Operations(
                    names=[rows.names[kind] for kind in kinds],
                    kind=[at[kind] for kind in rows.kind[first:last]],
                    lane=list(rows.lane[first:last]),
                    step=list(rows.step[first:last]),
                    start_ns=[instant - shift for instant in start[first:last]],
                    duration_ns=list(rows.duration[first:last]),
                    seq=[-1] * count,
                    micro_batch=[-1] * count,
                    chunk=[-1] * count,
                ),
            ),
            start_ns=begin,
            end_ns=max(begin, end),
            path=rows.path,
            utc=rows.utc,
            node=rows.node,
        )


def _places(rows: Rows) -> Iterator[tuple[int, int]]:
    """Where each part begins, as (operation, collective): both in order of time, ``PART_ROWS`` together."""
    start, collectives = rows.start, rows.collectives
    operation = collective = 0
    yield 0, 0
    while (
        operation + PART_ROWS < len(start)
        or len(collectives) - collective + len(start) - operation > PART_ROWS
    ):
        for _ in range(PART_ROWS):
            later = operation >= len(start) or (
                collective < len(collectives) and collectives[collective].enter_ns <= start[operation]
            )
            collective += later
            operation += not later
        yield operation, collective
