"""The kill switch waits for those that follow, ends those that do not, no one else, and says what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from probes import in_kernel, kill_switch, status
from probes.discovery import read_process
from probes.in_kernel import CannotLook, Program
from probes.status import AgentStatus, RuntimeFolderError
from tests.probes.test_status import me

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the kill switch needs root")


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_kernel, "programs", list)
    monkeypatch.setattr(in_kernel, "uprobes", list)
    monkeypatch.setattr(kill_switch, "GONE_S", 2.0)


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[bytes], AgentStatus]]:
    """A process, and a status as it would write it if it were an agent."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        seen = read_process(Path("/proc"), started.pid)
        assert seen
        yield started, me(pid=started.pid, start_ticks=seen.start_ticks)
    finally:
        started.kill()
        started.wait()


@contextmanager
def following(folder: Path, agent: AgentStatus) -> Iterator[None]:
    """Someone who writes what an agent that follows would."""
    end = threading.Event()

    def follow() -> None:
        while not end.wait(0.02):
            why = status.detached(folder)
            now = msgspec.structs.replace(agent, detached=why, at_ns=time.monotonic_ns())
            status.write(folder, now)

    status.write(folder, agent)
    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_an_agent_that_follows_is_waited_for_and_lives(tmp_path: Path) -> None:
    said: list[str] = []
    with process() as (running, agent), following(tmp_path, agent):
        assert kill_switch.detach_all(tmp_path, "job-1\x1b[31m crashes", said.append)
        assert running.poll() is None
    assert (tmp_path / "detached").stat().st_mode & 0o777 == 0o644
    assert (
        f"Agent {agent.pid} (node-a) took its probes off; it runs on, and reports that they are off." in said
    )
    assert "No BPF program and no uprobe of sysom is loaded in this kernel." in said
    assert said[-1] == "It holds until `sysom agent --attach`, or a reboot."


def test_an_agent_that_does_not_follow_is_killed_even_when_it_is_stopped(tmp_path: Path) -> None:
    said: list[str] = []
    with process() as (running, agent):
        running.send_signal(signal.SIGSTOP)
        status.write(tmp_path, agent)
        assert kill_switch.detach_all(tmp_path, "", said.append, follow_s=0.2)
        assert running.wait() == -signal.SIGKILL
    assert any("did not follow within 0.2 s: killed" in line for line in said)
    assert status.read_all(tmp_path) == [], "what a killed agent left is swept away"


def test_what_an_agent_said_before_the_switch_was_pressed_does_not_count(tmp_path: Path) -> None:
    with process() as (running, agent):
        status.write(tmp_path, msgspec.structs.replace(agent, detached="an earlier time"))
        kill_switch.detach_all(tmp_path, "", lambda _: None, follow_s=0.2)
        assert running.wait() == -signal.SIGKILL


def test_a_process_that_has_the_pid_of_an_agent_that_ended_is_left_alone(tmp_path: Path) -> None:
    said: list[str] = []
    with process() as (innocent, agent):
        status.write(tmp_path, msgspec.structs.replace(agent, start_ticks=agent.start_ticks - 1))
        assert kill_switch.detach_all(tmp_path, "", said.append, follow_s=0.2)
        assert innocent.poll() is None
    assert any("No agent that writes to" in line for line in said)


def test_a_pid_that_is_reused_between_looking_and_killing_is_left_alone(tmp_path: Path) -> None:
    with process() as (innocent, agent):
        other = msgspec.structs.replace(agent, start_ticks=agent.start_ticks - 1)
        assert "left alone" in kill_switch._end(other, 5.0)
        assert innocent.poll() is None
    assert "has ended since" in kill_switch._end(agent, 5.0)


def test_what_is_left_is_named_and_the_answer_is_no(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kill_switch, "GONE_S", 0.0)
    line = "p:uprobes/p_libtorch_bcc_7 /lib/libtorch_cpu.so:0x10"
    mine = [Program(number, "sched_switch", (os.getpid(),)) for number in range(1, 7)]
    monkeypatch.setattr(in_kernel, "programs", lambda: [*mine, Program(9, "gloo_end", ())])
    monkeypatch.setattr(in_kernel, "uprobes", lambda: [line])
    said: list[str] = []
    assert not kill_switch.detach_all(tmp_path, "", said.append)
    text = "\n".join(said)
    assert f"kill -KILL {os.getpid()}" in text
    assert "sched_switch (id 4) and 2 more, held by process" in text
    assert "gloo_end (id 9), held by no process" in text
    assert "echo '-:uprobes/p_libtorch_bcc_7' >> /sys/kernel/tracing/uprobe_events" in text
    assert "No BPF program" not in text


def test_programs_that_the_kernel_frees_a_moment_later_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks = [[Program(1, "gloo_end", ())], [Program(1, "gloo_end", ())], []]
    monkeypatch.setattr(in_kernel, "programs", lambda: looks.pop(0))
    assert kill_switch.detach_all(tmp_path, "", lambda _: None)


def test_a_kernel_that_does_not_tell_what_is_loaded_is_no_yes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cannot() -> list[Program]:
        raise CannotLook("the kernel does not tell: Operation not permitted")

    monkeypatch.setattr(in_kernel, "programs", cannot)
    said: list[str] = []
    assert not kill_switch.detach_all(tmp_path, "", said.append)
    assert any("Whether anything is left is not known" in line for line in said)


def test_taking_it_back_says_why_it_was_on(tmp_path: Path) -> None:
    said: list[str] = []
    kill_switch.engage(tmp_path, "maintenance")
    with process() as (_, agent):
        status.write(tmp_path, agent)
        kill_switch.attach(tmp_path, said.append)
    assert status.detached(tmp_path) == ""
    assert said == [
        "The kill switch is off. It was on because: maintenance",
        f"Agent {agent.pid} (node-a) attaches again within some seconds: `sysom doctor` shows its probes.",
    ]
    said.clear()
    kill_switch.attach(tmp_path, said.append)
    assert said[0].startswith("The kill switch was not on")


def test_a_folder_that_others_can_write_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o777)
    with process() as (running, agent):
        status.write(folder, agent)
        with pytest.raises(RuntimeFolderError, match="can be written by others"):
            kill_switch.detach_all(folder, "", lambda _: None, follow_s=0.0)
        assert running.poll() is None


@pytest.mark.parametrize(
    "act", [lambda f: kill_switch.detach_all(f, "", print), lambda f: kill_switch.attach(f, print)]
)
def test_without_root_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, act: Callable[[Path], object]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeFolderError, match="sudo"):
        act(tmp_path)
