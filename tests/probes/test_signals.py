"""The signals probe: real processes that are stopped, killed and told to end, against what was done to them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes import procfs
from probes.bpf import Kernel, kernel_release
from probes.discovery import RankProcess, read_process
from probes.host import endings
from probes.host.cgroup_tree import mounts
from probes.host.signal_events import MAX_EVENTS, PENDING
from probes.host.signals import SignalsProbe
from probes.records import Event, Metric
from tests.probes.conftest import Start
from tests.probes.processes import Child, until

WAITS = "import sys; print(1, flush=True); sys.stdin.readline()"
reads_endings = pytest.mark.skipif(
    kernel_release() < endings.TOLD_SINCE,
    reason="this kernel does not tell how a process that was waited for ended",
)


@pytest.fixture
def probe(root_and_bpf: Kernel) -> Iterator[SignalsProbe]:
    probe = SignalsProbe(root_and_bpf)
    yield probe
    probe.close()


def rank(child: Child, number: int = 2) -> RankProcess:
    process = read_process(Path("/proc"), child.pid)
    assert process is not None
    return RankProcess("job-1", number, 4, 0, process, Path("/lib/libtorch_cpu.so"), {})


class Seen:
    """All that a probe has told of some processes."""

    def __init__(self, probe: SignalsProbe, *ranks: RankProcess) -> None:
        self.probe = probe
        self.ranks = {rank.process.pid: rank for rank in ranks}
        self.events: list[Event] = []
        self.metrics: list[Metric] = []
        self.look()

    def look(self) -> None:
        reading = self.probe.read(self.ranks)
        self.events += reading.events
        for metrics in reading.ranks.values():
            self.metrics += metrics

    def wait_for(self, kind: str) -> Event:
        """The first event of a kind."""

        def there() -> bool:
            self.look()
            return any(event.kind == kind for event in self.events)

        until(there, f"an event {kind}")
        return next(event for event in self.events if event.kind == kind)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def send(number: int, pid: int) -> int:
    """Send a signal from a process of its own; its pid."""
    code = f"import os; os.kill({pid}, {int(number)})"
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as sender:
        pass
    assert sender.returncode == 0
    return sender.pid


def test_a_stop_is_told_with_its_length_and_who_did_it(probe: SignalsProbe, start: Start) -> None:
    child = start(WAITS)
    child.line()
    seen = Seen(probe, rank(child))
    before = time.monotonic_ns()
    stopper = send(signal.SIGSTOP, child.pid)
    inner = time.monotonic_ns()
    stopped = seen.wait_for("process-stopped")
    assert stopped.detail.startswith("stopped by SIGSTOP from python")
    assert f"(pid {stopper}, uid {os.getuid()}" in stopped.detail
    assert (stopped.job, stopped.rank) == ("job-1", 2)
    assert before <= stopped.at_ns <= inner
    until(lambda: time.monotonic_ns() - inner > 200_000_000, "it has been stopped for a while")
    seen.look()
    outer = time.monotonic_ns()
    waker = send(signal.SIGCONT, child.pid)
    went_on = seen.wait_for("process-continued")
    after = time.monotonic_ns()
    assert seen.kinds() == ["process-stopped", "process-continued"]
    told_ms = int(went_on.detail.removeprefix("stopped for ").partition(" ms")[0].replace(",", ""))
    assert (outer - inner) / 1e6 - 1 <= told_ms <= (after - before) / 1e6 + 1
    assert f"(pid {waker}," in went_on.detail
    assert "had been stopped by SIGSTOP from python" in went_on.detail
    assert f"(pid {stopper}," in went_on.detail
    assert sum(metric.value for metric in seen.metrics) == went_on.at_ns - stopped.at_ns
    assert len(seen.metrics) >= 2, "the stop is told while it lasts"
    assert seen.metrics[0].labels["by_pid"] == str(stopper)


def test_a_stop_within_one_reading_is_told_whole(probe: SignalsProbe, start: Start) -> None:
    # A group of its own: one without a parent in its session (orphaned, setpgid(2)) is not stopped by SIGTSTP.
    child = start(f"import os; os.setpgid(0, 0); {WAITS}")
    child.line()
    seen = Seen(probe, rank(child))
    os.kill(child.pid, signal.SIGTSTP)
    os.waitpid(child.pid, os.WUNTRACED)
    os.kill(child.pid, signal.SIGCONT)
    seen.wait_for("process-continued")
    assert seen.kinds() == ["signal", "process-stopped", "process-continued"]
    assert "stopped by SIGTSTP from" in seen.events[1].detail
    assert f"(pid {os.getpid()}," in seen.events[1].detail
    assert seen.metrics[0].value == seen.events[2].at_ns - seen.events[1].at_ns


GOES_ON_UNSEEN = """
import os, signal, subprocess, sys, threading
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its child does not tell it of stops then
code = '''
import os, sys, threading
def wait():
    print(os.getpid(), threading.get_native_id(), flush=True)
    threading.Event().wait()
threading.Thread(target=wait, daemon=True).start()
sys.stdin.readline()
'''
subprocess.Popen([sys.executable, "-S", "-c", code]).wait()
"""


def test_a_stop_ends_though_nothing_tells_that_it_was_continued(probe: SignalsProbe, start: Start) -> None:
    parent = start(GOES_ON_UNSEEN)
    pid, thread = map(int, parent.line().split())
    process = read_process(Path("/proc"), pid)
    assert process is not None
    seen = Seen(probe, RankProcess("job-1", 2, 4, 0, process, Path("/lib/libtorch_cpu.so"), {}))
    os.kill(pid, signal.SIGSTOP)
    stopped = seen.wait_for("process-stopped")
    until(lambda: b") T " in (procfs.read(f"/proc/{pid}/stat") or b""), "it has stopped")
    seen.look()
    last_stopped = time.monotonic_ns()
    os.kill(
        thread, signal.SIGCONT
    )  # a thread of the process: all of it goes on, and its own number is not named
    until(lambda: b") S " in (procfs.read(f"/proc/{pid}/stat") or b""), "it goes on")
    going = time.monotonic_ns()
    seen.look()
    assert seen.kinds() == ["process-stopped"], "the signal may come yet"
    seen.look()
    assert seen.kinds() == ["process-stopped", "process-continued"]
    told = seen.events[1]
    assert told.at_ns >= going
    words, _, had = told.detail.partition("; it had been stopped by ")
    least, most = (
        int(number.replace(",", ""))
        for number in words.removeprefix("stopped for ").partition(" ms")[0].split(" to ")
    )
    assert least <= (last_stopped - stopped.at_ns) / 1e6 + 1
    assert most >= (going - stopped.at_ns) / 1e6 - 1
    assert words.endswith(" ms, then seen going on; by whom is not known")
    assert had.startswith("SIGSTOP from python")
    seen.look()
    assert sum(metric.value for metric in seen.metrics) <= last_stopped - stopped.at_ns


def test_a_kill_is_told_with_who_did_it(probe: SignalsProbe, start: Start) -> None:
    child = start(WAITS)
    child.line()
    seen = Seen(probe, rank(child))
    killer = send(signal.SIGKILL, child.pid)
    ended = seen.wait_for("process-exited")
    assert seen.kinds() == ["signal", "process-exited"]
    assert seen.events[0].detail.startswith("SIGKILL from python")
    assert ended.detail.startswith("killed by SIGKILL from python")
    assert f"(pid {killer}," in ended.detail
    assert seen.events[0].at_ns <= ended.at_ns <= time.monotonic_ns()


@pytest.mark.parametrize("waited_for", [False, pytest.param(True, marks=reads_endings)])
def test_an_exit_is_told_with_its_code(probe: SignalsProbe, start: Start, waited_for: bool) -> None:
    child = start("import sys; print(1, flush=True); sys.stdin.readline(); sys.exit(7)")
    child.line()
    seen = Seen(probe, rank(child))
    child.tell("end")
    if waited_for:
        assert child.process.wait() == 7
    ended = seen.wait_for("process-exited")
    assert ended.detail == "exited with code 7"
    assert seen.kinds() == ["process-exited"]
    seen.look()
    assert seen.kinds() == ["process-exited"], "it ends once"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("os.abort()", "killed by SIGABRT from itself"),
        ("t = threading.Thread(target=os.abort); t.start(); t.join()", "killed by SIGABRT from itself"),
        (
            "ctypes.string_at(0)",
            "killed by SIGSEGV from the kernel, for what the thread itself did (code 1)",
        ),
    ],
)
def test_what_a_process_does_to_itself_is_told_as_such(
    probe: SignalsProbe, start: Start, code: str, words: str
) -> None:
    child = start(
        "import ctypes, os, resource, sys, threading\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        f"print(1, flush=True)\nsys.stdin.readline()\n{code}"
    )
    child.line()
    seen = Seen(probe, rank(child))
    child.tell("go")
    assert seen.wait_for("process-exited").detail.removesuffix(" (core dumped)") == words


def test_a_signal_that_is_ignored_is_told_as_such(probe: SignalsProbe, start: Start) -> None:
    child = start(
        "import signal, sys; signal.signal(15, signal.SIG_IGN); print(1, flush=True); sys.stdin.readline()"
    )
    child.line()
    seen = Seen(probe, rank(child))
    os.kill(child.pid, signal.SIGTERM)
    assert seen.wait_for("signal").detail.endswith(" (ignored)")


def test_a_helpers_end_is_told_as_the_ranks_helpers(probe: SignalsProbe, start: Start) -> None:
    child, helper = start(WAITS), start(WAITS)
    child.line()
    helper.line()
    probe.watch_helpers({helper.pid: child.pid})
    seen = Seen(probe, rank(child, 3))
    killer = send(signal.SIGKILL, helper.pid)
    ended = seen.wait_for("process-exited")
    assert ended.rank == 3
    assert ended.detail.startswith(f"helper {helper.pid} killed by SIGKILL from python")
    assert f"(pid {killer}," in ended.detail


def test_helpers_take_at_most_half_of_the_file_descriptors(
    probe: SignalsProbe, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(WAITS), start(WAITS)
    first.line()
    second.line()
    sleepers = [subprocess.Popen(["sleep", "90"]) for _ in range(12)]
    lacks = list(probe.missing)
    try:
        probe.watch_helpers({sleeper.pid: first.pid for sleeper in sleepers})
        monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 10))
        Seen(probe, rank(first, 0))
        assert held({first.pid, *(sleeper.pid for sleeper in sleepers)}) == 5
        words = "each takes a file descriptor of the agent, helpers at most half of its 10 (ulimit -n)"
        assert probe.missing == [*lacks, f"processes not watched: 8 ({words})"]
        Seen(probe, rank(first, 0), rank(second, 1))
        assert held({second.pid}) == 1, "a rank finds room in the other half"
        monkeypatch.undo()
        Seen(probe, rank(first, 0))
        assert held({sleeper.pid for sleeper in sleepers}) == len(sleepers)
        assert probe.missing == lacks
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def held(pids: set[int]) -> int:
    """How many pidfds of these processes this process has."""
    files = (procfs.read(str(file)) or b"" for file in Path("/proc/self/fdinfo").iterdir())
    told = (line for file in files for line in file.splitlines() if line.startswith(b"Pid:"))
    return sum(int(line.split()[1]) in pids for line in told)


def test_a_lack_of_file_descriptors_is_told_and_not_taken_for_an_end(
    probe: SignalsProbe, start: Start
) -> None:
    child = start(WAITS)
    child.line()
    lacks, of_child = list(probe.missing), rank(child)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # those that are open stay so
    try:
        seen = Seen(probe, of_child)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert probe.missing == [*lacks, "processes not watched: 1 (Too many open files)"]
    seen.look()
    assert probe.missing == lacks
    os.kill(child.pid, signal.SIGKILL)
    assert seen.wait_for("process-exited").detail.startswith("killed by SIGKILL")


def test_other_processes_and_other_signals_are_not_told(probe: SignalsProbe, start: Start) -> None:
    child, other = start(WAITS), start(WAITS)
    child.line()
    other.line()
    seen = Seen(probe, rank(child))
    rows = probe.rows_read
    os.kill(other.pid, signal.SIGKILL)
    other.process.wait()
    os.kill(child.pid, signal.SIGWINCH)
    os.kill(child.pid, 0)
    seen.look()
    assert (seen.events, probe.rows_read) == ([], rows)


def test_signals_in_a_loop_do_not_fill_the_batch(probe: SignalsProbe, start: Start) -> None:
    child = start(
        "import signal, sys; signal.signal(15, lambda *_: 0); print(1, flush=True)\nwhile True: signal.pause()"
    )
    child.line()
    seen = Seen(probe, rank(child))
    for _ in range(300):
        os.kill(child.pid, signal.SIGTERM)
    seen.look()
    assert len(seen.events) == MAX_EVENTS
    alike = seen.events[0].detail
    assert alike.startswith("SIGTERM from ")
    assert {event.detail.removesuffix(PENDING) for event in seen.events[:-1]} == {alike}
    more = 300 - MAX_EVENTS + 1
    assert seen.events[-1].detail == f"and {more} more within a second, up to this one: {alike}"
    assert seen.events[-1].rank == 2


def test_what_happens_to_many_helpers_does_not_hide_what_happened_to_a_rank(
    probe: SignalsProbe, start: Start
) -> None:
    ranks = [start(WAITS), start(WAITS)]
    sleepers = [subprocess.Popen(["sleep", "90"]) for _ in range(40)]
    try:
        for child in ranks:
            child.line()
        probe.watch_helpers({sleeper.pid: ranks[0].pid for sleeper in sleepers})
        seen = Seen(probe, rank(ranks[0], 0), rank(ranks[1], 1))
        os.kill(ranks[1].pid, signal.SIGKILL)
        until(lambda: zombie(ranks[1].pid), "the rank has ended")
        for sleeper in sleepers:
            os.kill(sleeper.pid, signal.SIGTERM)
        until(lambda: all(zombie(sleeper.pid) for sleeper in sleepers), "its helpers have ended")
        os.kill(ranks[0].pid, signal.SIGTERM)
        until(lambda: zombie(ranks[0].pid), "the other rank has ended")
        seen.look()
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
    own = [event for event in seen.events if event.detail.startswith(("SIG", "killed"))]
    assert [(event.kind, event.rank) for event in own] == [
        ("signal", 1),
        ("process-exited", 1),
        ("signal", 0),
        ("process-exited", 0),
    ]
    assert own[1].detail.startswith("killed by SIGKILL from")
    assert [event.at_ns for event in seen.events] == sorted(event.at_ns for event in seen.events)
    others = [event for event in seen.events if event not in own]
    assert len(others) == MAX_EVENTS
    assert [event.kind for event in others[:-1]] == ["process-exited"] * (MAX_EVENTS - 1)
    more = 2 * len(sleepers) - MAX_EVENTS + 1
    assert others[-1].detail == f"and {more} more signals, stops or ends of helpers within a second"


def zombie(pid: int) -> bool:
    return b") Z " in (procfs.read(f"/proc/{pid}/stat") or b"")


def test_closed_it_holds_no_process(root_and_bpf: Kernel, start: Start) -> None:
    probe, child = SignalsProbe(root_and_bpf), start(WAITS)
    child.line()
    Seen(probe, rank(child))
    assert held({child.pid}) == 1
    probe.close()
    assert held({child.pid}) == 0


EATS = """
import mmap, sys
print(1, flush=True)
sys.stdin.readline()
area = mmap.mmap(-1, 64 << 20)
for page in range(0, 64 << 20, 4096):
    area[page] = 1
"""


def test_a_kill_for_lack_of_memory_is_told_as_such(probe: SignalsProbe, start: Start) -> None:
    mount = next((m for m in mounts() if m.version == 1 and "memory" in m.controllers), None)
    if mount is None or not os.access(mount.point, os.W_OK):
        pytest.skip("needs a writable memory hierarchy of version 1")
    folder = Path(mount.point) / f"sysom-test-signals-{os.getpid()}"
    folder.mkdir()
    try:
        child = start(EATS)
        child.line()
        (folder / "cgroup.procs").write_text(str(child.pid))
        (folder / "memory.limit_in_bytes").write_text(str(16 << 20))
        seen = Seen(probe, rank(child))
        child.tell("eat")
        assert (
            seen.wait_for("process-exited").detail
            == "killed by SIGKILL from the kernel's out-of-memory killer"
        )
        child.process.wait()
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(), "the group is empty")
        folder.rmdir()
