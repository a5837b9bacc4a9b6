"""The gloo probe: every collective of a rank, from the moment its driving thread enters it to its end.

User space's side of bpf/gloo.bpf.c: finds the functions by symbol pattern, attaches entry uprobes to a rank's
process, and turns events into :class:`Call` rows and thread cuts. No uretprobe: gloo throws.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from probes import elf
from probes.bpf import BpfUnavailable, Kernel, possible_cpus
from probes.host.thread_time import CUT, Cut, read_cut
from probes.nccl import layout
from probes.records import Communicator

log = logging.getLogger(__name__)

LIBRARY = r"libtorch_cpu.*\.so"
"""Name of the mapped file that holds gloo's collectives."""

PREFIX = "_ZN4c10d16ProcessGroupGloo"
PATTERNS = {
    "arrival": r"9AsyncWorkC[12]ESt10shared_ptrIN4gloo7ContextEE\w*6OpType\w*",
    "end": r"9AsyncWork14finishWorkGlooEv",
    "failed": r"9AsyncWork19finishWorkGlooErrorE\w*",
    "identity": r"10getContextEj",
}
"""Rest of the mangled names after ``PREFIX``."""
TIMEOUT_ARGUMENT = "NSt6chrono8duration"
"""In the constructor's name: torch ≥ 2.8 passes a timeout before the title."""

ARRIVAL, END, FAILED, OWN = 1, 2, 3, 4
HEAD = struct.Struct("<2Q 4I 2Q q Q 5q q 6I")
"""``struct event`` of bpf/gloo.bpf.c up to its cuts."""
ESSENCE = struct.Struct("<2Q 3I")
"""What every event's beginning says: time, work, kind, process, number of cuts."""
SINCE = struct.Struct("<Q")
"""A cut's first field; 0 where there is no cut."""
OWN_CUTS = 32
"""Where the cuts of a ``struct own`` begin."""
GROUP = struct.Struct("<Q2IQ64sQ32s")

COMMUNICATOR_LIMIT = 256
"""Communicators of one rank; what it does on later ones is not followed (and counted): all are sent each second."""
RELEARN_S = 60.0
"""How long communicators known from before are waited for by name; after that those missing are held to be gone."""
PENDING_LIMIT = 4096
"""Collectives of one rank in flight; beyond it the oldest are given up (and counted)."""

STANDING_NS = 5_000_000_000
"""A collective that has not ended after this is told as such …"""
AGAIN_NS = 60_000_000_000
"""… and so often, while it lasts: whoever looks at the last minutes must find it."""
IN_FLIGHT = 16
"""Collectives of one communicator may overtake each other where several threads run them, by fewer than this."""


@dataclass(slots=True)
class Call:
    """One collective of one process. Instants and durations are CLOCK_MONOTONIC nanoseconds."""

    communicator: int
    """Index into ``Traffic.communicators``."""
    seq: int
    op: int
    bytes: int
    dtype: str
    enter_ns: int
    duration_ns: int = -1
    failed: bool = False


@dataclass
class Traffic:
    """What one process did: state that lasts, and what came since it was last taken."""

    communicators: list[Communicator] = field(default_factory=list)
    contexts: dict[int, int] = field(default_factory=dict)
    """gloo context (address) → index into ``communicators``."""
    pending: dict[int, Call] = field(default_factory=dict)
    """Work (address) → a collective that has not ended."""
    ended: list[Call] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    relearn_until: float = 0.0
    """CLOCK_MONOTONIC seconds: communicators were known before the probe was attached."""
    told_at: dict[int, int] = field(default_factory=dict)
    """Work → when it was told that it had not ended, ns."""
    last_ended: dict[int, int] = field(default_factory=dict)
    """Index of a communicator → the highest sequence number that ended on it."""

    def take(self) -> tuple[list[Call], list[Cut]]:
        """Hand over the ended collectives and the cuts since the last call."""
        taken = (self.ended, self.cuts)
        self.ended, self.cuts = [], []
        return taken

    def end(self, work: int) -> Call | None:
        """The collective of a work is pending no longer; its address may be another's next."""
        self.told_at.pop(work, None)
        return self.pending.pop(work, None)

    def standing(self, now_ns: int) -> list[Call]:
        """Collectives that have not ended for so long that it should be told, and told again. Where many later ones
        of the communicator have ended, its end was lost."""
        found = []
        for work, call in self.pending.items():
            due = max(call.enter_ns + STANDING_NS, self.told_at.get(work, -AGAIN_NS) + AGAIN_NS)
            if now_ns >= due and call.seq + IN_FLIGHT > self.last_ended.get(call.communicator, -1):
                self.told_at[work] = now_ns
                found.append(call)
        return found

    def names_wanted(self, now: float) -> bool:
        """Whether a communicator's name may still be learned; ``now`` in seconds."""
        used = set(self.contexts.values())
        if not used or any(not self.communicators[index].uid for index in used):
            return True
        return now < self.relearn_until and len(used) < len(self.communicators)


@dataclass(frozen=True)
class _Attached:
    library: Path
    functions: dict[str, tuple[int, bytes]]
    """What → (address, BPF function)."""
    identity: bool
    events: dict[str, bytes] = field(default_factory=dict)
    """What is attached now → BCC's name of it."""


class GlooProbe:
    """Attaches to ranks and reads their collectives. Not safe for several threads."""

    def __init__(self, kernel: Kernel, load: int) -> None:
        """Raises :class:`BpfUnavailable`. ``load``: of the :class:`probes.host.thread_time.ThreadTimeProbe` whose
        maps it uses; that must live longer."""
        self._bpf: Any = kernel.compile("gloo.bpf.c", layout.DEFINES | {"CPUS": possible_cpus()}, load)
        self._attached: dict[int, _Attached] = {}
        self._functions: dict[tuple[int, int, int], dict[str, tuple[int, bytes]]] = {}
        self.traffic: dict[int, Traffic] = defaultdict(Traffic)
        """Process → its traffic; entries appear with the first event and go with :meth:`forget`."""
        self.hits = 0
        self.unmatched = 0
        """Arrivals and ends that could not be put together: the agent came between the two, or a limit was met."""
        self._bpf[b"gloo_events"].open_ring_buffer(self._on_event)
        self._detailed = self._bpf[b"detailed"]
        self._in_detail: set[int] = set()

    def attach(self, pid: int, library: Path, known: Sequence[Communicator] = ()) -> None:
        """Watch process ``pid``, which has ``library`` mapped. Raises :class:`BpfUnavailable`.

        ``known``: its communicators as an earlier probe learned them; they keep their places.
        """
        functions = self._locate(library)
        self.recall(pid, known)
        self._attached[pid] = _Attached(library, functions, identity=True)
        attached: list[str] = []
        try:
            # The end before the arrival: an end without arrival is harmless, the other way round is not.
            for what in ("failed", "end", "identity", "arrival"):
                self._uprobe(pid, what)
                attached.append(what)
        except BpfUnavailable:
            for what in attached:
                self._remove(pid, what)
            del self._attached[pid]
            raise

    def recall(self, pid: int, known: Sequence[Communicator]) -> None:
        """A process's communicators as they were learned before: they keep their places. Where each one's context
        is must be learned again, by name."""
        if known and not self.traffic[pid].communicators:
            self.traffic[pid].communicators = list(known)
            self.traffic[pid].relearn_until = time.monotonic() + RELEARN_S

    def detach(self, pid: int) -> None:
        """Stop watching a process; it may have ended already. What is in flight is given up: its end will not be
        seen."""
        if pid in self.traffic:
            self.traffic[pid].pending.clear()
            self.traffic[pid].told_at.clear()
        self.cheap(pid)
        attached = self._attached.get(pid)
        if attached is None:
            return
        for what in ("arrival", "identity", "end", "failed"):
            self._remove(pid, what)
        del self._attached[pid]

    def forget(self, pid: int) -> None:
        """Drop what is known of a process that has ended."""
        self.traffic.pop(pid, None)

    def detail(self, pid: int, until_ns: int) -> None:
        """Cut a process's thread times at every arrival and end, each of its threads by itself, until this instant
        (CLOCK_MONOTONIC); the kernel's side stops then by itself."""
        self._detailed[self._detailed.Key(pid)] = self._detailed.Leaf(until_ns)
        self._in_detail.add(pid)

    def cheap(self, pid: int) -> None:
        """Cut only once in a while again."""
        if pid in self._in_detail:
            self._in_detail.remove(pid)
            self._detailed.pop(self._detailed.Key(pid), None)

    def attached(self) -> set[int]:
        """Processes that are watched."""
        return set(self._attached)

    def collect(self) -> None:
        """Read what the kernel has gathered into ``traffic``."""
        self._bpf.ring_buffer_consume()
        now = time.monotonic()
        for pid, attached in list(self._attached.items()):
            traffic = self.traffic.get(pid)
            if traffic is None or not traffic.contexts:
                continue
            unknown = traffic.names_wanted(now)
            if unknown == attached.identity:
                continue
            if unknown:
                try:
                    self._uprobe(pid, "identity")
                except BpfUnavailable as error:  # most likely it has just ended: the next scan says so
                    log.info("%s", error)
                    continue
            else:
                self._remove(pid, "identity")
            self._attached[pid] = replace(attached, identity=unknown)

    def lost(self) -> int:
        """Events that found no room in the ring buffer."""
        return sum(int(count.value) for count in self._bpf[b"lost"].values())

    def drop_caches(self) -> None:
        """Forget where functions stand in libraries; they are looked up anew."""
        self._functions.clear()

    def traps(self) -> int:
        """How often a rank was stopped at one of the probes since they were loaded."""
        return int(self._bpf[b"traps"].sum(0).value)

    def programs(self) -> list[int]:
        """File descriptors of its loaded programs."""
        return [function.fd for function in self._bpf.funcs.values()]

    def close(self) -> None:
        """Detach everything."""
        for pid in list(self._attached):
            self.detach(pid)
        self._bpf.cleanup()

    def _locate(self, library: Path) -> dict[str, tuple[int, bytes]]:
        status = library.stat()
        key = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if key not in self._functions:
            try:
                found = elf.functions(library, PREFIX, PATTERNS)
            except (elf.ElfUnreadable, OSError) as error:
                raise BpfUnavailable(f"cannot read the symbols of {library}: {error}") from error
            self._functions[key] = _entry_points(library, found)
        return self._functions[key]

    def _uprobe(self, pid: int, what: str) -> None:
        attached = self._attached[pid]
        if what not in attached.functions:
            return
        address, function = attached.functions[what]
        before = set(self._bpf.uprobe_fds)
        try:
            self._bpf.attach_uprobe(
                name=str(attached.library).encode(), addr=address, fn_name=function, pid=pid
            )
        except Exception as error:  # BCC raises bare Exception
            raise BpfUnavailable(f"cannot attach to {attached.library} in process {pid}: {error}") from error
        (attached.events[what],) = self._bpf.uprobe_fds.keys() - before

    def _remove(self, pid: int, what: str) -> None:
        event = self._attached[pid].events.pop(what, None)
        if event is None:
            return
        # By BCC's name of it: to make that name anew BCC would look into the library, which may be gone by now or
        # another one, and the descriptor would stay open for as long as the probes are loaded.
        try:
            self._bpf.detach_uprobe_event(event)
        except Exception as error:  # BCC raises bare Exception
            log.info("detaching from process %d: %s", pid, error)
            # BCC keeps its number when it fails half-way, and would close that once more at the end: by then it
            # may be another's.
            self._bpf.uprobe_fds.pop(event, None)

    def _on_event(self, _context: object, data: int, size: int) -> None:
        raw = ctypes.string_at(data, size)
        at, work, kind, tgid, cuts = ESSENCE.unpack_from(raw)
        traffic = self.traffic[tgid]
        self.hits += 1
        if kind == OWN:
            rows = (OWN_CUTS + index * CUT.size for index in range(cuts))
            traffic.cuts += [read_cut(raw, row) for row in rows if SINCE.unpack_from(raw, row)[0]]
            return
        for index in range(cuts):
            traffic.cuts.append(read_cut(raw, HEAD.size + index * CUT.size))
        if kind == ARRIVAL:
            self._arrival(traffic, raw)
            return
        call = traffic.end(work)
        if call is None:
            self.unmatched += 1
            return
        call.duration_ns, call.failed = max(0, at - call.enter_ns), kind == FAILED
        last = traffic.last_ended
        last[call.communicator] = max(call.seq, last.get(call.communicator, -1))
        traffic.ended.append(call)

    def _arrival(self, traffic: Traffic, raw: bytes) -> None:
        values = HEAD.unpack_from(raw)
        at, work, _, _, _, _, context, seq, elements, dimensions, *sizes, first = values[:16]
        tensors, dtype, op, _, group_rank, group_size = values[16:]
        backend, backend_rank, backend_size, length, uid, desc_length, desc = GROUP.unpack_from(
            raw, HEAD.size + 2 * CUT.size
        )
        same = bool(backend) and (backend_rank, backend_size) == (group_rank, group_size)
        name = _text(uid, length) if same else ""
        description = _text(desc, desc_length) if name else ""
        number, dtype_name = layout.input_bytes(elements, tensors, dimensions, sizes, first, dtype)
        index = _communicator(
            traffic, context, Communicator(uid=name, desc=description, rank=group_rank, size=group_size)
        )
        if index is None:
            self.unmatched += 1
            return
        if len(traffic.pending) >= PENDING_LIMIT:
            traffic.end(next(iter(traffic.pending)))
            self.unmatched += 1
        traffic.pending[work] = Call(index, seq, op, number, dtype_name, at)


def _text(characters: bytes, length: int) -> str:
    """A string that was read whole; else none."""
    return characters[:length].decode("ascii", "replace") if 0 < length < len(characters) else ""


def _communicator(traffic: Traffic, context: int, seen: Communicator) -> int | None:
    """Index of a communicator; None for one beyond the limit."""
    index = traffic.contexts.get(context)
    known = traffic.communicators[index] if index is not None else None
    other = known and (
        (known.rank, known.size) != (seen.rank, seen.size) or (seen.uid and known.uid not in ("", seen.uid))
    )
    if index is None or other:  # other: a group was destroyed and another one made at its address
        index = _place(traffic, seen)
        if index is None:
            return None
        traffic.contexts[context] = index
    elif seen.uid and not traffic.communicators[index].uid:
        traffic.communicators[index] = seen
    return index


def _place(traffic: Traffic, seen: Communicator) -> int | None:
    """The place of one known from before under this name, or a new one."""
    taken = set(traffic.contexts.values())
    for index, known in enumerate(traffic.communicators):
        if seen.uid and known == seen and index not in taken:
            return index
    if len(traffic.communicators) >= COMMUNICATOR_LIMIT:
        return None
    traffic.communicators.append(seen)
    return len(traffic.communicators) - 1


def _entry_points(library: Path, found: dict[str, dict[str, int]]) -> dict[str, tuple[int, bytes]]:
    entries: dict[str, tuple[int, bytes]] = {}
    for what, matches in found.items():
        if len(matches) > 1 or (not matches and what in ("arrival", "end")):
            raise BpfUnavailable(
                f"{library}: {len(matches) or 'no'} functions match the gloo probe's {what!r}: "
                "this PyTorch is not known to the probe"
            )
        for mangled, address in matches.items():
            function = {"end": b"gloo_end", "failed": b"gloo_failed", "identity": b"gloo_get_context"}.get(
                what
            )
            if function is None:
                function = b"gloo_arrival_8" if TIMEOUT_ARGUMENT in mangled else b"gloo_arrival_7"
            entries[what] = (address, function)
    return entries
