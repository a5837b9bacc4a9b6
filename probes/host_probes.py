"""The probes of the host beside thread_time, as a group: loaded one by one, read together, each failing alone.

None of them is needed to watch ranks, so each is loaded after thread_time and gloo, one per interval: a program
takes about a second to compile, and a node that is busy should not wait for all of them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from probes.bpf import BpfUnavailable, Kernel
from probes.discovery import RankProcess
from probes.host.cgroup import CgroupProbe
from probes.host.interrupts import InterruptsProbe
from probes.host.machine import MachineProbe
from probes.host.memory import MemoryProbe
from probes.host.on_cpu import OnCpuProbe
from probes.host.process import ProcessProbe
from probes.host.reading import Reading
from probes.host.signals import SignalsProbe
from probes.host.storage import StorageProbe
from probes.host.tcp import TcpProbe
from probes.records import Event, Metric

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""A probe that did not load, or failed, is tried again after this."""
NOT_YET = "not loaded yet: the probes of the host follow one by one"
IN_CAPTURES = "runs in captures only"
SETTLED_S = 10.0
"""Programs are compiled when watching has gone on for so long: a job that starts, and an agent that will not live,
have better things to do."""


class HostProbe(Protocol):
    """One probe. A probe of files has no programs."""

    @property
    def rows_read(self) -> int:
        """Rows that came to user space since it was loaded."""

    @property
    def lost(self) -> int:
        """Events that the kernel could not hand over since it was loaded."""

    @property
    def ticks_per_s(self) -> float:
        """Interrupts that it causes by itself, on all CPUs."""

    @property
    def missing(self) -> list[str]:
        """What of it this kernel or machine does not have, in words; the rest of it works."""

    def read(self, ranks: Mapping[int, RankProcess]) -> Reading:
        """What happened since the last call, of these ranks (by pid) and of the node."""

    def programs(self) -> Sequence[int]:
        """Descriptors of its loaded programs."""

    def close(self) -> None:
        """Detach."""


@dataclass(frozen=True)
class Kind:
    """A probe of the host that there is."""

    name: str
    make: Callable[[Kernel], HostProbe]
    compiles: bool = True
    """False: it reads files, and is there at once."""
    always: bool = True
    """False: in captures only."""


class HostProbes:
    """Loads, reads, unloads. Not safe for several threads. Instants are CLOCK_MONOTONIC seconds."""

    def __init__(self, kernel: Kernel, kinds: Sequence[Kind]) -> None:
        self._kernel = kernel
        self.kinds = {kind.name: kind for kind in kinds}
        self.loaded: dict[str, HostProbe] = {}
        self.why: dict[str, str] = {}
        """Probe → why it could not be loaded, or failed."""
        self.compile_s = 0.0
        """CPU time of this process that loading took since the agent started."""
        self.read_s: dict[str, float] = {}
        """CPU time that reading each took since the agent started."""
        self._retry_at: dict[str, float] = {}
        self._rows = 0
        self._lost: dict[str, int] = {}

    def keep(self, wanted: Sequence[str], now: float, *, compiling: bool = True) -> str:
        """Unload what is not wanted, and load one that is and is not there; in words why that failed, when it is
        news. ``compiling``: whether it may be one that has to be compiled."""
        for name in [name for name in self.loaded if name not in wanted]:
            self.unload(name)
        for name in wanted:
            may = compiling or not self.kinds[name].compiles
            if may and name not in self.loaded and now >= self._retry_at.get(name, 0.0):
                return self._load(self.kinds[name], now)
        return ""

    def _load(self, kind: Kind, now: float) -> str:
        before = time.process_time()
        try:
            with self._kernel.all_or_nothing():
                self.loaded[kind.name] = kind.make(self._kernel)
        except (
            Exception
        ) as error:  # BCC raises bare ones, and none of these may keep ranks from being watched
            if not isinstance(error, BpfUnavailable | OSError):
                log.exception("probe %s does not load", kind.name)
            words = f"{kind.name}: {error}"
            news = self.why.get(kind.name) != words
            self.why[kind.name] = words
            self._retry_at[kind.name] = now + RETRY_S
            return words if news else ""
        finally:
            self.compile_s += time.process_time() - before
        self.why.pop(kind.name, None)
        return ""

    def read(self, ranks: Mapping[int, RankProcess], now: float) -> Reading:
        """What all that are loaded say. One that fails is unloaded, and loaded anew after a while."""
        node: list[Metric] = []
        of_ranks: dict[int, list[Metric]] = {}
        events: list[Event] = []
        for name, probe in list(self.loaded.items()):
            before = time.process_time()
            try:
                reading = probe.read(ranks)
            except Exception as error:
                log.exception("probe %s failed", name)
                self.unload(name)
                self.why[name] = f"{name} failed: {error}; it is loaded anew within {RETRY_S:.0f} s"
                self._retry_at[name] = now + RETRY_S
                continue
            finally:
                self.read_s[name] = self.read_s.get(name, 0.0) + time.process_time() - before
            node += _numbers(reading.node)
            for pid, metrics in reading.ranks.items():
                of_ranks.setdefault(pid, []).extend(_numbers(metrics))
            events += reading.events
        return Reading(node=node, ranks=of_ranks, events=events)

    def follow(self, driving: Mapping[int, int], helpers: Mapping[int, int]) -> None:
        """Which thread drives each rank (pid → tid), as far as that is known, and which processes help which rank
        (pid → the rank's)."""
        for probe in self.loaded.values():
            if isinstance(probe, ProcessProbe | OnCpuProbe):
                probe.follow(driving)
            elif isinstance(probe, SignalsProbe):
                probe.watch_helpers(helpers)

    def unload(self, name: str) -> None:
        """Detach one."""
        probe = self.loaded.pop(name, None)
        if probe is None:
            return
        try:
            self._rows += probe.rows_read
            self._lost[name] = self._lost.get(name, 0) + probe.lost
        finally:
            try:
                probe.close()
            except Exception:
                log.exception("detaching %s failed", name)

    def close(self) -> None:
        """Detach all."""
        for name in list(self.loaded):
            self.unload(name)

    def rows(self, name: str = "") -> int:
        """Rows of maps that came to user space: of one probe that is loaded, or of all since the agent started."""
        if name:
            return self.loaded[name].rows_read if name in self.loaded else 0
        return self._rows + sum(probe.rows_read for probe in self.loaded.values())

    def lost(self, name: str) -> int:
        """Events of one probe that the kernel could not hand over, since the agent started."""
        here = self.loaded.get(name)
        return self._lost.get(name, 0) + (here.lost if here else 0)


def _numbers(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """A server refuses a batch with a value that is no number: better to lose the value."""
    return (metric for metric in metrics if math.isfinite(metric.value))


KINDS: tuple[Kind, ...] = (
    Kind("cgroup", lambda kernel: CgroupProbe(), compiles=False),
    Kind("process", lambda kernel: ProcessProbe(), compiles=False),
    Kind("machine", lambda kernel: MachineProbe(), compiles=False),
    Kind("signals", SignalsProbe),
    Kind("interrupts", InterruptsProbe),
    Kind("on_cpu", OnCpuProbe),
    Kind("tcp", TcpProbe),
    Kind("memory", MemoryProbe),
    Kind("storage", StorageProbe, always=False),
)
"""All there are, in the order in which they are loaded. A fast disk has requests by the hundred thousand:
``storage`` would take a CPU's time with it."""
