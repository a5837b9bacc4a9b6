"""The thread-time probe on the running kernel: ordinary processes, and what the scheduler itself says of them.

The truth is /proc/PID/schedstat (Documentation/scheduler/sched-stats.rst): time on a CPU and time waiting for one,
in nanoseconds. It is read around each cut, so that a bound on the probe's figure follows from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from probes.bpf import Kernel, has_tracepoint, kernel_release
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
WATCHED_NS = 2_000_000_000


@pytest.fixture(params=[None, False], ids=["states-told", "states-not-told"])
def probe(root_and_bpf: Kernel, request: pytest.FixtureRequest) -> Iterator[ThreadTimeProbe]:
    """The probe as this kernel has it, and as kernels before 5.18 do."""
    loaded = ThreadTimeProbe(root_and_bpf, prev_state=request.param)
    yield loaded
    loaded.close()


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


class Truth:
    """The scheduler's own counters of one process, as increments."""

    def __init__(self, pid: int) -> None:
        self._file = Path(f"/proc/{pid}/schedstat")

    def read(self) -> tuple[int, int]:
        """(ns on a CPU, ns runnable)."""
        on_cpu, waiting, _ = self._file.read_text().split()
        return int(on_cpu), int(waiting)


def watch(probe: ThreadTimeProbe, child: Child) -> tuple[Cut, Cut, tuple[int, int], list[Stay]]:
    """Watch a process for a while: first and last cut, the scheduler's increments between them, and who had the
    CPU instead."""
    probe.watch({child.pid: Role.DRIVING})
    cuts: list[Cut] = []

    def cut() -> bool:
        cuts[:] = probe.heartbeat().get(child.pid, [])
        return bool(cuts)

    until(cut, "the process is watched")
    truth = Truth(child.pid)
    probe.occupants()
    before = truth.read()
    until(cut, "a first cut")
    first = cuts[0]
    until(lambda: cut() and cuts[0].at_ns - first.at_ns >= WATCHED_NS, "it has been watched for long enough")
    last = cuts[0]
    after = truth.read()
    stays = [stay for stay in probe.occupants() if stay.tid == child.pid]
    return first, last, (after[0] - before[0], after[1] - before[1]), stays


def close(measured: int, truth: int) -> bool:
    """Within 2 %, or 10 ms: the scheduler counts a stay when it ends, and a run each tick; the probe to the
    nanosecond."""
    return abs(measured - truth) <= max(0.02 * truth, 10_000_000)


def assert_whole(*cuts: Cut) -> None:
    for cut in cuts:
        assert cut.running_ns + cut.runnable_ns + cut.blocked_ns == cut.at_ns - cut.since_ns


def test_a_process_that_computes_runs_or_is_runnable(probe: ThreadTimeProbe, start: Start) -> None:
    first, last, (on_cpu, waiting), _ = watch(probe, start(SPIN))
    assert_whole(first, last)
    assert close(last.running_ns - first.running_ns, on_cpu)
    assert close(last.runnable_ns - first.runnable_ns, waiting)
    assert last.uninterruptible_ns == 0


def test_a_process_that_sleeps_is_blocked(probe: ThreadTimeProbe, start: Start) -> None:
    first, last, (on_cpu, waiting), _ = watch(probe, start(SLEEP))
    assert_whole(first, last)
    blocked = last.blocked_ns - first.blocked_ns
    assert close(last.running_ns - first.running_ns, on_cpu)
    assert close(last.runnable_ns - first.runnable_ns, waiting)
    assert close(blocked, last.at_ns - first.at_ns - on_cpu - waiting)
    assert blocked > 0.5 * (last.at_ns - first.at_ns)


def test_a_process_beside_a_hog_is_runnable_and_the_hog_is_named(
    probe: ThreadTimeProbe, start: Start
) -> None:
    cpu = max(os.sched_getaffinity(0))
    hog = start(SPIN, cpu=cpu, name="cpu hog\n(x)")
    first, last, (on_cpu, waiting), stays = watch(probe, start(WORK_AND_SLEEP, cpu=cpu))
    assert_whole(first, last)
    runnable = last.runnable_ns - first.runnable_ns
    assert close(last.running_ns - first.running_ns, on_cpu)
    assert close(runnable, waiting)
    assert runnable > 0.1 * (last.at_ns - first.at_ns), "the hog did not get in the way"
    took = {stay.pid: stay for stay in stays}
    assert took[hog.pid].comm == "cpu hog\n(x)"
    credited = sum(stay.ns for stay in stays)
    assert credited <= 1.02 * runnable, "more was credited than was waited for"
    assert credited >= 0.95 * runnable
    others = sum(stay.ns for stay in stays if stay.pid != hog.pid)  # this machine's other work on that CPU
    assert took[hog.pid].ns >= 0.9 * (runnable - others)


def test_uninterruptible_sleep_is_part_of_blocked_where_the_kernel_tells(
    root_and_bpf: Kernel, start: Start
) -> None:
    if kernel_release() < (5, 18):
        pytest.skip("this kernel's sched_switch does not tell the state")
    probe = ThreadTimeProbe(root_and_bpf)
    try:
        first, last, _, _ = watch(probe, start(VFORK))
    finally:
        probe.close()
    uninterruptible = last.uninterruptible_ns - first.uninterruptible_ns
    assert 0 < uninterruptible <= last.blocked_ns - first.blocked_ns


def test_interrupts_are_part_of_running(probe: ThreadTimeProbe, start: Start) -> None:
    if not has_tracepoint("irq_vectors", "local_timer_entry"):
        pytest.skip(
            "this kernel has no tracepoint for timer interrupts, which a computing process is sure to get"
        )
    first, last, _, _ = watch(probe, start(SPIN))
    interrupted = last.interrupted_ns - first.interrupted_ns
    assert 0 < interrupted < 0.5 * (last.running_ns - first.running_ns)


def test_a_thread_that_ends_is_forgotten(probe: ThreadTimeProbe, start: Start) -> None:
    child = start(EXIT_ON_REQUEST)
    tid = int(child.line())
    assert tid != child.pid
    probe.watch({tid: Role.COMMUNICATION})  # asleep: it will be added when it next switches, at its very end
    child.tell("end")
    assert child.line() == "ended"
    probe.heartbeat()
    assert tid not in probe.seen


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


def test_nothing_is_watched_that_was_not_asked_for(probe: ThreadTimeProbe, start: Start) -> None:
    first, last, _, _ = watch(probe, start(SLEEP))
    assert first.tid == last.tid
    assert set(probe.seen) == {first.tid}
