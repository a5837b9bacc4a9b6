"""Verdicts on slow transfers: the link or the port, and never a sender that is only late."""

from __future__ import annotations

import pytest

from tests.diagnosis.replay.operations import always, blamed, verdict_of
from tests.diagnosis.replay.pipelines import Job, evidence_of, step_ms


def test_a_slow_link_is_located_and_no_node_is_blamed():
    verdict = verdict_of(evidence_of(Job(links={(1, 2): 60.0})))
    assert (verdict.status, verdict.owner, verdict.layer, verdict.cause) == (
        "slow",
        "network",
        "nccl",
        "slow-link",
    )
    assert "the link between ranks 6 and 10" in verdict.summary
    assert set(blamed(verdict)) <= {6, 10}
    well = step_ms(evidence_of(Job()))
    assert verdict.cost_ms_per_step == pytest.approx(
        step_ms(evidence_of(Job(links={(1, 2): 60.0}))) - well, rel=0.1
    )


def test_a_rank_all_of_whose_links_are_slow_has_a_slow_port():
    verdict = verdict_of(evidence_of(Job(links={(0, 2): 60.0, (1, 2): 60.0})))
    assert blamed(verdict) == [6]
    assert "all links of rank 6" in verdict.summary


def test_a_late_sender_is_no_slow_link():
    verdict = verdict_of(evidence_of(Job(slow={(1, 2): always(2.0)})))
    assert {culprit.owner for culprit in verdict.culprits} == {"node"}
    assert "slow-link" in {line.cause for line in verdict.ruled_out}


def test_a_slow_link_beside_a_slow_rank_is_named_too():
    verdict = verdict_of(evidence_of(Job(slow={(0, 0): always(1.8)}, links={(1, 2): 150.0})))
    owners = {culprit.rank: culprit.owner for culprit in verdict.culprits}
    assert owners[0] == "node"
    assert "network" in owners.values()
    assert set(owners) <= {0, 6, 10}
