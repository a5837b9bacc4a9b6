"""What only looks like a stall of one rank: what others do for good reasons, and what cannot be told from it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bench.synthetic import blamed, build, noisy, plan, verdict_of, with_rank
from diagnosis.engine import diagnose
from tests.diagnosis.stalling import (
    AT,
    LONG,
    STEPS,
    WATCHING,
    S,
    begins,
    doubts,
    stood,
    told,
    with_barrier,
    with_stop,
)


@pytest.mark.parametrize(
    "reason", ["storage-write", "network-send", "futex", "poll", "child", "sleep", "other"]
)
def test_nobody_is_blamed_for_what_a_checkpoint_of_one_rank_does(reason):
    verdict = diagnose(told(stood(rank=0), reason, rank=0))
    assert (verdict.status, blamed(verdict)) == ("healthy", [])
    (doubt,) = doubts(verdict)
    assert "rank 0" in doubt
    assert "a checkpoint or an evaluation on one rank looks like that" in doubt
    assert "once, for 6.0 s" in doubt


def test_nobody_is_blamed_for_running():
    verdict = diagnose(told(stood("running", rank=0)))
    assert (verdict.status, blamed(verdict), len(doubts(verdict))) == ("healthy", [], 1)
    assert "running on a CPU (6.0 s)" in doubts(verdict)[0]


def test_nobody_is_blamed_for_what_nothing_tells_of():
    """No probe of the host: it may have written."""
    verdict = verdict_of(stood())
    assert (verdict.status, blamed(verdict), len(doubts(verdict))) == ("healthy", [], 1)


def test_nobody_is_blamed_for_checkpoints_that_come_again():
    made = stood("running", rank=0, at=100)
    made.running[0, 310] += LONG
    verdict = diagnose(told(made))
    assert (verdict.status, blamed(verdict)) == ("healthy", [])
    (doubt,) = doubts(verdict)
    assert "2 times, for 12.0 s" in doubt


@pytest.mark.parametrize("ms", [2_500.0, LONG])
def test_nobody_is_blamed_for_checkpoints_that_come_regularly(ms):
    made = plan(steps=STEPS, seed=3)
    made.running[0, 50::90] += ms
    verdict = diagnose(told(made))
    assert (verdict.status, blamed(verdict), len(doubts(verdict))) == ("healthy", [], 1)


def test_nobody_is_blamed_for_a_crowded_fault_on_every_fiftieth_step():
    """As long as a pause, but for want of a CPU: no checkpoint, and left to the tests of steps."""
    made = plan(steps=STEPS, seed=3)
    made.running[2, 49::50] += 700.0
    made.runnable[2, 49::50] += np.array([1.3, 4.0, 1.6, 2.0, 3.9, 1.8, 3.0, 2.5]) * 1_000
    verdict = diagnose(told(made))
    assert "stood still" not in verdict.summary
    assert doubts(verdict) == []
    assert blamed(verdict) == [2]


def test_nobody_is_blamed_for_slow_steps_in_a_row():
    made = plan(steps=STEPS, seed=3)
    made.runnable[2, 200:203] += 1_500.0
    assert "stood still" not in diagnose(told(made)).summary
    made = plan(steps=STEPS, seed=3)
    made.runnable[2, 200:202] += 1_500.0
    assert "stood still once, for 3.0 s" in diagnose(told(made)).summary


@pytest.mark.parametrize(("hiccup", "named"), [(300.0, [2]), (800.0, [])])
def test_nobody_is_blamed_for_what_is_little_beside_other_long_steps(hiccup, named):
    made = stood("runnable", ms=2_000)
    made.runnable[1, [90, 300]] += hiccup
    made.runnable[3, [60, 350]] += hiccup
    assert blamed(diagnose(told(made))) == named
    made = stood(ms=2_000)
    made.runnable[1, [90, 300]] += hiccup
    assert blamed(diagnose(told(made, "stopped", ms=2_000))) == [2], "whoever was stopped was stopped"


@pytest.mark.parametrize("spread", [1.0, 0.8, 0.4])
def test_nobody_is_blamed_for_a_pause_that_all_take_part_in(spread):
    """A checkpoint of all, an evaluation: some are longer busy than others."""
    made = stood(rank=2)
    for rank in (0, 1, 3):
        made.asleep[rank, AT] += spread * LONG
    verdict = diagnose(told(made, "storage-read"))
    assert (verdict.status, blamed(verdict), doubts(verdict)) == ("healthy", [], [])


def test_nobody_is_blamed_for_a_short_pause_in_which_all_do_something():
    made = stood(ms=3_000)
    for rank in (0, 1, 3):
        made.asleep[rank, AT] += 900.0
    assert blamed(diagnose(told(made, "storage-read", ms=3_000))) == []


def test_nobody_is_blamed_for_a_wait_of_most_ranks():
    made = stood("runnable")
    made.runnable[:2, AT] += LONG
    assert "stood still" not in diagnose(told(made)).summary


def test_nobody_is_blamed_for_a_stop_while_all_others_work():
    made = stood()
    for rank in (0, 1, 3):
        made.running[rank, AT] += LONG
    assert blamed(diagnose(with_stop(told(made, "stopped"), 2, begins(made)))) == []


def test_nobody_is_blamed_for_a_slowdown_that_begins_with_its_longest_step():
    """And that goes on: of the steps since each is long, the last one as a pause is."""
    made = stood("runnable", steps=220)
    made.runnable[2, AT + 1 :] += 900.0
    made.runnable[2, -2] += 2_600.0
    assert "stood still" not in diagnose(told(made)).summary


def test_nobody_is_blamed_for_a_barrier_that_ordinary_steps_do_not_have():
    made = stood()
    evidence = with_barrier(told(made, "storage-read"), begins(made))
    assert blamed(diagnose(told(made, "storage-read"))) == [2]
    assert (diagnose(evidence).status, blamed(diagnose(evidence))) == ("healthy", [])


def test_nobody_is_blamed_for_the_first_steps():
    verdict = diagnose(told(stood(at=6), "storage-read", at=6))
    assert (verdict.status, blamed(verdict)) == ("healthy", [])
    assert "in the first steps" in doubts(verdict)[0]
    assert blamed(diagnose(told(stood(at=6), "stopped", at=6))) == [2]


def test_nobody_is_blamed_for_what_comes_back_every_so_many_steps():
    made = plan(steps=STEPS, seed=3)
    made.runnable[2, 50::90] += 1_500.0
    assert "stood still" not in diagnose(told(made)).summary
    made = plan(steps=STEPS, seed=3)
    for at in (50, 200, 230):
        made.runnable[2, at] += 1_500.0
    verdict = diagnose(told(made))
    assert blamed(verdict) == [2]
    assert "3 times, for 4.5 s" in verdict.summary


def test_nobody_is_blamed_for_the_whole_job_stopped():
    made = plan(steps=STEPS, seed=3)
    made.asleep[:, AT] += LONG
    evidence = told(made)
    for rank in range(4):
        evidence = with_stop(evidence, rank, begins(made))
    verdict = diagnose(evidence)
    assert (verdict.status, blamed(verdict)) == ("healthy", [])
    assert any("a pause of 6,0" in gap for gap in verdict.not_seen)


def test_nobody_is_blamed_for_a_transfer_that_took_long_once():
    made = plan(steps=STEPS, seed=3)
    made.transfer[AT] += LONG
    verdict = diagnose(told(made))
    assert (verdict.status, blamed(verdict), doubts(verdict)) == ("healthy", [], [])


def test_nobody_is_blamed_for_less_than_a_second():
    verdict = diagnose(told(stood(ms=900), "stopped", ms=900))
    assert "stood still" not in verdict.summary


def test_nobody_is_blamed_for_less_than_ten_steps():
    made = stood(ms=1_800, noise=0.02)
    for state in ("asleep", "running", "transfer"):
        getattr(made, state)[...] *= 7
    made.asleep[2, AT] = 140.0 + 1_800.0
    verdict = diagnose(told(made, "stopped", ms=1_800))
    assert verdict.step_ms is not None
    assert verdict.step_ms > 190
    assert "stood still" not in verdict.summary


def test_nobody_is_blamed_for_batches_that_are_missing():
    made = stood("runnable", rank=1)
    evidence = told(made)
    begin = begins(made)
    life = evidence.ranks[1]
    keep = (life.threads[0].at_ns < begin - S) | (life.threads[0].at_ns > begin + 7 * S)
    columns = {
        name: getattr(life.threads[0], name)[keep]
        for name in (
            "at_ns",
            "running_ns",
            "runnable_ns",
            "blocked_ns",
            "uninterruptible_ns",
            "interrupted_ns",
        )
    }
    thread = replace(life.threads[0], **columns, blocked_by={})
    assert blamed(diagnose(with_rank(evidence, 1, threads=[thread, *life.threads[1:]]))) == []


@pytest.mark.parametrize("seed", range(4))
def test_nobody_is_blamed_for_a_crowded_machine(seed):
    verdict = verdict_of(noisy(seed=seed, steps=600))
    assert "stood still" not in verdict.summary
    assert doubts(verdict) == []


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_nobody_is_blamed_for_a_cpu_that_its_own_threads_had(share):
    """A checkpoint that many threads compress: the driving thread wants a CPU, and nobody holds it up."""
    made = stood("runnable", rank=0)
    made.taken_by[0] = [(1000, "python3", "/jobs/a", share), (4711, "backup", "/system.slice", 1.0 - share)]
    verdict = diagnose(told(made))
    assert (verdict.status, blamed(verdict)) == ("healthy", [])
    (doubt,) = doubts(verdict)
    assert "waiting for a CPU (6.0 s)" in doubt


def test_nobody_is_blamed_for_a_job_that_is_suspended_where_one_node_tells_of_signals():
    """All slept outside collectives; that only one is known to have been stopped does not make it the only one."""
    made = plan(steps=STEPS, seed=3)
    made.asleep[:, AT] += LONG
    evidence, _ = build(made, nodes=["node-a", "node-b", "node-b", "node-b"])
    evidence = with_stop(replace(evidence, probes={"node-a": WATCHING}), 0, begins(made))
    assert (diagnose(evidence).status, blamed(diagnose(evidence))) == ("healthy", [])
    watched = replace(evidence, probes={"node-a": WATCHING, "node-b": WATCHING})
    assert blamed(diagnose(watched)) == [0], "where a stop of theirs would be known, they waited for the GPU"


def test_nobody_is_blamed_for_a_stop_of_its_helper():
    """A worker that loads data stood still, and the rank waited for it: it was not stopped itself."""
    made = stood()
    evidence = with_stop(told(made, "poll"), 2, begins(made))
    rows = [
        msgspec.structs.replace(row, labels=(("process", "helper"),)) for row in evidence.ranks[2].metrics
    ]
    verdict = diagnose(with_rank(evidence, 2, metrics=rows))
    assert (verdict.status, blamed(verdict), len(doubts(verdict))) == ("healthy", [], 1)


def test_long_steps_that_are_many_are_no_stalls():
    """One in twelve, at odd distances: what the job does now and then, and left to the tests of steps."""
    made = plan(steps=STEPS, seed=3)
    at = np.flatnonzero(np.random.default_rng(5).random(STEPS) < 1 / 12)
    made.runnable[2, at] += 1_500.0
    verdict = diagnose(told(made))
    assert "stood still" not in verdict.summary
    assert (blamed(verdict), doubts(verdict)) == ([2], [])
