"""Connections of jobs that are no ring within one node: who sends otherwise than others is not slow for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from bench.synthetic import blamed, build
from diagnosis.engine import diagnose
from diagnosis.evidence import Evidence, MetricRow
from tests.diagnosis.test_connections import BYTES, SECOND, address, nobody, slow_job


class Sends(NamedTuple):
    """What one rank sends to one address."""

    to: str
    bytes_per_s: float
    share: float
    """Of the time, on its way."""
    round_trip_ms: float = 0.3
    rank: int | None = None
    """Where it runs on the same node."""


def told(ranks: int, of: Callable[[int], Sequence[Sends]], local: Callable[[int], str] = address) -> Evidence:
    """Ranks that wait alike for long transfers, with what agents tell of the connections of each."""
    evidence = build(slow_job(ranks=ranks))[0]
    noise = np.random.default_rng(1)
    lives = {}
    for rank, life in evidence.ranks.items():
        rows = []
        for start in range(life.first_ns, life.last_ns, SECOND):
            for one in of(rank):
                near = {"peer_rank": str(one.rank)} if one.rank is not None else {}
                tags = tuple(sorted(({"local": local(rank), "peer": one.to} | near).items()))
                for name, unit, value in (
                    ("tcp_sending_ns", "ns", SECOND * one.share * noise.lognormal(0, 0.1)),
                    ("tcp_acknowledged_bytes", "B", one.bytes_per_s),
                    ("tcp_data_segments", "1", one.bytes_per_s / 1448),
                    ("tcp_round_trip_ns", "ns", 1e6 * one.round_trip_ms),
                ):
                    rows.append(MetricRow(start, start + SECOND, name, unit, tags, value))
        lives[rank] = replace(life, metrics=rows)
    return replace(evidence, ranks=lives)


# --- two nodes with four ranks each, a ring over all


def at(rank: int) -> str:
    return address(rank // 4)


def in_a_ring(rank: int, notices: tuple[float, float] = (0.01, 0.3)) -> list[Sends]:
    """Data to the next; ``notices`` (share of the time, round trip in ms) to the one before, where that is near."""
    after, before = (rank + 1) % 8, (rank - 1) % 8
    data = Sends(at(after), BYTES, 0.05, rank=after if at(after) == at(rank) else None)
    return [data, *([Sends(at(before), BYTES / 1000, *notices, before)] if at(before) == at(rank) else [])]


def test_notices_of_a_rank_that_sends_to_the_next_node_are_not_compared_with_others_data() -> None:
    verdict = diagnose(told(8, lambda rank: in_a_ring(rank, notices=(0.4, 20.0)), at))
    assert nobody(verdict), "their acknowledgements are delayed"


def test_what_goes_to_storage_holds_up_no_collective() -> None:
    storage = Sends("192.0.2.9", 2 * BYTES, 0.9, 20.0)
    assert nobody(diagnose(told(8, lambda rank: [*in_a_ring(rank), *([storage] if rank == 2 else [])], at)))


# --- one node


@pytest.mark.parametrize(("share", "slow"), [(0.3, []), (0.8, [0])])
def test_a_rank_that_sends_as_much_to_each_of_several_is_not_slow(share: float, slow: list[int]) -> None:
    """Three times what others send takes its port 0.3 of the time, of which they take 0.1."""

    def star(rank: int) -> list[Sends]:
        if rank:
            return [Sends(address(0), BYTES, 0.1, rank=0)]
        return [Sends(address(peer), BYTES, share, 1.5, peer) for peer in (1, 2, 3)]

    assert blamed(diagnose(told(4, star))) == slow
