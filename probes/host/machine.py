"""The machine probe: pressure, CPUs, memory and network of the whole node, and of each rank's network namespace.

Files only: /proc/pressure, /proc/stat, /proc/vmstat, /proc/PID/net and /sys. What a machine does not have (no
pressure information, no frequencies in a virtual machine) is said, and the rest works.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from probes import procfs
from probes.discovery import RankProcess
from probes.host import network_counters as network
from probes.host.cgroup_limits import stalled_ns
from probes.host.counters import Counters
from probes.host.files import FilesProbe
from probes.host.labels import OTHERS
from probes.host.reading import Reading
from probes.records import Metric

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
IDLE, IOWAIT, STEAL = 3, 4, 7
"""Columns of a CPU's line in /proc/stat."""
LISTED = 16
"""Rows per metric and reading, the largest; the rest is one sum under the label ``other``."""
MOSTLY = 0.9
"""A CPU that idles for this share of the interval could have done more work."""
ROUND = 10
"""Readings in which each CPU's thermal counters and each interface's carrier are looked at once."""
PRESSURE = ("cpu", "memory", "io", "irq")
PAGE = os.sysconf("SC_PAGE_SIZE")
VMSTAT = {
    "pswpin": ("swap_in_bytes", "B", PAGE),
    "pswpout": ("swap_out_bytes", "B", PAGE),
    "pgmajfault": ("node_major_faults", "1", 1),
    "pgsteal_kswapd": ("reclaimed_kswapd_bytes", "B", PAGE),
    "pgsteal_direct": ("reclaimed_direct_bytes", "B", PAGE),
    "workingset_refault_file": ("refaulted_file_bytes", "B", PAGE),
    "workingset_refault": ("refaulted_file_bytes", "B", PAGE),
    "workingset_refault_anon": ("refaulted_anon_bytes", "B", PAGE),
    "allocstall_normal": ("direct_reclaims", "1", 1),
    "allocstall_movable": ("direct_reclaims", "1", 1),
    "allocstall_dma32": ("direct_reclaims", "1", 1),
    "allocstall_dma": ("direct_reclaims", "1", 1),
    "compact_stall": ("direct_compactions", "1", 1),
    "oom_kill": ("node_oom_kills", "1", 1),
}
"""Counter → metric, unit, and what one of it is. Names differ between kernels: several may be one metric."""
WANTED = re.compile(rb"^(" + "|".join(VMSTAT).encode() + rb") (\d+)$", re.MULTILINE)
THERMAL = (("core_throttle_count", "core"), ("package_throttle_count", "package"))


class MachineProbe(FilesProbe):
    """Reads the node's counters. Not safe for several threads."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._proc, self._sys = proc, sys
        self._cpus_folder = sys / "devices/system/cpu"
        self._counters = Counters()
        self._turn = 0
        self._node = "1" if procfs.network_namespace(proc, "1") else "self"
        """A process in the node's network namespace."""
        self._namespace = procfs.network_namespace(proc, self._node)
        self._clock_source = ""
        self._pressure = [name for name in PRESSURE if stalled_ns(f"{proc}/pressure/{name}")]
        self._frequencies = next(self._cpus_folder.glob("cpu[0-9]*/cpufreq"), None) is not None
        self._thermal = [
            folder for folder in self._cpus_folder.glob("cpu[0-9]*") if (folder / "thermal_throttle").exists()
        ]

    @property
    def missing(self) -> list[str]:
        """What this machine does not tell, in words."""
        words = []
        if not self._pressure:
            words.append(
                "/proc/pressure: pressure is not told (CONFIG_PSI, or psi=1 on the kernel's command line)"
            )
        if not self._frequencies:
            words.append("cpufreq: the CPUs' frequencies are not told, as in most virtual machines")
        if not self._thermal:
            words.append("thermal_throttle: whether CPUs are slowed down by heat is not told")
        if not procfs.read(f"{self._proc}/{self._node}/net/snmp"):
            words.append(f"/proc/{self._node}/net: counters of TCP and of interfaces are not told")
        return words

    def read(self, ranks: Mapping[int, RankProcess]) -> Reading:
        """What the node counted since the last call, and what ranks' own network namespaces did."""
        self._counters.turn()
        node = [*self._pressures(), *self._cpus(), *self._memory(), *self._network(self._node)]
        node += [*self._backlogs(), *self._carriers(), *self._heat(), *self._clock()]
        self._turn += 1
        of_ranks = {pid: metrics for pid in ranks if (metrics := list(self._frequency(pid)))}
        by_namespace: dict[int, list[Metric]] = {}
        for pid in ranks:
            namespace = procfs.network_namespace(self._proc, str(pid))
            if namespace in (0, self._namespace):
                continue
            if namespace not in by_namespace:
                by_namespace[namespace] = list(self._network(str(pid), namespace))
            if by_namespace[namespace]:
                of_ranks.setdefault(pid, []).extend(by_namespace[namespace])
        return Reading(node=node, ranks=of_ranks)

    def _pressures(self) -> Iterator[Metric]:
        for resource in self._pressure:
            for who, total in stalled_ns(f"{self._proc}/pressure/{resource}").items():
                labels = {"resource": resource, "who": who}
                yield from self._grown("pressure_stalled_ns", total, "ns", labels)

    def _cpus(self) -> Iterator[Metric]:
        spent: dict[str, dict[str, int]] = {"cpu_stolen_ns": {}, "cpu_iowait_ns": {}, "cpu_idle_ns": {}}
        idle_cpus = known = 0
        raw = (procfs.read(f"{self._proc}/stat") or b"").decode("ascii", "replace")
        self.rows_read += 1
        for line in raw.splitlines():
            name, *fields = line.split()
            if not name.startswith("cpu"):
                break  # the CPUs come first
            if name == "cpu" or len(fields) <= STEAL:
                continue
            cpu = name.removeprefix("cpu")
            # Columns after STEAL are guests' time, which is in the first two already.
            took = [
                self._counters.grown((cpu, column), int(value))
                for column, value in enumerate(fields[: STEAL + 1])
            ]
            spent["cpu_stolen_ns"][cpu] = took[STEAL] * TICK_NS
            spent["cpu_iowait_ns"][cpu] = took[IOWAIT] * TICK_NS
            spent["cpu_idle_ns"][cpu] = took[IDLE] * TICK_NS
            known += sum(took) > 0
            idle_cpus += took[IDLE] + took[IOWAIT] >= MOSTLY * sum(took) > 0
        for name, by_cpu in spent.items():
            yield from _largest(name, by_cpu, "ns", "cpu")
        if known:
            yield Metric(name="cpus_idle", value=idle_cpus, unit="1", labels={"cpus": str(known)})

    def _memory(self) -> Iterator[Metric]:
        grown: dict[tuple[str, str], int] = {}
        rows = procfs.read(f"{self._proc}/vmstat", network.WHOLE) or b""
        for name, total in WANTED.findall(rows):
            metric, unit, size = VMSTAT[name.decode()]
            grown[metric, unit] = grown.get((metric, unit), 0) + size * self._counters.grown(name, int(total))
        self.rows_read += 1
        for (metric, unit), value in grown.items():
            if value:
                yield Metric(name=metric, value=value, unit=unit)

    def _network(self, pid: str, namespace: int = 0) -> Iterator[Metric]:
        folder = f"{self._proc}/{pid}/net"
        self.rows_read += 3
        by_metric: dict[str, dict[str, int]] = {}
        for interface, totals in network.interfaces(folder).items():
            for name, total in totals.items():
                grown = self._counters.grown((namespace, interface, name), total)
                by_metric.setdefault(name, {})[interface] = grown
        for name, by_interface in by_metric.items():
            yield from _largest(name, by_interface, "B" if name.endswith("bytes") else "1", "interface")
        for name, total in network.protocols(folder).items():
            yield from self._grown(name, total, "1", {}, namespace)

    def _backlogs(self) -> Iterator[Metric]:
        dropped: dict[str, int] = {}
        squeezed: dict[str, int] = {}
        for cpu, drops, squeezes in network.backlogs(f"{self._proc}/{self._node}/net"):
            dropped[str(cpu)] = self._counters.grown(("dropped", cpu), drops)
            squeezed[str(cpu)] = self._counters.grown(("squeezed", cpu), squeezes)
        yield from _largest("receive_queue_drops", dropped, "1", "cpu")
        yield from _largest("receive_cut_short", squeezed, "1", "cpu")

    def _carriers(self) -> Iterator[Metric]:
        if self._turn % ROUND:
            return
        changed: dict[str, int] = {}
        for folder in islice((self._sys / "class/net").glob("*"), network.MAX_INTERFACES):
            if folder.name == "lo":
                continue
            interface = os.fsencode(folder.name).decode("utf-8", "replace")[:64]
            changes = (procfs.read(f"{folder}/carrier_changes") or b"").strip()
            if changes.isdigit():
                changed[interface] = self._counters.grown(("carrier", folder.name), int(changes))
            speed = (procfs.read(f"{folder}/speed") or b"").strip()  # Mbit/s; −1 or an error without a link
            if speed.isdigit() and int(speed) > 0:
                labels = {"interface": interface}
                yield Metric(name="interface_speed", value=int(speed) * 125_000, unit="B/s", labels=labels)
        yield from _largest("carrier_changes", changed, "1", "interface")

    def _heat(self) -> Iterator[Metric]:
        # A tenth of the CPUs with each reading: 200 CPUs would be 400 files.
        for folder in self._thermal[self._turn % ROUND :: ROUND]:
            for file, where in THERMAL:
                count = (procfs.read(f"{folder}/thermal_throttle/{file}") or b"").strip()
                if count.isdigit():
                    labels = {"cpu": folder.name.removeprefix("cpu"), "where": where}
                    yield from self._grown("thermal_throttles", int(count), "1", labels)

    def _clock(self) -> Iterator[Metric]:
        # tsc, or what is read at a hundred times its cost; it may change while the machine runs.
        if self._turn % ROUND:
            return
        file = f"{self._sys}/devices/system/clocksource/clocksource0/current_clocksource"
        source = (procfs.read(file) or b"").decode("ascii", "replace").strip()
        if source:
            yield Metric(name="clock_source", value=1, unit="1", labels={"source": source[:64]})

    def _frequency(self, pid: int) -> Iterator[Metric]:
        if not self._frequencies:
            return
        stat = (procfs.read(f"{self._proc}/{pid}/stat") or b"").rpartition(b")")[2].split()
        if len(stat) <= 36:
            return
        cpu = stat[36].decode("ascii", "replace")  # field 39: the CPU that its main thread had last
        folder = f"{self._cpus_folder}/cpu{cpu}/cpufreq"
        # Asking for the present frequency interrupts the CPU, and waits for it on kernels before 5.18.
        now = (("cpu_frequency_hz", "scaling_cur_freq"),) if self._turn % ROUND == 1 else ()
        for name, file in (
            *now,
            ("cpu_frequency_limit_hz", "scaling_max_freq"),
            ("cpu_frequency_top_hz", "cpuinfo_max_freq"),
        ):
            khz = (procfs.read(f"{folder}/{file}") or b"").strip()
            if khz.isdigit():
                yield Metric(name=name, value=int(khz) * 1000, unit="Hz", labels={"cpu": cpu})

    def _grown(
        self, name: str, total: int, unit: str, labels: dict[str, str], namespace: int = 0
    ) -> Iterator[Metric]:
        grown = self._counters.grown((name, namespace, *labels.values()), total)
        if grown:
            yield Metric(name=name, value=grown, unit=unit, labels=labels)


def _largest(name: str, values: Mapping[str, int], unit: str, label: str) -> Iterator[Metric]:
    """One metric per row that is not zero, the largest first; what goes beyond ``LISTED`` is one sum."""
    rows = sorted(((value, key) for key, value in values.items() if value), reverse=True)
    for value, key in rows[:LISTED]:
        yield Metric(name=name, value=value, unit=unit, labels={label: key})
    rest = sum(value for value, _ in rows[LISTED:])
    if rest:
        yield Metric(name=name, value=rest, unit=unit, labels={label: OTHERS})
