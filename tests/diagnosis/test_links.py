"""A slow transfer is told from a late rank, and placed as far as collectives allow."""

from collections.abc import Callable

import numpy as np
import pytest

from bench.pipelines import Layout, healthy, simulate
from bench.synthetic import blamed, build, plan, without
from diagnosis.engine import diagnose
from diagnosis.layers.nccl import compute_or_communication
from diagnosis.verdict import Verdict

LAYOUT = Layout(data=4, stages=3, steps=160)
FACTOR = 40.0
USUAL_MS = 4 * 0.5
"""Four micro-batches one way, half a millisecond each."""


def verdict_with(slow: Callable[[int, int, int], bool], layout: Layout = LAYOUT) -> tuple[Verdict, float]:
    """And how much longer the step is than without."""
    made = healthy(layout)
    before = simulate(layout, made)[1].step_ms.mean()
    made.transfer = lambda a, b, step: FACTOR if slow(a, b, step) else 1.0
    evidence, truth = simulate(layout, made)
    return diagnose(evidence), float(truth.step_ms.mean() - before)


@pytest.mark.parametrize(
    ("slow", "culprit", "words"),
    [
        (lambda a, b, _: (a, b) == (1, 5), 1, "The link from rank 1 to rank 5"),
        (lambda a, b, _: {a, b} == {1, 5}, 1, "The link from rank 1 to rank 5"),
        (lambda a, b, _: a == 6, 6, "What rank 6 sends"),
        (lambda a, b, _: b == 6, 6, "What rank 6 receives"),
        (lambda a, b, _: 6 in (a, b), 6, "Everything to and from rank 6"),
    ],
    ids=["one-way", "both-ways", "sender", "receiver", "port"],
)
def test_rows_columns_and_cells_of_the_delay_matrix(slow, culprit, words):
    verdict, longer = verdict_with(slow)
    assert (verdict.status, blamed(verdict), verdict.layer, verdict.owner, verdict.cause) == (
        "slow",
        [culprit],
        "nccl",
        "network",
        "slow-link",
    )
    assert verdict.summary.startswith(words)
    assert verdict.cost_ms_per_step == pytest.approx(longer, rel=0.03)


def test_a_slow_link_and_a_slow_rank_are_both_found():
    made = healthy(LAYOUT)
    made.compute[2] *= 1.5
    made.transfer = lambda a, b, step: FACTOR if (a, b) == (1, 5) else 1.0
    verdict = diagnose(simulate(LAYOUT, made)[0])
    assert [(c.rank, c.owner) for c in verdict.culprits] == [(1, "network"), (2, "node")]
    assert {1, 2}.isdisjoint({cleared.rank for cleared in verdict.cleared})


def test_a_late_rank_is_no_slow_transfer():
    made = healthy(LAYOUT)
    made.compute[2] *= 2.0
    verdict = diagnose(simulate(LAYOUT, made)[0])
    assert [(c.rank, c.owner) for c in verdict.culprits] == [(2, "node")]


def test_of_one_all_reduce_it_is_said_that_the_link_is_not_known():
    layout = Layout(data=4, steps=240)
    made = healthy(layout)
    made.group = lambda members, step: 6.0 if len(members) == 4 and step >= 110 else 1.0
    verdict = diagnose(simulate(layout, made)[0])
    assert (verdict.status, verdict.culprits, verdict.layer, verdict.owner) == ("slow", [], "nccl", "network")
    assert verdict.cost_ms_per_step == pytest.approx(5 * 4.0 + 5 * 0.2 * 0, rel=0.06)
    assert any("which link it is collectives do not tell" in gap for gap in verdict.not_seen)


def test_groups_that_share_a_rank_point_to_its_port():
    layout = Layout(data=4, tensor=4, steps=160)
    made = healthy(layout)
    made.group = lambda members, step: 6.0 if len(members) < 16 and 6 in members else 1.0
    verdict = diagnose(simulate(layout, made)[0])
    assert (blamed(verdict), verdict.owner) == ([6], "network")


def test_one_slow_group_is_named_as_a_group():
    layout = Layout(data=4, tensor=4, steps=160)
    made = healthy(layout)
    made.group = lambda members, step: 6.0 if members == (4, 5, 6, 7) else 1.0
    verdict = diagnose(simulate(layout, made)[0])
    assert (verdict.culprits, verdict.owner) == ([], "network")
    assert "ranks 4–7" in verdict.summary


@pytest.mark.parametrize("gone", range(LAYOUT.ranks))
def test_without_any_one_rank_no_innocent_is_named(gone):
    made = healthy(LAYOUT)
    made.transfer = lambda a, b, step: FACTOR if (a, b) == (1, 5) else 1.0
    verdict = diagnose(without(simulate(LAYOUT, made)[0], gone))
    assert blamed(verdict) in ([1], []), verdict.summary


@pytest.mark.parametrize("gone", [0, 2])
def test_who_waits_for_a_rank_that_nobody_watches_does_not_blame_the_network(gone):
    made = plan(ranks=5, steps=700)
    made.running[gone, 350:] += 25.0
    verdict = diagnose(without(build(made)[0], gone))
    assert verdict.owner != "network"
    assert verdict.culprits == []
    assert f"rank {gone}, which nobody watches" in verdict.summary


def test_nor_against_peers():
    made = healthy(LAYOUT)
    made.compute[6] *= 2.0
    verdict = diagnose(without(simulate(LAYOUT, made)[0], 6))
    assert (verdict.status, verdict.owner, verdict.culprits) == ("insufficient", None, [])
    assert "the culprit may be among rank 6" in verdict.summary


def test_late_or_slow_by_the_durations_of_one_collective():
    longest, shortest, base = np.array([30.0, 30.0, 10.0]), np.array([10.0, 30.0, 10.0]), np.full(3, 10.0)
    p = compute_or_communication(longest, shortest, base)
    assert p[:2].tolist() == [1.0, 0.0]
    assert np.isnan(p[2]), "no longer than ever"
