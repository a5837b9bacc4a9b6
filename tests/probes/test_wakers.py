"""Who ended a thread's sleep: what the kernel tells, of real processes, and the rows that are made of it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from probes.bpf import Kernel
from probes.host.blocks import Wake
from probes.host.reasons import REASONS
from probes.host.thread_time import ThreadTimeProbe
from probes.host.wakers import LISTED, name_wakers
from probes.records import Role, Waker
from tests.probes import blocking, processes
from tests.probes.processes import Child, until

HANDED_ON_NS = 150_000_000
"""Half of what each block lasts; threads may start late on a busy machine, never by so much."""
SPIN = "import os, sys\nopen('/proc/self/comm', 'w').write('hog')\nprint(flush=True)\nwhile True: pass"


@pytest.fixture(scope="module")
def probe(root_and_bpf: Kernel) -> Iterator[ThreadTimeProbe]:
    loaded = ThreadTimeProbe(root_and_bpf)
    yield loaded
    loaded.close()


@pytest.fixture
def start(probe: ThreadTimeProbe) -> Iterator[Callable[[], Child]]:
    """Starts processes that block on request, watched; their sleeps up to now are none."""
    children: list[Child] = []

    def begin() -> Child:
        child = processes.start([sys.executable, "-S", blocking.__file__, "/dev/null"])
        children.append(child)
        assert child.line() == "ready"
        probe.watch({child.pid: Role.DRIVING})
        child.tell("sleep")
        child.line()
        until(lambda: child.pid in probe.heartbeat(), "it is watched")
        probe.wakers()
        return child

    yield begin
    for child in children:
        child.end()


def ask(probe: ThreadTimeProbe, child: Child, request: str) -> list[Waker]:
    """Who woke its main thread from one request to the next."""
    child.tell(request)
    child.line()
    probe.heartbeat()
    wakers = name_wakers(probe.wakers(), probe.seen)
    return [waker for waker in wakers[child.pid] if waker.tid == child.pid]


@pytest.mark.live
def test_a_thread_of_the_same_process_that_releases_a_lock_is_named(
    probe: ThreadTimeProbe, start: Callable[[], Child]
) -> None:
    child = start()
    slept: Counter[tuple[str, int, bool]] = Counter()
    for waker in ask(probe, child, "futex"):
        slept[(waker.reason, waker.pid, waker.waker_tid == child.pid)] += waker.slept_ns
    assert slept[("futex", child.pid, False)] > HANDED_ON_NS, slept


@pytest.mark.live
def test_a_process_that_writes_to_a_pipe_is_named(probe: ThreadTimeProbe, start: Callable[[], Child]) -> None:
    child = start()
    blocking.sleep()
    wakers = ask(probe, child, "poll")
    ours = [waker for waker in wakers if waker.pid == os.getpid()]
    assert [(waker.reason, waker.waker_tid) for waker in ours] == [("pipe-read", os.getpid())]
    assert ours[0].slept_ns >= 0.9 * blocking.LASTS_S * 1e9


@pytest.mark.live
def test_a_timer_is_an_interrupt_also_where_it_interrupts_somebody(
    probe: ThreadTimeProbe, start: Callable[[], Child]
) -> None:
    child, hog = start(), processes.python(SPIN)
    try:
        hog.line()
        cpu = max(os.sched_getaffinity(0))
        os.sched_setaffinity(hog.pid, {cpu})
        os.sched_setaffinity(child.pid, {cpu})
        wakers = ask(probe, child, "sleep")
    finally:
        hog.end()
    assert hog.pid not in {waker.pid for waker in wakers}
    slept = {(waker.reason, waker.pid, waker.name): waker.slept_ns for waker in wakers}
    assert slept[("sleep", 0, "interrupt")] >= 0.9 * blocking.LASTS_S * 1e9


@pytest.mark.live
def test_what_wakers_ended_is_what_was_blocked(probe: ThreadTimeProbe, start: Callable[[], Child]) -> None:
    child = start()
    ask(probe, child, "network_receive")
    (before,) = probe.heartbeat()[child.pid]
    wakers = ask(probe, child, "network_receive")
    (after,) = probe.heartbeat()[child.pid]
    number = REASONS.index("network-receive")
    blocked_ns = after.blocked_by[number] - before.blocked_by[number]
    assert sum(waker.slept_ns for waker in wakers if waker.reason == "network-receive") == blocked_ns > 0


def wake(tid: int, pid: int, ns: int, reason: str = "futex") -> Wake:
    return Wake(tid, reason, pid, pid, f"comm {pid}", ns)


def test_the_largest_wakers_of_a_thread_are_listed_and_the_rest_is_one_sum() -> None:
    wakes = [wake(7, pid, pid * 10) for pid in range(1, LISTED + 4)]
    rows = name_wakers(wakes, {7: (5, Role.DRIVING)})[5]
    assert [row.pid for row in rows] == [*range(LISTED + 3, 3, -1), -1]
    assert sum(row.slept_ns for row in rows) == sum(one.slept_ns for one in wakes)
    assert (rows[-1].name, rows[-1].slept_ns) == ("other wakers", 10 + 20 + 30)


def test_each_thread_of_a_process_has_its_own_wakers_and_a_helper_is_its_own_process() -> None:
    threads = {7: (5, Role.DRIVING), 8: (5, Role.COMMUNICATION), 9: (9, Role.HELPER)}
    named = name_wakers([wake(7, 1, 10), wake(8, 2, 20), wake(9, 3, 30, "storage-read")], threads)
    assert {(row.tid, row.pid) for row in named[5]} == {(7, 1), (8, 2)}
    assert [(row.tid, row.reason, row.pid) for row in named[9]] == [(9, "storage-read", 3)]


def test_threads_that_are_watched_no_more_are_left_out() -> None:
    assert name_wakers([wake(7, 1, 10)], {8: (5, Role.DRIVING)}) == {}


def test_an_interrupt_has_no_name_of_a_process() -> None:
    (row,) = name_wakers([Wake(7, "sleep", 0, 0, "", 10)], {7: (7, Role.DRIVING)})[7]
    assert (row.pid, row.waker_tid, row.name) == (0, 0, "interrupt")
