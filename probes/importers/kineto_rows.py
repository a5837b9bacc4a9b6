"""One Kineto trace as the rows of one rank: which step each operation belongs to, and which collective is which."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from probes.importers import Unusable
from probes.importers.kineto_collectives import Collective, Steps, on_device, on_host
from probes.importers.kineto_columns import Group, Operations
from probes.importers.kineto_names import rank_in_name
from probes.importers.kineto_trace import Trace, listed
from probes.records import Lane, TimedBy

FAR_NS = 86_400 * 1_000_000_000
"""What lies a day from a trace's middle is a clock's fault: profiles last seconds."""
_UTC = (1_420_000_000 * 10**9, 4_100_000_000 * 10**9)
"""2015 to 2099."""


@dataclass
class Rows:
    """What one file tells of one rank, rows in order of start. Instants: nanoseconds, UTC where ``utc``."""

    path: Path
    rank: int
    world_size: int
    """0: the trace does not say."""
    pid: int
    node: str
    utc: bool
    timed_by: TimedBy
    names: list[str]
    groups: list[Group]
    collectives: list[Collective]
    start: array[int] = field(default_factory=lambda: array("q"))
    duration: array[int] = field(default_factory=lambda: array("q"))
    kind: array[int] = field(default_factory=lambda: array("i"))
    lane: array[int] = field(default_factory=lambda: array("b"))
    step: array[int] = field(default_factory=lambda: array("q"))
    notes: list[str] = field(default_factory=list)
    first_ns: int = 0
    """The earliest start, and the end of what ends last; set when the file is read."""
    last_ns: int = 0


def rows_of(trace: Trace) -> Rows:
    """Raises :class:`Unusable` where the rank is not known."""
    info = trace.around.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    notes = _notes_of_file(trace)
    rank = _rank(trace, info, notes)
    base = _base(trace, notes)
    groups = list(trace.groups)
    _configured(groups, info)
    trace.launches.sort()
    trace.steps.sort()
    steps = Steps(trace.steps)
    device = bool(trace.transfers)
    operations = trace.operations
    if not trace.kernels:
        _outermost(trace.host_ops, operations)
    collectives = on_device(trace, groups, steps, notes) if device else on_host(trace, groups, steps, notes)
    order, dropped = _order(operations)
    columns = _columns(operations, order, base, trace, steps)
    middle = columns["start"][len(order) // 2] if order else None
    collectives = _sorted(collectives, base, middle, dropped)
    _say_dropped(dropped, notes)
    host = trace.around.get("host_name")
    return Rows(
        path=trace.path,
        rank=rank,
        world_size=_number(info.get("world_size")) or trace.default_size,
        pid=trace.pid,
        node=host[:200] if isinstance(host, str) else "",
        utc=_is_utc(columns["start"], collectives),
        timed_by=TimedBy.DEVICE if device else TimedBy.HOST,
        names=list(trace.places),
        groups=groups,
        collectives=collectives,
        notes=notes,
        **columns,
    )


def _rank(trace: Trace, info: dict[str, Any], notes: list[str]) -> int:
    recorded = info.get("rank")
    rank = _number(recorded) if type(recorded) is int or isinstance(recorded, str) else None
    named = rank_in_name(trace.path)
    if rank is None and trace.default_rank >= 0:
        rank = trace.default_rank
    if rank is not None:
        if named is not None and named != rank:
            notes.append(f"{trace.path.name} says that it is of rank {rank}, whatever its name says")
        return rank
    if named is not None:
        notes.append(f"{trace.path.name} does not record its rank; its name says {named}")
        return named
    if info or trace.calls or trace.transfers:
        where = "its distributedInfo has no rank" if info else "it has no distributedInfo"
        at = f" ({trace.cut})" if trace.cut else ""
        raise Unusable(
            f"{trace.path}: the trace does not record which rank it is of: {where}{at}. Name the file after its"
            " rank (rank3.json), or start the profiler after torch.distributed.init_process_group",
            trace.path,
        )
    notes.append(f"{trace.path.name} records no rank and no communication: taken as a job of one rank")
    return 0


def _base(trace: Trace, notes: list[str]) -> int:
    base = trace.around.get("baseTimeNanoseconds", 0)
    if type(base) is int and 0 <= base < 1 << 61:
        return base
    notes.append(
        f"{trace.path.name}: baseTimeNanoseconds is no time; instants count from the file's own zero"
    )
    return 0


def _configured(groups: list[Group], info: dict[str, Any]) -> None:
    """Put in what ``distributedInfo.pg_config`` says of the groups, also of those without collectives."""
    config = info.get("pg_config")
    if isinstance(config, dict):
        config = [{"pg_name": name, **one} for name, one in config.items() if isinstance(one, dict)]
    for one in config if isinstance(config, list) else []:
        if not isinstance(one, dict) or not isinstance(
            name := one.get("pg_name", one.get("name")), str | int
        ):
            continue
        ranks = tuple(listed(one.get("ranks")))
        size = _number(one.get("pg_size")) or len(ranks)
        desc = one.get("pg_desc", one.get("desc"))
        full = Group(
            str(name)[:200],
            desc[:200] if isinstance(desc, str) else "",
            size,
            ranks if len(ranks) == size else (),
        )
        place = next((at for at, known in enumerate(groups) if known.name == full.name), None)
        if place is None:
            groups.append(full)
        elif groups[place].size == full.size and not groups[place].ranks:
            groups[place] = full


def _outermost(nested: Operations, into: Operations) -> None:
    """Add the operators that no other operator called."""
    ends: dict[int, int] = {}
    for row in sorted(range(len(nested)), key=lambda row: (nested.start[row], -nested.duration[row])):
        tid, start, duration = nested.tid[row], nested.start[row], nested.duration[row]
        if start >= ends.get(tid, -1):
            ends[tid] = start + duration
            into.add(start, duration, nested.kind[row], Lane.HOST, -1, tid)


@dataclass
class _Dropped:
    twice: int = 0
    far: int = 0


def _order(operations: Operations) -> tuple[array[int], _Dropped]:
    """Rows in order of start, without those that are there twice and those of another day."""
    start, dropped = operations.start, _Dropped()
    order = array("q", sorted(range(len(operations)), key=start.__getitem__))
    if not order:
        return order, dropped
    middle = start[order[len(order) // 2]]
    kept = array("q")
    alike: set[tuple[int, ...]] = set()
    now = -1
    for row in order:
        if start[row] != now:
            now = start[row]
            alike.clear()
        key = (
            operations.duration[row],
            operations.kind[row],
            operations.correlation[row],
            operations.tid[row],
        )
        if abs(now - middle) > FAR_NS:
            dropped.far += 1
        elif key in alike:
            dropped.twice += 1
        else:
            alike.add(key)
            kept.append(row)
    return kept, dropped


def _columns(
    operations: Operations, order: array[int], base: int, trace: Trace, steps: Steps
) -> dict[str, Any]:
    launches = trace.launches
    step = array("q")
    for row in order:
        launch = launches.of(operations.correlation[row]) if operations.correlation[row] >= 0 else -1
        at = launches.at[launch] if launch >= 0 else operations.start[row]
        step.append(steps.at(at))
    return {
        "start": array("q", (operations.start[row] + base for row in order)),
        "duration": array("q", map(operations.duration.__getitem__, order)),
        "kind": array("i", map(operations.kind.__getitem__, order)),
        "lane": array("b", map(operations.lane.__getitem__, order)),
        "step": step,
    }


def _sorted(rows: list[Collective], base: int, middle: int | None, dropped: _Dropped) -> list[Collective]:
    rows.sort(key=lambda row: (row.enter_ns, row.group, row.duration_ns))
    if middle is None and rows:
        middle = rows[len(rows) // 2].enter_ns + base
    kept: list[Collective] = []
    for row in rows:
        row.enter_ns += base
        if middle is not None and abs(row.enter_ns - middle) > FAR_NS:
            dropped.far += 1
        elif kept and kept[-1] == row:
            dropped.twice += 1
        else:
            kept.append(row)
    return kept


def _notes_of_file(trace: Trace) -> list[str]:
    name = trace.path.name
    notes = []
    if trace.cut:
        notes.append(f"{name}: {trace.cut}; what comes before is used, what is missing is not known")
    if trace.broken:
        notes.append(f"{name}: {trace.broken} entries are no valid JSON or no events, and left out")
    if trace.unusable:
        notes.append(
            f"{name}: {trace.unusable} events have no instant or duration that could be (negative, not a number,"
            " missing), and are left out"
        )
    if trace.begin_end:
        notes.append(f"{name}: {trace.begin_end} events begin without saying how long they last; left out")
    early = sum(after[0] < before[1] for before, after in pairwise(sorted(trace.steps)))
    if early:
        notes.append(f"{name}: {early} profiler steps begin before the one before them ends")
    return notes


def _say_dropped(dropped: _Dropped, notes: list[str]) -> None:
    if dropped.twice:
        notes.append(f"{dropped.twice} events are there twice, and used once")
    if dropped.far:
        notes.append(
            f"{dropped.far} events lie more than a day from the others (a clock that stepped), and are left out"
        )


def _is_utc(start: array[int], collectives: list[Collective]) -> bool:
    instants = [*start[:1], *(row.enter_ns for row in collectives[:1])]
    return bool(instants) and all(_UTC[0] <= at < _UTC[1] for at in instants)


def _number(value: object) -> int | None:
    """A count or a rank, also as text; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    return value if type(value) is int and 0 <= value < 1 << 31 else None
