"""The memory probe: time that processes spend in finding memory, and processes that are killed for want of it.

User space's side of bpf/memory.bpf.c. Finding memory is reclaim (``direct``: the machine's memory is short;
``memcg``: a control group's limit is reached; ``node``: a NUMA node's, where vm.zone_reclaim_mode is set) and
compaction (there is memory, in pieces too small).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from probes import procfs
from probes.bpf import TRACEFS, BpfUnavailable, Kernel
from probes.discovery import RankProcess, read_process
from probes.host.labels import largest, process_label
from probes.host.reading import Reading
from probes.host.tracepoints import TracepointProbe, lacking
from probes.records import Event, Metric

KINDS = ("direct", "memcg", "node", "compaction")
"""By number, as in bpf/memory.bpf.c."""
COMPACTION = "compaction"
POINTS = {
    "HAVE_DIRECT": (
        ("vmscan", "mm_vmscan_direct_reclaim_begin"),
        ("vmscan", "mm_vmscan_direct_reclaim_end"),
    ),
    "HAVE_MEMCG": (("vmscan", "mm_vmscan_memcg_reclaim_begin"), ("vmscan", "mm_vmscan_memcg_reclaim_end")),
    "HAVE_NODE": (("vmscan", "mm_vmscan_node_reclaim_begin"), ("vmscan", "mm_vmscan_node_reclaim_end")),
    "HAVE_COMPACTION": (("compaction", "mm_compaction_begin"), ("compaction", "mm_compaction_end")),
    "HAVE_KSWAPD": (("vmscan", "mm_vmscan_kswapd_wake"),),
    "HAVE_VICTIM": (("oom", "mark_victim"),),
}
LOST_WITHOUT = {
    "HAVE_DIRECT": "reclaim when the machine's memory is short is not told",
    "HAVE_MEMCG": "reclaim for a control group's limit is not told",
    "HAVE_NODE": "reclaim of one NUMA node (vm.zone_reclaim_mode) is not told",
    "HAVE_COMPACTION": "compaction is not told",
    "HAVE_KSWAPD": "wakings of kswapd are not told",
    "HAVE_VICTIM": "processes killed for want of memory are not told",
}
LISTED = 5
"""Processes, beside ranks, that are told by name."""
THREADS_LISTED, THREAD_NS = 4, 1_000_000
"""Threads of a rank that are told by number: the largest, if they spent so much."""
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class _Work:
    """What one thread spent on one kind of finding memory, over an interval."""

    tgid: int
    tid: int
    kind: str
    ns: int
    times: int
    pages: int
    comm: str


class _InProgress(NamedTuple):
    at: int
    tgid: int
    told_ns: int


class MemoryProbe(TracepointProbe):
    """Loads the probe; it is attached from then on. Not safe for several threads."""

    def __init__(self, kernel: Kernel, *, proc: Path = Path("/proc")) -> None:
        """Raises :class:`BpfUnavailable`."""
        self.missing: list[str] = []
        """Tracepoints that this kernel does not have, and what is not told without them."""
        self.lost = 0
        """Work that found no room in the kernel's maps, and is not told."""
        defines: dict[str, int | None] = {}
        for name, points in POINTS.items():
            if absent := lacking(points):
                self.missing.append(f"{', '.join(absent)}: {LOST_WITHOUT[name]}")
            else:
                defines[name] = None
        if not defines:
            raise BpfUnavailable(
                "this kernel has no tracepoints of memory management (CONFIG_FTRACE, CONFIG_TRACING)"
            )
        if "HAVE_VICTIM" in defines and _has_field("oom", "mark_victim", "anon_rss"):
            defines["HAVE_VICTIM_MEMORY"] = None
        self._proc = proc
        super().__init__(kernel, "memory.bpf.c", defines)
        # Attached one after the other: of work that was short enough the end was not seen.
        self._bpf[b"begun"].clear()
        self._in_progress: dict[tuple[int, str], _InProgress] = {}
        """(Thread, kind) → what was told of work that had not ended."""
        self._owed: dict[tuple[int, int, str], tuple[int, int]] = {}
        """(Process, thread, kind) → (told before it ended, readings since): it comes once more, as a whole."""
        self._kswapd = {pid: (node, _ran_ns(proc, pid)) for pid, node in _kswapd(proc).items()}

    def read(self, ranks: Mapping[int, RankProcess]) -> Reading:
        """What finding memory took since the last call, work in progress included."""
        told: dict[int, list[_Work]] = {}
        others: list[_Work] = []
        for work in self._work():
            (told.setdefault(work.tgid, []) if work.tgid in ranks else others).append(work)
        return Reading(
            node=[*self._of_others(others), *self._of_kswapd()],
            ranks={pid: list(_of_rank(works)) for pid, works in told.items()},
            events=list(self._killed(ranks)),
        )

    # --- the kernel's rows

    def _drain(self, name: bytes) -> list[tuple[Any, Any]]:
        rows = list(self._bpf[name].items_lookup_and_delete_batch())
        self.rows_read += len(rows)
        return rows

    def _work(self) -> Iterator[_Work]:
        """Ended work is taken first, so that what ends meanwhile is told by the next reading, as a whole."""
        ended = self._drain(b"spent")
        begun = {
            (key.tid, KINDS[key.kind]): (value.at, value.tgid, _text(value.comm))
            for key, value in self._bpf[b"begun"].items_lookup_batch()
        }
        for (tid, kind), had in self._in_progress.items():
            if begun.get((tid, kind), (0,))[0] != had.at:
                key = (had.tgid, tid, kind)
                self._owed[key] = self._owed.get(key, (0, 0))[0] + had.told_ns, 0
        for who, sum_ in ended:
            key = (who.tgid, who.tid, KINDS[who.kind])
            told, _ = self._owed.pop(key, (0, 0))
            yield _Work(*key, max(0, sum_.ns - told), sum_.times, sum_.pages, _text(sum_.comm))
        self._owed = {key: (ns, age + 1) for key, (ns, age) in self._owed.items() if age < 2}
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        before, self._in_progress = self._in_progress, {}
        for (tid, kind), (at, tgid, comm) in begun.items():
            if not (
                self._proc / str(tid)
            ).exists():  # it has ended meanwhile: this is told by the next reading
                continue
            had = before.get((tid, kind), _InProgress(at, tgid, 0))
            told = had.told_ns if had.at == at else 0
            whole = max(told, now - at)
            self._in_progress[tid, kind] = _InProgress(at, tgid, whole)
            yield _Work(tgid, tid, kind, whole - told, 0, 0, comm)
        self.lost = int(self._bpf[b"unplaced"][0].value)

    # --- metrics and events

    def _of_others(self, works: list[_Work]) -> Iterator[Metric]:
        spent: dict[tuple[str, str], int] = {}
        names: dict[int, str] = {}
        for work in works:
            if work.tgid not in names:
                names[work.tgid] = process_label(work.tgid, work.comm, self._proc)
            key = (names[work.tgid], work.kind)
            spent[key] = spent.get(key, 0) + work.ns
        for (process, kind), ns in largest(spent, LISTED).items():
            yield from _metric("_ns", kind, ns, "ns", process=process)

    def _of_kswapd(self) -> Iterator[Metric]:
        for node, wakings in self._drain(b"kswapd"):
            yield Metric(name="kswapd_wakings", value=wakings, unit="1", labels={"node": str(node)})
        for pid, (name, before) in self._kswapd.items():
            ran = _ran_ns(self._proc, pid)
            self._kswapd[pid] = name, ran
            if ran > before:
                yield Metric(name="kswapd_running_ns", value=ran - before, unit="ns", labels={"node": name})

    def _killed(self, ranks: Mapping[int, RankProcess]) -> Iterator[Event]:
        for at, victim in sorted(self._drain(b"victims"), key=lambda row: row[0]):
            pid = _process_of(self._proc, victim.tid)
            rank = ranks.get(pid)
            name = _text(victim.comm) or process_label(pid, "?", self._proc)
            held = f" held {victim.anonymous_kb / 1024:.0f} MiB and" if victim.anonymous_kb else ""
            asker = f"{_text(victim.asker_comm)} (pid {victim.asker}) wanted more"
            yield Event(
                kind="oom-kill",
                at_ns=at,
                detail=f"{name} (pid {pid}){held} was killed for want of memory: {asker}",
                job=rank.job if rank else "",
                rank=rank.rank if rank else -1,
            )


def _of_rank(works: list[_Work]) -> Iterator[Metric]:
    for kind in KINDS:
        of_kind = [work for work in works if work.kind == kind]
        yield from _metric("_ns", kind, sum(work.ns for work in of_kind), "ns")
        yield from _metric("s", kind, sum(work.times for work in of_kind), "1")
        yield from _metric("ed_bytes", kind, sum(work.pages for work in of_kind) * PAGE, "B")
    threads: dict[tuple[int, str], int] = {}
    for work in works:
        threads[work.tid, work.kind] = threads.get((work.tid, work.kind), 0) + work.ns
    for (tid, kind), ns in sorted(threads.items(), key=lambda item: -item[1])[:THREADS_LISTED]:
        if ns >= THREAD_NS:
            yield from _metric("_thread_ns", kind, ns, "ns", tid=str(tid))


def _metric(ending: str, kind: str, value: int, unit: str, **labels: str) -> Iterator[Metric]:
    """A metric of compaction or of a kind of reclaim, unless it is zero."""
    if not value:
        return
    if kind == COMPACTION:
        yield Metric(name=f"compaction{ending}", value=value, unit=unit, labels=labels)
    else:
        yield Metric(name=f"reclaim{ending}", value=value, unit=unit, labels={"kind": kind} | labels)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _has_field(category: str, event: str, name: str) -> bool:
    """Whether a tracepoint tells this."""
    for root in (TRACEFS, Path("/sys/kernel/debug/tracing")):
        described = procfs.read(f"{root}/events/{category}/{event}/format")
        if described is not None:
            return re.search(rb"\b%s;" % name.encode(), described) is not None
    return False


def _process_of(proc: Path, tid: int) -> int:
    """The process that a thread is of; the thread's own number when it has gone."""
    found = re.search(rb"^Tgid:\s+(\d+)$", procfs.read(f"{proc}/{tid}/status") or b"", re.MULTILINE)
    return int(found[1]) if found else tid


def _kswapd(proc: Path) -> dict[int, str]:
    """Threads that reclaim in the background → their NUMA node."""
    threads = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            process = read_process(proc, int(entry.name))
            if process is not None and process.kernel and re.fullmatch(r"kswapd\d+", process.name):
                threads[process.pid] = process.name.removeprefix("kswapd")
    return threads


def _ran_ns(proc: Path, pid: int) -> int:
    fields = (procfs.read(f"{proc}/{pid}/schedstat") or b"").split()
    return int(fields[0]) if fields and fields[0].isdigit() else 0
