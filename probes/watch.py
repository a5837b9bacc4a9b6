"""Watching one node: from processes, probes and counters to the records of one interval.

:class:`NodeWatch` holds what lasts between intervals. It neither stores nor sends; ``agent.py`` does.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from probes.bpf import BpfUnavailable, Kernel
from probes.discovery import Discovery, RankProcess
from probes.host.occupants import name_occupants
from probes.host.steal import StealMeter
from probes.host.thread_time import Cut, ThreadTimeProbe
from probes.nccl.gloo import LIBRARY, Call, GlooProbe, Traffic
from probes.records import (
    Collectives,
    Event,
    Metric,
    Occupant,
    Probe,
    RankBatch,
    Role,
    ThreadTime,
)

log = logging.getLogger(__name__)

COMMUNICATION_THREADS = r"gloo_tcp_loop|pt_gloo_runloop"
"""Threads that move a rank's collectives: gloo's network loop (named by gloo) and its run loops (by PyTorch)."""
LOOK_FOR_THREADS_S = 10.0
UNLOAD_AFTER_S = 60.0
"""Probes are unloaded when no rank has run for so long: a node without training pays nothing."""
RETRY_S = 30.0
"""A rank to which attaching failed is tried again after this."""

TRAP_S = 14e-6
"""Cost of one uprobe hit, which the kernel's BPF statistics do not contain: measured on a virtual machine, the
dearest case known (bench/trap.py measures it)."""
BUDGET = 0.004
"""Share of the node's CPU time that traps may take; above it the gloo probe switches itself off for a while."""
OVER_INTERVALS = 15
"""… in the mean over so many intervals."""
OFF_FOR_S = 60.0


@dataclass(frozen=True)
class Interval:
    """What was seen between two instants (CLOCK_MONOTONIC nanoseconds)."""

    start_ns: int
    end_ns: int
    utc_offset_ns: int
    ranks: list[RankBatch]
    metrics: list[Metric]
    events: list[Event]
    probes: list[Probe]


def utc_offset_ns() -> int:
    """UTC minus CLOCK_MONOTONIC, read between two looks at the latter."""
    before = time.monotonic_ns()
    utc = time.time_ns()
    return utc - (before + time.monotonic_ns()) // 2


class NodeWatch:
    """Finds ranks, attaches the probes while there are any, and gathers what they see.

    Not safe for several threads. Call :meth:`gather` about once a second, and :meth:`close` at the end.
    """

    def __init__(self, cache: Path) -> None:
        """``cache``: folder for generated files (joined kernel headers). Raises :class:`BpfUnavailable` when
        this machine cannot be watched at all."""
        self._kernel = Kernel(cache)
        self._discovery = Discovery(LIBRARY)
        self._threads: ThreadTimeProbe | None = None
        self._gloo: GlooProbe | None = None
        self._steal = StealMeter()
        self._ranks: dict[int, RankProcess] = {}
        self._announced: set[int] = set()
        self._retry_at: dict[int, float] = {}
        self._why: dict[int, str] = {}
        self._idle_since = time.monotonic()
        self._threads_at = 0.0
        self._off_until = 0.0
        self._load_at = 0.0
        self._not_loaded = ""
        self._since_ns = time.monotonic_ns()
        self._cpu_s = _cpu_seconds()
        self._events: list[Event] = []
        self._was_lost = 0
        self._traps: deque[tuple[int, float]] = deque(maxlen=OVER_INTERVALS)
        """(traps since the probe was loaded, seconds) of the last intervals."""

    def gather(self) -> Interval:
        """Everything since the last call."""
        now = time.monotonic()
        found = self._discovery.scan()
        gone = [
            rank for pid, rank in self._ranks.items() if pid not in found or _life(found[pid]) != _life(rank)
        ]
        self._load_or_unload(bool(found or gone), now)
        for rank in found.values():
            self._attach(rank, now)
        self._look_for_threads(found, now)
        batches = self._collect(found, gone)
        for rank in gone:
            self._leave(rank)
        self._ranks = found
        start, self._since_ns = self._since_ns, time.monotonic_ns()
        metrics = self._metrics()
        self._mind_the_budget((self._since_ns - start) / 1e9, now)
        events, self._events = self._events, []
        return Interval(start, self._since_ns, utc_offset_ns(), batches, metrics, events, self.probes())

    def probes(self) -> list[Probe]:
        """Each probe's state in words."""
        if self._threads is None or self._gloo is None:
            state, why = (
                ("unavailable", self._not_loaded) if self._not_loaded else ("off", "no rank runs here")
            )
            return [Probe(name=name, state=state, why=why) for name in ("thread_time", "gloo")]
        state, why = "on", ""
        if time.monotonic() < self._off_until:
            state, why = (
                "off",
                f"above its budget of {BUDGET:.1%} of the node's CPU time: off for {OFF_FOR_S:.0f} s",
            )
        elif self._why:
            state, why = "unavailable", "; ".join(sorted(set(self._why.values())))
        elif self._gloo.unmatched:
            why = f"{self._gloo.unmatched} collectives seen in part only"
        gloo = Probe(name="gloo", state=state, why=why, hits=self._gloo.hits, lost=self._gloo.lost())
        return [Probe(name="thread_time", state="on"), gloo]

    def recover(self) -> None:
        """After :meth:`gather` failed: detach everything, and load the probes anew after a while."""
        try:
            self.close()
        except Exception:
            log.exception("detaching failed")
            self._gloo = self._threads = None
        self._load_at = time.monotonic() + RETRY_S
        self._not_loaded = f"watching failed; the probes are loaded anew within {RETRY_S:.0f} s"
        self._event("probe-unavailable", self._not_loaded)

    def close(self) -> None:
        """Detach everything."""
        if self._gloo is not None:
            self._gloo.close()
        if self._threads is not None:
            self._threads.close()
        self._gloo = self._threads = None

    def _load_or_unload(self, wanted: bool, now: float) -> None:
        if wanted:
            self._idle_since = now
            if self._threads is None and now >= self._load_at:
                self._load(now)
        elif self._threads is not None and now - self._idle_since > UNLOAD_AFTER_S:
            self.close()

    def _load(self, now: float) -> None:
        try:
            self._threads = ThreadTimeProbe(self._kernel)
            self._gloo = GlooProbe(self._kernel)
            self._was_lost = 0
            self._not_loaded = ""
        except BpfUnavailable as error:
            self.close()
            self._load_at = now + RETRY_S
            if self._not_loaded != str(error):
                self._not_loaded = str(error)
                self._event("probe-unavailable", self._not_loaded)

    def _attach(self, rank: RankProcess, now: float) -> None:
        pid = rank.process.pid
        gloo = self._gloo
        if gloo is None or pid in gloo.attached() or now < max(self._off_until, self._retry_at.get(pid, 0)):
            return
        try:
            gloo.attach(pid, rank.library)
        except (BpfUnavailable, OSError) as error:
            if not Path(f"/proc/{pid}/exe").exists():  # ended since it was found: the next scan says so
                return
            self._retry_at[pid] = now + RETRY_S
            if self._why.get(pid) != str(error):
                self._why[pid] = str(error)
                self._event("attach-failed", str(error), rank)
            return
        self._why.pop(pid, None)
        self._threads_at = 0.0
        if pid not in self._announced:
            self._announced.add(pid)
            self._event("rank-found", f"process {pid} ({rank.process.name})", rank)

    def _leave(self, rank: RankProcess) -> None:
        pid = rank.process.pid
        self._event("rank-ended", f"process {pid} ({rank.process.name})", rank)
        self._announced.discard(pid)
        self._retry_at.pop(pid, None)
        self._why.pop(pid, None)
        if self._gloo is not None:
            self._gloo.detach(pid)
            self._gloo.forget(pid)

    def _look_for_threads(self, found: dict[int, RankProcess], now: float) -> None:
        """Communication threads that run no probe of ours are watched by their names."""
        if self._threads is None or not found or now - self._threads_at < LOOK_FOR_THREADS_S:
            return
        self._threads_at = now
        wanted = {
            tid: Role.COMMUNICATION
            for pid in found
            for tid in self._discovery.threads(pid, COMMUNICATION_THREADS)
            if tid not in self._threads.seen
        }
        self._threads.watch(wanted)

    def _collect(self, found: dict[int, RankProcess], gone: list[RankProcess]) -> list[RankBatch]:
        # Who has gone first: after an exec both have one pid, and what was seen is of the one that has gone.
        lives = [*((rank, True) for rank in gone), *((rank, False) for rank in found.values())]
        if (
            self._threads is None or self._gloo is None
        ):  # the ranks are told, and that nothing is seen of them
            return [_rank_batch(rank, Traffic(), [], [], [], ended) for rank, ended in lives]
        self._gloo.collect()
        heartbeat = self._threads.heartbeat()
        occupants = name_occupants(self._threads.occupants(), self._threads.seen, self._discovery.rank_of)
        stolen = self._steal.stolen(
            {
                cut.tid: cut.running_ns
                for cuts in heartbeat.values()
                for cut in cuts
                if cut.role == Role.DRIVING
            }
        )
        if (lost := self._gloo.lost()) > self._was_lost:
            self._event(
                "events-lost", f"{lost - self._was_lost} events of gloo found no room in the ring buffer"
            )
            self._was_lost = lost
        batches = []
        for rank, ended in lives:
            pid = rank.process.pid
            traffic = self._gloo.traffic[pid]
            calls, cuts, _ = traffic.take()
            if ended:  # what will never end is told as such
                calls = [*calls, *traffic.pending.values()]
            threads = _threads([*cuts, *heartbeat.get(pid, [])], stolen)
            batches.append(_rank_batch(rank, traffic, calls, threads, occupants.get(pid, []), ended))
        return batches

    def _metrics(self) -> list[Metric]:
        cpu, self._cpu_s = self._cpu_s, _cpu_seconds()
        metrics = [
            Metric(name="agent_cpu", value=self._cpu_s - cpu, unit="s"),
            Metric(name="agent_memory", value=_resident_bytes(), unit="byte"),
        ]
        for cpu_name, seconds in self._steal.by_cpu().items():
            metrics.append(Metric(name="cpu_steal", value=seconds, unit="s", labels={"cpu": cpu_name}))
        return metrics

    def _mind_the_budget(self, seconds: float, now: float) -> None:
        """Switch the gloo probe off for a while when its traps cost too much; a burst, as when a job starts, is
        no reason."""
        gloo = self._gloo
        if gloo is None:
            self._traps.clear()
            return
        self._traps.append((gloo.hits, seconds))
        if len(self._traps) < OVER_INTERVALS or now < self._off_until:
            return
        rate = (self._traps[-1][0] - self._traps[0][0]) / sum(length for _, length in list(self._traps)[1:])
        share = rate * TRAP_S / (os.cpu_count() or 1)
        if share <= BUDGET:
            return
        self._off_until = now + OFF_FOR_S
        self._traps.clear()
        for pid in gloo.attached():
            gloo.detach(pid)
        self._event(
            "probe-shed",
            f"gloo: {rate:.0f} traps per second would take {share:.2%} of this node's CPU time, above the budget "
            f"of {BUDGET:.1%}: off for {OFF_FOR_S:.0f} s",
        )

    def _event(self, kind: str, detail: str, rank: RankProcess | None = None) -> None:
        log.info("%s: %s", kind, detail)
        job, number = (rank.job, rank.rank) if rank else ("", -1)
        self._events.append(Event(kind=kind, at_ns=time.monotonic_ns(), detail=detail, job=job, rank=number))


def _life(rank: RankProcess) -> tuple[int, int, int, str, int]:
    """What names one life of a rank. Its name and its parent may change while it lives."""
    return rank.process.pid, rank.process.start_ticks, rank.process.image, rank.job, rank.rank


def _rank_batch(
    rank: RankProcess,
    traffic: Traffic,
    calls: list[Call],
    threads: list[ThreadTime],
    occupants: list[Occupant],
    ended: bool,
) -> RankBatch:
    calls = sorted(calls, key=lambda call: call.enter_ns)
    return RankBatch(
        job=rank.job,
        rank=rank.rank,
        world_size=rank.world_size,
        local_rank=rank.local_rank,
        pid=rank.process.pid,
        start_ns=rank.process.start_ticks * (1_000_000_000 // os.sysconf("SC_CLK_TCK")),
        name=rank.process.name,
        env=rank.env,
        communicators=list(traffic.communicators),
        collectives=Collectives(
            communicator=[call.communicator for call in calls],
            seq=[call.seq for call in calls],
            op=[call.op for call in calls],
            bytes=[call.bytes for call in calls],
            dtype=[call.dtype for call in calls],
            enter_ns=[call.enter_ns for call in calls],
            duration_ns=[call.duration_ns for call in calls],
            failed=[call.failed for call in calls],
        ),
        threads=threads,
        occupants=occupants,
        ended=ended,
    )


def _threads(cuts: list[Cut], stolen: dict[int, int]) -> list[ThreadTime]:
    """One :class:`ThreadTime` per thread and life, its cuts in time order."""
    lives: dict[tuple[Role, int, int], list[Cut]] = {}
    for cut in cuts:
        lives.setdefault((cut.role, cut.tid, cut.since_ns), []).append(cut)
    columns = []
    for (role, tid, since), rows in sorted(lives.items()):
        rows.sort(key=lambda cut: cut.at_ns)
        columns.append(
            ThreadTime(
                tid=tid,
                role=role,
                since_ns=since,
                at_ns=[cut.at_ns for cut in rows],
                running_ns=[cut.running_ns for cut in rows],
                runnable_ns=[cut.runnable_ns for cut in rows],
                blocked_ns=[cut.blocked_ns for cut in rows],
                uninterruptible_ns=[cut.uninterruptible_ns for cut in rows],
                interrupted_ns=[cut.interrupted_ns for cut in rows],
                stolen_ns=stolen.get(tid, 0) if role == Role.DRIVING else 0,
            )
        )
    return columns


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
