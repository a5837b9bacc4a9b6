"""The cgroup probe: which limits stand above a rank, how often they were hit, and how long they held it up.

Files only. Every group from a rank's own up to the root is looked at, since any of them can be the one that
limits. Which limits are set is read anew every few seconds; each reading costs the counters of those that are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from probes import procfs
from probes.discovery import RankProcess
from probes.host import cgroup_limits as limits
from probes.host.cgroup_limits import CpuQuota
from probes.host.cgroup_tree import Level, label, levels, mounts
from probes.host.counters import Counters
from probes.host.files import FilesProbe
from probes.host.reading import Reading
from probes.records import Metric

LIMITS_S = 5.0
"""Limits are read anew so often: whoever sets one is seen within this."""
MOUNTS_S = 60.0
CONTROLLERS = ("cpu", "memory", "io", "cpuset")
PRESSURE = ("cpu", "memory", "io")


@dataclass
class _Limits:
    """What is set at one level."""

    quota: CpuQuota | None = None
    memory: dict[str, int] = field(default_factory=dict)
    io: dict[tuple[str, str], int] = field(default_factory=dict)
    cpus: str = ""


class CgroupProbe(FilesProbe):
    """Reads control groups. Not safe for several threads."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc, self._sys, self._clock = proc, sys, clock
        self._counters = Counters()
        self._limits: dict[Level, _Limits] = {}
        self._levels: dict[bytes, list[Level]] = {}
        """/proc/PID/cgroup → what it stands for: ranks of one container have the same."""
        self._limits_at = self._mounts_at = float("-inf")
        self._beyond: list[str] = []
        self._look_for_mounts()

    @property
    def missing(self) -> list[str]:
        """What this kernel or this place does not let see, in words."""
        words = []
        if not self._mounted:
            return ["no cgroup file system is mounted here: limits of CPU, memory and I/O are not seen"]
        lacking = [
            name for name in CONTROLLERS if not any(name in mount.controllers for mount in self._mounted)
        ]
        if lacking:
            words.append(f"no mounted cgroup hierarchy has the controllers {', '.join(lacking)}")
        if self._beyond:
            words.append(
                f"groups of ranks that lie outside of what is mounted here: {', '.join(self._beyond[:4])}; "
                "run the agent in the node's cgroup namespace (Docker: --cgroupns=host)"
            )
        return words

    def read(self, ranks: Mapping[int, RankProcess]) -> Reading:
        """The limits above each rank, and what they did since the last call."""
        now = self._clock()
        if now - self._mounts_at >= MOUNTS_S:
            self._look_for_mounts()
        if now - self._limits_at >= LIMITS_S:
            self._limits_at = now
            self._limits.clear()
            self._levels.clear()  # controllers come and go below a group, too
            self._beyond.clear()
        self._counters.turn()
        told: dict[Level, list[Metric]] = {}
        found: dict[int, list[Metric]] = {}
        for pid in ranks:
            metrics: list[Metric] = []
            has_cpuset = False
            for level in self._levels_of(pid):
                if level.controller == "cpuset":  # the lowest that has one is the one that holds
                    if has_cpuset:
                        continue
                    has_cpuset = True
                if level not in told:
                    told[level] = list(self._tell(level))
                metrics += told[level]
            if metrics:
                found[pid] = metrics
        self.rows_read += len(told)
        return Reading(ranks=found)

    def _look_for_mounts(self) -> None:
        self._mounted, self._mounts_at = mounts(self._proc), self._clock()
        self._online = limits.count_cpus(
            (procfs.read(f"{self._sys}/devices/system/cpu/online") or b"").decode("ascii", "replace")
        ) or (os.cpu_count() or 1)
        self._levels.clear()

    def _levels_of(self, pid: int) -> list[Level]:
        membership = procfs.read(f"{self._proc}/{pid}/cgroup")
        if membership is None:  # ended
            return []
        if membership not in self._levels:
            self._levels[membership], beyond = levels(membership, self._mounted)
            self._beyond += [path for path in beyond if path not in self._beyond]
        return self._levels[membership]

    def _tell(self, level: Level) -> Iterator[Metric]:
        fresh = level not in self._limits
        if fresh:
            self._limits[level] = _read_limits(level)
        found = self._limits[level]
        where = {"cgroup": label(level.cgroup)}
        if level.controller == "cpu":
            if found.quota or fresh:
                yield from self._cpu(level, found.quota, where)
        elif level.controller == "memory":
            yield from self._memory(level, found.memory, where)
        elif level.controller == "io" and found.io:
            yield from self._io(level, found.io, where)
        elif level.controller == "cpuset" and 0 < limits.count_cpus(found.cpus) < self._online:
            labels = where | {"cpus": found.cpus[:64]}
            yield Metric(name="cpuset_cpus", value=limits.count_cpus(found.cpus), unit="1", labels=labels)
        elif level.controller in ("core", "freezer") and level.leaf and level.cgroup != "/":
            if limits.is_frozen(level):
                yield Metric(name="cgroup_frozen", value=1, unit="1", labels=where)
            if level.controller == "core":
                yield from self._pressure(level, where)

    def _cpu(self, level: Level, quota: CpuQuota | None, where: dict[str, str]) -> Iterator[Metric]:
        labels = where
        if quota:
            labels = where | {"quota_us": str(quota.quota_us), "period_us": str(quota.period_us)}
            ratio = quota.quota_us / quota.period_us
            yield Metric(name="cpu_quota_ratio", value=ratio, unit="ratio", labels=labels)
        # Without a quota the counters rest; read now and then, they are where they were when one is set.
        throttled = limits.cpu_throttled(level)
        if throttled is not None:
            yield from self._grown(level, "cpu_periods", throttled.periods, "1", labels)
            yield from self._grown(level, "cpu_throttled_periods", throttled.throttled_periods, "1", labels)
            yield from self._grown(level, "cpu_throttled_ns", throttled.throttled_ns, "ns", labels)

    def _memory(self, level: Level, set_: dict[str, int], where: dict[str, str]) -> Iterator[Metric]:
        if set_:
            yield Metric(
                name="memory_used_bytes", value=limits.memory_used(level), unit="B", labels=dict(where)
            )
            hits = limits.memory_hits(level)
            for kind, limit in set_.items():
                labels = where | {"limit": kind}
                yield Metric(name="memory_limit_bytes", value=limit, unit="B", labels=labels)
                yield from self._grown(level, "memory_limit_hits", hits.get(kind, 0), "1", labels)
        if set_ or level.leaf:
            yield from self._grown(level, "memory_oom_kills", limits.oom_kills(level), "1", where)

    def _io(self, level: Level, set_: dict[tuple[str, str], int], where: dict[str, str]) -> Iterator[Metric]:
        used = limits.io_used(level)
        for (device, kind), limit in set_.items():
            labels = where | {"device": self._device(device)}
            in_bytes = kind.endswith("bytes")
            unit = "B/s" if in_bytes else "Hz"
            yield Metric(name=f"io_limit_{kind}", value=limit, unit=unit, labels=labels)
            total = used.get((device, kind), 0)
            yield from self._grown(level, f"io_limited_{kind}", total, "B" if in_bytes else "1", labels)

    def _pressure(self, level: Level, where: dict[str, str]) -> Iterator[Metric]:
        for resource in PRESSURE:
            for who, total in limits.stalled_ns(f"{level.folder}/{resource}.pressure").items():
                labels = where | {"resource": resource, "who": who}
                yield from self._grown(level, "cgroup_stalled_ns", total, "ns", labels)

    def _grown(
        self, level: Level, name: str, total: int, unit: str, labels: dict[str, str]
    ) -> Iterator[Metric]:
        # Labels may hold a limit, which may change; the counter goes on.
        which = tuple(value for key, value in labels.items() if not key.endswith("_us"))
        grown = self._counters.grown((level.folder, name, which), total)
        if grown:
            yield Metric(name=name, value=grown, unit=unit, labels=labels)

    def _device(self, number: str) -> str:
        try:
            return (self._sys / "dev/block" / number).readlink().name[:64]
        except OSError:
            return number[:64]


def _read_limits(level: Level) -> _Limits:
    match level.controller:
        case "cpu":
            return _Limits(quota=limits.cpu_quota(level))
        case "memory":
            return _Limits(memory=limits.memory_limits(level))
        case "io":
            return _Limits(io=limits.io_limits(level))
        case "cpuset":
            return _Limits(cpus=limits.cpus(level))
        case _:
            return _Limits()
