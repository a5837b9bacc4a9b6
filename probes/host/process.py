"""The process probe: faults, switches, migrations, place and state of each rank's process and driving thread.

Files of /proc/PID only (Documentation/filesystems/proc.rst). Plain facts: what they mean for a step is for others
to say.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from probes import procfs
from probes.discovery import RankProcess, read_process
from probes.host.cgroup_limits import count_cpus
from probes.host.counters import Counters
from probes.host.files import FilesProbe
from probes.host.reading import Reading
from probes.records import Metric

NUMA_S = 30.0
"""How often it is looked on which memory nodes a rank's pages are …"""
NUMA_LARGEST = 4 << 30
"""Of a larger process it is not read: while the kernel walks its page tables (10 ms for 1 GB), whatever in it maps
memory waits."""
NUMA_SHARE = 200
"""… and at most this share of time: the kernel walks all page tables for it (0.1 s for some 10 GB)."""
NUMA_LIMIT = 4 << 20
"""Bytes of numa_maps, about 40,000 mappings."""
MIN_FLT, MAJ_FLT, PROCESSOR = 7, 9, 36
"""Places in /proc/PID/stat after the name: fields 10, 12 and 39, counted from 1."""
ODD_STATES = frozenset("DTtZX")
"""Uninterruptible, stopped, traced, zombie, dead. The others, running and asleep, are how a thread should be."""
STATUS = re.compile(
    rb"^(TracerPid|VmRSS|VmSwap|Cpus_allowed_list|voluntary_ctxt_switches|nonvoluntary_ctxt_switches):\s*(\S+)",
    re.MULTILINE,
)
PAGES = re.compile(rb" N(\d+)=(\d+)")
PAGE_SIZE = re.compile(rb" kernelpagesize_kB=(\d+)")


@dataclass(frozen=True)
class _Thread:
    """What the files of a driving thread say."""

    state: str
    status: dict[str, str]
    minor_faults: int
    major_faults: int
    cpu: int


class ProcessProbe(FilesProbe):
    """Reads ranks' processes. Not safe for several threads."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc, self._sys, self._clock = proc, sys, clock
        self._counters = Counters()
        self._driving: dict[int, int] = {}
        self._numa_at: dict[int, float] = {}
        """Rank's process → when its pages are looked at next."""
        self._nodes = _nodes(sys)
        online = procfs.read(f"{sys}/devices/system/cpu/online") or b""
        self._online = count_cpus(online.decode("ascii", "replace")) or os.cpu_count() or 1
        self._counts_migrations = (procfs.read(f"{proc}/self/sched") or b"").find(b"nr_migrations") >= 0

    @property
    def missing(self) -> list[str]:
        """What this kernel does not let see, in words."""
        words = []
        if not self._counts_migrations:
            words.append("/proc/PID/sched: migrations between CPUs are not counted (CONFIG_SCHED_DEBUG)")
        if len(self._nodes) > 1 and not (self._proc / "self/numa_maps").exists():
            words.append("/proc/PID/numa_maps: on which memory node pages are is not seen (CONFIG_NUMA)")
        return words

    def follow(self, driving: Mapping[int, int]) -> None:
        """Which thread drives each rank, by the rank's process; where it is not said, the main thread."""
        self._driving = dict(driving)

    def read(self, ranks: Mapping[int, RankProcess]) -> Reading:
        """How each rank's process is now, and what it did since the last call."""
        self._counters.turn()
        self._numa_at = {pid: at for pid, at in self._numa_at.items() if pid in ranks}
        threads = {pid: thread for pid in ranks if (thread := self._thread(pid)) is not None}
        self.rows_read += len(threads)
        pinned = Counter(_allowed(thread) for thread in threads.values())
        found = {}
        for pid, thread in threads.items():
            life = (pid, ranks[pid].process.start_ticks)
            metrics = [*self._faults(life, thread), *self._scheduling(life, thread), *_state(thread)]
            metrics += [*self._place(thread, pinned), *_memory(thread), *self._tracer(thread)]
            metrics += self._pages(pid, thread)
            found[pid] = metrics
        return Reading(ranks=found)

    def _thread(self, pid: int) -> _Thread | None:
        """The driving thread; None when it has ended."""
        folder = f"{self._proc}/{pid}/task/{self._driving.get(pid, pid)}"
        status, stat = procfs.read(f"{folder}/status"), procfs.read(f"{folder}/stat")
        fields = (stat or b"").rpartition(b")")[2].split()
        if status is None or len(fields) <= PROCESSOR:
            return None
        return _Thread(
            state=fields[0].decode("ascii", "replace")[:1],
            status={key.decode(): value.decode("ascii", "replace") for key, value in STATUS.findall(status)},
            minor_faults=int(fields[MIN_FLT]),
            major_faults=int(fields[MAJ_FLT]),
            cpu=int(fields[PROCESSOR]),
        )

    def _faults(self, life: tuple[int, int], thread: _Thread) -> Iterator[Metric]:
        # Of the process these are sums over all threads, also those that have ended.
        fields = (procfs.read(f"{self._proc}/{life[0]}/stat") or b"").rpartition(b")")[2].split()
        if len(fields) > MAJ_FLT:
            yield from self._grown(life, "minor_faults", int(fields[MIN_FLT]))
            yield from self._grown(life, "major_faults", int(fields[MAJ_FLT]))
        yield from self._grown(life, "driving_minor_faults", thread.minor_faults)
        yield from self._grown(life, "driving_major_faults", thread.major_faults)

    def _scheduling(self, life: tuple[int, int], thread: _Thread) -> Iterator[Metric]:
        yield from self._grown(life, "voluntary_switches", _number(thread, "voluntary_ctxt_switches"))
        yield from self._grown(life, "involuntary_switches", _number(thread, "nonvoluntary_ctxt_switches"))
        if self._counts_migrations:
            tid = self._driving.get(life[0], life[0])
            sched = procfs.read(f"{self._proc}/{life[0]}/task/{tid}/sched") or b""
            count = sched.partition(b"nr_migrations")[2].partition(b"\n")[0].rpartition(b":")[2].strip()
            if count.isdigit():
                yield from self._grown(life, "migrations", int(count))

    def _place(self, thread: _Thread, pinned: Counter[str]) -> Iterator[Metric]:
        yield Metric(name="last_cpu", value=thread.cpu, unit="1")
        allowed = _allowed(thread)
        count = count_cpus(allowed)
        if 0 < count < self._online:
            labels = {"cpus": allowed[:64]}
            yield Metric(name="cpus_allowed", value=count, unit="1", labels=labels)
            if pinned[allowed] > 1:
                yield Metric(name="ranks_on_these_cpus", value=pinned[allowed], unit="1", labels=labels)

    def _tracer(self, thread: _Thread) -> Iterator[Metric]:
        tracer = _number(thread, "TracerPid")
        if tracer:
            process = read_process(self._proc, tracer)
            name = process.name[:64] if process else ""
            labels = {"tracer": name, "tracer_pid": str(tracer)}
            yield Metric(name="traced", value=1, unit="1", labels=labels)

    def _pages(self, pid: int, thread: _Thread) -> Iterator[Metric]:
        now = self._clock()
        if len(self._nodes) < 2 or now < self._numa_at.get(pid, now - 1):
            return
        if _number(thread, "VmRSS") * 1024 > NUMA_LARGEST:
            return
        before = time.thread_time()
        by_node = _bytes_by_node(procfs.read(f"{self._proc}/{pid}/numa_maps", NUMA_LIMIT) or b"")
        took = time.thread_time() - before
        self._numa_at[pid] = now + max(NUMA_S, NUMA_SHARE * took)
        total = sum(by_node.values())
        home = next((node for node, cpus in self._nodes.items() if thread.cpu in cpus), None)
        if total and home is not None:
            labels = {"node": str(home)}
            away = 1 - by_node.get(home, 0) / total
            yield Metric(name="memory_on_other_nodes_ratio", value=away, unit="ratio", labels=labels)

    def _grown(self, life: tuple[int, int], name: str, total: int) -> Iterator[Metric]:
        # The driving thread's own counters go with the thread.
        grown = self._counters.grown((life, self._driving.get(life[0], life[0]), name), total)
        if grown:
            yield Metric(name=name, value=grown, unit="1")


def _state(thread: _Thread) -> Iterator[Metric]:
    if thread.state in ODD_STATES:
        yield Metric(name="thread_state", value=1, unit="1", labels={"state": thread.state})


def _memory(thread: _Thread) -> Iterator[Metric]:
    for name, key in (("resident_bytes", "VmRSS"), ("swapped_bytes", "VmSwap")):
        size = _number(thread, key) * 1024
        if size:
            yield Metric(name=name, value=size, unit="B")


def _allowed(thread: _Thread) -> str:
    return thread.status.get("Cpus_allowed_list", "")


def _number(thread: _Thread, key: str) -> int:
    """0 where the kernel does not tell it."""
    value = thread.status.get(key, "")
    return int(value) if value.isdigit() else 0


def _bytes_by_node(numa_maps: bytes) -> dict[int, int]:
    """Memory node → bytes. Lines like ``7f… default file=/x mapped=5 N0=3 N1=2 kernelpagesize_kB=4``."""
    found: dict[int, int] = {}
    for line in numa_maps.splitlines():
        size = PAGE_SIZE.search(line)
        if size is not None:
            for node, pages in PAGES.findall(line):
                found[int(node)] = found.get(int(node), 0) + int(pages) * int(size[1]) * 1024
    return found


def _nodes(sys: Path) -> dict[int, frozenset[int]]:
    """Memory node → its CPUs; empty without NUMA."""
    found = {}
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        cpus: set[int] = set()
        for part in (procfs.read(f"{folder}/cpulist") or b"").decode("ascii", "replace").strip().split(","):
            low, _, high = part.partition("-")
            if low.isdigit():
                cpus.update(range(int(low), int(high or low) + 1))
        found[int(folder.name.removeprefix("node"))] = frozenset(cpus)
    return found
