"""The cgroup probe: files as other kernels write them, below a made-up /proc, and real groups with real limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes.discovery import Process, RankProcess
from probes.host import cgroup_limits, cgroup_tree
from probes.host.cgroup import LIMITS_S, CgroupProbe
from probes.host.cgroup_tree import Mount, label, levels, mounts
from probes.records import Metric
from tests.probes.conftest import Start
from tests.probes.fake_proc import Clock
from tests.probes.processes import until

SPIN = "print(1, flush=True)\nwhile True: pass"


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
POD = "cg/kubepods.slice/pod7"


@pytest.fixture
def pod(tmp_path: Path) -> Machine:
    """Process 42 in the container of a pod, all in version 2."""
    machine = Machine(tmp_path, V2)
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


def test_a_quota_above_a_rank_is_told_with_what_it_took(pod: Machine) -> None:
    pod.put(f"{POD}/cpu.max", "150000 100000\n")
    pod.put(f"{POD}/cpu.stat", cpu_stat(1000, 40, 5_000_000))
    probe = pod.probe()
    where = ("/kubepods.slice/pod7", "150000", "100000")
    assert read(probe) == {("cpu_quota_ratio", *where): 1.5}, "a first look has nothing to compare with"
    pod.put(f"{POD}/cpu.stat", cpu_stat(1010, 47, 5_250_000))
    assert read(probe) == {
        ("cpu_quota_ratio", *where): 1.5,
        ("cpu_periods", *where): 10,
        ("cpu_throttled_periods", *where): 7,
        ("cpu_throttled_ns", *where): 250_000_000,
    }
    assert probe.missing == []


def test_a_quota_that_is_set_while_watched_loses_nothing_of_its_first_seconds(pod: Machine) -> None:
    probe = pod.probe()
    assert read(probe) == {}
    pod.put(f"{POD}/train/cpu.max", "5000 100000\n")
    pod.put(f"{POD}/train/cpu.stat", cpu_stat(40, 39, 3_000_000))
    assert read(probe) == {}, "limits are read anew every few seconds only"
    pod.limits_are_due()
    assert read(probe)["cpu_throttled_ns", "/kubepods.slice/pod7/train", "5000", "100000"] == 3_000_000_000


def test_memory_limits_their_hits_and_oom_kills_are_told(pod: Machine) -> None:
    pod.put(f"{POD}/memory.max", "1073741824\n")
    pod.put(f"{POD}/memory.high", "805306368\n")
    pod.put(f"{POD}/memory.current", "805300000\n")
    pod.put(f"{POD}/memory.events.local", "low 0\nhigh 7\nmax 2\noom 1\noom_kill 0\n")
    pod.put(f"{POD}/memory.events", "low 0\nhigh 907\nmax 902\noom 901\noom_kill 3\n")
    pod.put(f"{POD}/train/memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 2\n")
    probe = pod.probe()
    assert read(probe) == {
        ("memory_used_bytes", "/kubepods.slice/pod7"): 805300000,
        ("memory_limit_bytes", "/kubepods.slice/pod7", "max"): 1 << 30,
        ("memory_limit_bytes", "/kubepods.slice/pod7", "high"): 768 << 20,
    }
    pod.put(f"{POD}/memory.events.local", "low 0\nhigh 19\nmax 5\noom 2\noom_kill 0\n")
    pod.put(f"{POD}/train/memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 3\n")
    after = read(probe)
    assert after["memory_limit_hits", "/kubepods.slice/pod7", "high"] == 12
    assert after["memory_limit_hits", "/kubepods.slice/pod7", "max"] == 3
    assert after["memory_oom_kills", "/kubepods.slice/pod7/train"] == 1


def test_throttled_devices_are_told_by_name_with_what_went_through(pod: Machine) -> None:
    pod.put(f"{POD}/train/io.max", "259:0 rbps=2097152 wbps=max riops=max wiops=120\n")
    pod.put(f"{POD}/train/io.stat", "259:0 rbytes=100 wbytes=200 rios=3 wios=4 dbytes=0 dios=0\n")
    (pod.root / "sys/dev/block").mkdir(parents=True)
    (pod.root / "sys/dev/block/259:0").symlink_to("../../devices/pci0000:00/nvme/nvme0/nvme0n1")
    probe = pod.probe()
    where = ("/kubepods.slice/pod7/train", "nvme0n1")
    assert read(probe) == {
        ("io_limit_read_bytes", *where): 2 << 20,
        ("io_limit_write_operations", *where): 120,
    }
    pod.put(f"{POD}/train/io.stat", "259:0 rbytes=2097252 wbytes=900 rios=30 wios=64 dbytes=0 dios=0\n")
    after = read(probe)
    assert after["io_limited_read_bytes", *where] == 2 << 20
    assert after["io_limited_write_operations", *where] == 60
    assert ("io_limited_write_bytes", *where) not in after, "no limit, nothing to compare with"


def test_the_cpus_that_a_group_may_use_are_told_where_they_are_not_all(pod: Machine) -> None:
    pod.put(f"{POD}/train/cpuset.cpus.effective", "2-3,6\n")
    assert read(pod.probe()) == {("cpuset_cpus", "/kubepods.slice/pod7/train", "2-3,6"): 3}


def test_what_the_group_waited_for_is_told_by_resource(pod: Machine) -> None:
    def stall(some: int, full: int) -> None:
        pod.put(
            f"{POD}/train/memory.pressure",
            f"some avg10=1.52 avg60=0.40 avg300=0.09 total={some}\n"
            f"full avg10=0.00 avg60=0.00 avg300=0.00 total={full}\n",
        )

    stall(1000, 900)
    probe = pod.probe()
    assert read(probe) == {}
    stall(51_000, 900)
    where = ("/kubepods.slice/pod7/train", "memory", "some")
    assert read(probe) == {("cgroup_stalled_ns", *where): 50_000_000}


def test_a_group_that_is_held_is_told(pod: Machine) -> None:
    pod.put(f"{POD}/train/cgroup.events", "populated 1\nfrozen 0\n")
    probe = pod.probe()
    assert read(probe) == {}
    pod.put(f"{POD}/train/cgroup.events", "populated 1\nfrozen 1\n")
    assert read(probe) == {("cgroup_frozen", "/kubepods.slice/pod7/train"): 1}


V1 = (
    "/ {root}/cpu rw - cgroup cgroup rw,cpu,cpuacct",
    "/ {root}/memory rw - cgroup cgroup rw,memory",
    "/ {root}/blkio rw - cgroup cgroup rw,blkio",
    "/ {root}/cpuset rw - cgroup cgroup rw,cpuset",
    "/ {root}/unified rw - cgroup2 cgroup2 rw",
)


def test_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    machine = Machine(tmp_path, *V1)
    machine.put(
        "proc/42/cgroup",
        "12:cpu,cpuacct:/docker/a\n7:blkio:/docker/a\n4:memory:/docker/a\n3:cpuset:/docker/a\n"
        "1:name=systemd:/docker/a\n0::/system.slice/docker.service\n",
    )
    machine.put("unified/cgroup.controllers", "\n")
    machine.put("cpu/docker/a/cpu.cfs_quota_us", "50000\n")
    machine.put("cpu/docker/a/cpu.cfs_period_us", "100000\n")
    machine.put("cpu/docker/cpu.cfs_quota_us", "-1\n")
    machine.put("memory/docker/a/memory.limit_in_bytes", "12582912\n")
    machine.put("memory/docker/a/memory.usage_in_bytes", "12500000\n")
    machine.put("memory/docker/memory.limit_in_bytes", "9223372036854771712\n")
    machine.put("blkio/docker/a/blkio.throttle.read_bps_device", "8:0 1048576\n")
    machine.put("cpuset/docker/a/cpuset.effective_cpus", "0-7\n")

    def count(periods: int, throttled: int, ns: int, fails: int, kills: int, read_bytes: int) -> None:
        stat = f"nr_periods {periods}\nnr_throttled {throttled}\nthrottled_time {ns}\n"
        machine.put("cpu/docker/a/cpu.stat", stat)
        machine.put("memory/docker/a/memory.failcnt", f"{fails}\n")
        control = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
        machine.put("memory/docker/a/memory.oom_control", control)
        moved = f"8:0 Read {read_bytes}\n8:0 Write 5\n8:0 Total {read_bytes + 5}\nTotal {read_bytes + 5}\n"
        machine.put("blkio/docker/a/blkio.throttle.io_service_bytes", moved)

    count(10, 1, 1000, 5, 0, 0)
    probe = machine.probe()
    read(probe)
    count(20, 9, 700_001_000, 25, 1, 1 << 20)
    assert read(probe) == {
        ("cpu_quota_ratio", "/docker/a", "50000", "100000"): 0.5,
        ("cpu_periods", "/docker/a", "50000", "100000"): 10,
        ("cpu_throttled_periods", "/docker/a", "50000", "100000"): 8,
        ("cpu_throttled_ns", "/docker/a", "50000", "100000"): 700_000_000,
        ("memory_used_bytes", "/docker/a"): 12_500_000,
        ("memory_limit_bytes", "/docker/a", "max"): 12 << 20,
        ("memory_limit_hits", "/docker/a", "max"): 20,
        ("memory_oom_kills", "/docker/a"): 1,
        ("io_limit_read_bytes", "/docker/a", "8:0"): 1 << 20,
        ("io_limited_read_bytes", "/docker/a", "8:0"): 1 << 20,
    }
    assert probe.missing == []


def test_no_cgroup_file_system_is_said_and_nothing_is_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.put("proc/42/cgroup", "0::/\n")
    probe = machine.probe()
    assert read(probe) == {}
    assert probe.missing[0].startswith("no cgroup file system is mounted")


def test_controllers_that_are_not_mounted_are_said(tmp_path: Path) -> None:
    machine = Machine(tmp_path, *V1[:2])
    machine.put("proc/42/cgroup", "12:cpu,cpuacct:/\n7:blkio:/x\n")
    probe = machine.probe()
    read(probe)
    assert probe.missing == [
        "no mounted cgroup hierarchy has the controllers io, cpuset",
        "groups of ranks that lie outside of what is mounted here: blkio:/x; run the agent in the node's cgroup "
        "namespace (Docker: --cgroupns=host)",
    ]


def test_a_group_above_the_agents_namespace_is_said_and_never_guessed(pod: Machine) -> None:
    pod.put("proc/42/cgroup", "0::/../../kubepods.slice/pod7\n")
    pod.put(f"{POD}/cpu.max", "150000 100000\n")
    probe = pod.probe()
    assert read(probe) == {}
    assert "version 2:/../../kubepods.slice/pod7" in probe.missing[0]


def test_a_mount_whose_root_is_a_group_serves_what_is_below_it() -> None:
    docker = Mount(1, frozenset({"cpu"}), "/docker/a", "/sys/fs/cgroup/cpu")
    found, beyond = levels(b"12:cpu,cpuacct:/docker/a/inner\n", [docker])
    assert [(level.cgroup, level.folder) for level in found] == [
        ("/docker/a/inner", "/sys/fs/cgroup/cpu/inner"),
        ("/docker/a", "/sys/fs/cgroup/cpu"),
    ]
    assert beyond == []
    found, beyond = levels(b"12:cpu,cpuacct:/docker/ab\xff\n", [docker])
    assert (found, beyond) == ([], ["cpu,cpuacct:/docker/ab\N{REPLACEMENT CHARACTER}"])


def test_a_rank_that_moves_to_another_group_begins_anew_there(pod: Machine) -> None:
    for name in ("a", "b"):
        pod.put(f"cg/{name}/cgroup.controllers", "cpu\n")
        pod.put(f"cg/{name}/cpu.max", "50000 100000\n")
    pod.put("cg/a/cpu.stat", cpu_stat(5, 5, 500))
    pod.put("cg/b/cpu.stat", cpu_stat(900, 900, 90_000))
    pod.put("proc/42/cgroup", "0::/a\n")
    probe = pod.probe()
    read(probe)
    pod.put("proc/42/cgroup", "0::/b\n")
    assert read(probe) == {("cpu_quota_ratio", "/b", "50000", "100000"): 0.5}


def test_a_group_made_anew_under_its_old_name_gives_no_negative_value(pod: Machine) -> None:
    pod.put(f"{POD}/cpu.max", "150000 100000\n")
    pod.put(f"{POD}/cpu.stat", cpu_stat(1000, 40, 5_000_000))
    probe = pod.probe()
    read(probe)
    pod.put(f"{POD}/cpu.stat", cpu_stat(3, 0, 0))
    assert list(read(probe)) == [("cpu_quota_ratio", "/kubepods.slice/pod7", "150000", "100000")]


def test_a_process_that_has_ended_is_left_out(pod: Machine) -> None:
    assert read(pod.probe(), pid=43) == {}


def test_long_and_hostile_paths_become_labels_of_64_characters_that_still_differ() -> None:
    slice_ = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1b3a.slice"
    container = f"{slice_}/cri-containerd-{'9f' * 32}.scope"
    assert label("/a") == "/a"
    assert len(label(slice_)) == len(label(container)) == 64
    assert label(slice_) != label(container)
    assert label("/\udcff") == "/�"


def test_lists_of_cpus_are_counted() -> None:
    assert cgroup_limits.count_cpus("0-3,8,10-11\n") == 7
    assert cgroup_limits.count_cpus("") == cgroup_limits.count_cpus("x-y") == 0


def test_names_of_mounts_with_spaces_are_read(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "/ {root}/a\\040b rw - cgroup2 cgroup2 rw")
    assert mounts(machine.root / "proc")[0].point == f"{tmp_path}/a b"


# --- real groups


@pytest.fixture
def group(request: pytest.FixtureRequest, start: Start) -> Iterator[Path]:
    """A new group of the controller that the test names; it goes when the children have ended."""
    name = f"sysom-test-{os.getpid()}"
    mount = next((m for m in mounts() if m.version == 1 and request.param in m.controllers), None)
    if mount is None or os.geteuid() != 0 or not os.access(mount.point, os.W_OK):
        pytest.skip(f"needs root and a writable hierarchy of version 1 with the controller {request.param}")
    folder = Path(mount.point) / name
    folder.mkdir()
    yield folder
    for pid in (folder / "cgroup.procs").read_text().split():
        Path(mount.point, "cgroup.procs").write_text(pid)
    folder.rmdir()


@pytest.mark.parametrize("group", ["cpu"], indirect=True)
def test_a_real_quota_throttles_as_the_kernels_own_counter_says(group: Path, start: Start) -> None:
    child = start(SPIN)
    (group / "cgroup.procs").write_text(str(child.pid))
    (group / "cpu.cfs_quota_us").write_text("20000")
    probe = CgroupProbe()

    def throttled() -> dict[str, int]:
        rows = (line.split() for line in (group / "cpu.stat").read_text().splitlines())
        return {name: int(value) for name, value in rows}

    outer, within, inner = throttled(), read(probe, child.pid), throttled()
    where = (f"/{group.name}", "20000", "100000")
    assert within["cpu_quota_ratio", *where] == 0.2
    files = {
        "cpu_throttled_ns": "throttled_time",
        "cpu_throttled_periods": "nr_throttled",
        "cpu_periods": "nr_periods",
    }
    told = dict.fromkeys(files, 0.0)
    before_last: dict[str, int] = {}

    def look() -> bool:
        before_last.update(throttled())
        seen = read(probe, child.pid)
        for name in told:
            told[name] += seen.get((name, *where), 0)
        return told["cpu_throttled_periods"] >= 5

    until(look, "the quota bites")
    last = throttled()
    for name, file in files.items():
        assert before_last[file] - inner[file] <= told[name] <= last[file] - outer[file], name
        assert told[name] > 0


EATS = """
import mmap, sys
print(1, flush=True)
sys.stdin.readline()
area = mmap.mmap(-1, 64 << 20)
for page in range(0, 64 << 20, 4096):
    area[page] = 1
"""


@pytest.mark.parametrize("group", ["memory"], indirect=True)
def test_a_real_memory_limit_is_hit_and_kills(group: Path, start: Start) -> None:
    eater, bystander = start(EATS), start("import sys; print(1, flush=True); sys.stdin.readline()")
    for child in (eater, bystander):
        assert child.line() == "1"
        (group / "cgroup.procs").write_text(str(child.pid))
    (group / "memory.limit_in_bytes").write_text(str(16 << 20))
    probe = CgroupProbe()
    first = read(probe, bystander.pid)
    cgroup = f"/{group.name}"
    assert first["memory_limit_bytes", cgroup, "max"] == 16 << 20
    eater.tell("eat")
    told = {"memory_limit_hits": 0.0, "memory_oom_kills": 0.0}

    def killed() -> bool:
        seen = read(probe, bystander.pid)
        told["memory_limit_hits"] += seen.get(("memory_limit_hits", cgroup, "max"), 0)
        told["memory_oom_kills"] += seen.get(("memory_oom_kills", cgroup), 0)
        return told["memory_oom_kills"] > 0

    until(killed, "the kernel kills what passes the limit")
    assert told["memory_oom_kills"] == 1
    assert told["memory_limit_hits"] > 0
    assert eater.process.wait() == -9


@pytest.mark.parametrize("group", ["io"], indirect=True)
def test_a_real_limit_of_a_device_is_told_by_the_devices_name(group: Path, start: Start) -> None:
    devices = [path for path in Path("/sys/block").iterdir() if (path / "device").exists()]
    if not devices:
        pytest.skip("this machine has no disk")
    child = start("import sys; print(1, flush=True); sys.stdin.readline()")
    (group / "cgroup.procs").write_text(str(child.pid))
    number = (devices[0] / "dev").read_text().strip()
    (group / "blkio.throttle.read_bps_device").write_text(f"{number} 3000000")
    seen = read(CgroupProbe(), child.pid)
    assert seen["io_limit_read_bytes", f"/{group.name}", devices[0].name] == 3_000_000


@pytest.mark.parametrize("group", ["freezer"], indirect=True)
def test_a_real_freeze_is_told_while_it_lasts(group: Path, start: Start) -> None:
    child = start("import sys; print(1, flush=True); sys.stdin.readline()")
    (group / "cgroup.procs").write_text(str(child.pid))
    probe = CgroupProbe()
    held = ("cgroup_frozen", f"/{group.name}")
    assert held not in read(probe, child.pid)
    (group / "freezer.state").write_text("FROZEN")
    try:
        until(lambda: held in read(probe, child.pid), "it is held")
    finally:
        (group / "freezer.state").write_text("THAWED")
    until(lambda: held not in read(probe, child.pid), "it goes on")


def test_here_nothing_is_missing_that_the_kernel_mounts() -> None:
    assert cgroup_tree.mounts(), "this machine mounts control groups"
    assert not [words for words in CgroupProbe().missing if words.startswith("no cgroup")]
