"""Verdicts on recorded jobs whose truth others published: the slowed worker and nobody else, or the job."""

from __future__ import annotations

import pytest

from bot.rendering import verdict_text
from tests.diagnosis.replay.operations import blamed, recorded, verdict_of, without
from tests.diagnosis.replay.pipelines import step_ms


def test_the_slowed_worker_of_ar_is_named_and_nobody_else():
    verdict = verdict_of(recorded("AR"))
    assert (verdict.status, blamed(verdict), verdict.owner) == ("slow", [0], "node")
    assert verdict.confidence > 0.9
    assert "1.97 times as long" in verdict.summary
    tested = {line.metric: line for line in verdict.evidence}
    assert tested["backward-compute"].effect > tested["forward-compute"].effect > 0
    assert "most of it in backward" in verdict.summary
    # Without its worker the paper's replay takes 23.4 s of 46.3.
    assert verdict.cost_ms_per_step == pytest.approx(46_336 - 23_446, rel=0.05)


def test_the_stages_behind_the_slowed_worker_are_cleared_as_its_victims():
    why = {line.rank: line.why for line in verdict_of(recorded("AR")).cleared}
    for rank in (16, 32, 48):
        assert "in receives for rank 0, before it in its pipeline" in why[rank]


def test_se_has_no_culprit_and_its_sequences_come_before_its_longer_last_stage():
    verdict = verdict_of(recorded("SE"))
    assert (verdict.status, verdict.culprits, verdict.owner, verdict.cause) == (
        "slow",
        [],
        "job",
        "uneven-sequences",
    )
    assert "1.54 times as long" in verdict.summary
    assert verdict.summary.index("Sequences are unevenly spread") < verdict.summary.index(
        "Stage 1, the last one"
    )
    assert "slow-rank" in {line.cause for line in verdict.ruled_out}
    assert verdict.also[0] == "longer-stage"
    first = verdict_text(verdict).splitlines()[0]
    assert first.endswith("no single rank is to blame, but uneven sequences and a longer pipeline stage")


def test_the_layer_of_the_slowed_worker_is_not_seen_and_that_is_said():
    verdict = verdict_of(recorded("AR"))
    assert [culprit.layer for culprit in verdict.culprits] == [None]
    assert any(gap.startswith("layer of rank 0 not seen") for gap in verdict.not_seen)


@pytest.mark.parametrize("name", ["AR", "SE"])
def test_removing_any_one_rank_names_no_innocent(name: str):
    whole = recorded(name)
    for gone in sorted(whole.ranks)[:: 1 if name == "AR" else 7]:
        verdict = verdict_of(without(whole, gone))
        if name == "SE" or gone == 0:
            assert blamed(verdict) == [], f"without rank {gone}"
            assert verdict.owner != "node"
        else:
            assert blamed(verdict) == [0], f"without rank {gone}"


def test_without_the_slowed_worker_the_culprit_may_be_among_the_unseen():
    verdict = verdict_of(without(recorded("AR"), 0))
    assert verdict.status == "insufficient"
    assert "for ranks that were not recorded" in verdict.summary


def test_the_account_adds_up_to_the_recorded_step():
    for name in ("AR", "SE"):
        evidence = recorded(name)
        verdict = verdict_of(evidence)
        total = sum(line.ms for line in verdict.account) + verdict.unexplained_ms
        assert total == pytest.approx(step_ms(evidence), abs=0.01)
        assert all(line.ms >= 0 for line in verdict.account)
