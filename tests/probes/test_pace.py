"""A thousand agents whose server comes back: when they come, and how much they bring."""

from __future__ import annotations

import random
from collections import Counter, deque
from datetime import UTC, datetime
from itertools import pairwise

import httpx
import pytest

from probes.pace import CATCH_UP_PER_S, LONGEST_ASKED_S, Backoff, retry_after_s
from probes.shipper import ship_pending

AGENTS = 1000
STORED = httpx.Response(200, content=b'{"stored": true}')


class Memory:
    """Stands where the spool does, without a disk: a number for each batch that waits."""

    def __init__(self) -> None:
        self.waiting: deque[int] = deque()

    def pending(self) -> list[int]:
        return list(self.waiting)

    def read(self, seq: int) -> bytes:
        return b"%d" % seq

    def remove(self, seq: int) -> None:
        assert self.waiting.popleft() == seq

    def settle(self, now_s: float) -> None:
        pass


class Cluster:
    """Agents that put a batch each second and ship, each at its own part of the second, on one clock."""

    def __init__(self, seed: int = 1) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.answer: httpx.Response | None = STORED
        self.arrivals: Counter[int] = Counter()
        """Requests per second, answered or not."""
        self.seconds: list[set[int]] = []
        self.agents = sorted((self.random.random(), number, Memory(), Backoff()) for number in range(AGENTS))
        self.agent = 0
        self.came: dict[int, float] = {}
        """Per agent: when its first request since the server's return came."""

    base_url = "http://server"

    def post(self, path: str, *, content: bytes, timeout: float) -> httpx.Response:
        self.arrivals[int(self.now)] += 1
        self.came.setdefault(self.agent, self.now)
        if self.answer is None:
            raise httpx.ConnectError("refused")
        return self.answer

    def run(self, seconds: int) -> None:
        begin = round(self.now)
        for second in range(begin, begin + seconds):
            for phase, number, memory, backoff in self.agents:
                self.now, self.agent = second + phase, number
                memory.waiting.append(second)
                ship_pending(
                    memory,  # type: ignore[arg-type]
                    self,  # type: ignore[arg-type]
                    backoff,
                    budget_s=5.0,
                    clock=lambda: self.now,
                    uniform=self.random.uniform,
                )
        self.now = float(begin + seconds)

    def returns(self, answer: httpx.Response | None = STORED) -> None:
        self.answer = answer
        self.arrivals.clear()
        self.came.clear()

    def waiting(self) -> int:
        return sum(len(memory.waiting) for _, _, memory, _ in self.agents)


def test_after_an_outage_a_cluster_comes_back_spread_over_a_minute_and_catches_up_at_a_pace() -> None:
    cluster = Cluster()
    cluster.run(3)
    assert (cluster.waiting(), set(cluster.arrivals.values())) == (0, {AGENTS})
    cluster.returns(None)
    cluster.run(120)
    assert sum(cluster.arrivals.values()) < 12 * AGENTS, "an absent server is asked seldom"
    cluster.returns()
    began = cluster.now
    cluster.run(125)
    firsts = Counter(int(came) for came in cluster.came.values())
    assert len(cluster.came) == AGENTS
    assert max(cluster.came.values()) - began <= 61
    assert max(firsts.values()) <= 0.05 * AGENTS, "no second has more than a twentieth of the agents"
    per_second = [cluster.arrivals[second] for second in sorted(cluster.arrivals)]
    assert max(per_second) <= CATCH_UP_PER_S * AGENTS
    assert max(b - a for a, b in pairwise(per_second)) <= 0.3 * AGENTS
    assert cluster.waiting() == 0
    assert per_second[-1] == AGENTS, "all have caught up: a batch per second and agent"


def test_a_server_that_asks_all_to_wait_as_long_is_not_asked_by_all_at_once() -> None:
    cluster = Cluster()
    cluster.run(1)
    cluster.returns(
        httpx.Response(503, headers={"Retry-After": "20"}, request=httpx.Request("POST", "http://server"))
    )
    cluster.run(2)
    cluster.returns()
    cluster.run(17)
    assert cluster.came == {}, "it is left alone for as long as it asked"
    cluster.run(14)
    assert len(cluster.came) == AGENTS
    firsts = Counter(int(came) for came in cluster.came.values())
    assert max(firsts.values()) <= 0.15 * AGENTS
    assert max(cluster.arrivals.values()) <= CATCH_UP_PER_S * AGENTS


@pytest.mark.parametrize(
    ("value", "date", "expected"),
    [
        ("0", "", 0.0),
        ("7", "", 7.0),
        (" 7 ", "", 7.0),
        ("9" * 400, "", LONGEST_ASKED_S),
        ("1.5", "", 0.0),
        ("", "", 0.0),
        ("Mon, 30 Nov 2026 11:00:30 GMT", "", 30.0),
        ("Mon, 30 Nov 2026 11:00:30 GMT", "Mon, 30 Nov 2026 11:00:20 GMT", 10.0),
        ("Mon, 30 Nov 2026 11:00:30 GMT", "no date", 30.0),
        ("Monday, 30-Nov-26 11:00:30 GMT", "", 30.0),
        ("Mon Nov 30 11:00:30 2026", "", 30.0),
        ("Mon, 30 Nov 1926 11:00:30 GMT", "", 0.0),
        ("Mon, 30 Nov 2126 11:00:30 GMT", "", LONGEST_ASKED_S),
        ("Mon, 99 Nov 2026 11:00:30 GMT", "", 0.0),
        ("Mon, 30 Nov 99999999999 11:00:30 GMT", "", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date_by_the_servers_own_clock(
    value: str, date: str, expected: float
) -> None:
    now = datetime(2026, 11, 30, 11, 0, 0, tzinfo=UTC)
    assert retry_after_s(value, date, now) == expected
