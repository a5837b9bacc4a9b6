"""Where a rank's groups lie: mounts of both versions, moves, and what cannot be seen from here."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.host import cgroup_tree
from probes.host.cgroup import CgroupProbe
from probes.host.cgroup_tree import Mount, label, levels, mounts
from tests.probes.cgroup_files import POD, V1, Machine, a_pod, cpu_stat, read


@pytest.fixture
def pod(tmp_path: Path) -> Machine:
    return a_pod(tmp_path)


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


def test_long_and_hostile_paths_become_labels_of_64_characters_that_still_differ() -> None:
    slice_ = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1b3a.slice"
    container = f"{slice_}/cri-containerd-{'9f' * 32}.scope"
    assert label("/a") == "/a"
    assert len(label(slice_)) == len(label(container)) == 64
    assert label(slice_) != label(container)
    assert label("/\udcff") == "/�"


def test_names_of_mounts_with_spaces_are_read(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "/ {root}/a\\040b rw - cgroup2 cgroup2 rw")
    assert mounts(machine.root / "proc")[0].point == f"{tmp_path}/a b"


def test_here_nothing_is_missing_that_the_kernel_mounts() -> None:
    assert cgroup_tree.mounts(), "this machine mounts control groups"
    assert not [words for words in CgroupProbe().missing if words.startswith("no cgroup")]
