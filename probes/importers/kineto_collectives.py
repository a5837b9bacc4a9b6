"""Which collectives a rank took part in, and when: from NCCL's kernels where there are any, else from the calls."""

from __future__ import annotations

from array import array
from bisect import bisect_right

import msgspec

from probes.importers.kineto_columns import Call, Group
from probes.importers.kineto_trace import Trace
from probes.records import Lane, Op


class Collective(msgspec.Struct, gc=False):
    """One collective of one rank. Instants as in :class:`Rows`."""

    enter_ns: int
    duration_ns: int
    group: int
    """Index into ``Rows.groups``."""
    seq: int
    """As the trace says; −1 where it does not."""
    op: int
    bytes: int
    dtype: str
    step: int
    """Step in which the host called it; −1 not known."""


class Steps:
    """Steps by time; ``spans`` is sorted."""

    def __init__(self, spans: list[tuple[int, int, int]]) -> None:
        self.starts = array("q", (start for start, _, _ in spans))
        self.spans = spans

    def at(self, instant: int) -> int:
        """Number of the step at an instant; −1 between and beside steps."""
        place = bisect_right(self.starts, instant) - 1
        if place < 0:
            return -1
        _, end, number = self.spans[place]
        return number if instant <= end else -1


def on_device(trace: Trace, groups: list[Group], steps: Steps, notes: list[str]) -> list[Collective]:
    """NCCL's kernels, with what the host's calls tell of them."""
    calls = _Nested(trace.calls)
    unnamed: dict[int, int] = {}
    rows, untold = [], 0
    called: set[int] = set()
    for kernel in trace.transfers:
        launch = trace.launches.of(kernel.correlation) if kernel.correlation >= 0 else -1
        around = calls.around(trace.launches.tid[launch], trace.launches.at[launch]) if launch >= 0 else []
        tied = trace.by_external.get(kernel.external)
        if tied is not None and tied not in around:
            around.append(tied)
        called.update(map(id, around))
        op, group, seq, size, dtype = kernel.op, kernel.group, kernel.seq, kernel.bytes, kernel.dtype
        for call in around:
            op = call.op if op == Op.UNKNOWN and call.op is not None else op
            group = call.group if group < 0 else group
            seq = call.seq if seq < 0 else seq
            size, dtype = (call.bytes, call.dtype) if size < 0 else (size, dtype)
        if group < 0:
            group = _unnamed(groups, unnamed, kernel.stream)
            untold += 1
        at = trace.launches.at[launch] if launch >= 0 else -1
        rows.append(
            Collective(
                kernel.start_ns,
                kernel.duration_ns,
                group,
                seq,
                op,
                size,
                dtype,
                steps.at(at) if at >= 0 else -1,
            )
        )
    rows = _merged(rows)
    silent = sum(1 for call in trace.calls if call.library.startswith("nccl") and id(call) not in called)
    name = trace.path.name
    if unnamed:
        notes.append(
            f"{name}: {untold} of {len(rows)} communication kernels do not say which process group they belong to;"
            " streams stand in for groups (newer versions of PyTorch record groups)"
        )
    if silent:
        notes.append(
            f"{name}: {silent} of {sum(call.library.startswith('nccl') for call in trace.calls)} NCCL calls have no"
            " kernel in the trace: kernels were sampled, or the recording ended before they ran"
        )
    other = [call for call in trace.calls if call.library and not call.library.startswith("nccl")]
    for call in other:
        kind = trace.places.setdefault(f"{call.library}:{_name(call.op).lower()}", len(trace.places))
        trace.operations.add(call.start_ns, call.duration_ns, kind, Lane.COMMUNICATION, -1, call.tid)
    return rows


def _unnamed(groups: list[Group], unnamed: dict[int, int], stream: int) -> int:
    """The group of a collective that names none: the only one there is; else, where all groups have the same ranks,
    one that stands for all of them; else one that stands for its stream."""
    named = groups[: len(groups) - len(set(unnamed.values()))]
    if len(named) == 1:
        return 0
    if stream not in unnamed:
        alike = len(named) > 1 and bool(named[0].ranks) and len({group.ranks for group in named}) == 1
        if alike and unnamed:
            unnamed[stream] = len(named)
        else:
            unnamed[stream] = len(groups)
            size, ranks = (named[0].size, named[0].ranks) if alike else (0, ())
            groups.append(Group("", "group not recorded" if stream < 0 else f"stream {stream}", size, ranks))
    return unnamed[stream]


def on_host(trace: Trace, groups: list[Group], steps: Steps, notes: list[str]) -> list[Collective]:
    """Calls as the host saw them: c10d's annotations, with what the ``record_param_comms`` around them tells."""
    annotated = [call for call in trace.calls if call.library]
    recorded = [call for call in trace.calls if not call.library]
    around = _Nested(recorded)
    used: set[int] = set()
    rows = []
    unnamed: dict[int, int] = {}
    untold = 0
    for call in annotated:
        op, group, seq, size, dtype = call.op, call.group, call.seq, call.bytes, call.dtype
        for record in around.around(call.tid, call.start_ns):
            used.add(id(record))
            group = record.group if group < 0 else group
            seq = record.seq if seq < 0 else seq
            size, dtype = (record.bytes, record.dtype) if record.bytes >= 0 else (size, dtype)
        if group < 0:
            group = _unnamed(groups, unnamed, -1)
            untold += 1
        rows.append(
            Collective(
                call.start_ns,
                call.duration_ns,
                group,
                seq,
                Op.UNKNOWN if op is None else op,
                size,
                dtype,
                steps.at(call.start_ns),
            )
        )
    if not any(call.library.startswith("gloo") for call in annotated):
        rows += [
            Collective(
                call.start_ns,
                call.duration_ns,
                call.group,
                call.seq,
                call.op,
                call.bytes,
                call.dtype,
                steps.at(call.start_ns),
            )
            for call in recorded
            if id(call) not in used and call.op is not None and call.group >= 0
        ]
    if any(call.library.startswith("nccl") for call in annotated):
        notes.append(
            f"{trace.path.name} has NCCL calls but no GPU kernels: how long a call took the host is known, not when"
            " the GPU was done (profile with ProfilerActivity.CUDA)"
        )
    if unnamed:
        notes.append(
            f"{trace.path.name}: {untold} of {len(rows)} collectives do not say which process group they belong to"
        )
    return rows


class _Nested:
    """Calls by thread, to find those that an instant lies in."""

    def __init__(self, calls: list[Call]) -> None:
        self.threads: dict[int, list[Call]] = {}
        for call in calls:
            self.threads.setdefault(call.tid, []).append(call)
        self.starts: dict[int, array[int]] = {}
        for tid, mine in self.threads.items():
            mine.sort(key=lambda call: (call.start_ns, -call.duration_ns))
            self.starts[tid] = array("q", (call.start_ns for call in mine))

    def around(self, tid: int, instant: int) -> list[Call]:
        """The calls of a thread that had begun and not ended, innermost first. Calls nest two or three deep."""
        if tid not in self.threads:
            return []
        place = bisect_right(self.starts[tid], instant)
        mine = self.threads[tid][max(0, place - 4) : place]
        return [call for call in reversed(mine) if instant <= call.start_ns + call.duration_ns]


def _merged(rows: list[Collective]) -> list[Collective]:
    """One row for a collective that took several kernels: those that the trace gives one sequence number."""
    first: dict[tuple[int, int, int], Collective] = {}
    kept = []
    for row in rows:
        known = first.setdefault((row.group, row.seq, row.op), row) if row.seq >= 0 else row
        if known is row:
            kept.append(row)
            continue
        end = max(known.enter_ns + known.duration_ns, row.enter_ns + row.duration_ns)
        known.enter_ns = min(known.enter_ns, row.enter_ns)
        known.duration_ns = end - known.enter_ns
    return kept


def _name(op: int | None) -> str:
    return (Op(op) if op in set(Op) else Op.UNKNOWN).name.lower()
