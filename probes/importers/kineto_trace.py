"""What one Kineto trace tells, gathered event by event.

Instants here are nanoseconds as the file counts them; :mod:`probes.importers.kineto_rows` adds its base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from probes.importers import Unusable
from probes.importers.kineto_columns import Call, Group, Launches, Operations, Transfer
from probes.importers.kineto_names import (
    ANNOTATION,
    COMMUNICATION,
    HOST_WAITS,
    MAX_NAME,
    STEP,
    dtype_of,
    op_of,
    op_of_kernel,
    shortened,
)
from probes.importers.kineto_stream import Args, Scalar, Stream, TraceEvent
from probes.records import Lane, Op

KINDS = 2_048
"""Most kinds of operations that are told apart; what comes after them counts as ``OTHER``."""
OTHER = "others"
LONG_CALL_NS = 1_000_000
"""A call of the runtime that takes 1 ms held up the host: a full queue, a copy of memory that is not pinned."""
_RAW_NAMES = 1 << 16
_THREADS = 1 << 16
_GROUPS = 1 << 14
"""Names, threads and groups that are remembered, so that a file of nothing but names needs no memory."""
_FAR_US = 1e16
"""Beyond ``_LIMIT``; larger floats have no whole number of nanoseconds."""
_LIMIT = 1 << 61
"""Instants and durations below: 73 years of nanoseconds, so that sums with ``base_ns`` stay below 2^62."""


@dataclass
class Trace:
    """One file, read. Rows in the order of the file."""

    path: Path
    around: dict[str, Any] = field(default_factory=dict)
    cut: str = ""
    broken: int = 0
    places: dict[str, int] = field(default_factory=dict)
    """Kinds of operations → their number, in order."""
    operations: Operations = field(default_factory=Operations)
    host_ops: Operations = field(default_factory=Operations)
    """Operators on the CPU; kept only where no kernel is in the trace."""
    launches: Launches = field(default_factory=Launches)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, end, number)."""
    calls: list[Call] = field(default_factory=list)
    by_external: dict[int, Call] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    group_places: dict[tuple[str, int], int] = field(default_factory=dict)
    """(name, size) → index into ``groups``."""
    raw_names: dict[str, tuple[int, bool, Op | None]] = field(default_factory=dict)
    """Names as they came → (kind's number, whether it moves data between GPUs, what it does if NCCL's); of those
    that were seen last, because looking into a name takes longer than reading its event."""
    threads: dict[tuple[Scalar, Scalar], int] = field(default_factory=dict)
    pid: int = 0
    default_rank: int = -1
    """What the calls in the default group say of this rank."""
    default_size: int = 0
    kernels: int = 0
    unusable: int = 0
    """Events left out: no number, negative, beyond all clocks."""
    begin_end: int = 0
    """Events given as pairs of begin and end, which Kineto does not write."""


def gather(path: Path) -> Trace:
    """Read a file. Raises :class:`Unusable` where nothing can be had of it."""
    trace = Trace(path)
    stream = Stream(path)
    for events in stream.events():
        for event in events:
            take = _TAKE.get(event.cat)
            if take is None or event.ph != "X":
                trace.begin_end += event.ph == "B"
                continue
            start, duration, name = event.ts, event.dur, event.name
            if type(start) is float:
                start = round(start * 1000) if -1 < start < _FAR_US else -1
            elif type(start) is int:
                start *= 1000
            if type(duration) is float:
                duration = round(duration * 1000) if -1 < duration < _FAR_US else -1
            elif type(duration) is int:
                duration *= 1000
            if (
                type(start) is int
                and type(duration) is int
                and type(name) is str
                and 0 <= start < _LIMIT
                and 0 <= duration < _LIMIT
            ):
                take(trace, event, name, start, duration)
            else:
                trace.unusable += 1
    trace.around, trace.cut, trace.broken = stream.around, stream.cut, stream.broken
    if not (len(trace.operations) or len(trace.host_ops) or trace.calls or trace.transfers or trace.steps):
        why = f"{trace.cut}, and" if trace.cut else "it has events, but"
        raise Unusable(
            f"{path}: {why} none of them is a kernel, an operator or an annotation of PyTorch's profiler",
            path,
        )
    return trace


def _kernel(trace: Trace, event: TraceEvent, name: str, start: int, duration: int) -> None:
    args = event.args or _NO_ARGS
    correlation = _whole(args.correlation, -1)
    kind, communication, op = trace.raw_names.get(name) or _looked_into(trace, name)
    lane = Lane.COMMUNICATION if communication else Lane.COMPUTE
    if not trace.kernels:
        trace.host_ops = Operations()
    trace.kernels += 1
    trace.operations.add(start, duration, kind, lane, correlation, 0)
    if op is None:
        return
    named = op_of(args.collective) if isinstance(args.collective, str) else None
    if named is not None and (op == Op.UNKNOWN or named not in (Op.UNKNOWN, Op.COALESCED)):
        op = named
    size, dtype = _bytes(args)
    external = _whole(args.external, -1)
    trace.transfers.append(
        Transfer(
            start,
            duration,
            op,
            size,
            dtype,
            _group(trace, args),
            _whole(args.seq, -1),
            _whole(args.stream, _whole(event.tid, -1)),
            correlation,
            # A kernel that nothing ties to an operator carries its own correlation there (Kineto of 2023).
            -1 if external == correlation else external,
        )
    )


def _copy(trace: Trace, event: TraceEvent, name: str, start: int, duration: int) -> None:
    correlation = _whole((event.args or _NO_ARGS).correlation, -1)
    trace.operations.add(start, duration, _kind(trace, name), Lane.COMPUTE, correlation, 0)


def _runtime(trace: Trace, event: TraceEvent, name: str, start: int, duration: int) -> None:
    if "Launch" in name or "Memcpy" in name or "Memset" in name:
        trace.launches.correlation.append(_whole((event.args or _NO_ARGS).correlation, -1))
        trace.launches.at.append(start)
        trace.launches.tid.append(_thread(trace, event))
    if duration >= LONG_CALL_NS or HOST_WAITS.fullmatch(name):
        trace.operations.add(start, duration, _kind(trace, name), Lane.HOST, -1, _thread(trace, event))


def _annotation(trace: Trace, event: TraceEvent, name: str, start: int, duration: int) -> None:
    thread = _thread(trace, event)
    step = STEP.fullmatch(name)
    if step:
        trace.steps.append((start, start + duration, int(step[1])))
        trace.pid = trace.pid or max(0, _whole(event.pid, 0))
        name = "ProfilerStep"
    call = ANNOTATION.match(name)
    if call is None:
        kind = _kind(trace, name, said=True)
        trace.operations.add(start, duration, kind, Lane.HOST, -1, thread)
        return
    size, dtype = _shapes(event.args or _NO_ARGS)
    op = op_of(call[2])
    if op is not None:
        trace.calls.append(Call(start, duration, thread, op, size, dtype, -1, -1, call[1]))


def _operator(trace: Trace, event: TraceEvent, name: str, start: int, duration: int) -> None:
    if name != "record_param_comms":
        if not trace.kernels:
            thread = _thread(trace, event)
            trace.host_ops.add(start, duration, _kind(trace, name), Lane.HOST, -1, thread)
        return
    args = event.args or _NO_ARGS
    op = op_of(args.collective) if isinstance(args.collective, str) else None
    size, dtype = _bytes(args)
    if size < 0:
        size, dtype = _shapes(args)
    call = Call(
        start,
        duration,
        _thread(trace, event),
        op,
        size,
        dtype,
        _group(trace, args),
        _whole(args.seq, -1),
        "",
    )
    trace.calls.append(call)
    external = _whole(args.external, -1)
    if external >= 0:
        trace.by_external[external] = call
    if args.group_desc == "default_pg":
        trace.default_rank = max(trace.default_rank, _whole(args.rank, -1))
        trace.default_size = max(trace.default_size, _whole(args.group_size, 0))


_Take = Callable[[Trace, TraceEvent, str, int, int], None]
_TAKE: dict[Scalar, _Take] = {
    "kernel": _kernel,
    "Kernel": _kernel,
    "gpu_memcpy": _copy,
    "Memcpy": _copy,
    "gpu_memset": _copy,
    "Memset": _copy,
    "cuda_runtime": _runtime,
    "cuda_driver": _runtime,
    "hip_runtime": _runtime,
    "xpu_runtime": _runtime,
    "privateuse1_runtime": _runtime,
    "Runtime": _runtime,
    "user_annotation": _annotation,
    "cpu_op": _operator,
    "Operator": _operator,
}
"""Categories (libkineto/src/ActivityType.cpp; capitals: before 2022). What is not here is not used: Python frames,
flows, annotations repeated on the GPU."""
_NO_ARGS = Args()


def _kind(trace: Trace, name: str, *, said: bool = False) -> int:
    """Number of an operation's kind; ``said``: a name that people gave, which is none of C++'s."""
    return (trace.raw_names.get(name) or _looked_into(trace, name, said))[0]


def _looked_into(trace: Trace, name: str, said: bool = False) -> tuple[int, bool, Op | None]:
    if len(trace.raw_names) >= _RAW_NAMES:
        trace.raw_names.clear()
    short = name[:MAX_NAME] if said else shortened(name)
    if len(trace.places) >= KINDS and short not in trace.places:
        short = OTHER
    communication = COMMUNICATION.search(name) is not None
    found = (
        trace.places.setdefault(short, len(trace.places)),
        communication,
        op_of_kernel(name) if communication else None,
    )
    trace.raw_names[name] = found
    return found


def _thread(trace: Trace, event: TraceEvent) -> int:
    key = (event.pid, event.tid)
    if len(trace.threads) >= _THREADS and key not in trace.threads:
        return _THREADS
    return trace.threads.setdefault(key, len(trace.threads))


def _group(trace: Trace, args: Args) -> int:
    """Index of the process group that a collective names; −1 where it names none."""
    if args.group is None or args.group == "":
        return -1
    groups = trace.group_places
    key = (str(args.group)[:200], max(0, _whole(args.group_size, 0)))
    if key not in groups:
        if len(groups) >= _GROUPS:
            return -1
        groups[key] = len(trace.groups)
        ranks = tuple(listed(args.group_ranks))
        trace.groups.append(
            Group(
                key[0],
                str(args.group_desc or "")[:200],
                key[1] or len(ranks),
                ranks if len(ranks) == (key[1] or len(ranks)) else (),
            )
        )
    return groups[key]


def listed(ranks: object) -> list[int]:
    """Ranks of a group, from a list or the text of one; none where the text is abbreviated (after 30 ranks)."""
    if isinstance(ranks, str):
        if "..." in ranks or len(ranks) > 1 << 20:
            return []
        try:
            ranks = msgspec.json.decode(ranks)
        except (msgspec.DecodeError, RecursionError):
            return []
    if not isinstance(ranks, list):
        return []
    return [rank for rank in ranks if type(rank) is int and 0 <= rank < 1 << 31]


def _bytes(args: Args) -> tuple[int, str]:
    """(bytes of the input, its type) as ``record_param_comms`` says; (−1, type) where it does not."""
    if not isinstance(args.dtype, str):
        return -1, ""
    dtype, width = dtype_of(args.dtype)
    elements = _whole(args.elements, -1)
    return (elements * width if elements >= 0 and width else -1), dtype


def _shapes(args: Args) -> tuple[int, str]:
    """(bytes, type) of the first tensor, from the shapes that operators carry (``record_shapes=True``)."""
    try:
        dims = msgspec.json.decode(args.dims, type=list[Any])
        types = msgspec.json.decode(args.types, type=list[Any])
    except (msgspec.DecodeError, RecursionError):
        return -1, ""
    if not dims or not types or not isinstance(types[0], str) or not isinstance(dims[0], list) or not dims[0]:
        return -1, ""
    dtype, width = dtype_of(types[0])
    total = width
    for size in dims[0]:
        if type(size) is not int or size < 0:
            return -1, ""
        total *= size
    return (total if width and total < _LIMIT else -1), dtype if width else ""


def _whole(value: Scalar, otherwise: int) -> int:
    """A whole number within 62 bits; ``otherwise`` for anything else."""
    if type(value) is str and value.isascii() and value.isdecimal() and len(value) < 19:
        value = int(value)
    return value if type(value) is int and -_LIMIT < value < _LIMIT else otherwise
