"""PyTorch Flight Recorder dumps: one file per rank, a ring of the collectives that it enqueued, how far each came.

The format is torch/csrc/distributed/c10d/FlightRecorder.hpp (versions 2.0 to 2.10; ``dump`` writes a pickle, newer
PyTorch also JSON). Of older versions, 1.x, what has the same names is read.

A send or receive runs on a communicator of its own two ranks (ProcessGroupNCCL's key "low:high"), so it is given
one here too: uid ``group/low:high``, this rank's place 0 when it is the lower. Each rank gets the pairs that others
name it in, so that a receive whose sender never came shows whom it waits for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from probes.importers import PART_ROWS, Note, Part, Unusable
from probes.importers.files import open_plain
from probes.importers.flight_recorder_entry import (
    LIMIT,
    OPS,
    POINT_TO_POINT,
    STATES,
    counter,
    group_of,
    input_size,
    number_in,
    ranks_in,
    text,
)
from probes.importers.unpickling import MAX_BYTES, RefusedPickle, loads
from probes.records import Collectives, Communicator, Op, Progress, RankBatch, State

KNOWN_VERSION = 2

_CROSSING = (Op.SEND, Op.RECV)
_COALESCED = (
    Op.COALESCED,
    Op.ALLREDUCE_COALESCED,
    Op.ALLGATHER_COALESCED,
    Op.REDUCE_SCATTER_COALESCED,
)
_RANK_IN_NAME = (re.compile(r"rank[_-]?(\d{1,9})(?!\d)"), re.compile(r"(\d{1,9})(?!\d)\D*$"))
_UTC_FROM = 10**17
"""Nanoseconds since 1970 are beyond this since 1973; what is below counts from something else."""


@dataclass
class _Rank:
    """What is kept of a dump after its rows were given away."""

    path: Path
    rank: int
    world: int
    members: dict[str, list[int]]
    """Group → its ranks, in its own order."""
    communicators: list[Communicator] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)
    """uid → place in ``communicators``."""
    status: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    last_ns: int = -1


class _Row(msgspec.Struct):
    record: int
    call: tuple[str, int, int]
    """Group and both its numbers: entries of one coalesced call have them in common."""
    communicator: int
    seq: int
    op: int
    bytes: int
    dtype: str
    enter_ns: int
    duration_ns: int
    state: int


def read(paths: Sequence[Path], *, job: str) -> Iterator[Part | Note]:
    """See :mod:`probes.importers`. The last part of each rank has no rows: it tells the communicators with those
    that other dumps name it in, and how far it is on each. Raises :class:`probes.importers.Unusable`."""
    ranks: list[_Rank] = []
    paired: set[tuple[str, str]] = set()
    """(uid, desc) of groups with sends and receives: their counters mix two countings."""
    pairs: dict[int, set[tuple[str, str, int, int]]] = {}
    late = False
    for path in paths:
        dump = _load(path)
        known = _opening(path, dump)
        yield from _oddities(path, dump, known)
        rows, notes = _rows(dump, known, paired, pairs)
        yield from (Note(text, known.rank) for text in notes)
        late |= any(row.duration_ns >= 0 for row in rows)
        for part in _parts(rows, known, job):
            yield part
            known.last_ns = part.end_ns
        known.status, unmapped = _status(dump, known)
        if unmapped:
            yield Note(
                f"{path}: how far {unmapped} groups are cannot be told: the dump does not name them",
                known.rank,
            )
        ranks.append(known)
    if late:
        yield Note(
            "Flight Recorder dumps: a collective ends when PyTorch's watchdog notices it, up to 0.1 s late; "
            "durations are no measure of speed"
        )
    newest = max(known.last_ns for known in ranks)
    for known in ranks:
        yield _closing(known, job, max(newest, 0), paired, pairs.get(known.rank, set()))


def _load(path: Path) -> dict[str, Any]:
    with open_plain(path) as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise Unusable(f"{path}: more than {MAX_BYTES:,} bytes: no Flight Recorder dump is that large", path)
    try:
        dump = loads(data) if data[:1] == b"\x80" else msgspec.json.decode(data)
    except RefusedPickle as error:
        raise Unusable(f"{path}: {error}; get the dump again from the node that wrote it", path) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unusable(
            f"{path}: not JSON: {error}; get the dump again from the node that wrote it", path
        ) from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list):
        raise Unusable(f"{path}: no Flight Recorder dump: entries must be a list in a dictionary", path)
    if "entries" not in dump and "pg_status" not in dump:
        raise Unusable(f"{path}: no Flight Recorder dump: it has neither entries nor pg_status", path)
    return dump


def _opening(path: Path, dump: dict[str, Any]) -> _Rank:
    config = dump.get("pg_config")
    groups: list[tuple[str, str, list[int]]] = []
    for key, group in config.items() if isinstance(config, dict) else ():
        if isinstance(group, dict):
            name = text(group.get("name"), str(key))
            groups.append((name, text(group.get("desc")), ranks_in(group.get("ranks"))))
    rank = _whose(path, dump, [ranks for _, _, ranks in groups if ranks])
    everybody = [other for _, _, ranks in groups for other in ranks]
    known = _Rank(path, rank, 1 + max([rank, *everybody]), {name: ranks for name, _, ranks in groups})
    for name, desc, ranks in groups:
        _place(known, name, desc, ranks.index(rank) if rank in ranks else -1, len(ranks))
    return known


def _whose(path: Path, dump: dict[str, Any], groups: list[list[int]]) -> int:
    """The rank that wrote a dump: as its name says, else the only one that is in all of its groups."""
    common = set(groups[0]).intersection(*groups[1:]) if groups else set()
    told = number_in(dump.get("rank"))
    stem = path.name.lower().removesuffix(".gz")
    named = next((int(found[1]) for form in _RANK_IN_NAME if (found := form.search(stem))), None)
    rank = told if told is not None and told >= 0 else named
    if rank is None and len(common) == 1:
        (rank,) = common
    if rank is None:
        raise Unusable(
            f"{path}: whose dump is this? Neither its name ends in a rank (_dump_3) nor do its groups (pg_config) "
            "have one rank only in common: name it after its rank",
            path,
        )
    if common and rank not in common:
        raise Unusable(
            f"{path}: named as rank {rank}, which is not in all groups of its pg_config "
            f"(those have {_few(sorted(common))} in common): name it after the rank that wrote it",
            path,
        )
    return rank


def _few(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown


def _oddities(path: Path, dump: dict[str, Any], known: _Rank) -> Iterator[Note]:
    version = text(dump.get("version"), "not stated")
    if version.partition(".")[0] != str(KNOWN_VERSION):
        yield Note(
            f"{path}: Flight Recorder version {version}; versions {KNOWN_VERSION}.x are known", known.rank
        )
    if not known.members:
        yield Note(f"{path}: it names no groups (pg_config): who belongs together is not known", known.rank)


def _place(known: _Rank, uid: str, desc: str, rank: int, size: int) -> int:
    if uid not in known.index:
        known.index[uid] = len(known.communicators)
        known.communicators.append(Communicator(uid=uid, desc=desc, rank=max(rank, 0), size=size))
    return known.index[uid]


def _rows(
    dump: dict[str, Any],
    known: _Rank,
    paired: set[tuple[str, str]],
    pairs: dict[int, set[tuple[str, str, int, int]]],
) -> tuple[list[_Row], list[str]]:
    """The ring in order of enqueueing. Grows ``known.communicators``, ``paired`` and ``pairs``."""
    rows: dict[int, _Row] = {}
    unusable: list[int] = []
    twice = 0
    for place, entry in enumerate(dump.get("entries", [])):
        row = _row(entry, place, known, paired, pairs)
        if row is None:
            unusable.append(place)
        elif row.record in rows:
            twice += 1
        else:
            rows[row.record] = row
    notes = []
    if unusable:
        notes.append(
            f"{known.path}: {len(unusable)} of {len(dump['entries'])} entries left out, first [{unusable[0]}]"
            ": without a group, a number, a time of creation, or with an end before its creation"
        )
    if twice:
        notes.append(f"{known.path}: {twice} entries are there twice; each counts once")
    return sorted(_settled(list(rows.values())), key=lambda row: (row.enter_ns, row.record)), notes


def _settled(rows: list[_Row]) -> list[_Row]:
    """Coalesced calls: their sends, receives or collectives stay "scheduled" for ever, only the entry of the whole
    call tells how it went (torch/test/distributed/test_c10d_nccl.py, test_batched_send_recv). Sends and receives
    take that over, as they name the other side; of coalesced collectives the whole is kept."""
    whole = {row.call: row for row in rows if row.op in _COALESCED}
    crossed = {row.call for row in rows if row.op in _CROSSING}
    kept = []
    for row in rows:
        over = whole.get(row.call)
        if over is None or (row is over and row.call not in crossed):
            kept.append(row)
        elif row.op in _CROSSING:
            row.state = over.state
            if over.duration_ns >= 0:
                row.duration_ns = max(over.enter_ns + over.duration_ns - row.enter_ns, 0)
            kept.append(row)
    return kept


def _row(
    entry: object,
    place: int,
    known: _Rank,
    paired: set[tuple[str, str]],
    pairs: dict[int, set[tuple[str, str, int, int]]],
) -> _Row | None:
    if not isinstance(entry, dict):
        return None
    uid, desc = group_of(entry)
    created = number_in(entry.get("time_created_ns"))
    name = text(entry.get("profiling_name")).partition(":")[2] or text(entry.get("profiling_name"))
    crossing = POINT_TO_POINT.fullmatch(name)
    seq = number_in(entry.get("p2p_seq_id" if crossing else "collective_seq_id", entry.get("seq_id")))
    if not uid or created is None or not 0 < created < LIMIT or seq is None or not 0 <= seq < LIMIT:
        return None
    state = STATES.get(text(entry.get("state")), State.UNKNOWN)
    ended = number_in(entry.get("time_discovered_completed_ns")) or None  # JSON dumps write 0 for "not yet"
    if ended is not None and not created <= ended < LIMIT:
        return None
    members = known.members.get(uid, [])
    communicator = _place(
        known, uid, desc, members.index(known.rank) if known.rank in members else -1, len(members)
    )
    op = int(OPS.get(name, Op.UNKNOWN))
    if crossing:
        communicator, op = _crossing(crossing, uid, desc, known, paired, pairs)
    amount, dtype = input_size(entry.get("input_sizes"), entry.get("input_dtypes"))
    number = number_in(entry.get("record_id", entry.get("id")))
    return _Row(
        record=number if number is not None else -1 - place,
        call=(uid, _numbered(entry, "collective_seq_id", seq), _numbered(entry, "p2p_seq_id", 0)),
        communicator=communicator,
        seq=seq,
        op=op,
        bytes=amount,
        dtype=dtype,
        enter_ns=created,
        duration_ns=ended - created if ended is not None else -1,
        state=int(State.COMPLETED if ended is not None else state),
    )


def _numbered(entry: dict[Any, Any], name: str, otherwise: int) -> int:
    number = number_in(entry.get(name))
    return otherwise if number is None else number


def _crossing(
    found: re.Match[str],
    uid: str,
    desc: str,
    known: _Rank,
    paired: set[tuple[str, str]],
    pairs: dict[int, set[tuple[str, str, int, int]]],
) -> tuple[int, int]:
    """Communicator and op of a send or receive; numbers in its name are ranks within the group."""
    mine, other = int(found[2]), int(found[3])
    low, high = min(mine, other), max(mine, other)
    pair = f"{uid}/{low}:{high}"
    paired.add((uid, desc))
    members = known.members.get(uid, [])
    if other < len(members):
        pairs.setdefault(members[other], set()).add((pair, desc, int(other == high), 2))
    communicator = _place(known, pair, desc, int(mine == high), 2)
    return communicator, int(Op.SEND if found[1] == "send" else Op.RECV)


def _parts(rows: list[_Row], known: _Rank, job: str) -> Iterator[Part]:
    for first in range(0, len(rows), PART_ROWS):
        chunk = rows[first : first + PART_ROWS]
        columns = {
            name: [getattr(row, name) for row in chunk]
            for name in Collectives.__struct_fields__
            if name != "failed"
        }
        batch = _batch(known, job, Collectives(failed=[False] * len(chunk), **columns))
        last = max(row.enter_ns + max(row.duration_ns, 0) for row in chunk)
        yield Part(batch, chunk[0].enter_ns, last, known.path, utc=chunk[0].enter_ns >= _UTC_FROM)


def _batch(known: _Rank, job: str, collectives: Collectives, progress: Sequence[Progress] = ()) -> RankBatch:
    return RankBatch(
        job=job,
        rank=known.rank,
        world_size=known.world,
        local_rank=0,
        pid=0,
        start_ns=0,
        name="",
        env={},
        communicators=list(known.communicators),
        collectives=collectives,
        progress=list(progress),
        source="flight-recorder",
    )


def _status(dump: dict[str, Any], known: _Rank) -> tuple[dict[str, tuple[int, int, int]], int]:
    """Group → (enqueued, started, completed), and of how many groups it cannot be told which they are.

    ``pg_status`` names groups by numbers of this process, in order of their making; ``pg_config`` by their names,
    which are numbers too, in order of making, unless PyTorch hashed them. Entries name both.
    """
    status = dump.get("pg_status")
    if not isinstance(status, dict):
        return {}, 0
    names = {
        str(number_in(entry.get("pg_id"))): group_of(entry)[0]
        for entry in dump.get("entries", [])
        if _paired(entry)
    }
    numbers, groups = [str(key) for key in status], list(known.members)
    if len(numbers) == len(groups) and all(name.isdecimal() for name in [*numbers, *groups]):
        by_order = dict(zip(sorted(numbers, key=int), sorted(groups, key=int), strict=True))
        if all(by_order.get(number) == name for number, name in names.items()):
            names = by_order
    told, unmapped = {}, 0
    for number, counters in status.items():
        name = names.get(str(number), str(number) if not known.members else None)
        if name is None or not isinstance(counters, dict):
            unmapped += 1
            continue
        told[name] = (
            counter(counters.get("last_enqueued_collective")),
            counter(counters.get("last_started_collective")),
            counter(counters.get("last_completed_collective")),
        )
    return told, unmapped


def _paired(entry: object) -> bool:
    return isinstance(entry, dict) and number_in(entry.get("pg_id")) is not None and bool(group_of(entry)[0])


def _closing(
    known: _Rank, job: str, newest: int, paired: set[tuple[str, str]], pairs: set[tuple[str, str, int, int]]
) -> Part:
    progress = []
    groups = {uid for uid, _ in paired}
    # Groups of one kind ("PIPELINE_MODEL_PARALLEL_GROUP") are used alike on all ranks.
    kinds = {desc for _, desc in paired if desc not in ("", "undefined")}
    for name, (enqueued, started, completed) in known.status.items():
        place = _place(known, name, "", -1, 0)
        if name not in groups and known.communicators[place].desc not in kinds:
            progress.append(
                Progress(communicator=place, enqueued=enqueued, started=started, completed=completed)
            )
    for uid, desc, place, size in sorted(pairs):
        _place(known, uid, desc, place, size)
    start = known.last_ns if known.last_ns >= 0 else newest
    end = max(start, newest)
    return Part(_batch(known, job, Collectives(), progress), start, end, known.path, utc=end >= _UTC_FROM)
