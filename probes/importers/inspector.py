"""Logs of NCCL's profiler plugin "inspector" (NCCL 2.28 and later): JSON lines, one per collective that ended.

The format is that of ext-profiler/inspector in NVIDIA/nccl (inspector.cc). Up to version 4.2, and in 5.x, each line
has its ``header`` and ``metadata``; in 4.3 a ``dump_stats`` line carries them for those after it. ``coll_sn`` is
counted per communicator *and* kind of collective (NCCL's ``comm->seqNumber[func]``), so each kind is given a
communicator of its own here, uid ``hash/AllReduce``; a send or receive one of its two ranks, as in
:mod:`probes.importers.flight_recorder`.

A line gives the rank within its communicator only. Which rank of the job a process is, the largest communicator
tells in which all processes are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from probes.importers import PART_ROWS, Note, Part, Unusable
from probes.importers.files import open_plain
from probes.records import Collectives, Communicator, Op, RankBatch, TimedBy

MAX_LINE = 1 << 20
"""Longest line that is read. One with the events of 64 channels has some 10 kB."""
_LIMIT = 1 << 62
_OPS = {
    "AllReduce": Op.ALLREDUCE,
    "AllGather": Op.ALLGATHER_BASE,
    "ReduceScatter": Op.REDUCE_SCATTER_BASE,
    "Broadcast": Op.BROADCAST,
    "Reduce": Op.REDUCE,
    "AlltoAll": Op.ALLTOALL,
    "AllToAll": Op.ALLTOALL,
    "Gather": Op.GATHER,
    "Scatter": Op.SCATTER,
    "Send": Op.SEND,
    "Recv": Op.RECV,
}


class _Process(NamedTuple):
    """Whose line it is: one process of one machine, or one communicator's rank where a process has several GPUs."""

    node: str
    pid: int


class _Line(NamedTuple):
    """One usable line. Instants and durations in ns."""

    process: _Process
    group: str
    desc: str
    place: int
    size: int
    name: str
    peer: int
    seq: int
    bytes: int
    duration_ns: int
    source: str
    begun_ns: int
    """−1 when the line does not tell."""
    dumped_ns: int


@dataclass
class _Survey:
    """What the first reading gives."""

    opened: dict[Path, int] = field(default_factory=dict)
    """File → when its first line was dumped: rotated files are read in that order."""
    members: dict[str, dict[_Process, int]] = field(default_factory=lambda: defaultdict(dict))
    """Communicator → its processes, each with its place."""
    sizes: dict[str, int] = field(default_factory=dict)
    host_timed: set[_Process] = field(default_factory=set)
    untold: bool = False
    """Some line does not tell when its collective began."""
    notes: list[str] = field(default_factory=list)


@dataclass
class _Rank:
    """What is kept of a rank while its lines are read."""

    rank: int
    process: _Process
    communicators: list[Communicator] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)
    rows: list[tuple[int, _Line]] = field(default_factory=list)
    """(when it began, line)."""
    last_seq: dict[str, int] = field(default_factory=dict)
    free_ns: dict[str, int] = field(default_factory=dict)
    """Communicator → when its last collective that was laid out ended."""
    path: Path = Path()


def read(paths: Sequence[Path], *, job: str) -> Iterator[Part | Note]:
    """See :mod:`probes.importers`. Reads the files twice. Raises :class:`probes.importers.Unusable`."""
    survey = _survey(paths)
    yield from map(Note, survey.notes)
    ranks, world, assumed = _ranks(survey)
    if assumed:
        yield Note(assumed)
    if survey.untold:
        yield Note(
            "Inspector logs without events (NCCL_INSPECTOR_DUMP_VERBOSE=1): they tell how long collectives took, "
            "not when they began; they are laid out one after the other, about when they were written"
        )
    if survey.host_timed:
        yield Note(
            f"{len(survey.host_timed)} processes have collectives that the CPU timed: those show when work was "
            "enqueued, not how long the GPU took"
        )
    repeated = 0
    for path in sorted(survey.opened, key=lambda one: (survey.opened[one], one)):
        for line in _lines(path, None):
            rank = ranks[line.process]
            rank.path = path
            repeated += not _add(rank, line)
            if len(rank.rows) >= 2 * PART_ROWS:
                yield _part(rank, world, job, PART_ROWS, line.process in survey.host_timed)
    for process, rank in sorted(ranks.items(), key=lambda found: found[1].rank):
        while rank.rows:
            yield _part(rank, world, job, PART_ROWS, process in survey.host_timed)
    if repeated:
        yield Note(
            f"{repeated:,} lines tell of a collective that was told before, or of an earlier one: left out"
        )


def _survey(paths: Sequence[Path]) -> _Survey:
    found = _Survey()
    for path in paths:
        for line in _lines(path, found.notes):
            found.opened.setdefault(path, line.dumped_ns)
            before = found.members[line.group].setdefault(line.process, line.place)
            size = found.sizes.setdefault(line.group, line.size)
            if before != line.place or size != line.size:
                what = (
                    f"rank {before} and {line.place}"
                    if before != line.place
                    else f"{size} and {line.size} ranks"
                )
                raise Unusable(
                    f"{path}: process {line.process.pid} on {line.process.node or 'its node'} has {what} of "
                    f"communicator {line.group}: one process with several GPUs cannot be told apart in these logs",
                    path,
                )
            found.untold |= line.begun_ns < 0
            if line.source.endswith("_cpu"):
                found.host_timed.add(line.process)
    if not found.opened:
        why = found.notes[0] if found.notes else f"{paths[0]}: no line with a collective"
        raise Unusable(f"{why}: nothing can be used", paths[0])
    return found


def _ranks(survey: _Survey) -> tuple[dict[_Process, _Rank], int, str]:
    """Process → rank, the world size, and in words what was assumed."""
    everybody = sorted({process for members in survey.members.values() for process in members})
    whole = [
        (survey.sizes[group], group)
        for group, members in survey.members.items()
        if len(members) == len(everybody) and len(set(members.values())) == len(members)
    ]
    if whole:
        size, group = min(whole, key=lambda one: (-one[0], one[1]))
        places = survey.members[group]
        note = ""
        if size < max(survey.sizes.values()):
            note = "the largest communicator does not hold all processes: ranks are places in a smaller one"
        return {process: _Rank(places[process], process) for process in everybody}, size, note
    numbered = {process: _Rank(number, process) for number, process in enumerate(everybody)}
    return (
        numbered,
        max(len(everybody), *survey.sizes.values()),
        "no communicator holds all processes, so these logs do not tell ranks: numbered by node and process",
    )


def _lines(path: Path, notes: list[str] | None) -> Iterator[_Line]:
    """The usable lines of a file; ``notes`` is told how many are not, and where the first is."""
    header: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    unusable, first, lost, number = 0, "", 0, 0
    with open_plain(path) as stream:
        while raw := stream.readline(MAX_LINE):
            number += 1
            if not raw.strip():
                continue
            told = _object(raw)
            if told is None:
                unusable += 1
                first = first or f"line {number} is no JSON object" + (
                    "" if raw.endswith(b"\n") else ", cut short"
                )
                continue
            if "dump_stats" in told:
                header, metadata = _dict(told.get("header")), _dict(told.get("metadata"))
                stats = _dict(told["dump_stats"])
                lost += sum(
                    max(_whole(stats.get(f"{kind}_dropped_since_last_dump")), 0) for kind in ("coll", "p2p")
                )
            if "coll_perf" not in told and "p2p_perf" not in told:
                continue
            whose = _dict(told.get("header")) or (told if "n_ranks" in told else header)
            where = _dict(told.get("metadata")) or (told if "hostname" in told else metadata)
            line = _line(told, whose, where)
            if line is None:
                unusable += 1
                first = (
                    first
                    or f"line {number} lacks a communicator, a number, a time or a size, or one is negative"
                )
            else:
                yield line
    if notes is not None and unusable:
        notes.append(f"{path}: {unusable:,} of {number:,} lines left out: {first}")
    if notes is not None and lost:
        notes.append(f"{path}: NCCL overwrote {lost:,} collectives before they were written")


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        told = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _line(told: dict[str, Any], header: dict[str, Any], metadata: dict[str, Any]) -> _Line | None:
    kind = "coll" if "coll_perf" in told else "p2p"
    perf = _dict(told.get(f"{kind}_perf"))
    group, name = header.get("id"), perf.get(kind)
    place, size = _whole(header.get("rank")), _whole(header.get("n_ranks"))
    seq, peer = _whole(perf.get(f"{kind}_sn")), _whole(perf.get("p2p_peer"))
    took = _nanoseconds(perf.get(f"{kind}_exec_time_us"))
    dumped = _nanoseconds(metadata.get("dump_timestamp_us"))
    if not isinstance(group, str) or not group or not isinstance(name, str) or not name:
        return None
    if not 0 <= place < size < 1 << 31 or seq < 0 or took < 0 or dumped < 0:
        return None
    if kind == "p2p" and (not 0 <= peer < size or name not in ("Send", "Recv")):
        return None
    node, pid = metadata.get("hostname"), _whole(metadata.get("pid"))
    source, desc = perf.get(f"{kind}_timing_source"), header.get("comm_name")
    return _Line(
        process=_Process(node[:256] if isinstance(node, str) else "", max(pid, 0)),
        group=group[:256],
        desc=desc[:256] if isinstance(desc, str) else "",
        place=place,
        size=size,
        name=name[:64],
        peer=peer if kind == "p2p" else -1,
        seq=seq,
        bytes=_whole(perf.get(f"{kind}_msg_size_bytes")),
        duration_ns=took,
        source=source if isinstance(source, str) else "",
        begun_ns=_begun(_dict(perf.get("event_trace_ts")), kind),
        dumped_ns=dumped,
    )


def _begun(events: dict[str, Any], kind: str) -> int:
    """When its first kernel began, else when it was enqueued; −1 when neither is told."""
    kernels = events.get("kernel_events")
    starts = [
        start
        for kernel in (kernels if isinstance(kernels, list) else [])
        if (start := _nanoseconds(_dict(kernel).get("kernel_start_ts"))) > 0
    ]
    enqueued = _nanoseconds(events.get(f"{kind}_start_ts"))
    return min(starts) if starts else (enqueued if enqueued > 0 else -1)


def _add(rank: _Rank, line: _Line) -> bool:
    """Take a line in; False when its collective was there before."""
    uid, place, size = f"{line.group}/{line.name}", line.place, line.size
    counted = uid
    if line.peer >= 0:
        low, high = min(line.place, line.peer), max(line.place, line.peer)
        uid, place, size = f"{line.group}/{low}:{high}", int(line.place == high), 2
        counted = f"{uid}/{line.name}"
    if line.seq <= rank.last_seq.get(counted, -1):
        return False
    rank.last_seq[counted] = line.seq
    if uid not in rank.index:
        rank.index[uid] = len(rank.communicators)
        rank.communicators.append(Communicator(uid=uid, desc=line.desc, rank=place, size=size))
    begun = line.begun_ns
    if begun < 0:
        begun = max(line.dumped_ns - line.duration_ns, rank.free_ns.get(uid, 0), 0)
        rank.free_ns[uid] = begun + line.duration_ns
    rank.rows.append((begun, line._replace(group=uid)))
    return True


def _part(rank: _Rank, world: int, job: str, count: int, host_timed: bool) -> Part:
    """The oldest rows of a rank, which it forgets."""
    rank.rows.sort(key=lambda row: (row[0], rank.index[row[1].group], row[1].seq))
    rows, rank.rows = rank.rows[:count], rank.rows[count:]
    collectives = Collectives(
        communicator=[rank.index[line.group] for _, line in rows],
        seq=[line.seq for _, line in rows],
        op=[int(_OPS.get(line.name, Op.UNKNOWN)) for _, line in rows],
        bytes=[line.bytes for _, line in rows],
        dtype=[""] * len(rows),
        enter_ns=[begun for begun, _ in rows],
        duration_ns=[line.duration_ns for _, line in rows],
        failed=[False] * len(rows),
    )
    batch = RankBatch(
        job=job,
        rank=rank.rank,
        world_size=world,
        local_rank=0,
        pid=rank.process.pid,
        start_ns=0,
        name="",
        env={},
        communicators=list(rank.communicators),
        collectives=collectives,
        timed_by=TimedBy.HOST if host_timed else TimedBy.DEVICE,
        source="inspector",
    )
    end = max(begun + line.duration_ns for begun, line in rows)
    return Part(batch, rows[0][0], end, rank.path, node=rank.process.node)


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> int:
    """A whole number from 0 on; −1 for anything else."""
    return value if type(value) is int and 0 <= value < _LIMIT else -1


def _nanoseconds(value: object) -> int:
    """Microseconds as nanoseconds; −1 for what is no finite, non-negative number."""
    if type(value) is int and 0 <= value < _LIMIT // 2000:
        return value * 1000
    if type(value) is float and 0 <= value < _LIMIT / 2000:
        return round(value * 1000)
    return -1
