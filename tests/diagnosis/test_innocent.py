"""Beside a culprit: who is to blame too, and who only differs while all wait."""

from collections.abc import Callable

import numpy as np
import pytest

from bench.synthetic import Plan, blamed, build, contended, noisy, plan, renumbered, verdict_of
from diagnosis.engine import diagnose
from diagnosis.verdict import Verdict

ONSET = 450


def why(verdict: Verdict, rank: int) -> str:
    return next(line.why for line in verdict.cleared if line.rank == rank)


def crowded(*, seed: int = 0) -> Plan:
    """Ranks 0 to 2 share a CPU, rank 0 always comes last there; rank 3 is alone until a process comes beside it."""
    made = plan(seed=seed)
    made.runnable[:3] += 3.0
    made.runnable[0] += 6.0
    return contended(made, 3, 25.0, since=ONSET)


def test_who_was_as_slow_before_is_not_what_changed():
    verdict = verdict_of(crowded())
    assert (blamed(verdict), verdict.cause) == ([3], "cpu-contention")
    assert why(verdict, 0).startswith(
        "6.0 ms per step slower than its peers, but not what changed: it was so before"
    )


@pytest.mark.parametrize("number", [[2, 0, 3, 1], [3, 2, 1, 0]])
def test_whatever_its_number(number: list[int]):
    evidence, _ = build(crowded())
    assert blamed(diagnose(renumbered(evidence, dict(enumerate(number))))) == [number[3]]


def test_who_stays_as_it_was_while_its_peers_have_more_of_the_cpu_did_not_turn_slow():
    made = plan()
    made.runnable[:3] += 8.0
    made.runnable[1:3, ONSET:] -= 7.0  # they wait for rank 3 now, and leave rank 0's CPU alone
    verdict = verdict_of(contended(made, 3, 40.0, since=ONSET))
    assert blamed(verdict) == [3]
    assert "not what changed" in why(verdict, 0)


def test_two_that_turned_slow_together_are_both_named_though_one_hides_the_other():
    made = plan()
    made.running[1, ONSET:] += 60.0
    made.asleep[2, ONSET:] += 15.0
    verdict = verdict_of(made)
    assert blamed(verdict) == [1, 2]
    assert verdict.culprits[1].cost_ms_per_step < 1.0  # alone; rank 1 hides it


def test_two_that_hide_each_other_behind_a_third_are_all_named():
    made = plan(ranks=6)
    made.running[1, ONSET:] += 60.0
    made.asleep[2:4, ONSET:] += 20.0
    assert blamed(verdict_of(made)) == [1, 2, 3]


def test_two_that_were_slow_all_the_time_are_both_named_when_nothing_else_changed():
    made = plan(ranks=6)
    made.running[1] += 20.0
    made.asleep[4] += 15.0
    made.running[:, ONSET:] += 15.0
    assert blamed(verdict_of(made)) == [1, 4]


def test_a_second_one_that_would_cost_nothing_were_the_first_cured_is_said_and_not_named():
    """Among restless peers, of whom another is as late in each step, it holds nobody up."""
    random = np.random.default_rng(5)
    made = plan(ranks=12)
    made.asleep += random.exponential(12.0, made.asleep.shape)
    made.running[1] += 90.0
    made.running[2] += 13.0
    verdict = verdict_of(made)
    assert blamed(verdict) == [1]
    assert "only once the culprit runs like its peers" in why(verdict, 2)


@pytest.mark.parametrize("make", [plan, noisy])
def test_who_handed_over_to_another_within_the_slow_stretch_is_not_named(make: Callable[..., Plan]):
    made = make(ranks=5, steps=1200, seed=1)
    made.running[3, 300:700] += 30.0
    made.running[1, 700:] += 30.0
    verdict = verdict_of(made)
    assert (verdict.status, blamed(verdict)) == ("slow", [1])
    # All steps are as slow since step 300; whose fault it is can be told of the newest 500 only.
    assert verdict.steps == pytest.approx(500, abs=3)
    assert verdict.cost_ms_per_step == pytest.approx(30.0, rel=0.2)
    assert any("only the" in gap and "steps since then are compared" in gap for gap in verdict.not_seen)


def test_a_steady_culprit_is_compared_over_all_slow_steps():
    made = plan(ranks=5, steps=1200)
    made.running[1, 300:] += 30.0
    verdict = verdict_of(made)
    assert blamed(verdict) == [1]
    assert verdict.steps == pytest.approx(900, abs=3)
