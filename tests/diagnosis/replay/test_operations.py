"""Verdicts from timed operations: the slow rank and nobody else, the job's own unevenness, links, missing ranks."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from bot.rendering import verdict_text
from diagnosis.evidence import Evidence
from diagnosis.limits import ALPHA
from diagnosis.replay.operations import diagnose_operations
from diagnosis.replay.trace import trace_of
from diagnosis.replay.workers import compute_of, slow_ranks
from diagnosis.verdict import Verdict
from probes.importers import gather, read
from tests.diagnosis.replay.pipelines import Job, bare, evidence_of, of_parts, step_ms
from tests.recorded import WHAT_IF


@cache
def recorded(name: str) -> Evidence:
    path = WHAT_IF / f"trace-{name}.parquet"
    if not path.is_file():
        pytest.skip(f"the recorded trace is not at {path}")
    return of_parts(read(gather([path]), job="job-123"))


def without(evidence: Evidence, *gone: int) -> Evidence:
    ranks = {rank: one for rank, one in evidence.ranks.items() if rank not in gone}
    return dataclasses.replace(evidence, ranks=ranks)


def few_steps(evidence: Evidence, keep: list[int]) -> Evidence:
    """Only these steps (by their place in the order of steps)."""
    ranks = {}
    for rank, one in evidence.ranks.items():
        table = one.operations
        assert table is not None
        chosen = np.isin(table.step, np.unique(table.step)[keep])
        columns = {
            name: getattr(table, name)[chosen]
            for name in ("kind", "lane", "step", "start_ns", "duration_ns", "seq", "micro_batch", "chunk")
        }
        ranks[rank] = dataclasses.replace(one, operations=dataclasses.replace(table, **columns))
    return dataclasses.replace(evidence, ranks=ranks)


def verdict_of(evidence: Evidence) -> Verdict:
    verdict = diagnose_operations(evidence, bare(evidence))
    assert verdict is not None
    return verdict


def blamed(verdict: Verdict) -> list[int]:
    return sorted(culprit.rank for culprit in verdict.culprits)


def always(factor: float):
    return lambda step: factor


# --- recorded jobs whose truth others published ------------------------------------------------------------


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


@pytest.mark.parametrize("keep", [[3], [0, 20], [5, 6, 7]])
def test_a_few_steps_are_enough_to_tell_the_two_jobs_apart(keep: list[int]):
    assert blamed(verdict_of(few_steps(recorded("AR"), keep))) == [0]
    assert blamed(verdict_of(few_steps(recorded("SE"), keep))) == []


def test_the_account_adds_up_to_the_recorded_step():
    for name in ("AR", "SE"):
        evidence = recorded(name)
        verdict = verdict_of(evidence)
        total = sum(line.ms for line in verdict.account) + verdict.unexplained_ms
        assert total == pytest.approx(step_ms(evidence), abs=0.01)
        assert all(line.ms >= 0 for line in verdict.account)


# --- played-out jobs: one fault ----------------------------------------------------------------------------


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


def test_pauses_that_wander_are_no_uneven_sequences():
    verdict = verdict_of(evidence_of(Job(pauses=400.0)))
    assert (verdict.culprits, verdict.owner, verdict.cause) == ([], "job", "uneven-pauses")


def test_a_rank_that_is_slow_in_every_fiftieth_step_is_named():
    slow = {(1, 2): lambda step: 3.0 if step % 50 == 7 else 1.0}
    verdict = verdict_of(evidence_of(Job(steps=200, stages=2, micro_batches=4, slow=slow)))
    assert (verdict.status, blamed(verdict), verdict.owner) == ("slow", [6], "node")
    assert "in 4 of 200 steps" in verdict.summary


def test_incidents_that_hit_now_this_rank_and_now_that_name_nobody():
    slow = {
        (stage, data): (lambda step, mine=stage * 4 + data: 3.0 if step == 10 * mine else 1.0)
        for stage in range(2)
        for data in range(4)
    }
    verdict = verdict_of(evidence_of(Job(steps=80, stages=2, micro_batches=4, slow=slow)))
    assert verdict.culprits == []


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


def test_when_most_of_a_stage_is_slow_peers_prove_nothing():
    slow = {(1, data): always(1.5) for data in (0, 2, 3)}
    verdict = verdict_of(evidence_of(Job(slow=slow)))
    assert (verdict.status, verdict.culprits) == ("insufficient", [])
    assert "rank 5 computed shorter than the others of the stage" in verdict.summary


# --- transfers ---------------------------------------------------------------------------------------------


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


# --- several at once ---------------------------------------------------------------------------------------


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


def test_a_pipeline_of_long_micro_batches_is_no_row_of_bad_machines():
    """All stages of one data-parallel rank are longer in the only step: its data is, not four machines."""
    for seed in (2, 10, 25, 31):
        job = Job(data=8, micro_batches=2, steps=1, uneven=0.3, seed=seed)
        verdict = verdict_of(evidence_of(job))
        assert verdict.culprits == [], seed


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


@pytest.mark.parametrize("uneven", [0.3, 0.6])
def test_forward_and_backward_of_one_long_micro_batch_are_no_two_witnesses(uneven: float):
    """Four micro batches: as eight trials, they named a rank of this healthy step."""
    job = Job(data=16, stages=1, micro_batches=4, steps=1, uneven=uneven, seed=101)
    verdict = verdict_of(evidence_of(job))
    assert (blamed(verdict), verdict.owner) == ([], "job")


def test_of_one_step_a_rank_is_named_without_confidence():
    """Whatever befell a healthy rank in the only step looks the same."""
    one, many = (verdict_of(evidence_of(Job(slow={(1, 2): always(1.5)}, steps=steps))) for steps in (1, 20))
    assert blamed(one) == blamed(many) == [6]
    assert one.confidence <= 0.5 < 0.9 < many.confidence
    assert "in the only step that was recorded" in one.culprits[0].detail
    assert verdict_of(few_steps(recorded("AR"), [3])).confidence <= 0.5


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


# --- partial and odd evidence ------------------------------------------------------------------------------


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
