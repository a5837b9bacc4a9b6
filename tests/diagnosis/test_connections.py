"""A rank whose data is on its way longer than its peers' is told from all that looks like it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from bench.synthetic import Plan, blamed, build, contended, plan
from diagnosis import connections
from diagnosis.connections import slow_connection
from diagnosis.engine import diagnose
from diagnosis.evidence import Evidence, MetricRow
from diagnosis.scene import Scene, observe, pieces
from diagnosis.verdict import Verdict, to_json

SECOND = 1_000_000_000
RANKS = 4
TRANSFER_MS = 40.0
USUAL = 0.05
"""Of the time, data is on its way."""
BYTES = 20e6
"""Per second, of each rank, to the next in the ring."""


FAR = {(2, 1): 5.0}
"""Round trip from rank 2 to rank 1, ms; 0.3 ms is usual."""


def address(rank: int) -> str:
    return f"10.0.0.{rank + 1}"


def slow_job(ranks: int = RANKS, transfer_ms: float = TRANSFER_MS, since: int = 0, steps: int = 700) -> Plan:
    """One whose transfers take long, of all ranks alike."""
    made = plan(ranks=ranks, steps=steps)
    made.transfer[since:] += transfer_ms
    return made


def told(
    evidence: Evidence,
    *,
    sending: Mapping[tuple[int, int], float] | None = None,
    carried: Mapping[int, float] | None = None,
    round_trip_ms: Mapping[tuple[int, int], float] | None = None,
    again: Mapping[tuple[int, int], float] | None = None,
    by: tuple[int, ...] = (),
    far: tuple[int, ...] = (),
) -> Evidence:
    """With what the agents of the ranks ``by`` (none: all) tell of a ring in which each sends to the one before it.
    ``sending`` (share of the time, where not the usual), ``round_trip_ms`` and ``again`` (segments per second)
    are by (sender, receiver); ``carried``: times the usual bytes; ``far``: their peers run on another node."""
    count = len(evidence.ranks)
    noise = np.random.default_rng(1)
    lives = {}
    for rank, life in evidence.ranks.items():
        rows = []
        for start in range(life.first_ns, life.last_ns, SECOND):
            for peer, size in (((rank - 1) % count, 1.0), ((rank + 1) % count, 0.001)):
                share = (sending or {}).get((rank, peer), USUAL if size == 1.0 else 0.01)
                labels = {"local": address(rank), "peer": address(peer)} | (
                    {} if rank in far else {"peer_rank": str(peer)}
                )
                carries = BYTES * size * (carried or {}).get(rank, 1.0)
                trip = (round_trip_ms or {}).get((rank, peer), 0.3)
                for name, unit, value in (
                    ("tcp_sending_ns", "ns", SECOND * share * noise.lognormal(0, 0.1)),
                    ("tcp_acknowledged_bytes", "B", carries),
                    ("tcp_data_segments", "1", carries / 1448),
                    ("tcp_round_trip_ns", "ns", 1e6 * trip * noise.lognormal(0, 0.1)),
                    ("tcp_segments_again", "1", (again or {}).get((rank, peer), 0.0)),
                ):
                    if value:
                        tags = tuple(sorted(labels.items()))
                        rows.append(MetricRow(start, start + SECOND, name, unit, tags, value))
        lives[rank] = replace(life, metrics=rows if not by or rank in by else [])
    return replace(evidence, ranks=lives)


def around(rank: int, most: tuple[int, int]) -> dict[tuple[int, int], float]:
    """Sending of all connections of ``rank``, whose data or acknowledgements wait there; ``most``: data."""
    before, after = (rank - 1) % RANKS, (rank + 1) % RANKS
    ends = [(rank, before), (before, rank), (rank, after), (after, rank)]
    return {pair: 0.7 if pair == most else 0.45 for pair in ends}


def capped(rank: int, made: Plan | None = None) -> Verdict:
    """What leaves ``rank`` is slow: its data, and its acknowledgements for the rank that sends to it."""
    to = (rank, (rank - 1) % RANKS)
    evidence = build(made or slow_job())[0]
    return diagnose(told(evidence, sending=around(rank, to), round_trip_ms={to: 5.0}))


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_sends_slowly_is_named_though_all_wait_alike(rank: int) -> None:
    verdict = capped(rank)
    assert (verdict.status, blamed(verdict), verdict.cause, verdict.layer, verdict.owner) == (
        "slow",
        [rank],
        "slow-link",
        "nccl",
        "network",
    )
    # Data is on its way for longer than usual 0.65 of the time to one peer and 0.4 to the other, so 0.79 to one or
    # the other; steps take 70 ms, of which they wait 43.
    assert verdict.cost_ms_per_step == pytest.approx(43, rel=0.03)
    assert f"what leaves rank {rank}" in verdict.summary
    assert "MB/s" in verdict.summary
    assert f'"rank": {rank}' in to_json(verdict)
    assert sum(line.ms for line in verdict.account) + verdict.unexplained_ms == pytest.approx(70, rel=0.03)
    assert {one.rank for one in verdict.cleared} == set(range(RANKS)) - {rank}
    assert "a round trip takes" in verdict.summary
    assert "packet-loss" in [one.cause for one in verdict.ruled_out]


def test_it_costs_no_more_than_the_ranks_wait() -> None:
    verdict = capped(2, slow_job(transfer_ms=12.0))
    assert blamed(verdict) == [2]
    assert verdict.cost_ms_per_step < 16.5, (
        "they wait 12 and 2 ms for transfers, and less than 2 ms for each other"
    )


def test_since_when_is_told_by_the_jobs_past() -> None:
    verdict = capped(1, slow_job(since=350))
    assert blamed(verdict) == [1]
    assert verdict.since is not None


def test_a_receiver_to_whom_all_is_slow_is_named_in_place_of_who_sends_to_it() -> None:
    verdict = diagnose(told(build(slow_job())[0], sending=around(1, (2, 1)), round_trip_ms={(2, 1): 5.0}))
    assert (blamed(verdict), verdict.cause) == ([1], "slow-link")
    assert "what comes to rank 1" in verdict.summary


def test_where_other_connections_do_not_tell_the_end_that_is_said() -> None:
    verdict = diagnose(told(build(slow_job())[0], sending={(2, 1): 0.7}, round_trip_ms=FAR))
    assert (blamed(verdict), verdict.cause) == ([2], "slow-link")
    assert "the link from rank 2 to 10.0.0.2 (rank 1)" in verdict.summary
    assert any("at which end of the link" in gap for gap in verdict.not_seen)
    assert verdict.confidence < capped(2).confidence


def test_a_link_that_loses_packets_is_told_from_one_that_is_slow() -> None:
    evidence = build(slow_job())[0]
    verdict = diagnose(told(evidence, sending={(3, 2): 0.6}, again={(3, 2): 400.0, (3, 0): 3.0, (1, 0): 1.0}))
    assert (blamed(verdict), verdict.cause, verdict.owner) == ([3], "packet-loss", "network")
    # 403 of 13,826 segments per second.
    assert "2.9 % of its segments had to be sent again" in verdict.summary
    (again,) = [one for one in verdict.evidence if one.metric == "segments sent again"]
    assert (again.value, again.unit) == (pytest.approx(2.92, abs=0.01), "%")


def test_losses_that_all_have_are_no_rank_s() -> None:
    again = {(rank, (rank - 1) % RANKS): 50.0 for rank in range(RANKS)}
    verdict = diagnose(
        told(build(slow_job())[0], sending={(3, 2): 0.6}, again=again, round_trip_ms={(3, 2): 5.0})
    )
    assert verdict.cause == "slow-link"
    assert diagnose(told(build(slow_job())[0], again=again)).status == "healthy"


def held_back(evidence: Evidence, per_s: Mapping[int, float], interface: str = "net0") -> Evidence:
    """With what interfaces of ranks held back, as it is told each fifth second."""
    lives = {}
    for rank, life in evidence.ranks.items():
        tags = (("interface", interface), ("qdisc", "tbf 45 Mbit/s"))
        rows = [
            MetricRow(start, start + SECOND, "egress_held_back", "1", tags, 5 * per_s[rank])
            for start in range(life.first_ns, life.last_ns, 5 * SECOND)
            if rank in per_s
        ]
        lives[rank] = replace(life, metrics=[*life.metrics, *rows])
    return replace(evidence, ranks=lives)


def test_a_limit_on_the_rank_s_own_interface_is_the_thing_at_fault() -> None:
    evidence = told(build(slow_job())[0], sending=around(2, (2, 1)), round_trip_ms=FAR)
    verdict = diagnose(held_back(evidence, {2: 1000.0, 0: 20.0}))
    assert blamed(verdict) == [2]
    found = re.search(r"tbf 45 Mbit/s on its interface net0 holds back ([0-9,]+) packets", verdict.summary)
    assert found is not None
    assert float(found[1].replace(",", "")) == pytest.approx(1000, rel=0.1)
    assert "Raise or take away the limit on net0 of rank 2" in verdict.actions[0]


def test_a_command_to_paste_runs_nothing_that_a_container_put_into_a_name() -> None:
    evidence = told(build(slow_job())[0], sending=around(2, (2, 1)), round_trip_ms=FAR)
    verdict = diagnose(held_back(evidence, {2: 1000.0}, interface="a$(reboot)"))
    assert "tc qdisc show dev 'a$(reboot)'," in verdict.actions[0]


@pytest.mark.parametrize("per_s", [{}, {2: 3.0}, {0: 900.0, 1: 900.0, 2: 1000.0, 3: 900.0}, {1: 1000.0}])
def test_a_limit_that_holds_nothing_back_or_all_alike_is_not(per_s: dict[int, float]) -> None:
    evidence = told(build(slow_job())[0], sending=around(2, (2, 1)), round_trip_ms=FAR)
    verdict = diagnose(held_back(evidence, per_s))
    assert blamed(verdict) == [2]
    assert "tbf" not in verdict.summary
    assert "negotiated speed" in verdict.actions[0]


def test_nor_is_one_of_the_sender_where_the_receiver_s_end_is_slow() -> None:
    evidence = told(build(slow_job())[0], sending=around(1, (2, 1)), round_trip_ms=FAR)
    verdict = diagnose(held_back(evidence, {2: 1000.0}))
    assert blamed(verdict) == [1]
    assert "tbf" not in verdict.summary


def test_of_many_ranks_all_is_read_only_where_steps_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MANY_RANKS", RANKS - 1)
    assert nobody(capped(1))
    assert blamed(capped(1, slow_job(since=350))) == [1]


def test_seconds_of_which_nothing_is_told_are_left_out() -> None:
    evidence = told(build(slow_job())[0], sending=around(2, (2, 1)), round_trip_ms=FAR)
    whole = slow_connection(evidence, scene_of(evidence))
    gaps = {}
    for rank, life in evidence.ranks.items():
        rows = [
            row for row in life.metrics if (row.start_ns - life.first_ns) // SECOND % 10 >= 4 or rank != 0
        ]
        gaps[rank] = replace(life, metrics=rows)
    told_less = replace(evidence, ranks=gaps)
    found = slow_connection(told_less, scene_of(told_less))
    assert whole is not None
    assert found is not None
    assert found.connection.rank == 2
    assert found.sending_ms == pytest.approx(whole.sending_ms, rel=0.05)
    assert found.usual_ms == pytest.approx(whole.usual_ms, rel=0.05)


# --- what looks like it


def nobody(verdict: Verdict) -> bool:
    return verdict.owner != "network" and not verdict.culprits


def test_long_transfers_of_all_alike_are_no_rank_s() -> None:
    assert (
        diagnose(
            told(build(slow_job())[0], sending={(rank, (rank - 1) % RANKS): 0.6 for rank in range(RANKS)})
        ).status
        == "healthy"
    )


def test_a_rank_that_sends_more_is_not_slow() -> None:
    assert nobody(
        diagnose(told(build(slow_job())[0], sending={(2, 1): 0.6}, round_trip_ms=FAR, carried={2: 12.0}))
    )


def slow_at(evidence: Evidence, rank: int, when: Callable[[int], bool]) -> Evidence:
    """With what ``rank`` sends on its way nearly all the time in some seconds of the window."""
    life = evidence.ranks[rank]
    rows = [
        replace_value(row, SECOND * 0.9)
        if row.name == "tcp_sending_ns"
        and when((row.start_ns - life.first_ns) // SECOND)
        and row.value > SECOND * 0.02
        else row
        for row in life.metrics
    ]
    return replace(evidence, ranks={**evidence.ranks, rank: replace(life, metrics=rows)})


def test_now_and_then_is_not_enough() -> None:
    evidence = told(build(slow_job())[0], round_trip_ms=FAR)
    assert nobody(diagnose(slow_at(evidence, 2, lambda second: second % 10 < 2)))
    assert blamed(diagnose(slow_at(evidence, 2, lambda second: second % 10 < 7))) == [2]


def test_what_chance_does_among_three_in_few_seconds_is_nobody_s() -> None:
    made = slow_job(ranks=3, steps=220)
    evidence = told(build(made)[0], round_trip_ms={(2, 1): 5.0})
    assert nobody(diagnose(slow_at(evidence, 2, lambda second: 4 <= second < 12)))
    evidence = told(build(slow_job(ranks=3))[0], round_trip_ms={(2, 1): 5.0})
    assert blamed(diagnose(slow_at(evidence, 2, lambda second: second % 14 >= 4))) == [2]


def replace_value(row: MetricRow, value: float) -> MetricRow:
    return MetricRow(row.start_ns, row.end_ns, row.name, row.unit, row.labels, value)


def test_who_sends_to_a_late_rank_is_not_blamed_for_it() -> None:
    verdict = diagnose(
        told(build(contended(slow_job(), 1, 40.0))[0], sending={(2, 1): 0.7}, round_trip_ms=FAR)
    )
    assert (blamed(verdict), verdict.cause) == ([1], "cpu-contention")


def test_nor_who_sends_to_one_whose_threads_lack_a_cpu() -> None:
    made = slow_job(transfer_ms=20.0)
    made.starved[1] += 25.0
    verdict = diagnose(told(build(made)[0], sending={(2, 1): 0.7}, round_trip_ms=FAR))
    assert "network" not in {culprit.owner for culprit in verdict.culprits}
    assert verdict.owner != "network"
    # Nor where nobody is blamed for it: what slow connections say is the same.
    evidence = told(build(made)[0], sending={(2, 1): 0.7}, round_trip_ms=FAR)
    assert slow_connection(evidence, scene_of(evidence)) is None
    evidence = told(build(slow_job())[0], sending={(2, 1): 0.7}, round_trip_ms=FAR)
    found = slow_connection(evidence, scene_of(evidence))
    assert found is not None
    assert (found.connection.rank, found.end) == (2, None)


def test_nor_one_that_takes_longer_on_its_own() -> None:
    for ms, slow in ((10.0, True), (30.0, False)):
        evidence = build(contended(slow_job(), 2, ms))[0]
        evidence = told(evidence, sending={(2, 1): 0.7}, round_trip_ms=FAR)
        found = slow_connection(evidence, scene_of(evidence))
        assert (found is not None) == slow, "it costs 43 ms"


def scene_of(evidence: Evidence) -> Scene:
    tables, (steps,) = pieces(evidence)
    return observe(evidence, tables, steps)


def test_data_that_waits_for_its_last_acknowledgement_alone_is_on_no_slow_link() -> None:
    assert nobody(diagnose(told(build(slow_job())[0], sending={(2, 1): 0.7}, round_trip_ms={(2, 1): 0.5})))


def test_a_way_to_another_node_is_not_compared_with_one_within_a_node() -> None:
    assert nobody(diagnose(told(build(slow_job())[0], sending={(2, 1): 0.7}, round_trip_ms=FAR, far=(2,))))


def test_a_rank_s_number_that_is_none_is_no_rank() -> None:
    evidence = build(slow_job())[0]
    life = evidence.ranks[0]
    tags = (("local", address(0)), ("peer", address(1)), ("peer_rank", "²"))
    row = MetricRow(life.first_ns, life.first_ns + SECOND, "tcp_round_trip_ns", "ns", tags, 1e6)
    (one,) = connections.connections(replace(life, metrics=[row]), life.first_ns, life.last_ns)
    assert one.peer_rank is None


def test_of_ranks_of_which_nothing_is_told_nothing_is_said() -> None:
    verdict = diagnose(told(build(slow_job())[0], sending={(2, 1): 0.7}, round_trip_ms=FAR, by=(1, 2)))
    assert nobody(verdict), "with one other, either may be the odd one"
    verdict = diagnose(told(build(slow_job())[0], sending={(2, 1): 0.7}, round_trip_ms=FAR, by=(0, 1, 2)))
    assert blamed(verdict) == [2]


def test_a_rank_of_which_nothing_is_told_is_not_named_for_what_others_tell() -> None:
    evidence = told(build(slow_job(ranks=5))[0], sending={(2, 1): 0.7, (0, 1): 0.7}, round_trip_ms=FAR)
    evidence = replace(evidence, ranks={rank: life for rank, life in evidence.ranks.items() if rank != 1})
    verdict = diagnose(evidence)
    assert 1 not in blamed(verdict)


def test_a_job_that_hardly_communicates_has_no_slow_link() -> None:
    assert nobody(diagnose(told(build(plan(steps=700))[0], sending={(2, 1): 0.7}, round_trip_ms=FAR)))
