"""The on_cpu probe: in what kind of code ranks' threads run: Python, its garbage collector, a library, the kernel.

User space's side of bpf/on_cpu.bpf.c. Each CPU is looked at 49 times a second; a sample stands for the time to the
next one, so times are estimates. There are no stacks: what is told is where the thread was, not who called it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from probes import procfs
from probes.bpf import BpfUnavailable, Kernel
from probes.discovery import RankProcess
from probes.host.code import KERNEL, NATIVE, Codes, Kind
from probes.host.labels import LONGEST, OTHERS
from probes.host.reading import Reading
from probes.host.tracepoints import TracepointProbe
from probes.records import Metric

HZ = 49
"""Not 50: what happens at round intervals would be seen always at the same point, or never."""
PERIOD_NS = 1_000_000_000 // HZ
IN_KERNEL = 1
"""As in bpf/on_cpu.bpf.c."""
DRIVING = "driving"
THREAD_SHARE = 0.05
"""Share of a CPU from which on a thread beside the driving one is told by name, …"""
THREAD_STAYS_S = 30.0
"""… and for so long after that …"""
THREADS_LISTED = 8
"""… if it is among so many with the most samples."""
LIBRARIES_LISTED = 8
"""Libraries that are told by name per rank and reading: those with the most samples of the driving thread."""
FILES_LISTED = 4
"""Interpreters without symbols that are told by name."""
MAX_RANKS = 1024
"""Size of the map `ranks`."""
_SOFTWARE, _CPU_CLOCK = 1, 0
"""PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CPU_CLOCK: include/uapi/linux/perf_event.h."""

_Samples = dict[int, dict[Kind, int]]
"""Thread → kind of code → samples."""


class OnCpuProbe(TracepointProbe):
    """Loads the probe; it samples from then on. Not safe for several threads."""

    def __init__(self, kernel: Kernel, *, proc: Path = Path("/proc")) -> None:
        """Raises :class:`BpfUnavailable`."""
        self._proc = proc
        self._codes = Codes(proc)
        self._driving: Mapping[int, int] = {}
        self._named: dict[int, dict[int, float]] = {}
        """Process → thread that is told by name → when it last had its share of a CPU."""
        self._watched: set[int] = set()
        self._silent = ""
        super().__init__(kernel, "on_cpu.bpf.c", {})
        try:
            self._sample_all(kernel)
        except BaseException:
            self.close()
            raise
        self._read_at = time.monotonic()

    def _sample_all(self, kernel: Kernel) -> None:
        """Open an event on each CPU that is up. In the event's own period: a frequency would have the kernel look
        for the period, and refuse it where it allows fewer samples."""
        program = self._bpf.load_func(b"sampled", kernel.bcc.BPF.PERF_EVENT)
        attributes = kernel.bcc.Perf.perf_event_attr()
        attributes.size = ctypes.sizeof(attributes)
        attributes.type, attributes.config = _SOFTWARE, _CPU_CLOCK
        attributes.sample_period = PERIOD_NS
        attributes.exclude_idle = 1
        opened: dict[int, int] = {}
        self._bpf.open_perf_events[_SOFTWARE, _CPU_CLOCK] = opened  # BCC closes them
        refused: list[str] = []
        cpus = _online_cpus()
        for cpu in cpus:
            handle = kernel.bcc.libbcc.lib.bpf_attach_perf_event_raw(
                program.fd, ctypes.byref(attributes), -1, cpu, -1, 0
            )
            if handle < 0:
                refused.append(os.strerror(ctypes.get_errno()))
            else:
                opened[cpu] = handle
        if not opened:
            raise BpfUnavailable(
                f"the CPU clock cannot be sampled ({refused[0] if refused else 'no CPU is up'}): a container's "
                "seccomp profile or the kernel's lockdown forbids perf_event_open; run the agent on the node "
                "itself, or privileged"
            )
        self.ticks_per_s = HZ * len(opened)
        if refused:
            words = f"{len(refused)} of {len(cpus)} CPUs cannot be sampled ({refused[0]})"
            self._silent = f"{words}: what runs there is not told"

    @property
    def missing(self) -> list[str]:
        """CPUs that are not sampled, and interpreters in which the collector cannot be told apart."""
        blind = sorted(self._codes.blind.items())
        words = [
            f"the collector cannot be told apart from Python in {path}: {why}"
            for path, why in blind[:FILES_LISTED]
        ]
        if len(blind) > FILES_LISTED:
            words.append(f"nor in {len(blind) - FILES_LISTED} other files")
        return [self._silent, *words] if self._silent else words

    @property
    def lost(self) -> int:
        """Samples that found no room in the kernel's map."""
        return int(self._bpf[b"unplaced"][0].value)

    def follow(self, driving: Mapping[int, int]) -> None:
        """Which thread drives each rank (pid → tid)."""
        self._driving = driving

    def read(self, ranks: Mapping[int, RankProcess]) -> Reading:
        """Where threads ran since the last call. A rank is told of from the call on in which it first stood in
        ``ranks``, up to ``MAX_RANKS`` of them."""
        now = time.monotonic()
        elapsed, self._read_at = now - self._read_at, now
        rows = self._drain()
        self._watch(ranks)
        by_process: dict[int, list[tuple[int, int, int]]] = {}
        for tgid, tid, address, count in rows:
            if tgid in ranks:
                by_process.setdefault(tgid, []).append((tid, address, count))
        told = {}
        for pid, samples in by_process.items():
            self._codes.begin(pid, now)
            told[pid] = list(self._of_rank(pid, self._by_kind(pid, samples, now), now, elapsed))
        return Reading(ranks=told)

    # --- the kernel's rows

    def _watch(self, ranks: Mapping[int, RankProcess]) -> None:
        wanted = set(list(ranks)[:MAX_RANKS])
        table = self._bpf[b"ranks"]
        for pid in self._watched - wanted:
            del table[table.Key(pid)]
        for pid in wanted - self._watched:
            table[table.Key(pid)] = table.Leaf(1)
        self._watched = wanted
        self._codes.keep(wanted)
        self._named = {pid: threads for pid, threads in self._named.items() if pid in wanted}

    def _drain(self) -> list[tuple[int, int, int, int]]:
        """(process, thread, address, samples)."""
        rows: list[tuple[Any, Any]] = list(self._bpf[b"samples"].items_lookup_and_delete_batch())
        self.rows_read += len(rows)
        return [(key.tgid, key.tid, key.ip, count) for key, count in rows]

    def _by_kind(self, pid: int, samples: list[tuple[int, int, int]], now: float) -> _Samples:
        threads: _Samples = {}
        for tid, address, count in samples:
            kind = KERNEL if address == IN_KERNEL else self._codes.kind_at(pid, address, now)
            kinds = threads.setdefault(tid, {})
            kinds[kind] = kinds.get(kind, 0) + count
        return threads

    # --- metrics

    def _of_rank(self, pid: int, threads: _Samples, now: float, elapsed: float) -> Iterator[Metric]:
        driving = threads.pop(self._driving.get(pid, 0), {})
        if driving:
            whole = sum(driving.values())
            yield Metric(name="on_cpu_samples", value=whole, unit="1", labels={"thread": DRIVING})
        libraries = {kind: count for kind, count in driving.items() if kind.kind == NATIVE}
        listed = sorted(libraries, key=lambda kind: (-libraries[kind], kind))[:LIBRARIES_LISTED]
        rest = sum(count for kind, count in libraries.items() if kind not in listed)
        for kind, count in driving.items():
            if kind.kind != NATIVE or kind in listed:
                yield _ran(count, DRIVING, kind)
        if rest:
            yield _ran(rest, DRIVING, Kind(NATIVE, OTHERS))
        named = self._names(pid, threads, now, elapsed)
        others: dict[tuple[str, str], int] = {}
        for tid, kinds in threads.items():
            for kind, count in kinds.items():
                key = named.get(tid, OTHERS), kind.kind
                others[key] = others.get(key, 0) + count
        for (name, what), count in others.items():
            yield _ran(count, name, Kind(what))

    def _names(self, pid: int, threads: _Samples, now: float, elapsed: float) -> dict[int, str]:
        """Thread → its name and number, of those that had their share of a CPU now or a little while ago."""
        counts = {tid: sum(kinds.values()) for tid, kinds in threads.items()}
        since = self._named.setdefault(pid, {})
        for tid, count in counts.items():
            if count * PERIOD_NS >= THREAD_SHARE * elapsed * 1e9:
                since[tid] = now
        for tid in [tid for tid, at in since.items() if now - at > THREAD_STAYS_S]:
            del since[tid]
        listed = sorted((tid for tid in counts if tid in since), key=lambda tid: (-counts[tid], tid))
        return {tid: f"{self._comm(pid, tid)} ({tid})" for tid in listed[:THREADS_LISTED]}

    def _comm(self, pid: int, tid: int) -> str:
        raw = procfs.read(f"{self._proc}/{pid}/task/{tid}/comm") or b"?"
        return raw.removesuffix(b"\n").decode("utf-8", "replace")[:LONGEST]


def _ran(samples: int, thread: str, kind: Kind) -> Metric:
    labels = {"thread": thread, "in": kind.kind} | ({"library": kind.library} if kind.library else {})
    return Metric(name="on_cpu_ns", value=samples * PERIOD_NS, unit="ns", labels=labels)


def _online_cpus() -> list[int]:
    cpus: list[int] = []
    for part in Path("/sys/devices/system/cpu/online").read_text().strip().split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus
