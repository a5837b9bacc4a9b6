"""The way from the agent's disk to the store when the server is away for long, and when the agent is killed."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.types import ASGIApp

from bot.web.app import create_app
from diagnosis.ingest import Ingest
from diagnosis.store.sqlite import SqliteStore
from probes.pace import Backoff
from probes.shipper import open_client, ship_pending
from probes.spool import Counts, Spool
from tests.bot.web.live import serving
from tests.probes.batches import a_batch, utc
from tests.probes.outage import STEPS, Watched, a_real_rank

NODES = 3
RANKS = 1
TOKENS = {f"node-{number}": f"token-{number}" for number in range(NODES)}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that can be: thousands of fsyncs are not what these tests are about."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:
        yield Path(place)


@pytest.fixture
def store(folder: Path) -> Iterator[Watched]:
    store = SqliteStore(folder / "sysom.db")
    yield Watched(store)
    store.close()


def app(store: Watched) -> ASGIApp:
    return create_app(Ingest(store, TOKENS))


class Node:
    """An agent's spool and shipper, on a clock that the test moves."""

    def __init__(self, folder: Path, number: int, address: str) -> None:
        self.number = number
        self.spool = Spool(folder / f"spool-{number}")
        self.client = open_client(address, TOKENS[f"node-{number}"])
        self.backoff = Backoff()
        self.duplicates = 0
        self.largest = 0
        self.told: list[bool] = []
        self._chance = random.Random(number)

    def second(self, second: int) -> None:
        """Put the second's batch."""
        world = NODES * RANKS
        ranks = [a_real_rank(second, RANKS * self.number + local, world) for local in range(RANKS)]
        self.spool.put(
            a_batch(
                second,
                node=f"node-{self.number}",
                agent=self.spool.agent,
                boot_id=f"boot-{self.number}",
                ranks=ranks,
            )
        )

    def ship(self, now_s: float) -> None:
        result = ship_pending(
            self.spool,
            self.client,
            self.backoff,
            budget_s=5.0,
            on_reply=lambda _, reply: self.told.append(reply.stored),
            clock=lambda: now_s,
            uniform=self._chance.uniform,
        )
        assert result.refused == 0, result.refused_words
        self.duplicates += result.duplicates
        self.largest = max(self.largest, self.spool.size_bytes)

    def close(self) -> None:
        self.client.close()
        self.spool.close()


def test_with_the_server_away_for_ten_minutes_under_load_nothing_is_lost_and_all_is_stored_once(
    folder: Path, store: Watched
) -> None:
    now = 0
    with serving(app(store)) as address:
        port = httpx.URL(address).port
        assert port is not None
        nodes = [Node(folder, number, address) for number in range(NODES)]
        for now in range(5):
            for node in nodes:
                node.second(now)
                node.ship(now)
    assert [len(node.spool.pending()) for node in nodes] == [0] * NODES
    for now in range(5, 605):
        for node in nodes:
            node.second(now)
            node.ship(now)
    assert [len(node.spool.pending()) for node in nodes] == [600] * NODES
    with serving(app(store), port):
        last = now
        while any(node.spool.pending() for node in nodes):
            now += 1
            for node in nodes:
                if now < 620:  # the job runs on for a while
                    last = now
                    node.second(now)
                node.ship(now)
            assert now < 1000, "a spool is not emptied"
    for node in nodes:
        assert node.spool.counts == Counts()
        # A batch takes whole blocks of 4 KiB; beside them there are the folders, the state and its successor.
        assert node.largest < (last + 10) * 2 * 4096
        assert node.told.count(True) == last + 1, "each acknowledged batch was new once"
        node.close()
    assert set(store.added) == {(f"node-{n}", second) for n in range(NODES) for second in range(last + 1)}
    assert {came.count(True) for came in store.added.values()} == {1}
    evidence = store._store.evidence("job-1", utc(0), utc(last + 1))
    for rank in range(NODES * RANKS):
        seqs = evidence.ranks[rank].collectives.seq.tolist()
        assert sorted(seqs) == list(range(STEPS * (last + 1)))


def test_an_agent_killed_fifty_times_loses_nothing_that_it_kept_and_gives_no_number_twice(
    folder: Path, store: Watched
) -> None:
    spool_folder = folder / "spool"
    with serving(app(store)) as address:
        command = [
            sys.executable,
            "-m",
            "tests.probes.agent_storage",
            str(spool_folder),
            address,
            "token-0",
            "50",
            "7",
        ]
        subprocess.run(command, check=True, cwd=ROOT, timeout=200)
        lines = Path(f"{spool_folder}.log").read_text().splitlines()
        spool, backoff = Spool(spool_folder), Backoff()
        agent = spool.agent
        seconds = itertools.count()
        with open_client(address, "token-0") as client:
            while spool.pending():
                ship_pending(spool, client, backoff, budget_s=100.0, clock=lambda: float(next(seconds)))
        assert spool.counts.refused == 0
        bad = spool.counts.bad
        spool.close()
    assert "failed" not in lines
    put = [int(line.removeprefix("put ")) for line in lines if line.startswith("put ")]
    assert len(put) > 100
    assert put == sorted(set(put)), "a number was given twice"
    # All of one agent: its id and its numbers outlived every kill.
    assert {batch.agent for batch in store.first.values()} == {agent}
    stored = {seq for (_, seq), came in store.added.items() if came.count(True) == 1}
    assert set(put) <= stored
    assert {came.count(True) for came in store.added.values()} == {1}
    assert all(came[0] and not any(came[1:]) for came in store.added.values())
    # A kill may hit a put before it returned: that batch is stored, or set aside when it was cut off.
    assert len(stored) - len(put) + bad <= 50
