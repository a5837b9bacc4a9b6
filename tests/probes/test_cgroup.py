"""The cgroup probe on files as other kernels write them: which limits a rank has, and what they took from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.host import cgroup_limits
from tests.probes.cgroup_files import POD, V1, Machine, a_pod, cpu_stat, read


@pytest.fixture
def pod(tmp_path: Path) -> Machine:
    return a_pod(tmp_path)


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


def test_a_group_made_anew_under_its_old_name_gives_no_negative_value(pod: Machine) -> None:
    pod.put(f"{POD}/cpu.max", "150000 100000\n")
    pod.put(f"{POD}/cpu.stat", cpu_stat(1000, 40, 5_000_000))
    probe = pod.probe()
    read(probe)
    pod.put(f"{POD}/cpu.stat", cpu_stat(3, 0, 0))
    assert list(read(probe)) == [("cpu_quota_ratio", "/kubepods.slice/pod7", "150000", "100000")]


def test_a_process_that_has_ended_is_left_out(pod: Machine) -> None:
    assert read(pod.probe(), pid=43) == {}


def test_lists_of_cpus_are_counted() -> None:
    assert cgroup_limits.count_cpus("0-3,8,10-11\n") == 7
    assert cgroup_limits.count_cpus("") == cgroup_limits.count_cpus("x-y") == 0
