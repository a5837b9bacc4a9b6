"""Control groups as other kernels tell of them, in a made-up /proc, /sys and cgroup file system."""

from __future__ import annotations

from pathlib import Path

from probes.discovery import Process, RankProcess
from probes.host.cgroup import LIMITS_S, CgroupProbe
from probes.records import Metric
from tests.probes.fake_proc import Clock


def a_rank(pid: int) -> RankProcess:
    return RankProcess("job-1", 0, 4, 0, Process(pid, 1, 100, "python"), Path("/lib/libtorch_cpu.so"), {})


class Machine:
    """A made-up /proc, /sys and cgroup file system."""

    def __init__(self, root: Path, *mounted: str) -> None:
        self.root, self.clock = root, Clock()
        (root / "proc/self").mkdir(parents=True)
        lines = [f"{30 + index} 23 0:28 {line.format(root=root)}" for index, line in enumerate(mounted)]
        (root / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")
        self.put("sys/devices/system/cpu/online", "0-7\n")

    def put(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def probe(self) -> CgroupProbe:
        return CgroupProbe(self.root / "proc", self.root / "sys", self.clock)

    def limits_are_due(self) -> None:
        self.clock.now += LIMITS_S


V2 = "/ {root}/cg rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


V1 = (
    "/ {root}/cpu rw - cgroup cgroup rw,cpu,cpuacct",
    "/ {root}/memory rw - cgroup cgroup rw,memory",
    "/ {root}/blkio rw - cgroup cgroup rw,blkio",
    "/ {root}/cpuset rw - cgroup cgroup rw,cpuset",
    "/ {root}/unified rw - cgroup2 cgroup2 rw",
)


POD = "cg/kubepods.slice/pod7"


def a_pod(folder: Path) -> Machine:
    """Process 42 in the container of a pod, all in version 2."""
    machine = Machine(folder, V2)
    machine.put("proc/42/cgroup", "0::/kubepods.slice/pod7/train\n")
    machine.put("cg/cgroup.controllers", "cpuset cpu io memory hugetlb pids rdma misc\n")
    for folder in ("cg/kubepods.slice", POD, f"{POD}/train"):
        machine.put(f"{folder}/cgroup.controllers", "cpuset cpu io memory pids\n")
        machine.put(f"{folder}/cpu.max", "max 100000\n")
        machine.put(f"{folder}/memory.max", "max\n")
        machine.put(f"{folder}/memory.high", "max\n")
        machine.put(f"{folder}/io.max", "")
        machine.put(f"{folder}/cpuset.cpus.effective", "0-7\n")
        machine.put(f"{folder}/cpu.stat", cpu_stat(0, 0, 0))
        machine.put(f"{folder}/memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n")
    return machine


def cpu_stat(periods: int, throttled: int, usec: int) -> str:
    """As Linux 6.1 writes it."""
    return (
        "usage_usec 84012923\nuser_usec 70991092\nsystem_usec 13021831\ncore_sched.force_idle_usec 0\n"
        f"nr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec {usec}\nnr_bursts 0\nburst_usec 0\n"
    )


def read(probe: CgroupProbe, pid: int = 42) -> dict[tuple[str, ...], float]:
    """(name, label values …) → value."""
    metrics: list[Metric] = list(probe.read({pid: a_rank(pid)}).ranks.get(pid, ()))
    named = {(metric.name, *metric.labels.values()): metric.value for metric in metrics}
    assert len(named) == len(metrics), "two metrics of one name and the same labels"
    return named
