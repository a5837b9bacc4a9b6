"""Which threads the thread-time probe watches on the running kernel, and what it tells of whom when it is asked."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import pytest

from probes.host import thread_time
from probes.host.reasons import REASONS
from probes.host.thread_time import Cut, ThreadTimeProbe
from probes.records import Role
from tests.probes.processes import Child, until
from tests.probes.thread_time.watched import (
    SLACK_NS,
    SLEEP,
    SPIN,
    WORK_AND_SLEEP,
    Start,
    as_it_is,
    assert_whole,
    watch,
)

pytestmark = pytest.mark.live

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


def test_nothing_is_watched_that_was_not_asked_for(probe: ThreadTimeProbe, start: Start) -> None:
    child = start(SLEEP)
    probe.watch({child.pid: Role.DRIVING})
    until(lambda: child.pid in probe.heartbeat(), "the process is watched")
    assert set(probe.seen) == {child.pid}


def test_communication_threads_of_a_process_come_as_one_sum(probe: ThreadTimeProbe, start: Start) -> None:
    children = [start(SLEEP), start(SLEEP)]
    probe.watch({child.pid: Role.COMMUNICATION for child in children})
    until(lambda: all(child.pid in probe.heartbeat() for child in children), "both are watched")
    for child in children:
        (total,) = probe.heartbeat()[child.pid]
        assert (total.tid, total.role) == (0, Role.COMMUNICATION)
        assert probe.seen[child.pid] == (child.pid, Role.COMMUNICATION)


def test_threads_come_apart_for_those_of_whom_it_is_asked(probe: ThreadTimeProbe, start: Start) -> None:
    child = start(SLEEP)
    probe.watch({child.pid: Role.COMMUNICATION})
    until(lambda: child.pid in probe.heartbeat(), "it is watched")
    (own,) = probe.heartbeat({child.pid})[child.pid]
    assert (own.tid, own.role) == (child.pid, Role.COMMUNICATION)
    assert_whole(own)


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
