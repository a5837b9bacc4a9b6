"""From credits to names: on a made-up /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from probes.discovery import PF_KTHREAD
from probes.host.occupants import LISTED, cgroup_of, name_occupants
from probes.host.thread_time import Stay
from probes.records import Occupant, Role

THREADS = {100: (90, Role.DRIVING), 101: (90, Role.COMMUNICATION), 200: (200, Role.DRIVING)}
"""Threads 100 and 101 of process 90, thread 200 of process 200."""


def nobody(_pid: int) -> None:
    return None


def put(proc: Path, pid: int, name: str, *, flags: int = 0, cgroup: str = "", started: int = 5) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    fields = ["S", "1", *["0"] * 4, str(flags), *["0"] * 12, str(started), *["0"] * 25, "1"]
    (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    (folder / "cgroup").write_text(cgroup)


def test_who_had_the_cpu_is_named_with_its_cgroup(tmp_path: Path) -> None:
    put(tmp_path, 7, "backup (x)", cgroup="0::/system.slice/backup.service\n")
    named = name_occupants([Stay(100, 7, 5_000, "backup-thread", 1)], THREADS, nobody, tmp_path)
    assert named == {
        90: [
            Occupant(
                role=Role.DRIVING,
                pid=7,
                name="backup (x)",
                cgroup="/system.slice/backup.service",
                took_ns=5_000,
            )
        ]
    }


def test_waits_of_one_process_s_threads_add_up_by_role(tmp_path: Path) -> None:
    threads = THREADS | {102: (90, Role.COMMUNICATION)}
    stays = [Stay(100, 7, 10, "a", 1), Stay(101, 7, 20, "a", 1), Stay(102, 7, 30, "a", 1)]
    named = name_occupants(stays, threads, nobody, tmp_path)
    assert {(occupant.role, occupant.took_ns) for occupant in named[90]} == {
        (Role.DRIVING, 10),
        (Role.COMMUNICATION, 50),
    }


def test_a_process_that_has_ended_keeps_the_name_it_had_on_the_cpu(tmp_path: Path) -> None:
    (occupant,) = name_occupants([Stay(100, 7, 10, "short", 1)], THREADS, nobody, tmp_path)[90]
    assert (occupant.name, occupant.cgroup, occupant.kernel) == ("short", "", False)


@pytest.mark.parametrize(
    ("started_before_ns", "name", "cgroup", "job"),
    [(1_000_000_000, "young", "/new", "job-2"), (-1_000_000_000, "old-thread", "", "")],
    ids=["it had the CPU itself", "it started after the CPU was had"],
)
def test_a_pid_used_again_does_not_lend_its_new_name_to_what_ran_before(
    tmp_path: Path, started_before_ns: int, name: str, cgroup: str, job: str
) -> None:
    last_ns = time.monotonic_ns()
    suspended = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    ticks = (last_ns - started_before_ns + suspended) * os.sysconf("SC_CLK_TCK") // 1_000_000_000
    put(tmp_path, 7, "young", cgroup="0::/new\n", started=ticks)
    stays = [Stay(100, 7, 10, "older", 1, last_ns - 5), Stay(101, 7, 20, "old-thread", 1, last_ns)]
    for occupant in name_occupants(stays, THREADS, {7: ("job-2", 5)}.get, tmp_path)[90]:
        assert (occupant.name, occupant.cgroup, occupant.rank_job) == (name, cgroup, job)


def test_the_idle_cpu_and_kernel_threads_are_told_apart(tmp_path: Path) -> None:
    put(tmp_path, 9, "ksoftirqd/1", flags=PF_KTHREAD, cgroup="0::/\n")
    stays = [Stay(100, 0, 10, "swapper/1", 1), Stay(100, 9, 20, "ksoftirqd/1", 1)]
    largest, idle = name_occupants(stays, THREADS, nobody, tmp_path)[90]
    assert (largest.name, largest.pid, largest.kernel) == ("ksoftirqd/1", 9, True)
    assert (idle.name, idle.pid, idle.kernel) == ("idle", 0, True)


def test_another_rank_on_the_cpu_is_named_as_one(tmp_path: Path) -> None:
    ranks = {7: ("job-2", 5)}
    (occupant,) = name_occupants([Stay(200, 7, 10, "python", 1)], THREADS, ranks.get, tmp_path)[200]
    assert (occupant.rank_job, occupant.rank) == ("job-2", 5)


def test_stays_beside_a_thread_that_is_gone_are_left_out(tmp_path: Path) -> None:
    assert name_occupants([Stay(999, 7, 10, "a", 1)], THREADS, nobody, tmp_path) == {}


def test_only_the_largest_are_listed_and_the_rest_is_one_sum(tmp_path: Path) -> None:
    stays = [Stay(100, pid, pid, f"p{pid}", 1) for pid in range(1, LISTED + 31)]
    listed = name_occupants(stays, THREADS, nobody, tmp_path)[90]
    assert [occupant.pid for occupant in listed[:LISTED]] == list(range(LISTED + 30, 30, -1))
    assert [(occupant.pid, occupant.name) for occupant in listed[LISTED:]] == [(-1, "other processes")]
    assert sum(occupant.took_ns for occupant in listed) == sum(stay.ns for stay in stays)


@pytest.mark.parametrize(
    ("lines", "cgroup"),
    [
        ("0::/kubepods/pod1\n", "/kubepods/pod1"),
        ("5:cpu,cpuacct:/docker/abc\n3:memory:/other\n0::/\n", "/docker/abc"),
        ("5:cpu,cpuacct:/docker/abc\n0::/system.slice\n", "/system.slice"),
        ("4:cpuset:/sets\n0::/\n", "/"),
        ("0::/with:colons:in it\n", "/with:colons:in it"),
        ("", ""),
    ],
)
def test_the_cgroup_is_the_one_that_limits_the_cpu(tmp_path: Path, lines: str, cgroup: str) -> None:
    put(tmp_path, 7, "a", cgroup=lines)
    assert cgroup_of(tmp_path, 7) == cgroup


def test_a_process_that_has_ended_has_no_cgroup(tmp_path: Path) -> None:
    assert cgroup_of(tmp_path, 7) == ""
