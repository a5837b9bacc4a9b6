"""Verdicts from operations that are incomplete or odd: ranks and stages that nobody told of, in any order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from diagnosis.replay.operations import diagnose_operations
from tests.diagnosis.replay.operations import always, blamed, verdict_of, without
from tests.diagnosis.replay.pipelines import Job, bare, evidence_of


def test_permuting_ranks_permutes_the_verdict():
    order = np.random.default_rng(3).permutation(16).tolist()
    job = Job(slow={(1, 2): always(1.5), (3, 0): always(1.4)})
    plain = verdict_of(evidence_of(job))
    other = verdict_of(
        evidence_of(dataclasses.replace(job, number=lambda stage, data, width: order[stage * width + data]))
    )
    assert blamed(other) == sorted(order[rank] for rank in blamed(plain))
    costs = {order[c.rank]: c.cost_ms_per_step for c in plain.culprits}
    assert {c.rank: c.cost_ms_per_step for c in other.culprits} == pytest.approx(costs)
    assert sorted(order[line.rank] for line in plain.cleared) == sorted(line.rank for line in other.cleared)


def test_removing_any_rank_of_a_played_out_job_names_no_innocent():
    whole = evidence_of(Job(steps=10, slow={(1, 2): always(1.6)}))
    for gone in whole.ranks:
        verdict = verdict_of(without(whole, gone))
        assert blamed(verdict) == ([] if gone == 6 else [6]), f"without rank {gone}"
        if gone == 6:
            assert verdict.status == "insufficient"


def test_a_rank_that_lacks_operations_in_a_step_is_not_compared_there():
    whole = evidence_of(Job(steps=10, stages=1, data=4))
    table = whole.ranks[2].operations
    assert table is not None
    keep = ~((table.kind == 1) & (table.step < 9))
    columns = {
        name: getattr(table, name)[keep]
        for name in ("kind", "lane", "step", "start_ns", "duration_ns", "seq", "micro_batch", "chunk")
    }
    two = dataclasses.replace(whole.ranks[2], operations=dataclasses.replace(table, **columns))
    verdict = verdict_of(dataclasses.replace(whole, ranks={**whole.ranks, 2: two}))
    assert verdict.culprits == []


def test_one_recorded_rank_has_nobody_to_be_compared_with():
    whole = evidence_of(Job(steps=3))
    verdict = verdict_of(without(whole, *(rank for rank in whole.ranks if rank != 3)))
    assert (verdict.status, verdict.culprits) == ("insufficient", [])


def test_stages_that_nobody_told_make_no_peers():
    whole = evidence_of(Job(steps=5, stage_factor={3: 2.0}))
    ranks = {
        rank: dataclasses.replace(one, place=type(one.place)(data=one.place.data))
        for rank, one in whole.ranks.items()
    }
    verdict = verdict_of(dataclasses.replace(whole, ranks=ranks))
    assert (verdict.status, verdict.culprits) == ("insufficient", [])
    assert "does not tell which stage each is" in verdict.summary


def test_evidence_without_operations_is_left_to_others():
    whole = evidence_of(Job(steps=2))
    ranks = {rank: dataclasses.replace(one, operations=None) for rank, one in whole.ranks.items()}
    empty = dataclasses.replace(whole, ranks=ranks)
    assert diagnose_operations(empty, bare(empty)) is None
    sampled = {rank: dataclasses.replace(one, source="kineto") for rank, one in whole.ranks.items()}
    profile = dataclasses.replace(whole, ranks=sampled)
    assert diagnose_operations(profile, bare(profile)) is None


def test_the_same_evidence_gives_the_same_verdict():
    job = Job(uneven=0.3, slow={(1, 2): always(1.8)})
    assert verdict_of(evidence_of(job)) == verdict_of(evidence_of(job))
