"""Time that the hypervisor took. Tracepoints cannot see it: to them a thread on a halted CPU runs.

Per CPU from /proc/stat (Documentation/filesystems/proc.rst), in clock ticks, so coarse. Per thread the kernel's
own run time (/proc/PID/task/TID/schedstat) leaves stolen time out where paravirtual accounting is on: what
sched_switch shows beyond it, bounded by what the CPUs lost together, is the thread's share. An estimate.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from probes import procfs
from probes.records import Metric


class StealMeter:
    """Differences between calls."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._tick = 1 / os.sysconf("SC_CLK_TCK")
        self._cpus = self._read()
        self._last: dict[str, float] = {}
        self._threads: dict[int, tuple[int, int]] = {}

    def by_cpu(self) -> dict[str, float]:
        """CPU → seconds stolen between the last two calls of :meth:`stolen`; only CPUs that lost any."""
        return dict(self._last)

    def stolen(self, running_ns: Mapping[int, int]) -> dict[int, int]:
        """Thread → nanoseconds stolen from it since the last call.

        ``running_ns``: thread → its cumulative time on a CPU as sched_switch shows it.
        """
        before, self._cpus = self._cpus, self._read()
        self._last = {
            cpu: (ticks - before[cpu]) * self._tick
            for cpu, ticks in self._cpus.items()
            if ticks > before.get(cpu, ticks)
        }
        lost_ns = int(sum(self._last.values()) * 1e9)
        stolen = {}
        seen = {}
        for tid, running in running_ns.items():
            executed = self._executed_ns(tid)
            if executed is None:
                continue
            seen[tid] = (running, executed)
            if lost_ns and tid in self._threads:
                ran, had_executed = self._threads[tid]
                beyond = (running - ran) - (executed - had_executed)
                stolen[tid] = max(0, min(beyond, lost_ns))
        self._threads = seen
        return stolen

    def _read(self) -> dict[str, int]:
        cpus = {}
        for line in (procfs.read(f"{self._proc}/stat") or b"").decode("ascii", "replace").splitlines():
            name, *fields = line.split()
            if not name.startswith("cpu"):
                break  # the CPUs come first
            if name != "cpu" and len(fields) > 7:
                cpus[name.removeprefix("cpu")] = int(fields[7])
        return cpus

    def _executed_ns(self, tid: int) -> int | None:
        fields = (procfs.read(f"{self._proc}/{tid}/schedstat") or b"").split()
        # None: it has ended, or the kernel has no CONFIG_SCHED_INFO.
        return int(fields[0]) if fields and fields[0].isdigit() else None


def steal_metrics(meter: StealMeter) -> list[Metric]:
    """What the hypervisor took of each CPU since it was last asked."""
    return [
        Metric(name="cpu_steal", value=lost_s, unit="s", labels={"cpu": cpu})
        for cpu, lost_s in meter.by_cpu().items()
    ]
