"""Processes that compute and sleep, watched for a while by the probe and by the scheduler's own counters.

Those are /proc/PID/schedstat (Documentation/scheduler/sched-stats.rst): time on a CPU and time waiting for one, in
nanoseconds. It is read around each cut, so that a bound on the probe's figure follows from it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from probes.host.thread_time import Cut, Stay, ThreadTimeProbe
from probes.records import Role
from tests.probes.processes import Child, until

SPIN = "import os, sys\nprint(flush=True)\nwhile True: pass"
SLEEP = "import select\nprint(flush=True)\nwhile True: select.select([], [], [], 0.01)"
WORK_AND_SLEEP = """
import select, time
print(flush=True)
while True:
    until = time.thread_time() + 0.003
    while time.thread_time() < until: pass
    select.select([], [], [], 0.002)
"""
VFORK = """
import os
print(flush=True)
while True:  # the parent waits uninterruptibly, in vfork(2), until its child has replaced itself
    os.posix_spawn("/bin/sh", ["sh", "-c", ":"], {})
    os.wait()
"""
WATCHED_NS = 1_000_000_000
SLACK_NS = 10_000_000
"""The scheduler adds up a run at each tick; the probe knows it to the nanosecond."""

Start = Callable[..., Child]

as_it_is = pytest.mark.parametrize("loaded", [None], indirect=True, ids=["states-told"])


class Reading(NamedTuple):
    """The scheduler's own counters of one process, read before and after something; nanoseconds."""

    before: tuple[int, int]
    """(on a CPU, runnable)."""
    after: tuple[int, int]
    settled: tuple[int, int]
    """Read after the next switch, because a wait is counted only when it ends."""


class Watched(NamedTuple):
    first: Cut
    last: Cut
    start: Reading
    end: Reading
    stays: list[Stay]
    later: Cut
    """From after the stays were read."""

    def increment(self, name: str) -> int:
        return int(getattr(self.last, name) - getattr(self.first, name))

    @property
    def wall_ns(self) -> int:
        return self.last.at_ns - self.first.at_ns


def schedstat(pid: int) -> tuple[int, int, int]:
    """(ns on a CPU, ns runnable, times switched in)."""
    on_cpu, waiting, switches = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(on_cpu), int(waiting), int(switches)


def stolen_ns() -> int:
    """What the hypervisor took from all CPUs: sched_switch sees it as running, schedstat does not."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[8]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def watch(probe: ThreadTimeProbe, child: Child, role: Role = Role.DRIVING) -> Watched:
    """Watch a process for a while."""
    probe.watch({child.pid: role})
    until(lambda: child.pid in probe.heartbeat(), "the process is watched")
    probe.occupants()
    first, start = _cut(probe, child.pid)
    until(lambda: time.monotonic_ns() - first.at_ns >= WATCHED_NS, "it has been watched for long enough")
    last, end = _cut(probe, child.pid)
    stays = [stay for stay in probe.occupants() if stay.tid == child.pid]
    later, _ = _cut(probe, child.pid)
    return Watched(first, last, start, end, stays, later)


def _cut(probe: ThreadTimeProbe, pid: int) -> tuple[Cut, Reading]:
    cuts: list[Cut] = []
    before = schedstat(pid)

    def cut() -> bool:
        nonlocal before
        before = schedstat(pid)
        cuts[:] = probe.heartbeat().get(pid, [])
        return bool(cuts)

    until(cut, "a cut of the process")
    at_once = settled = after = schedstat(pid)
    give_up = time.monotonic_ns() + 300_000_000  # alone on its CPU, it may not be switched at all
    # The scheduler adds up a run at its CPU's next tick, which a paused virtual CPU has late.
    while after[0] == at_once[0] and time.monotonic_ns() < give_up:
        settled = after = schedstat(pid)
    while settled[2] == at_once[2] and time.monotonic_ns() < give_up:
        settled = schedstat(pid)
    return cuts[0], Reading(before[:2], after[:2], settled[:2])


def assert_whole(*cuts: Cut) -> None:
    for cut in cuts:
        assert cut.running_ns + cut.runnable_ns + cut.blocked_ns == cut.at_ns - cut.since_ns
        assert sum(cut.blocked_by) == cut.blocked_ns
