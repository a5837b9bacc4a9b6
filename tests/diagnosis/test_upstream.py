"""Pipelines and groups: the slow rank is named, who waited for it is cleared with the way the delay took."""

import functools

import numpy as np
import pytest

from bench.pipelines import Faults, Layout, Truth, healthy, simulate
from bench.synthetic import blamed, renumbered, with_clock_offset, with_rank, without
from diagnosis.engine import diagnose
from diagnosis.evidence import Evidence
from diagnosis.scene import Scene, observe, pieces
from diagnosis.upstream import waited_for
from diagnosis.verdict import Verdict
from probes.records import Place, TimedBy

PIPELINE = Layout(data=4, stages=3, steps=160)


def slow(layout: Layout, *ranks: int, factor: float = 1.5, since: int = 0) -> Faults:
    made = healthy(layout)
    made.compute[list(ranks), since:] *= factor
    return made


@functools.cache
def one_slow(rank: int) -> tuple[Evidence, Truth]:
    return simulate(PIPELINE, slow(PIPELINE, rank))


def why(verdict: Verdict, rank: int) -> str:
    return next(cleared.why for cleared in verdict.cleared if cleared.rank == rank)


def scene_of(evidence: Evidence) -> Scene:
    tables, found = pieces(evidence)
    return observe(evidence, tables, found[0])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=4, steps=200),
        Layout(data=4, tensor=2, steps=200),
        PIPELINE,
        Layout(data=2, stages=2, tensor=2, steps=200),
        Layout(data=4, stages=2, steps=200, world_norm=False),
        Layout(data=4, stages=2, steps=200, world_norm=False, pairs=False),
    ],
    ids=["data", "tensor", "pipeline", "3d", "bridged-by-pairs", "bridged-by-pipeline"],
)
def test_the_slow_rank_is_named_and_nobody_else(layout):
    rank = layout.ranks // 2 + 1
    evidence, truth = simulate(layout, slow(layout, rank))
    verdict = diagnose(evidence)
    assert (verdict.status, blamed(verdict), verdict.owner) == ("slow", [rank], "node")
    assert {cleared.rank for cleared in verdict.cleared} == set(range(layout.ranks)) - {rank}
    assert verdict.step_ms == pytest.approx(float(np.median(truth.step_ms)), rel=0.02)
    others = np.delete(truth.own_ms, rank, axis=0)
    cost = (truth.own_ms[rank] - others.max(axis=0)).mean()
    assert verdict.cost_ms_per_step == pytest.approx(float(cost), rel=0.03)


@pytest.mark.parametrize(
    "layout", [Layout(data=4, steps=200), PIPELINE, Layout(data=2, stages=2, tensor=2, steps=200)]
)
def test_a_healthy_job_has_no_culprit(layout):
    verdict = diagnose(simulate(layout, healthy(layout))[0])
    assert (verdict.status, verdict.culprits) == ("healthy", [])


def test_a_victim_downstream_is_cleared_with_whom_it_waited_for():
    verdict = diagnose(one_slow(1)[0])  # stage 0, second pipeline: ranks 1, 5, 9
    assert "rank 1" in why(verdict, 5)
    assert "a send to or receive from rank 1" in why(verdict, 5)
    assert why(verdict, 0).startswith("waited 2"), "of its own stage"
    assert "rank 1;" in why(verdict, 0)
    assert "its own time is 0." in why(verdict, 5)


def test_the_way_of_the_delay_is_followed_to_the_first_that_nothing_made_wait():
    evidence, _ = one_slow(9)  # the last stage of the second pipeline
    upstream = waited_for(scene_of(evidence), evidence.ranks)
    assert [rank for rank, _ in upstream.chain(1, frozenset([9]))] == [5, 9]
    assert upstream.chain(9, frozenset([9])) == []


def test_what_a_rank_waited_adds_up_to_its_account():
    evidence, _ = one_slow(1)
    scene = scene_of(evidence)
    upstream = waited_for(scene, evidence.ranks)
    waiting = scene.now.mean("waiting", "receiving")
    for row, rank in enumerate(scene.ranks):
        assert sum(w.ms for w in upstream.waits[rank].values()) <= waiting[row] * 1.001


def test_stages_of_one_rank_are_compared_with_their_own_past_only():
    layout = Layout(data=1, stages=4, steps=240)
    verdict = diagnose(simulate(layout, slow(layout, 2, since=110))[0])
    assert blamed(verdict) == [2]
    assert any("ranks 0–3 do work that no other rank does" in gap for gap in verdict.not_seen)
    assert any(
        "there are no peers: ranks are named against their own past" in gap for gap in verdict.not_seen
    )


def test_a_stage_of_one_rank_without_a_past_is_neither_blamed_nor_called_healthy():
    layout = Layout(data=1, stages=4, steps=200)
    verdict = diagnose(simulate(layout, slow(layout, 2))[0])
    assert (verdict.status, verdict.culprits) == ("insufficient", [])
    assert "rank 2 takes 2" in verdict.summary
    assert "no peers and no past" in verdict.summary


def test_a_longer_stage_is_the_jobs():
    verdict = diagnose(simulate(PIPELINE, slow(PIPELINE, 8, 9, 10, 11))[0])
    assert (verdict.status, verdict.culprits, verdict.owner, verdict.cause) == (
        "slow",
        [],
        "job",
        "longer-stage",
    )
    assert "the pipeline stage of ranks 8–11" in verdict.summary


def test_work_that_is_uneven_in_turns_is_the_jobs():
    layout = Layout(data=8, steps=200)
    made = healthy(layout)
    made.compute *= np.random.default_rng(1).lognormal(0, 0.25, made.compute.shape)
    evidence, truth = simulate(layout, made)
    verdict = diagnose(evidence)
    assert (verdict.status, verdict.culprits, verdict.owner, verdict.layer) == ("slow", [], "job", "job")
    over = truth.own_ms.max(axis=0) - np.median(truth.own_ms, axis=0)
    assert verdict.cost_ms_per_step == pytest.approx(float(over.mean()), rel=0.05)


def test_all_ranks_slower_alike_is_the_jobs():
    layout = Layout(data=8, steps=300)
    made = healthy(layout)
    made.compute[:, 150:] *= 1.5
    verdict = diagnose(simulate(layout, made)[0])
    assert (verdict.status, verdict.culprits, verdict.owner) == ("slow", [], "job")
    assert "each rank's own time grew by 21.0 ms" in verdict.summary


@pytest.mark.parametrize("gone", range(PIPELINE.ranks))
def test_without_any_one_rank_no_innocent_is_named(gone):
    verdict = diagnose(without(one_slow(5)[0], gone))
    assert blamed(verdict) == ([] if gone == 5 else [5])


def test_renumbered_ranks_renumber_the_verdict():
    number = {rank: (rank * 5 + 3) % 12 for rank in range(12)}
    here, there = diagnose(one_slow(5)[0]), diagnose(renumbered(one_slow(5)[0], number))
    assert blamed(there) == [number[5]] == [number[rank] for rank in blamed(here)]
    assert there.cost_ms_per_step == here.cost_ms_per_step
    assert there.account == here.account
    assert sorted(cleared.rank for cleared in there.cleared) == sorted(number[c.rank] for c in here.cleared)


@pytest.mark.parametrize("node", ["node-0", "node-2"])
def test_clocks_do_not_matter(node):
    here = one_slow(5)[0]
    first, second = diagnose(here), diagnose(with_clock_offset(here, node, 7_000_000_000_003))
    assert (first.culprits, first.account, first.cleared) == (second.culprits, second.account, second.cleared)


def test_stages_that_the_evidence_tells_are_believed():
    layout = Layout(data=4, steps=200)
    evidence, _ = simulate(layout, slow(layout, 3))
    for rank in range(4):
        evidence = with_rank(evidence, rank, place=Place(stage=0 if rank < 3 else 1))
    verdict = diagnose(evidence)
    assert verdict.culprits == []
    assert "rank 3 takes" in verdict.summary


def test_a_trace_of_few_steps_names_who_is_last_in_all_of_them():
    layout = Layout(data=8, steps=7, numbered=True)
    verdict = diagnose(simulate(layout, slow(layout, 3))[0])
    assert blamed(verdict) == [3]
    assert verdict.confidence < 0.3, "six steps of one trace"


def test_a_trace_of_few_steps_of_some_ranks_names_nobody():
    layout = Layout(data=8, steps=7, numbered=True)
    verdict = diagnose(without(simulate(layout, slow(layout, 3))[0], 6))
    assert (verdict.status, verdict.culprits) == ("insufficient", [])
    assert any(gap.startswith("rank 3 takes") for gap in verdict.not_seen)


def test_host_timed_nccl_calls_show_nobody():
    layout = Layout(data=4, steps=200)
    evidence, _ = simulate(layout, slow(layout, 2), timed_by=TimedBy.HOST, source="kineto")
    for rank in evidence.ranks.values():
        rank.collectives.duration_ns[:] = 20_000  # enqueued
    verdict = diagnose(evidence)
    assert (verdict.status, verdict.culprits) == ("insufficient", [])
    assert "NCCL's end there when they are enqueued" in verdict.summary
