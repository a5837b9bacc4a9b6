"""Verdicts from timed operations, one fault at a time: the slow rank and nobody else, or the job's unevenness."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from diagnosis.limits import ALPHA
from diagnosis.replay.trace import trace_of
from diagnosis.replay.workers import compute_of, slow_ranks
from tests.diagnosis.replay.operations import always, blamed, verdict_of
from tests.diagnosis.replay.pipelines import Job, evidence_of, step_ms


@pytest.mark.parametrize(
    "job",
    [
        Job(seed=2),
        Job(stages=1, data=8),
        Job(noise=0.03),
        Job(data=2),
        Job(chunks=2),
        Job(steps=1),
        Job(steps=3, noise=0.03),
        Job(skew_ms=10_000),
    ],
    ids=["even", "one stage", "noise", "two pipelines", "chunks", "one step", "three steps", "clocks apart"],
)
def test_a_healthy_job_is_healthy(job: Job):
    verdict = verdict_of(evidence_of(job))
    assert (verdict.status, verdict.culprits) == ("healthy", [])


def test_healthy_jobs_have_no_culprit_more_often_than_promised():
    jobs = 120
    named = 0
    for seed in range(jobs):
        made = Job(data=4, stages=1, micro_batches=2, steps=8, noise=0.1, seed=seed)
        trace = trace_of(evidence_of(made))
        assert trace is not None
        named += bool(slow_ranks(trace, compute_of(trace), np.nanmax(trace.wall, axis=0)))
    assert named <= max(1, ALPHA * jobs * 2)


@pytest.mark.parametrize(
    ("job", "rank"),
    [
        (Job(slow={(1, 2): always(1.5)}), 6),
        (Job(slow={(1, 2): always(1.15)}), 6),
        (Job(slow={(0, 3): always(1.5)}, stages=1, data=8), 3),
        (Job(slow={(1, 1): always(1.5)}, data=2), 3),
        (Job(slow={(0, 1): always(1.5)}, data=2, stages=1), 1),
        (Job(slow={(1, 2): always(1.5)}, chunks=2), 6),
        (Job(slow={(1, 2): always(1.5)}, steps=1), 6),
        (Job(slow={(1, 2): always(1.5)}, skew_ms=10_000), 6),
        (Job(slow={(1, 2): always(1.8)}, uneven=0.3, steps=40), 6),
    ],
    ids=[
        "much",
        "little",
        "no pipeline",
        "two pipelines",
        "two ranks",
        "chunks",
        "one step",
        "clocks",
        "uneven too",
    ],
)
def test_a_slow_rank_is_named_and_nobody_else(job: Job, rank: int):
    verdict = verdict_of(evidence_of(job))
    assert (verdict.status, blamed(verdict), verdict.owner) == ("slow", [rank], "node")
    assert verdict.culprits[0].node == f"node-{rank}"


def test_the_cost_is_what_the_job_would_save_without_the_fault():
    sick, well = (step_ms(evidence_of(Job(slow=slow, noise=0.0))) for slow in ({(1, 2): always(1.6)}, {}))
    verdict = verdict_of(evidence_of(Job(slow={(1, 2): always(1.6)}, noise=0.0)))
    assert verdict.cost_ms_per_step == pytest.approx(sick - well, rel=0.03)


def test_a_longer_stage_is_the_jobs_and_no_rank_of_it_is_blamed():
    verdict = verdict_of(evidence_of(Job(stage_factor={3: 1.5})))
    assert (verdict.status, verdict.culprits, verdict.owner, verdict.cause) == (
        "slow",
        [],
        "job",
        "longer-stage",
    )
    assert "Stage 3, the last one, computes 1.50 times as long" in verdict.summary


def test_a_longer_stage_of_one_rank_may_be_a_machine():
    verdict = verdict_of(evidence_of(Job(data=1, slow={(1, 0): always(1.6)})))
    assert (verdict.status, verdict.culprits, verdict.owner) == ("slow", [], "unknown")
    assert "may as well be a slow machine" in verdict.summary


def test_uneven_sequences_are_the_jobs():
    verdict = verdict_of(evidence_of(Job(uneven=0.4, data=16, stages=2)))
    assert (verdict.culprits, verdict.owner, verdict.cause) == ([], "job", "uneven-sequences")
    assert "grow together (correlation 1.00)" in verdict.summary


def test_pauses_that_wander_are_no_uneven_sequences():
    verdict = verdict_of(evidence_of(Job(pauses=400.0)))
    assert (verdict.culprits, verdict.owner, verdict.cause) == ([], "job", "uneven-pauses")


def test_a_rank_that_is_slow_in_every_fiftieth_step_is_named():
    slow = {(1, 2): lambda step: 3.0 if step % 50 == 7 else 1.0}
    verdict = verdict_of(evidence_of(Job(steps=200, stages=2, micro_batches=4, slow=slow)))
    assert (verdict.status, blamed(verdict), verdict.owner) == ("slow", [6], "node")
    assert "in 4 of 200 steps" in verdict.summary


def test_since_when_a_rank_is_slow():
    evidence = evidence_of(Job(steps=30, slow={(1, 2): lambda step: 2.0 if step >= 20 else 1.0}))
    verdict = verdict_of(evidence)
    assert blamed(verdict) == [6]
    assert verdict.since is not None
    assert verdict.baseline is not None
    assert verdict.baseline.steps == 20
    well = step_ms(evidence_of(Job(steps=20)))
    assert verdict.baseline.step_ms == pytest.approx(well, rel=0.01)


def test_a_rank_that_was_slow_and_recovered_is_not_blamed_for_good():
    verdict = verdict_of(evidence_of(Job(steps=40, slow={(1, 2): lambda step: 1.0 if step >= 8 else 1.3})))
    assert verdict.status == "healthy" or "in 8 of 40 steps" in verdict.summary


def test_when_all_ranks_slow_alike_it_is_the_jobs_change():
    verdict = verdict_of(evidence_of(Job(steps=30, everybody=lambda step: 1.5 if step >= 15 else 1.0)))
    assert (verdict.status, verdict.culprits, verdict.owner) == ("slow", [], "job")
    assert "All ranks compute 50 % longer since" in verdict.summary


def test_operations_that_only_a_host_does_show_the_layer():
    """One rank loads its data for 400 ms longer in each step than the others: no GPU does that."""
    whole = evidence_of(Job(stages=1, data=4))
    ranks = {}
    for rank, one in whole.ranks.items():
        table = one.operations
        assert table is not None
        names = ["data-loading" if name == "optimizer" else name for name in table.names]
        more = np.where((table.kind == 10) & (rank == 2), 400_000_000, 0)
        ranks[rank] = dataclasses.replace(
            one,
            operations=dataclasses.replace(table, names=names, duration_ns=table.duration_ns + more),
        )
    verdict = verdict_of(dataclasses.replace(whole, ranks=ranks))
    assert [(culprit.rank, culprit.layer) for culprit in verdict.culprits] == [(2, "os")]
    assert "data-loading (+400" in verdict.culprits[0].detail
    assert not any("layer of" in gap for gap in verdict.not_seen)
