"""The agent's loop: it goes on past a bad interval, gives up when nothing works, and loses nothing on the way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes import agent
from probes.agent import AgentConfig
from probes.records import Event
from probes.spool import MIN_BYTES, Spool, SpoolFull
from probes.watch import Interval
from tests.probes.batches import a_rank


class Watch:
    """Stands where NodeWatch does: gives intervals, or fails, as told; then has the agent stop."""

    def __init__(self, steps: list[bool], stop: threading.Event) -> None:
        self.steps: Iterator[bool] = iter(steps)
        self.left = len(steps)
        self.stop = stop
        self.recovered = 0
        self.closed = False

    def gather(self) -> Interval:
        self.left -= 1
        if self.left == 0:
            self.stop.set()
        if not next(self.steps, True):  # once more after it was told to stop
            raise RuntimeError("a map entry vanished")
        return Interval(0, 1_000_000_000, 0, [a_rank(0)], [], [], [])

    def recover(self) -> None:
        self.recovered += 1

    def close(self) -> None:
        self.closed = True


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, steps: list[bool]) -> Watch:
    stop = threading.Event()
    watch = Watch(steps, stop)
    monkeypatch.setattr(agent, "NodeWatch", lambda cache: watch)
    monkeypatch.setattr(agent, "INTERVAL_S", 0.0)
    monkeypatch.setattr(agent, "_step_aside", lambda: None)
    config = AgentConfig("http://127.0.0.1:9", "token", "node-a", folder, 1 << 20)
    try:
        agent.run(config, stop)
    finally:
        assert watch.closed
    return watch


def test_an_interval_that_fails_is_lost_and_the_agent_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    watch = run(monkeypatch, tmp_path, [True, False, True, True])
    assert watch.recovered == 1
    spool = Spool(tmp_path / "spool")
    assert len(spool.pending()) == 4, "the server is away: what was watched is on the disk"
    spool.close()


def test_the_agent_gives_up_when_nothing_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a map entry vanished"):
        run(monkeypatch, tmp_path, [True] + [False] * (agent.FAILURES_IN_A_ROW + 3))


def test_what_the_spool_lost_is_told_once(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", max_bytes=MIN_BYTES)
    losses = agent._Losses(spool)
    interval = Interval(0, 1, 0, [a_rank(0)], [], [], [])
    for _ in range(300):
        with contextlib.suppress(SpoolFull):
            spool.put(agent.to_batch(interval, "node-a", "boot", spool.agent, spool.next_seq))
    (told,) = losses.events(at_ns=5)
    assert told == Event(
        kind="batches-dropped",
        at_ns=5,
        detail=f"{300 - len(spool.pending())} batches found no room on the node's disk",
    )
    assert losses.events(at_ns=6) == []
    spool.close()
