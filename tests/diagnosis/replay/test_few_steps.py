"""How much is said of one step or a few: a rank by its name where they suffice, and a doubt where they do not."""

from __future__ import annotations

import pytest

from tests.diagnosis.replay.operations import always, blamed, few_steps, recorded, verdict_of
from tests.diagnosis.replay.pipelines import Job, evidence_of


@pytest.mark.parametrize("keep", [[3], [0, 20], [5, 6, 7]])
def test_a_few_steps_are_enough_to_tell_the_two_jobs_apart(keep: list[int]):
    assert blamed(verdict_of(few_steps(recorded("AR"), keep))) == [0]
    assert blamed(verdict_of(few_steps(recorded("SE"), keep))) == []


def test_of_one_step_a_rank_is_named_without_confidence():
    """Whatever befell a healthy rank in the only step looks the same."""
    one, many = (verdict_of(evidence_of(Job(slow={(1, 2): always(1.5)}, steps=steps))) for steps in (1, 20))
    assert blamed(one) == blamed(many) == [6]
    assert one.confidence <= 0.5 < 0.9 < many.confidence
    assert "in the only step that was recorded" in one.culprits[0].detail
    assert verdict_of(few_steps(recorded("AR"), [3])).confidence <= 0.5


@pytest.mark.parametrize("steps", [4, 6])
def test_one_slow_rank_in_a_few_steps_is_not_called_uneven_sequences_for_sure(steps: int):
    """Slow in the newer half of too few steps to name it: nor is it said that the slowest rank changes."""
    slow = {(0, 2): lambda step: 2.0 if step >= steps // 2 else 1.0}
    verdict = verdict_of(evidence_of(Job(data=4, stages=1, steps=steps, slow=slow)))
    assert verdict.culprits == []
    assert verdict.confidence <= 0.4
    assert any("rank 2 alone" in gap and f"{steps} steps are too few" in gap for gap in verdict.not_seen)
    assert "changes from step to step" not in verdict.summary
    assert (verdict.cleared, "slow-rank" in {line.cause for line in verdict.ruled_out}) == ([], False)


def test_few_steps_of_uneven_sequences_leave_a_doubt_and_many_do_not():
    few, many = (verdict_of(evidence_of(Job(uneven=0.4, data=16, stages=2, steps=steps))) for steps in (7, 8))
    assert [few.cause, many.cause] == ["uneven-sequences", "uneven-sequences"]
    assert (few.confidence, many.confidence) == (0.4, 0.9)
    assert any("7 steps are too few" in gap for gap in few.not_seen)
    assert many.not_seen == []
    assert "changes from step to step" in many.summary


def test_a_pipeline_of_long_micro_batches_is_no_row_of_bad_machines():
    """All stages of one data-parallel rank are longer in the only step: its data is, not four machines."""
    for seed in (2, 10, 25, 31):
        job = Job(data=8, micro_batches=2, steps=1, uneven=0.3, seed=seed)
        verdict = verdict_of(evidence_of(job))
        assert verdict.culprits == [], seed


@pytest.mark.parametrize("uneven", [0.3, 0.6])
def test_forward_and_backward_of_one_long_micro_batch_are_no_two_witnesses(uneven: float):
    """Four micro batches: as eight trials, they named a rank of this healthy step."""
    job = Job(data=16, stages=1, micro_batches=4, steps=1, uneven=uneven, seed=101)
    verdict = verdict_of(evidence_of(job))
    assert (blamed(verdict), verdict.owner) == ([], "job")
