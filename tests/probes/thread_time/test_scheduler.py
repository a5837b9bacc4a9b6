"""The thread-time probe on the running kernel: ordinary processes, and what the scheduler itself says of them."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest

from probes.bpf import has_tracepoint, kernel_release
from probes.host.thread_time import Cut, ThreadTimeProbe
from probes.records import Role
from tests.probes.processes import until
from tests.probes.thread_time.watched import (
    SLACK_NS,
    SLEEP,
    SPIN,
    VFORK,
    WORK_AND_SLEEP,
    Start,
    Watched,
    as_it_is,
    assert_whole,
    schedstat,
    stolen_ns,
    watch,
)

pytestmark = pytest.mark.live

STEAL_STEP_NS = (os.cpu_count() or 1) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
"""The hypervisor's share is counted in whole ticks per CPU; less than one of each may be missing."""
BOUNDARY_SHARE = 0.01
"""Of wall time: the two draw the line elsewhere. The probe counts a wait from the waking, the scheduler from the
queue: 20 to 45 µs later, over 1,180 wakings each of six sleepers. Runs of 40 µs differ by some µs per switch."""


def assert_agrees(watched: Watched, stolen: int) -> None:
    """Running and runnable time lie between what the scheduler counted inside and outside of the two cuts."""
    start, end = watched.start, watched.end
    slack = SLACK_NS + BOUNDARY_SHARE * watched.wall_ns
    stolen += STEAL_STEP_NS
    running, runnable = watched.increment("running_ns"), watched.increment("runnable_ns")
    assert running >= 0.98 * (end.before[0] - start.after[0]) - slack
    assert runnable <= 1.02 * (end.settled[1] - start.before[1]) + slack + stolen
    # A virtual CPU that its host takes away in the middle of a switch: the scheduler calls it waiting.
    on_the_way = max(0, 1.02 * (end.settled[1] - start.before[1]) - runnable)
    assert running <= 1.02 * (end.after[0] - start.before[0]) + slack + stolen + on_the_way
    both = end.before[0] + end.before[1] - start.after[0] - start.settled[1]
    assert running + runnable >= 0.98 * both - slack - stolen
    blocked = watched.increment("blocked_ns")
    assert running + runnable + blocked == watched.wall_ns


def test_a_process_that_computes_runs_or_is_runnable(probe: ThreadTimeProbe, start: Start) -> None:
    stolen = stolen_ns()
    watched = watch(probe, start(SPIN))
    assert_agrees(watched, stolen_ns() - stolen)
    assert_whole(watched.first, watched.last)
    assert watched.increment("uninterruptible_ns") == 0
    # Where the state is not told, a wait in progress is held to be a block until it ends.
    waits = watched.end.settled[1] - watched.end.before[1]
    assert watched.increment("blocked_ns") <= waits + SLACK_NS


def test_a_process_that_sleeps_is_blocked(probe: ThreadTimeProbe, start: Start) -> None:
    stolen = stolen_ns()
    watched = watch(probe, start(SLEEP))
    assert_agrees(watched, stolen_ns() - stolen)
    assert_whole(watched.first, watched.last)
    assert watched.increment("blocked_ns") > 0.5 * watched.wall_ns


def test_a_process_beside_a_hog_is_runnable_and_the_hog_is_named(
    probe: ThreadTimeProbe, start: Start
) -> None:
    cpu = max(os.sched_getaffinity(0))
    hog, victim = start(SPIN, cpu=cpu, name="cpu hog\n(x)"), start(WORK_AND_SLEEP, cpu=cpu)
    for _ in range(5):
        stolen, hog_before = stolen_ns(), schedstat(hog.pid)[0]
        watched = watch(probe, victim)
        assert_agrees(watched, stolen_ns() - stolen)
        assert_whole(watched.first, watched.last)
        hog_ran = schedstat(hog.pid)[0] - hog_before
        others = watched.wall_ns - hog_ran - watched.increment("running_ns")
        if others < 0.1 * watched.wall_ns:  # else this machine had more to do on that CPU: look again
            break
    runnable = watched.increment("runnable_ns")
    assert runnable > 0.1 * watched.wall_ns, "the hog did not get in the way"
    took = {stay.pid: stay for stay in watched.stays}
    assert took[hog.pid].comm == "cpu hog\n(x)"
    assert took[hog.pid].ns >= 0.9 * (runnable - max(0, others)) - SLACK_NS
    runnable_up_to_stays = watched.later.runnable_ns - watched.first.runnable_ns
    assert sum(stay.ns for stay in watched.stays) <= 1.02 * runnable_up_to_stays + SLACK_NS


@as_it_is
def test_uninterruptible_sleep_is_part_of_blocked_where_the_kernel_tells(
    probe: ThreadTimeProbe, start: Start
) -> None:
    if kernel_release() < (5, 18):
        pytest.skip("this kernel's sched_switch does not tell the state")
    watched = watch(probe, start(VFORK))
    assert 0 < watched.increment("uninterruptible_ns") <= watched.increment("blocked_ns")


def test_interrupts_are_part_of_running(probe: ThreadTimeProbe, start: Start) -> None:
    if not has_tracepoint("irq_vectors", "local_timer_entry"):
        pytest.skip(
            "this kernel has no tracepoint for timer interrupts, which a computing process is sure to get"
        )
    watched = watch(probe, start(SPIN))
    assert 0 < watched.increment("interrupted_ns") < 0.5 * watched.increment("running_ns")


@as_it_is
def test_a_cut_holds_though_the_agent_waits_for_a_cpu_after_reading(
    probe: ThreadTimeProbe, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start(WORK_AND_SLEEP)
    probe.watch({child.pid: Role.DRIVING})
    until(lambda: child.pid in probe.heartbeat(), "it is watched")
    table = probe._threads

    def slowly() -> Iterator[tuple[object, object]]:
        for row in table.items():
            select.select([], [], [], 0.02)
            yield row

    cuts: list[Cut] = []
    for delayed in [True, False] * 10:
        with monkeypatch.context() as patch:
            if delayed:
                patch.setattr(probe, "_threads", SimpleNamespace(items=slowly))
            cuts += probe.heartbeat().get(child.pid, [])
    assert len(cuts) > 10
    assert_whole(*cuts)
    for earlier, later in pairwise(cuts):
        assert later.at_ns >= earlier.at_ns
        assert later.running_ns >= earlier.running_ns
        assert later.runnable_ns >= earlier.runnable_ns
        assert later.blocked_ns >= earlier.blocked_ns
