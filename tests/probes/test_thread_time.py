"""The thread-time probe on the running kernel: ordinary processes, and what the scheduler itself says of them.

The truth is /proc/PID/schedstat (Documentation/scheduler/sched-stats.rst): time on a CPU and time waiting for one,
in nanoseconds. It is read around each cut, so that a bound on the probe's figure follows from it.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from probes.bpf import Kernel, has_tracepoint, kernel_release
from probes.host import thread_time
from probes.host.reasons import REASONS
from probes.host.thread_time import Cut, Stay, ThreadTimeProbe
from probes.records import Role
from tests.probes import processes
from tests.probes.processes import Child, until

pytestmark = pytest.mark.live

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
EXIT_ON_REQUEST = """
import sys, threading
def run(ready):
    print(threading.get_native_id(), flush=True)
    end.wait()
end = threading.Event()
thread = threading.Thread(target=run, args=(None,))
print(flush=True)
thread.start()
sys.stdin.readline()
end.set()
thread.join()
print("ended", flush=True)
sys.stdin.readline()
"""
EXEC_ON_REQUEST = f"""
import os, select, sys
print(flush=True)
while not select.select([0], [], [], 0.01)[0]: pass
os.execv(sys.executable, [sys.executable, "-S", "-c", {SLEEP!r}])
"""
WATCHED_NS = 1_000_000_000


@pytest.fixture(scope="module", params=[None, False], ids=["states-told", "states-not-told"])
def loaded(root_and_bpf: Kernel, request: pytest.FixtureRequest) -> Iterator[ThreadTimeProbe]:
    """The probe as this kernel has it, and as kernels before 5.18 do: compiled once for all tests here."""
    probe = ThreadTimeProbe(root_and_bpf, prev_state=request.param)
    yield probe
    probe.close()


@pytest.fixture
def probe(loaded: ThreadTimeProbe) -> ThreadTimeProbe:
    """Nothing is watched yet."""
    loaded.pause()
    loaded.resume()
    loaded.name_occupants(True)
    loaded.name_reasons(list(Role))
    return loaded


as_it_is = pytest.mark.parametrize("loaded", [None], indirect=True, ids=["states-told"])


Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python processes on one CPU, which end with the test."""
    children: list[Child] = []

    def begin(code: str, *arguments: str, cpu: int | None = None, name: str = "") -> Child:
        rename = f"open('/proc/self/comm', 'w').write({name!r})\n" if name else ""
        child = processes.python(rename + code, *arguments)
        children.append(child)
        child.line()
        if cpu is not None:
            os.sched_setaffinity(child.pid, {cpu})
        return child

    yield begin
    for child in children:
        child.end()


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


SLACK_NS = 10_000_000
"""The scheduler adds up a run at each tick; the probe knows it to the nanosecond."""
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


def assert_whole(*cuts: Cut) -> None:
    for cut in cuts:
        assert cut.running_ns + cut.runnable_ns + cut.blocked_ns == cut.at_ns - cut.since_ns
        assert sum(cut.blocked_by) == cut.blocked_ns


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


def test_a_thread_that_ends_is_forgotten(probe: ThreadTimeProbe, start: Start) -> None:
    child = start(EXIT_ON_REQUEST)
    tid = int(child.line())
    assert tid != child.pid
    probe.watch({tid: Role.COMMUNICATION})  # asleep: it will be added when it next switches, at its very end
    child.tell("end")
    assert child.line() == "ended"  # Python is done with it; the kernel may need a moment more

    def forgotten() -> bool:
        probe.heartbeat()
        return tid not in probe.seen

    until(forgotten, "the thread is forgotten")


def test_a_process_that_replaces_its_program_is_watched_on(probe: ThreadTimeProbe, start: Start) -> None:
    child = start(EXEC_ON_REQUEST)
    probe.watch({child.pid: Role.DRIVING})
    until(lambda: child.pid in probe.heartbeat(), "the process is watched")
    (before,) = probe.heartbeat()[child.pid]
    child.tell("exec")
    child.line()
    until(lambda: child.pid in probe.heartbeat(), "it is still watched")
    (after,) = probe.heartbeat()[child.pid]
    assert_whole(before, after)
    assert after.since_ns == before.since_ns
    assert after.running_ns > before.running_ns


def test_communication_threads_of_a_process_come_as_one_sum(probe: ThreadTimeProbe, start: Start) -> None:
    children = [start(SLEEP), start(SLEEP)]
    probe.watch({child.pid: Role.COMMUNICATION for child in children})
    until(lambda: all(child.pid in probe.heartbeat() for child in children), "both are watched")
    for child in children:
        (total,) = probe.heartbeat()[child.pid]
        assert (total.tid, total.role) == (0, Role.COMMUNICATION)
        assert probe.seen[child.pid] == (child.pid, Role.COMMUNICATION)


@as_it_is
def test_occupants_can_be_left_out_and_come_back_without_the_time_between(
    probe: ThreadTimeProbe, start: Start
) -> None:
    cpu = max(os.sched_getaffinity(0))
    start(SPIN, cpu=cpu)
    victim = start(WORK_AND_SLEEP, cpu=cpu)
    probe.name_occupants(False)
    without = watch(probe, victim)
    assert without.increment("runnable_ns") > 0.05 * without.wall_ns, "nothing got in the way"
    assert without.stays == []
    on = time.monotonic_ns()
    probe.name_occupants(True)
    again = watch(probe, victim)
    credited = sum(stay.ns for stay in again.stays)
    assert 0 < credited <= 1.02 * again.increment("runnable_ns") + SLACK_NS
    assert all(on < stay.last_ns < time.monotonic_ns() for stay in again.stays)


@as_it_is
def test_a_pause_forgets_the_watched_and_what_comes_after_is_counted_anew(
    probe: ThreadTimeProbe, start: Start
) -> None:
    child = start(WORK_AND_SLEEP)
    before = watch(probe, child)
    probe.pause()
    assert not probe.attached
    assert probe.heartbeat() == {}
    resumed = time.monotonic_ns()
    probe.resume()
    after = watch(probe, child)
    assert after.first.since_ns >= resumed > before.last.at_ns
    assert_whole(after.first, after.last)


@as_it_is
def test_a_helper_comes_by_itself_under_its_own_number(probe: ThreadTimeProbe, start: Start) -> None:
    driving, helper = start(SLEEP), start(SLEEP)
    probe.watch({driving.pid: Role.DRIVING, helper.pid: Role.HELPER})
    until(lambda: {driving.pid, helper.pid} <= probe.heartbeat().keys(), "both are watched")
    (own,) = probe.heartbeat()[helper.pid]
    assert (own.tid, own.role) == (helper.pid, Role.HELPER)
    assert probe.seen[helper.pid] == (helper.pid, Role.HELPER)
    assert_whole(own)


@as_it_is
def test_helpers_leave_room_for_ranks_and_those_that_are_not_watched_are_counted(
    probe: ThreadTimeProbe, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_time, "MAX_HELPERS", 2)
    lacks = list(probe.missing)
    helpers = [start(SLEEP) for _ in range(4)]
    communication = start(SLEEP)
    probe.watch({helpers[0].pid: Role.HELPER})
    until(lambda: helpers[0].pid in probe.heartbeat(), "a helper is watched")
    asked = {child.pid: Role.HELPER for child in helpers[1:]} | {communication.pid: Role.COMMUNICATION}
    probe.watch(asked)
    until(lambda: {helpers[1].pid, communication.pid} <= probe.heartbeat().keys(), "another, and a rank's")
    assert set(probe.seen) == {helpers[0].pid, helpers[1].pid, communication.pid}
    assert probe.missing == [*lacks, "helpers not watched: 2 (at most 2 are)"]
    probe.watch({})
    assert probe.missing == lacks


@as_it_is
def test_cuts_of_many_ranks_are_settled_without_a_look_at_all_threads_for_each(
    probe: ThreadTimeProbe, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = [start(SLEEP), start(SLEEP)]
    probe.watch({child.pid: Role.COMMUNICATION for child in children})
    found: dict[int, list[Cut]] = {}

    def both() -> bool:
        found.update(probe.heartbeat())
        return all(child.pid in found for child in children)

    until(both, "both are watched")
    asked: list[list[int]] = []

    def settled(tids: Iterable[int], at_ns: int, parts: tuple[int, ...]) -> tuple[int, ...]:
        asked.append(list(tids))
        return parts

    monkeypatch.setattr(probe._reasons, "settled", settled)
    monkeypatch.setattr(probe._reasons, "seen", None)  # to look through it again would fail
    (total,) = found[children[0].pid]
    assert probe.settled(children[0].pid, [total, total._replace(tid=7)]) == [total, total._replace(tid=7)]
    assert asked == [[children[0].pid], [7]]


@as_it_is
def test_who_had_the_cpu_is_not_written_down_for_helpers(probe: ThreadTimeProbe, start: Start) -> None:
    cpu = max(os.sched_getaffinity(0))
    start(SPIN, cpu=cpu)
    victim = start(WORK_AND_SLEEP, cpu=cpu)
    assert watch(probe, victim, Role.HELPER).stays == []


@as_it_is
def test_only_threads_of_the_roles_that_are_asked_say_why_they_block(
    probe: ThreadTimeProbe, start: Start
) -> None:
    driving, helper = start(SLEEP), start(SLEEP)
    probe.name_reasons([Role.HELPER])
    probe.watch({driving.pid: Role.DRIVING, helper.pid: Role.HELPER})
    poll = REASONS.index("poll")

    def has_slept(child: Child) -> Cut | None:
        cuts = probe.heartbeat().get(child.pid, [])
        return next((cut for cut in cuts if cut.blocked_ns > 100_000_000), None)

    until(lambda: bool(has_slept(driving) and has_slept(helper)), "both have slept for a while")
    asked, not_asked = has_slept(helper), has_slept(driving)
    assert asked is not None
    assert not_asked is not None
    assert asked.blocked_by[poll] >= 0.9 * asked.blocked_ns
    assert not_asked.blocked_by[0] == not_asked.blocked_ns, "nothing is known of it"
    assert {wake.tid for wake in probe.wakers()} == {helper.pid}


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


def test_threads_come_apart_for_those_of_whom_it_is_asked(probe: ThreadTimeProbe, start: Start) -> None:
    child = start(SLEEP)
    probe.watch({child.pid: Role.COMMUNICATION})
    until(lambda: child.pid in probe.heartbeat(), "it is watched")
    (own,) = probe.heartbeat({child.pid})[child.pid]
    assert (own.tid, own.role) == (child.pid, Role.COMMUNICATION)
    assert_whole(own)


def test_nothing_is_watched_that_was_not_asked_for(probe: ThreadTimeProbe, start: Start) -> None:
    child = start(SLEEP)
    probe.watch({child.pid: Role.DRIVING})
    until(lambda: child.pid in probe.heartbeat(), "the process is watched")
    assert set(probe.seen) == {child.pid}
