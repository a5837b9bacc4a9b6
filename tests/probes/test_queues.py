"""What holds an interface's sending back: real queueing disciplines, against what tc(8) counts of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import probes.host.queues
from probes.bpf import Kernel
from probes.host.queues import LISTED, Queue, Queues, queues
from tests.probes.processes import DEADLINE_S, Child, start, until

SENDER = """
import socket, sys
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print("there", flush=True)
for _ in sys.stdin:
    for _ in range(200):
        out.sendto(bytes(1000), ("127.0.0.1", 9))
    print("sent", flush=True)
"""


@pytest.fixture
def inside(root_and_bpf: Kernel) -> Iterator[tuple[str, Child]]:
    """A network namespace of its own, and a process in it that sends 200 packets when it is told to."""
    name = f"sysom-q-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    child = None
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        child = start(["ip", "netns", "exec", name, sys.executable, "-S", "-c", SENDER])
        assert child.line() == "there"
        yield name, child
    finally:
        if child is not None:
            child.end()
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def limit(name: str) -> None:
    """10 kB are let through at once, then 1 Mbit/s, and as much waits at most."""
    words = ["qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1mbit", "burst", "10kb", "limit", "20kb"]
    subprocess.run(["tc", "-n", name, *words], check=True)


def test_a_limit_is_told_with_its_rate_and_what_it_held_back_and_dropped(inside: tuple[str, Child]) -> None:
    name, child = inside
    followed = Queues()
    assert followed.read([child.pid]) == ([], {}), "there was nothing before"
    limit(name)
    child.tell("send")
    assert child.line() == "sent"
    _, ranks = followed.read([child.pid])
    told = {metric.name: metric for metric in ranks[child.pid]}
    assert told["egress_held_back"].labels == {"interface": "lo", "qdisc": "tbf 1 Mbit/s"}
    (shown,) = json.loads(
        subprocess.run(
            ["tc", "-n", name, "-s", "-j", "qdisc", "show", "dev", "lo"], capture_output=True
        ).stdout
    )
    # 200 kB were sent at once, and 30 kB had room.
    assert told["egress_drops"].value == shown["drops"] > 150
    assert 0 < told["egress_held_back"].value <= shown["overlimits"]


def test_each_reading_tells_what_came_since_the_last(inside: tuple[str, Child]) -> None:
    name, child = inside
    limit(name)
    child.tell("send")
    assert child.line() == "sent"
    followed = Queues()
    followed.read([child.pid])
    child.tell("send")
    assert child.line() == "sent"
    _, ranks = followed.read([child.pid])
    assert 0 < next(one.value for one in ranks[child.pid] if one.name == "egress_drops") <= 200
    assert followed.read([]) == ([], {}), "nobody's namespace is asked whose rank is no longer watched"


def test_a_name_that_a_container_gave_is_told_without_what_is_no_letter(inside: tuple[str, Child]) -> None:
    name, child = inside
    new = b"a\xff\x1b[1m<!x>"
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "down"], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "name", new], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", new, "up"], check=True)
    assert {queue.interface for queue in queues(child.pid)} == {"a??[1m<!x>"}


def test_of_a_namespace_with_many_only_those_with_most_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((0, 1))

    def told(pid: int, proc: Path) -> dict[Queue, tuple[int, int]]:
        now = next(seconds)
        return {Queue(f"net{number}", "tbf", 1): (now * number, now) for number in range(100)}

    monkeypatch.setattr(probes.host.queues, "queues", told)
    followed = Queues()
    followed.read([])
    metrics, _ = followed.read([])
    held_back = [metric for metric in metrics if metric.name == "egress_held_back"]
    assert [metric.value for metric in held_back] == list(range(99, 99 - LISTED, -1))
    assert len(metrics) == 2 * LISTED


def test_a_kernel_that_does_not_answer_keeps_no_reading_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    asked: list[int] = []

    def hangs(pid: int, proc: Path) -> dict[Queue, tuple[int, int]]:
        asked.append(pid)
        assert answers.wait(DEADLINE_S)
        return {Queue("net0", "tbf", 1): (len(asked), 0)}

    monkeypatch.setattr(probes.host.queues, "queues", hangs)
    monkeypatch.setattr(probes.host.queues, "PATIENCE_S", 0.01)
    followed = Queues()
    assert followed.read([]) == ([], {})
    assert followed.read([]) == ([], {})
    assert "the kernel does not answer" in followed.missing
    assert len(asked) == 1, "it is not asked again meanwhile"
    monkeypatch.setattr(probes.host.queues, "PATIENCE_S", DEADLINE_S)
    answers.set()
    until(lambda: followed.read([]) == ([], {}) and not followed.missing, "it answers again")
    assert [metric.value for metric in followed.read([])[0]] == [1]


def test_of_a_process_that_has_ended_not_this_namespace_is_told() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(FileNotFoundError):
        queues(ended.pid)


def test_of_this_namespace_it_is_the_node_that_is_told_of() -> None:
    assert Queue("lo", "noqueue", 0) in queues()
    assert Queues().read([os.getpid()])[1] == {}
