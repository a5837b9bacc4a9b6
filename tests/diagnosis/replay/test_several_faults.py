"""Verdicts where several things are wrong at once: each is said, and nobody beside them blamed."""

from __future__ import annotations

import dataclasses

import pytest

from tests.diagnosis.replay.operations import always, blamed, verdict_of
from tests.diagnosis.replay.pipelines import Job, evidence_of, step_ms


@pytest.mark.parametrize(
    ("slow", "ranks"),
    [
        ({(1, 2): always(1.5), (3, 0): always(1.4)}, [6, 12]),
        ({(1, 2): always(1.5), (1, 3): always(1.4)}, [6, 7]),
        ({(1, 2): always(1.5), (1, 3): always(1.5)}, [6, 7]),
    ],
    ids=["two stages", "one stage", "equal"],
)
def test_several_slow_ranks_are_all_named(slow, ranks: list[int]):
    verdict = verdict_of(evidence_of(Job(slow=slow)))
    assert blamed(verdict) == ranks
    well = step_ms(evidence_of(Job()))
    saved = step_ms(evidence_of(Job(slow=slow))) - well
    assert verdict.joint_cost_ms_per_step == pytest.approx(saved, rel=0.03)


def test_a_slow_rank_and_a_longer_stage_are_both_said():
    verdict = verdict_of(evidence_of(Job(stage_factor={3: 1.5}, slow={(1, 2): always(2.0)})))
    assert (blamed(verdict), verdict.owner) == ([6], "node")
    assert "Stage 3, the last one, is longer too: 1.50 times" in verdict.summary


def test_a_slow_rank_that_uneven_work_hides_is_named_beside_it():
    job = Job(data=8, micro_batches=4, steps=5, uneven=0.3, slow={(1, 2): always(1.5)})
    verdict = verdict_of(evidence_of(job))
    assert (verdict.status, verdict.owner, verdict.cause) == ("slow", "job", "uneven-sequences")
    assert [(culprit.rank, culprit.owner) for culprit in verdict.culprits] == [(10, "node")]
    assert "Besides, rank 10 computes longer than its stage's others" in verdict.summary


def test_who_is_fast_beside_a_slow_rank_makes_nobody_slow():
    for seed in range(8):
        job = Job(data=2, stages=2, micro_batches=2, steps=10, uneven=0.1, noise=0.1, seed=seed)
        job.slow = {(0, 0): always(1.5)}
        assert set(blamed(verdict_of(evidence_of(job)))) <= {0}, seed


def test_of_ranks_that_work_on_one_batch_together_none_is_singled_out():
    evidence = evidence_of(Job(data=8, stages=1, slow={(0, 2): always(1.5), (0, 3): always(1.5)}))
    ranks = {
        rank: dataclasses.replace(one, place=type(one.place)(data=rank // 2, stage=0, tensor=rank % 2))
        for rank, one in evidence.ranks.items()
    }
    verdict = verdict_of(dataclasses.replace(evidence, ranks=ranks))
    assert (verdict.status, verdict.culprits, verdict.owner) == ("slow", [], "node")
    assert verdict.summary.startswith("One of ranks 2 and 3 holds the job up")


def test_incidents_that_hit_now_this_rank_and_now_that_name_nobody():
    slow = {
        (stage, data): (lambda step, mine=stage * 4 + data: 3.0 if step == 10 * mine else 1.0)
        for stage in range(2)
        for data in range(4)
    }
    verdict = verdict_of(evidence_of(Job(steps=80, stages=2, micro_batches=4, slow=slow)))
    assert verdict.culprits == []


def test_when_most_of_a_stage_is_slow_peers_prove_nothing():
    slow = {(1, data): always(1.5) for data in (0, 2, 3)}
    verdict = verdict_of(evidence_of(Job(slow=slow)))
    assert (verdict.status, verdict.culprits) == ("insufficient", [])
    assert "rank 5 computed shorter than the others of the stage" in verdict.summary
