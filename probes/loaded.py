"""The probes of this node as they are loaded: which are on, which are off and why, and where they are attached."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from probes.bpf import BpfUnavailable, Kernel
from probes.budget import Usage
from probes.costs import TICK_S, TRAP_S, CostMeter
from probes.discovery import Process, RankProcess
from probes.host.reading import Reading
from probes.host.thread_time import ThreadTimeProbe
from probes.host_probes import IN_CAPTURES, KINDS, SETTLED_S, HostProbes
from probes.host_probes import NOT_YET as HOST_NOT_YET
from probes.nccl.gloo import GlooProbe
from probes.records import Communicator, Metric, Probe, Role

log = logging.getLogger(__name__)

PROBES = ("thread_time", "gloo")
"""Without these no rank can be watched; those of the host (``host_probes.KINDS``) come after them."""
ASKED_WHY = (Role.DRIVING, Role.HELPER)
"""Threads of these roles are asked why they block. A communication thread waits for the network, as a rule."""
RETRY_S = 30.0
"""A process to which attaching failed is tried again after this, and so are probes that did not load."""
NO_RANK = "no rank runs here"
NOT_YET = "not loaded yet: that takes some seconds"


class UnknownProbe(ValueError):
    """There is no probe of this name; the message names those there are."""


class LoadedProbes:
    """Loads, attaches, switches. Not safe for several threads. Instants are CLOCK_MONOTONIC seconds."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.meter = CostMeter()
        self.occupants = True
        """Whether it is written down who had the CPU, what blocked threads wait for, and who woke them."""
        self.helpers: dict[int, int] = {}
        """Process that helps a rank → the rank's."""
        self.helpers_of: dict[int, list[int]] = {}
        """A rank's process → those that help it."""
        self.threads: ThreadTimeProbe | None = None
        self.gloo: GlooProbe | None = None
        self.host = HostProbes(kernel, KINDS)
        self.not_loaded = ""
        """Why the probes could not be loaded."""
        self.compile_s = 0.0
        """CPU time of this process that loading took since the agent started."""
        self.failed: dict[int, str] = {}
        """Process → why attaching to it failed."""
        self._off: dict[str, dict[str, str]] = {name: {} for name in (*PROBES, *self.host.kinds)}
        """Probe → by whom it is switched off → why."""
        self._load_at = 0.0
        self._loaded_at = 0.0
        self._retry_at: dict[int, float] = {}
        self._hits = 0
        self._lost = 0
        self._traps = 0
        self._rows = 0

    # --- which are wanted

    def off(self, probe: str) -> str:
        """Why a probe is switched off; empty when it may run. Raises :class:`UnknownProbe`."""
        return next(iter(self._reasons(probe).values()), "")

    def switch(self, probe: str, by: str, why: str) -> None:
        """Switch a probe off (``why`` in words) or let it run again (an empty ``why``), as far as ``by`` is
        concerned: it runs while nobody has it switched off. Raises :class:`UnknownProbe`."""
        reasons = self._reasons(probe)
        if reasons.get(by, "") == why:
            return
        if why:
            reasons[by] = why
        else:
            reasons.pop(by, None)
        self._apply()

    def name_occupants(self, on: bool) -> None:
        """Whether it is written down who had the CPU, what blocked threads wait for, and who woke them: now, and
        after loading anew."""
        self.occupants = on
        self._name()
        self.meter.changed()

    def _name(self) -> None:
        if self.threads is not None:
            self.threads.name_occupants(self.occupants)
            self.threads.name_reasons(ASKED_WHY if self.occupants else ())

    def _reasons(self, probe: str) -> dict[str, str]:
        if probe not in self._off:
            raise UnknownProbe(f"there is no probe {probe[:60]!r}: there are {', '.join(self._off)}")
        return self._off[probe]

    def _apply(self) -> None:
        if all(self._off[name] for name in PROBES):
            self.unload()
            return
        for name in list(self.host.loaded):
            if self._off[name]:
                self._unload_host(name)
        self.meter.changed()
        if self.threads is not None:
            if self._off["thread_time"]:
                self.threads.pause()
            else:
                self.threads.resume()
        if self.gloo is not None and self._off["gloo"]:
            for pid in self.gloo.attached():
                self.gloo.detach(pid)

    # --- loading

    def load(self, now: float) -> str:
        """Load what is wanted and not loaded; why it failed, when that is new."""
        if self.threads is not None or now < self._load_at or all(self._off[name] for name in PROBES):
            return ""
        before = time.process_time()
        try:
            self.threads = ThreadTimeProbe(self._kernel)
            self.gloo = GlooProbe(self._kernel, self.threads.load)
        except BpfUnavailable as error:
            self.unload()
            self._load_at = now + RETRY_S
            news = str(error) if self.not_loaded != str(error) else ""
            self.not_loaded = str(error)
            return news
        finally:
            self.compile_s += time.process_time() - before
        self.not_loaded = ""
        self._loaded_at = now
        self._name()
        self._apply()
        return ""

    def mind_host(self, capturing: bool, now: float) -> str:
        """Have those probes of the host loaded that are wanted, one more with each call; why one failed, when that
        is new. None without thread_time and gloo."""
        wanted = [
            name
            for name, kind in self.host.kinds.items()
            if not self._off[name] and (kind.always or capturing) and self.threads is not None
        ]
        gone = [name for name in self.host.loaded if name not in wanted]
        for name in gone:
            self._unload_host(name)
        before = len(self.host.loaded)
        trouble = self.host.keep(wanted, now, compiling=now >= self._loaded_at + SETTLED_S)
        if len(self.host.loaded) != before:
            self.meter.changed()
        return trouble

    def rest_host(self, long: bool) -> None:
        """No rank runs here: those of captures go at once, all of them when it has been so for ``long``."""
        for name in list(self.host.loaded):
            if long or not self.host.kinds[name].always:
                self._unload_host(name)

    def _unload_host(self, name: str) -> None:
        self.meter.close()  # before its programs go, and their descriptors are others'
        self.meter.changed()
        self.host.unload(name)

    def switch_host(self, by: str, why: str) -> None:
        """:meth:`switch` for all probes of the host."""
        for name in self.host.kinds:
            self.switch(name, by, why)

    def unload(self) -> None:
        """Detach everything and take the programs out of the kernel."""
        self.meter.close()  # before its programs go, and their descriptors are others'
        self.meter.changed()
        self.host.close()
        gloo, threads = self.gloo, self.threads
        self.gloo = self.threads = None
        self._retry_at.clear()
        self.failed.clear()
        if gloo is not None:
            try:
                self._hits, self._traps = self._hits + gloo.hits, self._traps + gloo.traps()
                self._lost += gloo.lost()
            finally:
                gloo.close()
        if threads is not None:
            self._rows += threads.rows_read
            threads.close()

    def give_up(self, why: str, now: float) -> None:
        """After a failure: unload, and load anew after a while."""
        try:
            self.unload()
        except Exception:
            log.exception("detaching failed")
        self._load_at = now + RETRY_S
        self.not_loaded = why

    # --- attaching

    def attach(self, process: Process, library: Path, known: list[Communicator], now: float) -> str | None:
        """Attach gloo to a process where it is wanted. None: it is not attached (nothing is wrong, or it was said
        already); an empty text: it is attached since this call; a text: why attaching failed."""
        pid, gloo = process.pid, self.gloo
        if gloo is None or self._off["gloo"] or pid in gloo.attached() or now < self._retry_at.get(pid, 0):
            return None
        try:
            gloo.attach(pid, library, known)
        except (BpfUnavailable, OSError) as error:
            if not Path(f"/proc/{pid}/exe").exists():  # ended since it was found: the next scan says so
                return None
            self._retry_at[pid] = now + RETRY_S
            if self.failed.get(pid) == str(error):
                return None
            self.failed[pid] = str(error)
            return self.failed[pid]
        self.failed.pop(pid, None)
        return ""

    def leave(self, pid: int) -> None:
        """A process has ended."""
        self._retry_at.pop(pid, None)
        self.failed.pop(pid, None)
        if self.gloo is not None:
            self.gloo.detach(pid)
            self.gloo.forget(pid)

    # --- what they say

    def measure(self, now: float, *, near: bool) -> None:
        """Measure what the programs that are attached cost, when it is time."""
        programs = {}
        if self.threads is not None and self.threads.attached:
            programs["thread_time"] = self.threads.programs()
        if self.gloo is not None and not self._off["gloo"]:
            programs["gloo"] = self.gloo.programs()
        for name, probe in self.host.loaded.items():
            programs[name] = list(probe.programs())
        self.meter.tick(now, programs, near=near)

    def costs(self, traps: float, reading: Mapping[str, float]) -> dict[str, float]:
        """CPU seconds per second by probe that is on, as far as it was measured. ``traps``: those of the last
        interval. ``reading``: what reading probes of the host took in it."""
        costs = {}
        if self.threads is not None and self.threads.attached:
            costs["thread_time"] = self.meter.rate("thread_time")
        if self.gloo is not None and not self._off["gloo"]:
            ran = self.meter.rate("gloo")
            costs["gloo"] = ran if ran is None and not traps else (ran or 0.0) + traps
        for name, probe in self.host.loaded.items():
            ran = self.meter.rate(name) if probe.programs() else 0.0
            besides = reading.get(name, 0.0) + probe.ticks_per_s * TICK_S
            costs[name] = None if ran is None else ran + besides
        return {name: cost for name, cost in costs.items() if cost is not None}

    def know_helpers(self, helpers: dict[int, int]) -> None:
        """Which processes help which rank's, from now on."""
        self.helpers, self.helpers_of = helpers, {}
        for helper, rank in helpers.items():
            self.helpers_of.setdefault(rank, []).append(helper)

    def used(self, before: Counted, now: Counted, seconds: float) -> Usage:
        """What watching took between two counts, which lie so many seconds apart: each probe's own, and the rest of
        the agent's process without what compiling took."""
        reading = {
            name: (spent - before.reading_s.get(name, 0.0)) / seconds for name, spent in now.reading_s.items()
        }
        costs = self.costs(trap_cost(now.traps - before.traps, seconds), reading)
        agent = (now.cpu_s - before.cpu_s - (now.compile_s - before.compile_s)) / seconds
        agent = max(0.0, agent - sum(reading.get(name, 0.0) for name in costs))
        return Usage(agent, costs, now.memory_bytes, (now.events - before.events) / seconds)

    def read_host(self, ranks: Mapping[int, RankProcess], now: float) -> Reading:
        """What the probes of the host say since the last call."""
        seen = self.threads.seen if self.threads is not None else {}
        driving = {pid: tid for tid, (pid, role) in seen.items() if role == Role.DRIVING}
        self.host.follow(driving, self.helpers)
        return self.host.read(ranks, now)

    def traps(self) -> int:
        """Traps since the agent started."""
        return self._traps + (self.gloo.traps() if self.gloo else 0)

    def lost(self) -> int:
        """Events that found no room in a ring buffer since the agent started."""
        return self._lost + (self.gloo.lost() if self.gloo else 0)

    def hits(self) -> int:
        """Events since the agent started."""
        return self._hits + (self.gloo.hits if self.gloo else 0)

    def events(self) -> int:
        """What came to user space since the agent started: events, those lost, and rows of maps."""
        return self.hits() + self.lost() + self.rows() + self.host.rows()

    def rows(self) -> int:
        """Rows of thread_time's maps since the agent started."""
        return self._rows + (self.threads.rows_read if self.threads else 0)

    def describe(self, detached: str, costs: Mapping[str, float]) -> list[Probe]:
        """Each probe's state in words. ``detached``: why nothing may be attached; ``costs``: CPU seconds per second
        by probe, where measured."""
        described = []
        for name in PROBES:
            state, why = self._state(name, detached)
            counts = {"hits": self.rows()}
            if name == "gloo":
                counts = {"hits": self.hits(), "lost": self.lost()}
            cost = costs.get(name, -1e-3) * 1e3 if state == "on" else -1.0
            described.append(Probe(name=name, state=state, why=why, cost_ms_per_s=cost, **counts))
        for name in self.host.kinds:
            state, why = self._host_state(name, detached)
            cost = costs.get(name, -1e-3) * 1e3 if state == "on" else -1.0
            counts = {"hits": self.host.rows(name), "lost": self.host.lost(name)}
            described.append(Probe(name=name, state=state, why=why, cost_ms_per_s=cost, **counts))
        return described

    def _host_state(self, name: str, detached: str) -> tuple[str, str]:
        if detached or self.off(name):
            return "off", detached or self.off(name)
        if name in self.host.loaded:
            return "on", "; ".join(self.host.loaded[name].missing)
        if name in self.host.why:
            return "unavailable", self.host.why[name]
        if self.threads is None:
            return "off", NO_RANK if "idle" in self._off["thread_time"] else NOT_YET
        return "off", HOST_NOT_YET if self.host.kinds[name].always else IN_CAPTURES

    def _state(self, name: str, detached: str) -> tuple[str, str]:
        if detached or self.off(name):
            return "off", detached or self.off(name)
        if self.threads is None or self.gloo is None:
            if self.not_loaded:
                return "unavailable", self.not_loaded
            return "off", NO_RANK if "idle" in self._off["thread_time"] else NOT_YET
        if name == "gloo" and self.failed:
            return "unavailable", "; ".join(sorted(set(self.failed.values())))
        if name == "gloo" and self.gloo.unmatched:
            return "on", f"{self.gloo.unmatched} collectives seen in part only"
        return "on", "; ".join(self.threads.missing) if name == "thread_time" else ""


def trap_cost(traps: int, seconds: float) -> float:
    """CPU seconds per second that so many traps took."""
    return traps * TRAP_S / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Counted:
    """Counters since the agent started, and the memory that its process holds now."""

    cpu_s: float
    compile_s: float
    reading_s: dict[str, float]
    """By probe of the host."""
    traps: int
    events: int
    memory_bytes: int

    @classmethod
    def now(cls, probes: LoadedProbes) -> Counted:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        cpu_s = usage.ru_utime + usage.ru_stime
        compile_s = probes.compile_s + probes.host.compile_s
        reading_s = dict(probes.host.read_s)
        return cls(cpu_s, compile_s, reading_s, probes.traps(), probes.events(), resident)


def cost_metrics(before: Counted, now: Counted, costs: Mapping[str, float], seconds: float) -> list[Metric]:
    """What watching took in an interval of so many seconds. ``costs``: CPU seconds per second by probe."""
    metrics = [
        Metric(name="agent_cpu", value=now.cpu_s - before.cpu_s, unit="s"),
        Metric(name="agent_compile_cpu", value=now.compile_s - before.compile_s, unit="s"),
        Metric(name="agent_memory", value=now.memory_bytes, unit="byte"),
        Metric(name="probe_events", value=now.events - before.events, unit="1"),
    ]
    for probe, cost in costs.items():
        metrics.append(Metric(name="probe_cpu", value=cost * seconds, unit="s", labels={"probe": probe}))
    return metrics
