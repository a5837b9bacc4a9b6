"""Verdicts on a simulated job: who, why, since when, at what cost, and what cannot be known."""

import re
from datetime import datetime

import numpy as np
import pytest

from bench.synthetic import (
    T0,
    blamed,
    build,
    contended,
    noisy,
    plan,
    scaled,
    verdict_of,
)
from diagnosis.engine import diagnose
from diagnosis.verdict import Verdict


def part(verdict: Verdict, name: str) -> tuple[float, float]:
    return next((line.ms, line.peers_ms) for line in verdict.account if line.part == name)


# --- who and why -------------------------------------------------------------------------------------------


def test_a_process_that_takes_a_ranks_cpu_is_named_with_its_cost():
    made = contended(plan(seed=3), 2, 18.0, since=300)
    evidence, truth = build(made)
    verdict = diagnose(evidence)
    assert (verdict.status, blamed(verdict), verdict.cause, verdict.layer, verdict.owner) == (
        "slow",
        [2],
        "cpu-contention",
        "os",
        "node",
    )
    culprit = verdict.culprits[0]
    assert "stress-ng (pid 4711, cgroup /user.slice) had the CPU for" in culprit.detail
    slow = truth.own[:, 301:]
    cost = (slow.max(axis=0) - np.delete(slow, 2, axis=0).max(axis=0)).mean()
    assert culprit.cost_ms_per_step == pytest.approx(cost, rel=0.02)
    assert culprit.share_explained == pytest.approx(1.0, abs=0.06)
    assert culprit.confidence > 0.8
    assert verdict.baseline is not None
    assert verdict.baseline.step_ms == pytest.approx(np.median(truth.step[:299]), rel=0.02)
    assert verdict.step_ms == pytest.approx(np.median(truth.step[301:]), rel=0.02)
    assert verdict.since is not None
    onset = (truth.begins_ns[300] - T0) / 1e9
    since = datetime.fromisoformat(verdict.since).timestamp() - T0 / 1e9
    assert since == pytest.approx(onset, abs=0.1)
    assert any("stress-ng" in action for action in verdict.actions)
    assert [r.cause for r in verdict.ruled_out] == ["runs-longer"]
    seconds = verdict.since.partition(".")[0]
    assert verdict.summary.startswith("Rank 2 on node-a holds the job up. It costs ")
    assert f" of each step since {seconds}Z: the median step takes " in verdict.summary


def test_a_rank_that_computes_more_runs_longer():
    made = plan()
    made.running[0] += 12.0
    verdict = verdict_of(made)
    assert (blamed(verdict), verdict.cause, verdict.owner) == ([0], "runs-longer", "unknown")
    assert [r.cause for r in verdict.ruled_out] == ["cpu-contention"]


def test_a_rank_that_sleeps_is_late_and_not_for_want_of_a_cpu():
    made = plan()
    made.asleep[1] += 20.0
    verdict = verdict_of(made)
    assert (verdict.status, blamed(verdict), verdict.cause, verdict.layer) == ("slow", [1], None, "os")
    assert "asleep outside collectives 20.0 ms" in verdict.culprits[0].detail
    assert "not for want of a CPU" in verdict.culprits[0].detail
    assert sorted(r.cause for r in verdict.ruled_out) == ["cpu-contention", "runs-longer"]


def test_an_idle_cpu_beside_a_rank_that_wants_it_is_a_quota_and_no_contention():
    made = plan()
    made.runnable[3] += 30.0
    made.taken_by[3] = [(0, "swapper/1", "", 0.97)]
    verdict = verdict_of(made)
    assert (blamed(verdict), verdict.cause) == ([3], None)
    assert "quota" in verdict.culprits[0].detail
    assert any("nr_throttled" in action for action in verdict.actions)


def test_starved_communication_threads_are_contention_though_the_rank_arrives_in_time():
    made = plan()
    made.starved[2] = 15.0
    made.taken_by[2] = [(99, "make", "/build", 0.95)]
    verdict = verdict_of(made)
    assert (blamed(verdict), verdict.cause) == ([2], "cpu-contention")
    assert part(verdict, "communication")[0] == pytest.approx(15.0, abs=0.2)


def test_victims_are_cleared_with_what_they_waited():
    verdict = verdict_of(contended(plan(), 2, 18.0))
    assert [cleared.rank for cleared in verdict.cleared] == [0, 1, 3]
    for cleared in verdict.cleared:
        waited = re.match(
            r"waited ([\d.]+) ms per step for rank 2 .*its own time is 0\.\d ms from", cleared.why
        )
        assert waited
        assert float(waited[1]) == pytest.approx(20.5, abs=1.0)


def test_the_account_adds_up_to_the_step():
    verdict = verdict_of(contended(plan(buckets=2), 2, 18.0, since=300))
    step = sum(line.ms for line in verdict.account) + verdict.unexplained_ms
    assert step == pytest.approx(verdict.step_ms, rel=0.01)
    assert sum(line.peers_ms for line in verdict.account) == pytest.approx(step, rel=1e-3)
    assert abs(verdict.unexplained_ms) < 0.01
    assert part(verdict, "runnable")[0] - part(verdict, "runnable")[1] == pytest.approx(18.0, abs=0.2)


def test_two_culprits_hide_each_others_cost():
    made = plan(ranks=6)
    made.running[1] += 20.0
    contended(made, 4, 20.0)
    verdict = verdict_of(made)
    assert blamed(verdict) == [1, 4]
    assert {culprit.rank: culprit.cause for culprit in verdict.culprits} == {
        1: "runs-longer",
        4: "cpu-contention",
    }
    assert all(culprit.cost_ms_per_step < 2.0 for culprit in verdict.culprits)
    assert verdict.joint_cost_ms_per_step == pytest.approx(19.3, abs=1.0)


def test_a_great_fault_does_not_hide_a_smaller_one():
    made = plan(ranks=6)
    made.running[1] += 60.0
    made.asleep[4] += 15.0
    assert blamed(verdict_of(made)) == [1, 4]


def test_of_two_ranks_the_slower_is_named():
    made = plan(ranks=2)
    made.running[1] += 10.0
    verdict = verdict_of(made)
    assert blamed(verdict) == [1]
    assert any("two ranks" in doubt for doubt in verdict.not_seen)


# --- who is not blamed -------------------------------------------------------------------------------------


def test_noisy_healthy_jobs_have_no_culprit():
    """A crowded machine, lasting differences of up to 5 %, hiccups: 200 jobs, none of them slow."""
    verdicts = [verdict_of(noisy(seed=seed, steps=500)) for seed in range(200)]
    assert not any(verdict.culprits for verdict in verdicts)
    doubted = [verdict for verdict in verdicts if verdict.status != "healthy"]
    assert len(doubted) <= 4  # hiccups of several steps on one rank do not look healthy
    assert all("too unsteadily to be sure" in verdict.summary for verdict in doubted)


def test_a_rank_that_is_slower_by_what_matters_is_not_healthy_where_no_test_shows_it():
    """119 steps of 2 s, one rank 1.4 s slower in the newer half: too few steps to prove it."""
    made = plan(ranks=4, steps=119, seed=5)
    made.running[1, 60:] += 20.0
    verdict = verdict_of(scaled(made, 70.0))
    assert (verdict.status, verdict.culprits, verdict.cause) == ("insufficient", [], None)
    assert re.search(
        r"rank 1 takes (6|7)\d\d ms per step longer than its peers, too unsteadily", verdict.summary
    )


def test_a_rank_that_is_slower_by_less_than_what_matters_is_healthy():
    made = plan(ranks=4, steps=119, seed=5)
    made.running[1, 60:] += 1.5
    assert verdict_of(scaled(made, 70.0)).status == "healthy"


def test_most_ranks_slow_is_not_the_healthy_ones_fault():
    made = plan()
    made.running[[0, 1, 3]] += 15.0
    verdict = verdict_of(made)
    assert (verdict.status, verdict.culprits) == ("insufficient", [])
    assert "rank 2 has less to do" in verdict.summary


def test_one_slow_rank_that_few_restless_steps_show_is_named_against_its_past_and_says_so():
    made = scaled(plan(steps=430, seed=3), 1.6)
    made.running[3, 310:] += 180.0 * np.random.default_rng(3).lognormal(0.0, 0.5, 120)
    verdict = verdict_of(made)
    assert (verdict.status, blamed(verdict)) == ("slow", [3])
    assert [found.metric for found in verdict.evidence] == ["growth"]
    (doubt,) = [doubt for doubt in verdict.not_seen if "against their own past" in doubt]
    assert "most ranks are slow" not in doubt
    assert "too few" in doubt


def test_most_ranks_slow_against_their_own_past_are_named():
    made = plan()
    made.running[[0, 1, 3], 400:] += 15.0
    verdict = verdict_of(made)
    assert (verdict.status, blamed(verdict), verdict.cause) == ("slow", [0, 1, 3], "runs-longer")
    assert any("peers prove nothing" in doubt for doubt in verdict.not_seen)
    for found in verdict.evidence:
        assert (found.metric, found.peers) == ("growth", pytest.approx(0.0, abs=0.1))
        assert found.value == pytest.approx(15.0, abs=0.2)
        assert found.effect == pytest.approx(found.value - found.peers, abs=0.002)
        assert found.q < 0.005  # what the permutation gave, not the threshold


def test_all_ranks_slower_alike_is_the_jobs():
    made = plan()
    made.running[:, 400:] += 15.0
    verdict = verdict_of(made)
    assert (verdict.status, verdict.culprits, verdict.layer, verdict.owner, verdict.cause) == (
        "slow",
        [],
        "job",
        "job",
        None,
    )
    assert verdict.cost_ms_per_step == pytest.approx(15.0, abs=0.5)
    assert verdict.since is not None
    assert verdict.summary.startswith("All ranks are slower alike, none holds the others up: each rank's own")
    assert "most of it: running on a CPU" in verdict.summary


def test_all_ranks_slower_little_by_little_is_the_jobs_with_since_when_and_by_how_much():
    made = plan()
    made.running += np.clip(np.arange(900) - 300, 0, None) * 0.03  # from 30 ms, 0.1 % of it with each step
    evidence, truth = build(made)
    verdict = diagnose(evidence)
    assert (verdict.status, verdict.culprits, verdict.layer, verdict.owner) == ("slow", [], "job", "job")
    assert verdict.since is not None
    onset = (truth.begins_ns[300] - T0) / 1e9
    assert datetime.fromisoformat(verdict.since).timestamp() - T0 / 1e9 == pytest.approx(onset, abs=1.5)
    assert verdict.baseline is not None
    assert verdict.baseline.step_ms == pytest.approx(np.median(truth.step[:299]), rel=0.02)
    told = re.match(
        r"Steps become longer little by little, by 0\.03 ms \(0\.1 %\) with each step, "
        r"from ([\d.]+) ms to ([\d.]+) ms so far, all ranks alike: each rank's own",
        verdict.summary,
    )
    assert told
    assert float(told[1]) == pytest.approx(np.median(truth.step[:299]), abs=0.5)
    assert float(told[2]) == pytest.approx(np.median(truth.step[:299]) + 18, abs=1.0)
    newest = truth.step[-225:].mean() - truth.step[:300].mean()  # of what drifts, the newest quarter
    assert verdict.cost_ms_per_step == pytest.approx(newest, abs=0.5)


def test_a_drift_that_is_less_than_what_matters_is_healthy_and_said():
    made = plan()
    made.running += np.linspace(0.0, 4.2, 900)
    verdict = verdict_of(made)
    assert (verdict.status, verdict.since) == ("healthy", None)
    assert re.search(r"Steps became 1[345] % slower little by little since 2026", verdict.summary)
    assert any("it may have begun before" in gap for gap in verdict.not_seen)


def test_one_rank_that_slows_little_by_little_is_named_and_the_job_is_not():
    made = plan()
    made.running[2] += np.linspace(0.0, 9.0, 900)
    verdict = verdict_of(made)
    assert (verdict.status, blamed(verdict), verdict.cause) == ("slow", [2], "runs-longer")
    assert any("steps became longer little by little, from 3" in gap for gap in verdict.not_seen)


def test_a_little_slower_alike_is_healthy_and_said():
    made = plan()
    made.running[:, 400:] += 4.0
    verdict = verdict_of(made)
    assert (verdict.status, verdict.since, verdict.baseline) == ("healthy", None, None)
    assert "Steps are 13 % slower since 2026" in verdict.summary


def test_a_slower_transfer_is_no_ranks_fault():
    made = plan()
    made.transfer[400:] += 15.0
    verdict = verdict_of(made)
    assert (verdict.status, verdict.culprits, verdict.layer) == ("slow", [], "nccl")


def test_a_slowdown_that_ended_is_over():
    made = plan(steps=1200)
    made.running[1, 400:700] += 30.0
    verdict = verdict_of(made)
    assert (verdict.status, verdict.culprits, verdict.since) == ("healthy", [], None)
    assert "has recovered" in verdict.summary


def test_without_a_past_a_slowdown_of_all_is_not_claimed_away():
    verdict = verdict_of(plan())
    assert verdict.status == "healthy"
    assert any("a slowdown of all ranks alike before that cannot be seen" in gap for gap in verdict.not_seen)
