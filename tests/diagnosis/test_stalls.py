"""One long stall of one rank: who is named, with what, and beside what goes on now."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.synthetic import T0, blamed, contended, plan, renumbered, with_rank
from bot import rendering
from diagnosis import stalls
from diagnosis.engine import diagnose
from diagnosis.evidence import MetricRow
from tests.diagnosis.stalling import AT, LONG, MS, STEPS, S, begins, doubts, stood, told, with_stop


def test_a_stopped_rank_is_named_with_when_how_long_who_stopped_it_and_what_the_job_lost():
    made = stood()
    verdict = diagnose(with_stop(told(made, "stopped"), 2, begins(made)))
    assert (verdict.status, blamed(verdict), verdict.cause, verdict.owner) == (
        "slow",
        [2],
        "process-stopped",
        "node",
    )
    # T0 is 2026-09-21T14:13:20Z; the first 200 steps of 30 ms take 6 s; the usual 30 ms are no part of the stall.
    assert "once, for 6.0 s" in verdict.summary
    assert "from 2026-09-21T14:13:26Z to 2026-09-21T14:13:32Z" in verdict.summary
    assert (
        "process 1002 of rank 2 was stopped by gdb (pid 77); it stood still once, for 6.0 s"
        in verdict.culprits[0].detail
    )
    assert "per step" not in verdict.culprits[0].detail
    assert "the job lost 6.0 s" in verdict.culprits[0].detail
    assert verdict.step_ms == pytest.approx(30.0, abs=1.5)
    assert [one.rank for one in verdict.cleared] == [0, 1, 3]
    assert all("for rank 2" in one.why for one in verdict.cleared)
    assert any("Find out why gdb (pid 77) stops process 1002" in action for action in verdict.actions)
    assert verdict.confidence >= 0.9
    assert not [gap for gap in verdict.not_seen if "a pause of" in gap]


def test_it_costs_no_step_of_now():
    made = stood()
    verdict = diagnose(with_stop(told(made, "stopped"), 2, begins(made)))
    assert (verdict.cost_ms_per_step, verdict.joint_cost_ms_per_step, verdict.account) == (0.0, 0.0, [])
    (found,) = [one for one in verdict.evidence if one.metric == "stall"]
    assert (found.rank, found.unit) == (2, "ms")
    assert found.effect == pytest.approx(LONG, rel=0.02)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_whatever_the_number_of_ranks(ranks):
    verdict = diagnose(told(stood(rank=ranks - 1, ranks=ranks), "stopped", rank=ranks - 1))
    assert (verdict.status, blamed(verdict), verdict.cause) == ("slow", [ranks - 1], "process-stopped")
    assert len(verdict.cleared) == ranks - 1


def test_one_of_many_ranks(monkeypatch):
    """Of which it is asked first whether any waited."""
    monkeypatch.setattr(stalls, "MANY_RANKS", 3)
    assert blamed(diagnose(told(stood(), "storage-read"))) == [2]
    made = plan(steps=STEPS, seed=3)
    made.asleep[:, AT] += LONG
    assert blamed(diagnose(told(made, "stopped"))) == []
    made = plan(steps=STEPS, seed=3)
    made.transfer[AT] += LONG
    assert blamed(diagnose(with_stop(told(made), 1, begins(made) + 28 * MS))) == [1]


@pytest.mark.parametrize("reason", ["stopped", "storage-read", "", "storage-write"])
def test_other_rank_numbers_say_the_same_of_the_others(reason):
    evidence = told(stood(), reason)
    number = {0: 3, 1: 0, 2: 1, 3: 2}
    here, there = diagnose(evidence), diagnose(renumbered(evidence, number))
    assert blamed(there) == [number[rank] for rank in blamed(here)]
    assert (here.status, here.cause, here.confidence) == (there.status, there.cause, there.confidence)
    assert len(doubts(here)) == len(doubts(there))


def test_stopped_within_a_collective_where_nobody_comes_late():
    made = plan(steps=STEPS, seed=3)
    made.transfer[AT] += LONG
    assert blamed(diagnose(told(made))) == []
    verdict = diagnose(with_stop(told(made), 1, begins(made) + 28 * MS))
    assert (verdict.status, blamed(verdict), verdict.cause) == ("slow", [1], "process-stopped")
    assert "once, for 6.0 s" in verdict.summary


def test_two_ranks_stopped_within_a_collective_of_two():
    made = plan(ranks=2, steps=STEPS, seed=3)
    made.transfer[AT] += LONG
    evidence = with_stop(told(made), 1, begins(made) + 28 * MS)
    assert blamed(diagnose(evidence)) == [1]
    rows = evidence.ranks[1].metrics
    assert blamed(diagnose(with_rank(evidence, 0, metrics=rows))) == [], "both: the whole job was stopped"


@pytest.mark.parametrize("ranks", [2, 4])
def test_stopped_within_a_collective_that_the_others_got_out_of(ranks):
    """They wait in the next one, and it comes late to that, but it never was outside of one for long."""
    made = stood(rank=1, ranks=ranks)
    evidence = with_stop(told(made, "stopped", rank=1), 1, begins(made))
    table = evidence.ranks[1].collectives
    last = int(np.searchsorted(table.enter_ns, begins(made))) - 1
    longer = table.duration_ns.copy()
    longer[last] += int(LONG * MS)
    verdict = diagnose(with_rank(evidence, 1, collectives=replace(table, duration_ns=longer)))
    assert (verdict.status, blamed(verdict), verdict.cause) == ("slow", [1], "process-stopped")
    assert "and the job lost 6.0 s" in verdict.summary


def test_a_pause_of_all_stays_a_pause_beside_a_stall():
    made = stood()
    made.asleep[:, 300] += LONG
    verdict = diagnose(with_stop(told(made, "stopped"), 2, begins(made)))
    assert blamed(verdict) == [2]
    assert any("a pause of 6,0" in gap for gap in verdict.not_seen)


def test_reads_of_seconds_in_a_job_that_saves_its_state_with_all_ranks():
    made = stood()
    made.running[:, [120, 320]] += 9_000.0
    verdict = diagnose(told(made, "storage-read"))
    assert (blamed(verdict), verdict.cause) == ([2], "storage-read")
    assert any("2 pauses of 9,0" in gap for gap in verdict.not_seen)


def test_a_frozen_control_group_holds_all_its_ranks():
    made = stood()
    made.asleep[3, AT] += LONG
    evidence = told(made)
    begin = begins(made)
    frozen = [
        MetricRow(T0 + at * S, T0 + (at + 1) * S, "cgroup_frozen", "1", (("cgroup", "/jobs/b"),), 1.0)
        for at in range((begin - T0) // S, (begin - T0) // S + 7)
    ]
    for rank in (2, 3):
        evidence = with_rank(evidence, rank, metrics=frozen)
    verdict = diagnose(evidence)
    assert (verdict.status, blamed(verdict), verdict.cause) == ("slow", [2, 3], "process-stopped")
    assert "cgroup /jobs/b was frozen" in verdict.culprits[0].detail


def test_reads_that_took_seconds_once_are_the_cause():
    verdict = diagnose(told(stood(), "storage-read"))
    assert (verdict.status, blamed(verdict), verdict.cause, verdict.owner) == (
        "slow",
        [2],
        "storage-read",
        "storage",
    )
    assert "waits for reads from storage 6,0" in verdict.culprits[0].detail


def test_a_cpu_that_others_had_for_seconds_is_the_cause():
    made = stood("runnable", rank=1)
    made.taken_by[1] = [(4711, "backup", "/system.slice", 1.0)]
    verdict = diagnose(told(made))
    assert (verdict.status, blamed(verdict), verdict.cause) == ("slow", [1], "cpu-contention")
    assert "backup (pid 4711, cgroup /system.slice) had the CPU for 5,9" in verdict.culprits[0].detail


def test_held_up_by_two_things_is_named_without_one_cause():
    made = stood(ms=LONG / 2)
    made.runnable[2, AT] += LONG / 2
    verdict = diagnose(told(made, "storage-read", ms=LONG / 2))
    assert (verdict.status, blamed(verdict), verdict.cause) == ("slow", [2], None)
    assert "Cause not found" in verdict.summary


@pytest.mark.parametrize("state", ["runnable", "running"])
def test_two_ranks_one_right_after_the_other(state):
    """Each costs the job what it stood still itself, though the second waited for the first in the same steps; and
    what it then did is no measure of what the first one's peers do."""
    made = stood("runnable", rank=2)
    getattr(made, state)[1, AT + 1] += LONG
    verdict = diagnose(told(made))
    (second,) = [culprit for culprit in verdict.culprits if culprit.rank == 2]
    assert "waits for a CPU 5,999 ms longer than its peers" in second.detail
    assert "also" not in second.detail
    assert "stood still once" in second.detail
    assert "the job lost 6.0 s" in second.detail
    assert "lost 12.0 s" not in " ".join([verdict.summary, *verdict.not_seen])
    assert [one.rank for one in verdict.cleared] == [0, 3]
    assert len(doubts(verdict)) == (state == "running")


def test_who_kept_the_others_waiting_at_another_time_is_not_cleared():
    made = stood()
    made.running[1, 320] += LONG
    verdict = diagnose(told(made, "stopped"))
    assert (blamed(verdict), len(doubts(verdict))) == ([2], 1)
    assert [one.rank for one in verdict.cleared] == [0, 3]


class TestBesideWhatGoesOnNow:
    def test_who_is_slow_now_leads(self):
        made = contended(stood(steps=600), 1, 15.0, since=300)
        verdict = diagnose(with_stop(told(made, "stopped"), 2, begins(made)))
        assert verdict.status == "slow"
        assert [culprit.rank for culprit in verdict.culprits] == [1, 2]
        assert (verdict.cause, verdict.culprits[1].cause) == ("cpu-contention", "process-stopped")
        assert verdict.summary.startswith("Rank 1")
        assert "Besides: Rank 2 on node-a stood still once" in verdict.summary
        assert verdict.since is not None
        assert 2 not in [one.rank for one in verdict.cleared]
        assert verdict.culprits[0].cost_ms_per_step == pytest.approx(15.0, rel=0.2)

    def test_the_same_rank_is_named_once_with_both(self):
        made = contended(stood(rank=1, steps=600), 1, 15.0, since=300)
        verdict = diagnose(with_stop(told(made, "stopped", rank=1), 1, begins(made)))
        assert [(culprit.rank, culprit.cause) for culprit in verdict.culprits] == [(1, "cpu-contention")]
        assert "Besides, process 1001 of rank 1 was stopped by gdb" in verdict.culprits[0].detail

    @pytest.mark.parametrize(("stood_ms", "cause"), [(LONG, "process-stopped"), (3_000.0, None)])
    def test_the_same_rank_is_led_by_what_cost_more_where_why_it_is_slow_now_is_not_known(
        self, stood_ms, cause
    ):
        """300 steps of 15 ms more are 4.5 s."""
        made = stood(rank=1, steps=600, ms=stood_ms)
        made.runnable[1, 300:] += 15.0
        verdict = diagnose(told(made, "stopped", rank=1, ms=stood_ms))
        assert (blamed(verdict), verdict.cause) == ([1], cause)
        detail = verdict.culprits[0].detail
        assert ("Besides, it costs" in detail) == (cause is not None)
        assert ("Besides, process 1001 of rank 1 was stopped" in detail) == (cause is None)

    def test_all_slower_alike_stays_nobodys(self):
        made = stood(steps=600)
        made.asleep[:, 300:] += 15.0
        verdict = diagnose(with_stop(told(made, "stopped"), 2, begins(made)))
        assert (verdict.status, blamed(verdict)) == ("slow", [])
        assert "Besides: Rank 2 on node-a stood still once" in verdict.summary

    def test_a_stall_that_is_not_over_is_no_stall(self):
        made = stood(at=STEPS - 1)
        assert "stood still" not in diagnose(told(made, "stopped", at=STEPS - 1)).summary

    def test_several_times(self):
        made = stood()
        made.asleep[2, 320] += 2_000.0
        evidence = told(made, "stopped")
        rows = [
            *with_stop(evidence, 2, begins(made)).ranks[2].metrics,
            *with_stop(evidence, 2, begins(made, 320), 2_000.0).ranks[2].metrics,
        ]
        verdict = diagnose(with_rank(evidence, 2, metrics=rows))
        assert (blamed(verdict), verdict.cause) == ([2], "process-stopped")
        assert "2 times, for 8.0 s" in verdict.summary
        assert "the job lost 8.0 s" in verdict.summary

    def test_what_people_read_of_it_gives_no_cost_per_step(self):
        made = stood()
        text = rendering.verdict_text(diagnose(with_stop(told(made, "stopped"), 2, begins(made))))
        assert "A stopped process on rank 2, node-a" in text
        assert "and the job lost 6.0 s by it" in " ".join(text.split())
        assert "of each step" not in text
        assert "since when is not known" not in text

    def test_what_people_read_of_both_adds_no_stall_to_the_cost_of_steps(self):
        made = contended(stood(steps=600), 1, 15.0, since=300)
        text = rendering.verdict_text(diagnose(with_stop(told(made, "stopped"), 2, begins(made))))
        assert "Together they cost" not in text
        assert "Owner of the fix" in text
