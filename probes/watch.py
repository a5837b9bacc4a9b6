"""Watching one node: from processes, probes and counters to the records of one interval.

:class:`NodeWatch` holds what lasts between intervals. It neither stores nor sends; ``agent.py`` does. What it
costs it measures (``costs.py``), and gives up in a fixed order what would go beyond its limits (``budget.py``).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import time
from pathlib import Path

import msgspec

from probes.bpf import Kernel
from probes.budget import WORDS, Budget, Deed, Limits, Part, Step, Usage
from probes.candidates import Candidates
from probes.captures import Capture, check_seconds
from probes.costs import Cost
from probes.discovery import Discovery, RankProcess
from probes.host.occupants import name_occupants
from probes.host.reading import Reading
from probes.host.steal import StealMeter, steal_metrics
from probes.host.wakers import name_wakers
from probes.interval import Interval, life, rank_batch, thread_columns, utc_offset_ns
from probes.loaded import (
    NO_RANK,
    PROBES,
    RETRY_S,
    Counted,
    LoadedProbes,
    UnknownProbe,
    cost_metrics,
)
from probes.nccl.gloo import LIBRARY, Traffic
from probes.records import Event, Metric, Probe, RankBatch, Role
from probes.remembered import Remembered

__all__ = ["Cost", "Interval", "Limits", "NodeWatch", "UnknownProbe"]

log = logging.getLogger(__name__)

COMMUNICATION_THREADS = r"gloo_tcp_loop|pt_gloo_runloop"
"""Threads that move a rank's collectives: gloo's network loop (named by gloo) and its run loops (by PyTorch)."""
LOOK_FOR_THREADS_S = 10.0
UNLOAD_AFTER_S = 60.0
"""Probes are unloaded when no rank has run for so long: a node without training pays nothing."""


class NodeWatch:
    """Finds ranks, attaches the probes while there are any, and gathers what they see.

    Not safe for several threads. Call :meth:`gather` about once a second, and :meth:`close` at the end.
    """

    def __init__(self, cache: Path, *, limits: Limits | None = None, host: str = "") -> None:
        """``cache``: folder for generated files (joined kernel headers, communicators). ``host``: this node's name,
        for jobs that have none but an address of this node; the host's own by default. Raises
        :class:`BpfUnavailable` when this machine cannot be watched at all."""
        self._probes = LoadedProbes(Kernel(cache))
        self._remembered = Remembered(cache)
        self._discovery = Discovery(LIBRARY, host=host or os.uname().nodename)
        self._candidates = Candidates(self._discovery, self._probes)
        self._budget = Budget(limits or Limits(), os.cpu_count() or 1)
        self._steal = StealMeter()
        self._captures: dict[str, Capture] = {}
        self._ranks: dict[int, RankProcess] = {}
        self._announced: set[int] = set()
        self._detached = ""
        self._idle_since = self._ranks_at = time.monotonic()
        self._threads_at = 0.0
        self._since_ns = time.monotonic_ns()
        self._events: list[Event] = []
        self._was_lost = 0
        self._counted = Counted.now(self._probes)
        self._used = Usage(0.0, {}, self._counted.memory_bytes, 0.0)

    # --- what is seen

    def gather(self) -> Interval:
        """Everything since the last call."""
        now = time.monotonic()
        found = self._discovery.scan()
        gone = [
            rank for pid, rank in self._ranks.items() if pid not in found or life(found[pid]) != life(rank)
        ]
        self._load_or_unload(bool(found or gone), now)
        for rank in found.values():
            self._attach(rank, now)
        self._candidates.attach(set(found), now)
        self._mind_captures(found, now)
        self._look_for_threads(found, now)
        reading = self._probes.read_host(found, now)
        self._events += reading.events
        batches = self._collect(found, gone, reading)
        for batch in batches:
            if batch.job in self._captures:
                self._captures[batch.job].add(batch)
        for rank in gone:
            self._leave(rank)
        self._ranks = found
        start, self._since_ns = self._since_ns, time.monotonic_ns()
        metrics = [*self._mind_the_budget((self._since_ns - start) / 1e9, now), *reading.node]
        events, self._events = self._events, []
        return Interval(start, self._since_ns, utc_offset_ns(), batches, metrics, events, self.probes())

    def probes(self) -> list[Probe]:
        """Each probe's state in words."""
        return self._probes.describe(self._detached, self._used.probes)

    def cost(self) -> Cost:
        """What watching takes now, and what it may take."""
        limits = self._budget.limits
        on = [probe for probe in self.probes() if probe.state == "on"]
        return Cost(
            probes_ms_per_s={probe.name: probe.cost_ms_per_s for probe in on},
            agent_ms_per_s=self._used.agent * 1e3,
            compile_ms=(self._probes.compile_s + self._probes.host.compile_s) * 1e3,
            budget_ms_per_s=limits.cpu(self._budget.cpus) * 1e3,
            memory_bytes=self._used.memory_bytes,
            memory_budget_bytes=limits.memory_bytes,
            events_per_s=self._used.events_per_s,
            events_budget_per_s=limits.events_per_s,
            why_unmeasured=self._probes.meter.why,
        )

    def shed(self) -> list[str]:
        """What is given up now to stay within the budgets, in words."""
        return [f"{WORDS[part]}: {why}" for part, why in self._budget.shed]

    # --- what is asked of it

    def switch(self, probe: str, on: bool, why: str) -> None:
        """Switch a probe off, at once and until it is switched on again, or on. ``why`` is what its records say.

        Raises :class:`UnknownProbe`.
        """
        self._probes.switch(probe, "order", "" if on else why or "switched off")
        for job in list(self._captures) if not on and probe in PROBES else ():
            self._end_capture(job, time.monotonic(), f"{probe} was switched off, and it needs both probes")
        self._threads_at = 0.0

    def start_capture(self, job: str, seconds: float) -> None:
        """Watch the ranks of ``job`` at full detail for so long; again: for so long from now on.

        Raises ValueError, in words, when no rank of it runs here, for a length out of bounds, and when what a
        capture needs is not on.
        """
        check_seconds(seconds)
        if job not in {rank.job for rank in self._ranks.values()}:
            raise ValueError(f"no rank of job {job[:100]!r} runs on this node: nothing to capture")
        if any(part == Part.CAPTURES for part, _ in self._budget.shed):
            raise ValueError("captures are given up for now, to stay within what watching may cost")
        for probe in self.probes():
            if probe.name in PROBES and probe.state != "on":
                raise ValueError(f"a capture needs {probe.name}, which is {probe.state}: {probe.why}")
        now = time.monotonic()
        capture = self._captures.get(job)
        if capture is None:
            self._captures[job] = Capture(job, now, now + seconds)
            self._event("capture-started", f"for {seconds:.0f} s", job=job)
        else:
            capture.until = max(capture.until, now + seconds)
        self._mind_captures(self._ranks, now)

    def end_capture(self, job: str) -> None:
        """End a capture; nothing happens where there is none."""
        self._end_capture(job, time.monotonic(), "it was ended")

    def captures(self) -> dict[str, float]:
        """Job → seconds left."""
        now = time.monotonic()
        return {job: max(0.0, capture.until - now) for job, capture in self._captures.items()}

    def detach_all(self, why: str) -> None:
        """Detach everything and load nothing until :meth:`allow_all`: ranks are told, and that nothing is seen of
        them because of ``why``."""
        self._detached = why or "everything was detached"
        for job in list(self._captures):
            self._end_capture(job, time.monotonic(), self._detached)
        self._probes.unload()

    def allow_all(self) -> None:
        """Take :meth:`detach_all` back."""
        self._detached = ""

    def recover(self) -> None:
        """After :meth:`gather` failed: detach everything, and load the probes anew after a while."""
        why = f"watching failed; the probes are loaded anew within {RETRY_S:.0f} s"
        self._probes.give_up(why, time.monotonic())
        self._event("probe-unavailable", why)

    def close(self) -> None:
        """Detach everything."""
        self._probes.unload()

    # --- probes and processes

    def _load_or_unload(self, ranks: bool, now: float) -> None:
        # Candidates are watched for collectives only: what the scheduler does matters once they are ranks.
        self._probes.switch("thread_time", "idle", "" if ranks else NO_RANK)
        if ranks:
            self._ranks_at = now
        else:
            self._probes.rest_host(now - self._ranks_at > UNLOAD_AFTER_S)
        if ranks or self._candidates.any():
            self._idle_since = now
            if not self._detached:
                troubles = [self._probes.load(now)]
                troubles += [self._probes.mind_host(bool(self._captures), now)] if ranks else []
                for trouble in filter(None, troubles):
                    self._event("probe-unavailable", trouble)
        elif self._probes.threads is not None and now - self._idle_since > UNLOAD_AFTER_S:
            self._probes.unload()

    def _attach(self, rank: RankProcess, now: float) -> None:
        process = rank.process
        if process.pid not in self._announced:
            self._announced.add(process.pid)
            self._event("rank-found", f"process {process.pid} ({process.name})", rank)
        known = self._remembered.of(process.pid, process.start_ticks)
        outcome = self._probes.attach(process, rank.library, known, now)
        if outcome == "":
            self._threads_at = 0.0
        elif outcome:
            self._event("attach-failed", outcome, rank)

    def _leave(self, rank: RankProcess) -> None:
        pid = rank.process.pid
        self._event("rank-ended", f"process {pid} ({rank.process.name})", rank)
        self._announced.discard(pid)
        self._probes.leave(pid)

    def _look_for_threads(self, found: dict[int, RankProcess], now: float) -> None:
        """Communication threads that run no probe of ours are watched by their names, helpers by their parents."""
        threads = self._probes.threads
        if (
            threads is None
            or not threads.attached
            or not found
            or now - self._threads_at < LOOK_FOR_THREADS_S
        ):
            return
        self._threads_at = now
        self._probes.know_helpers(self._discovery.helpers(found))
        # Helpers come after: if there is no room for all, it is they who are not watched.
        wanted = {
            tid: Role.COMMUNICATION
            for pid in found
            for tid in self._discovery.threads(pid, COMMUNICATION_THREADS)
        } | dict.fromkeys(self._probes.helpers, Role.HELPER)
        threads.watch({tid: role for tid, role in wanted.items() if tid not in threads.seen})

    def _collect(
        self, found: dict[int, RankProcess], gone: list[RankProcess], reading: Reading
    ) -> list[RankBatch]:
        # Who has gone first: after an exec both have one pid, and what was seen is of the one that has gone.
        lives = [*((rank, True) for rank in gone), *((rank, False) for rank in found.values())]
        threads, gloo = self._probes.threads, self._probes.gloo
        if threads is None or gloo is None:  # the ranks are told, and that nothing is seen of them
            return [self._blind(rank, ended) for rank, ended in lives]
        gloo.collect()
        self._candidates.number()
        captured = {pid for pid, rank in found.items() if rank.job in self._captures}
        heartbeat = threads.heartbeat(captured) if threads.attached else {}
        stays = threads.occupants() if threads.attached else []
        occupants = name_occupants(stays, threads.seen, self._discovery.rank_of)
        wakers = name_wakers(threads.wakers(), threads.seen) if threads.attached else {}
        stolen = self._steal.stolen(
            {
                cut.tid: cut.running_ns
                for cuts in heartbeat.values()
                for cut in cuts
                if cut.role == Role.DRIVING
            }
        )
        if (lost := self._probes.lost()) > self._was_lost:
            words = f"{lost - self._was_lost} events of gloo found no room in the ring buffer"
            self._event("events-lost", words)
            self._was_lost = lost
        self._remembered.keep(
            {
                (pid, rank.process.start_ticks): list(gloo.traffic[pid].communicators)
                for pid, rank in found.items()
            }
        )
        batches = []
        for rank, ended in lives:
            pid = rank.process.pid
            traffic = gloo.traffic[pid]
            calls, cuts = traffic.take()
            # What has not ended is told as such: of who has gone all, else what stands still.
            calls = [*calls, *(traffic.pending.values() if ended else traffic.standing(time.monotonic_ns()))]
            cuts = threads.settled(pid, cuts)
            processes = [pid, *self._probes.helpers_of.get(pid, ())]
            cuts += [cut for process in processes for cut in heartbeat.get(process, ())]
            columns = thread_columns(cuts, stolen)
            batch = rank_batch(rank, traffic, calls, columns, occupants.get(pid, []), ended)
            if not ended:  # after an exec the pid is another's
                batch = msgspec.structs.replace(
                    batch,
                    wakers=[waker for process in processes for waker in wakers.get(process, ())],
                    metrics=list(reading.ranks.get(pid, ())),
                )
            batches.append(batch)
        return batches

    def _blind(self, rank: RankProcess, ended: bool) -> RankBatch:
        known = self._remembered.of(rank.process.pid, rank.process.start_ticks)
        return rank_batch(rank, Traffic(communicators=list(known)), [], [], [], ended)

    # --- captures

    def _mind_captures(self, found: dict[int, RankProcess], now: float) -> None:
        """Full detail for the ranks of captured jobs, also those that came since; and the end of what is over."""
        for job, capture in list(self._captures.items()):
            pids = [pid for pid, rank in found.items() if rank.job == job]
            if now >= capture.until:
                self._end_capture(job, now, "its time is over")
            elif not pids:
                self._end_capture(job, now, "no rank of the job runs here any more")
            elif self._probes.gloo is not None:
                for pid in pids:
                    self._probes.gloo.detail(pid, int(capture.until * 1e9))

    def _end_capture(self, job: str, now: float, why: str) -> None:
        capture = self._captures.pop(job, None)
        if capture is None:
            return
        if self._probes.gloo is not None:
            for pid, rank in self._ranks.items():
                if rank.job == job:
                    self._probes.gloo.cheap(pid)
        self._event("capture-ended", f"{capture.words(now)}; {why}", job=job)

    # --- what it costs

    def _mind_the_budget(self, seconds: float, now: float) -> list[Metric]:
        """Count what the interval took, do what the budget decides, and tell both."""
        before, self._counted = self._counted, Counted.now(self._probes)
        took = self._counted
        self._used = self._probes.used(before, took, seconds)
        self._probes.measure(now, near=self._budget.near())
        for step in self._budget.decide(now, self._used, self._active()):
            self._carry_out(step)
        return [*cost_metrics(before, took, self._used.probes, seconds), *steal_metrics(self._steal)]

    def _active(self) -> list[Part]:
        """What runs and could be given up."""
        threads, gloo = self._probes.threads, self._probes.gloo
        runs = {
            Part.CAPTURES: bool(self._captures),
            Part.OCCUPANTS: threads is not None and threads.attached and self._probes.occupants,
            Part.HOST: bool(self._probes.host.loaded),
            Part.GLOO: gloo is not None and not self._probes.off("gloo"),
            Part.THREAD_TIME: threads is not None and threads.attached,
        }
        return [part for part, does in runs.items() if does]

    def _carry_out(self, step: Step) -> None:
        if step.deed == Deed.DROP_CACHES:
            self._drop_caches()
            self._event("probe-shed", f"caches: {step.why}")
        elif step.deed == Deed.RELOAD:
            self._probes.unload()  # the next interval loads them
            self._drop_caches()
            self._event("probe-shed", f"all probes are loaded anew: {step.why}")
        elif step.part is not None and step.deed == Deed.SHED:
            why = f"{step.why}: off for {step.for_s:.0f} s"
            self._give_up(step.part, why)
            self._event("probe-shed", f"{WORDS[step.part]}: {why}")
        elif step.part is not None:
            self._give_up(step.part, "")
            self._event("probe-restored", f"{WORDS[step.part]}: {step.why}")

    def _give_up(self, part: Part, why: str) -> None:
        """Do without a part; with an empty ``why``, have it back."""
        if part == Part.CAPTURES:
            for job in list(self._captures) if why else ():
                self._end_capture(job, time.monotonic(), why)
        elif part == Part.OCCUPANTS:
            self._probes.name_occupants(not why)
        elif part == Part.HOST:
            self._probes.switch_host("budget", why)
        else:
            self._probes.switch(part.value, "budget", why)
            self._threads_at = 0.0

    def _drop_caches(self) -> None:
        if self._probes.gloo is not None:
            self._probes.gloo.drop_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def _event(self, kind: str, detail: str, rank: RankProcess | None = None, job: str = "") -> None:
        log.info("%s: %s", kind, detail)
        job, number = (rank.job, rank.rank) if rank else (job, -1)
        self._events.append(Event(kind=kind, at_ns=time.monotonic_ns(), detail=detail, job=job, rank=number))
