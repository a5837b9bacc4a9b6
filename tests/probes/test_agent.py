"""The agent's loop: it goes on past a bad interval, gives up when nothing works, follows the kill switch and signed
commands, tells how it is, and loses nothing on the way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from probes import agent, kill_switch, status
from probes.agent import AgentConfig
from probes.codec import decode
from probes.interval import Interval
from probes.records import Batch, Event, Probe
from probes.spool import Counts, Spool, SpoolError
from probes.watch import Cost
from tests.probes.batches import a_rank


class Watch:
    """Stands where NodeWatch does: gives intervals, or fails, as told; then has the agent stop."""

    def __init__(self, steps: list[bool], stop: threading.Event, each: Callable[[Watch, int], None]) -> None:
        self.steps: Iterator[bool] = iter(steps)
        self.left = len(steps)
        self.stop = stop
        self.each = each
        self.done = 0
        self.recovered = 0
        self.closed = False
        self.detached = ""
        self.told: list[tuple[str, ...]] = []

    def gather(self) -> Interval:
        self.left -= 1
        if self.left == 0:
            self.stop.set()
        self.done += 1
        self.each(self, self.done)
        if not next(self.steps, True):  # once more after it was told to stop
            raise RuntimeError("a map entry vanished")
        return Interval(0, 1_000_000_000, 0, [a_rank(0)], [], [], [])

    def detach_all(self, why: str) -> None:
        self.detached = why
        self.told.append(("detach_all", why))

    def allow_all(self) -> None:
        self.detached = ""
        self.told.append(("allow_all",))

    def probes(self) -> list[Probe]:
        return [Probe(name="gloo", state="off" if self.detached else "on", why=self.detached)]

    def captures(self) -> dict[str, float]:
        return {}

    def shed(self) -> list[str]:
        return []

    def cost(self) -> Cost:
        return Cost({}, 10.0, 0.0, 40.0, 100 << 20, 512 << 20, 51.0, 20_000.0)

    def recover(self) -> None:
        self.recovered += 1

    def close(self) -> None:
        self.closed = True


def config(folder: Path, **changes: Any) -> AgentConfig:
    plain = AgentConfig(
        server="http://127.0.0.1:9",
        token="token",
        node="node-a",
        state=folder / "state",
        spool_bytes=1 << 20,
        runtime=folder / "run",
    )
    return replace(plain, **changes)


def run(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    steps: list[bool],
    each: Callable[[Watch, int], None] = lambda watch, interval: None,
    **changes: Any,
) -> Watch:
    """Run the agent for so many intervals; ``each`` is called in the middle of every one, counted from 1."""
    stop = threading.Event()
    watch = Watch(steps, stop, each)
    monkeypatch.setattr(agent, "NodeWatch", lambda cache, limits, host: watch)
    monkeypatch.setattr(agent, "INTERVAL_S", 0.0)
    monkeypatch.setattr(agent, "_step_aside", lambda: None)
    try:
        agent.run(config(folder, **changes), stop)
    finally:
        assert watch.closed
        assert status.read_all(folder / "run") == [], "an ended agent's status is taken away"
    return watch


def spooled(folder: Path) -> list[Batch]:
    """What the agent left for a server that is away."""
    spool = Spool(folder / "state" / "spool")
    try:
        return [decode(spool.read(seq) or b"") for seq in spool.pending()]
    finally:
        spool.close()


def test_an_interval_that_fails_is_lost_and_the_agent_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    watch = run(monkeypatch, tmp_path, [True, False, True, True])
    assert watch.recovered == 1
    assert len(spooled(tmp_path)) == 4, "the server is away: what was watched is on the disk"


def test_the_agent_gives_up_when_nothing_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a map entry vanished"):
        run(monkeypatch, tmp_path, [True] + [False] * (agent.FAILURES_IN_A_ROW + 3))


def test_the_status_says_how_the_agent_is_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[status.AgentStatus] = []

    def look(_watch: Watch, _interval: int) -> None:
        seen.extend(status.living(tmp_path / "run"))

    run(monkeypatch, tmp_path, [True, False, True], look)
    first, second, third = seen[:3]
    assert first.pid == os.getpid()
    assert (first.node, first.server, first.state) == (
        "node-a",
        "http://127.0.0.1:9",
        str(tmp_path / "state"),
    )
    assert first.ranks == [], "told before anything is loaded"
    assert second.ranks == ["job-1 rank 0 (pid 100)"]
    assert (second.agent_ms_per_s, second.budget_ms_per_s, second.events_budget) == (10.0, 40.0, 20_000)
    assert (second.spool_batches, second.intervals_lost) == (1, 0)
    assert third.intervals_lost == 1
    assert third.at_ns > second.at_ns >= first.started_ns


def test_the_kill_switch_is_followed_told_and_taken_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[tuple[str, str]] = []

    def press(_watch: Watch, interval: int) -> None:
        (now,) = status.living(tmp_path / "run")
        told.append((now.detached, now.probes[0].state))
        if interval == 1:
            kill_switch.engage(tmp_path / "run", "job-1 crashes")
        if interval == 3:
            kill_switch.release(tmp_path / "run")

    watch = run(monkeypatch, tmp_path, [True] * 5, press)
    assert watch.told == [("detach_all", "job-1 crashes"), ("allow_all",)]
    assert told[0] == ("", "on")
    assert told[1:3] == [("job-1 crashes", "off")] * 2, "said before the next interval, which may take long"
    assert told[3:] == [("", "on")] * (len(told) - 3)
    events = [(batch.seq, event.kind, event.detail) for batch in spooled(tmp_path) for event in batch.events]
    assert events == [(1, "detached", "job-1 crashes"), (3, "attached", "the kill switch is off")]


def test_an_agent_that_starts_under_the_kill_switch_attaches_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kill_switch.engage(tmp_path / "run", "")
    detached: list[str] = []
    watch = run(monkeypatch, tmp_path, [True], lambda watch, _: detached.append(watch.detached))
    assert watch.told == [("detach_all", "no reason was given")]
    assert detached[0] == "no reason was given", "before the first interval"


def test_an_agent_that_cannot_detach_ends_so_that_the_kernel_detaches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(self: Watch, why: str) -> None:
        raise RuntimeError("cannot detach")

    monkeypatch.setattr(Watch, "detach_all", broken)
    with pytest.raises(RuntimeError, match="cannot detach"):
        run(monkeypatch, tmp_path, [True] * 5, lambda *_: kill_switch.engage(tmp_path / "run", "now"))


def test_a_second_agent_on_the_same_spool_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    first = Spool(tmp_path / "state" / "spool")
    try:
        monkeypatch.setattr(agent, "NodeWatch", lambda cache, limits, host: None)
        monkeypatch.setattr(agent, "_step_aside", lambda: None)
        with pytest.raises(SpoolError, match="another agent uses the spool"):
            agent.run(config(tmp_path), threading.Event())
    finally:
        first.close()
    assert status.read_all(tmp_path / "run") == []


def test_a_server_address_that_is_none_is_refused_and_the_spool_is_free_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(agent, "NodeWatch", lambda cache, limits, host: None)
    monkeypatch.setattr(agent, "_step_aside", lambda: None)
    with pytest.raises(ValueError, match="must look like"):
        agent.run(config(tmp_path, server="ftp://server"), threading.Event())
    Spool(tmp_path / "state" / "spool").close()


def test_what_could_not_be_kept_is_told_with_a_batch_that_finds_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original, full = Spool.put, [True]

    def put(self: Spool, batch: Batch, *, tells: Counts | None = None) -> None:
        if full and any(event.kind == "detached" for event in batch.events):
            full.pop()
            raise SpoolError("the disk is full")
        original(self, batch, tells=tells)

    monkeypatch.setattr(Spool, "put", put)
    kill_switch.engage(tmp_path / "run", "why not")
    run(monkeypatch, tmp_path, [True] * 3)
    first, *_ = spooled(tmp_path)
    assert [(event.kind, event.detail) for event in first.events] == [("detached", "why not")]


def test_metrics_are_served_while_the_agent_runs_and_a_taken_port_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        run(monkeypatch, tmp_path, [True], metrics=("127.0.0.1", taken.getsockname()[1]))
    assert len(spooled(tmp_path)) == 2


def test_what_the_spool_lost_is_said_by_kind() -> None:
    assert agent.losses(Counts(), at_ns=5) == []
    assert agent.losses(Counts(dropped=2, bad=1, refused=3), at_ns=5) == [
        Event(
            kind="batches-dropped",
            at_ns=5,
            detail="2 batches found no room on the node's disk, or were too large to send",
        ),
        Event(kind="batches-damaged", at_ns=5, detail="1 batches were damaged on the node's disk"),
        Event(kind="batches-refused", at_ns=5, detail="3 batches were refused by the server for good"),
    ]


def test_the_lag_is_the_age_of_the_oldest_batch(tmp_path: Path) -> None:
    old = tmp_path / f"{7:020}.batch"
    old.touch()
    os.utime(old, (time.time() - 90, time.time() - 90))
    (tmp_path / f"{8:020}.batch").touch()
    assert agent._lag_s(tmp_path, []) == 0.0
    assert 89 < agent._lag_s(tmp_path, [7, 8]) < 120
    assert agent._lag_s(tmp_path, [6, 7]) == 0.0, "just sent"


def test_a_status_of_an_older_version_can_still_be_read(tmp_path: Path) -> None:
    least = {"pid": 1, "node": "n", "state": "/s", "server": "u", "started_ns": 1, "at_ns": 2}
    (tmp_path / "agent-1.json").write_bytes(msgspec.json.encode(least))
    (found,) = status.read_all(tmp_path)
    assert found.captures == {}


@pytest.mark.parametrize(("set_before", "then"), [("0", "10"), ("10", "10"), ("15", "15")])
def test_a_priority_that_a_unit_has_set_is_not_lowered_once_more(set_before: str, then: str) -> None:
    code = (
        "import os; from probes import agent; agent._step_aside(); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    before = os.getpriority(os.PRIO_PROCESS, 0)
    command = ["nice", "-n", str(int(set_before) - before), sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == then
