"""One long stall of one rank: who is named, with what, and everything that only looks like it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.synthetic import (
    T0,
    Plan,
    blamed,
    build,
    contended,
    noisy,
    plan,
    renumbered,
    verdict_of,
    with_rank,
)
from bot import rendering
from diagnosis import stalls
from diagnosis.engine import diagnose
from diagnosis.evidence import CollectiveTable, Evidence, MetricRow
from diagnosis.verdict import Verdict
from probes.records import Communicator, Event, Op, Probe
from tests.diagnosis.test_host_causes import asleep_by

S, MS = 10**9, 10**6
STEPS, AT, LONG = 400, 200, 6_000.0
WATCHING = [Probe(name=name, state="on") for name in ("cgroup", "signals", "storage")]


def stood(state: str = "asleep", rank: int = 2, at: int = AT, ms: float = LONG, **more: int) -> Plan:
    """A healthy job of 29 ms per step but for one step of one rank."""
    made = plan(**{"steps": STEPS, "seed": 3, **more})
    getattr(made, state)[rank, at] += ms
    return made


def told(made: Plan, reason: str = "", rank: int = 2, at: int = AT, ms: float = LONG) -> Evidence:
    """The job's evidence; reasons for sleeping are told: collectives on futexes, else on purpose, and of the rank
    in that step for ``reason``."""
    evidence, truth = build(made)
    for number, life in list(evidence.ranks.items()):
        thread = asleep_by(life, life.threads[0], {"sleep": 1.0})
        if number == rank and reason and reason != "sleep":
            begin = int(truth.begins_ns[at])
            here = np.clip(thread.at_ns - begin, 0, int(ms * MS))
            by = dict(thread.blocked_by)
            by["sleep"] = by["sleep"] - here
            by[reason] = by.get(reason, np.zeros_like(here)) + here
            thread = replace(thread, blocked_by=by)
        evidence = with_rank(evidence, number, threads=[thread, *life.threads[1:]])
    return replace(evidence, probes={"node-a": WATCHING})


def with_stop(evidence: Evidence, rank: int, begin_ns: int, ms: float = LONG) -> Evidence:
    """What the probe of signals tells of it: once a second, and when it ended."""
    end_ns = begin_ns + int(ms * MS)
    first, last = (begin_ns - T0) // S, (end_ns - T0) // S
    rows = [
        MetricRow(
            T0 + at * S,
            T0 + (at + 1) * S,
            "stopped_ns",
            "ns",
            (("by", "gdb"), ("by_pid", "77"), ("process", "rank")),
            float(min(end_ns, T0 + (at + 1) * S) - max(begin_ns, T0 + at * S)),
        )
        for at in range(first, last + 1)
    ]
    event = Event(
        kind="process-stopped", at_ns=begin_ns, detail="stopped by SIGSTOP", job="job-123", rank=rank
    )
    return with_rank(replace(evidence, events=[event]), rank, metrics=rows)


def begins(made: Plan, at: int = AT) -> int:
    return int(build(made)[1].begins_ns[at])


def doubts(verdict: Verdict) -> list[str]:
    return [gap for gap in verdict.not_seen if "kept the others waiting" in gap]


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


class TestNobodyIsBlamedFor:
    """What others do for good reasons, and what cannot be told from it."""

    @pytest.mark.parametrize(
        "reason", ["storage-write", "network-send", "futex", "poll", "child", "sleep", "other"]
    )
    def test_what_a_checkpoint_of_one_rank_does(self, reason):
        verdict = diagnose(told(stood(rank=0), reason, rank=0))
        assert (verdict.status, blamed(verdict)) == ("healthy", [])
        (doubt,) = doubts(verdict)
        assert "rank 0" in doubt
        assert "a checkpoint or an evaluation on one rank looks like that" in doubt
        assert "once, for 6.0 s" in doubt

    def test_running(self):
        verdict = diagnose(told(stood("running", rank=0)))
        assert (verdict.status, blamed(verdict), len(doubts(verdict))) == ("healthy", [], 1)
        assert "running on a CPU (6.0 s)" in doubts(verdict)[0]

    def test_what_nothing_tells_of(self):
        """No probe of the host: it may have written."""
        verdict = verdict_of(stood())
        assert (verdict.status, blamed(verdict), len(doubts(verdict))) == ("healthy", [], 1)

    def test_checkpoints_that_come_again(self):
        made = stood("running", rank=0, at=100)
        made.running[0, 310] += LONG
        verdict = diagnose(told(made))
        assert (verdict.status, blamed(verdict)) == ("healthy", [])
        (doubt,) = doubts(verdict)
        assert "2 times, for 12.0 s" in doubt

    @pytest.mark.parametrize("ms", [2_500.0, LONG])
    def test_checkpoints_that_come_regularly(self, ms):
        made = plan(steps=STEPS, seed=3)
        made.running[0, 50::90] += ms
        verdict = diagnose(told(made))
        assert (verdict.status, blamed(verdict), len(doubts(verdict))) == ("healthy", [], 1)

    def test_a_crowded_fault_on_every_fiftieth_step(self):
        """As long as a pause, but for want of a CPU: no checkpoint, and left to the tests of steps."""
        made = plan(steps=STEPS, seed=3)
        made.running[2, 49::50] += 700.0
        made.runnable[2, 49::50] += np.array([1.3, 4.0, 1.6, 2.0, 3.9, 1.8, 3.0, 2.5]) * 1_000
        verdict = diagnose(told(made))
        assert "stood still" not in verdict.summary
        assert doubts(verdict) == []
        assert blamed(verdict) == [2]

    def test_slow_steps_in_a_row(self):
        made = plan(steps=STEPS, seed=3)
        made.runnable[2, 200:203] += 1_500.0
        assert "stood still" not in diagnose(told(made)).summary
        made = plan(steps=STEPS, seed=3)
        made.runnable[2, 200:202] += 1_500.0
        assert "stood still once, for 3.0 s" in diagnose(told(made)).summary

    @pytest.mark.parametrize(("hiccup", "named"), [(300.0, [2]), (800.0, [])])
    def test_what_is_little_beside_other_long_steps(self, hiccup, named):
        made = stood("runnable", ms=2_000)
        made.runnable[1, [90, 300]] += hiccup
        made.runnable[3, [60, 350]] += hiccup
        assert blamed(diagnose(told(made))) == named
        made = stood(ms=2_000)
        made.runnable[1, [90, 300]] += hiccup
        assert blamed(diagnose(told(made, "stopped", ms=2_000))) == [2], "whoever was stopped was stopped"

    @pytest.mark.parametrize("spread", [1.0, 0.8, 0.4])
    def test_a_pause_that_all_take_part_in(self, spread):
        """A checkpoint of all, an evaluation: some are longer busy than others."""
        made = stood(rank=2)
        for rank in (0, 1, 3):
            made.asleep[rank, AT] += spread * LONG
        verdict = diagnose(told(made, "storage-read"))
        assert (verdict.status, blamed(verdict), doubts(verdict)) == ("healthy", [], [])

    def test_a_short_pause_in_which_all_do_something(self):
        made = stood(ms=3_000)
        for rank in (0, 1, 3):
            made.asleep[rank, AT] += 900.0
        assert blamed(diagnose(told(made, "storage-read", ms=3_000))) == []

    def test_a_wait_of_most_ranks(self):
        made = stood("runnable")
        made.runnable[:2, AT] += LONG
        assert "stood still" not in diagnose(told(made)).summary

    def test_a_stop_while_all_others_work(self):
        made = stood()
        for rank in (0, 1, 3):
            made.running[rank, AT] += LONG
        assert blamed(diagnose(with_stop(told(made, "stopped"), 2, begins(made)))) == []

    def test_a_slowdown_that_begins_with_its_longest_step(self):
        """And that goes on: of the steps since each is long, the last one as a pause is."""
        made = stood("runnable", steps=220)
        made.runnable[2, AT + 1 :] += 900.0
        made.runnable[2, -2] += 2_600.0
        assert "stood still" not in diagnose(told(made)).summary

    def test_a_barrier_that_ordinary_steps_do_not_have(self):
        made = stood()
        evidence = with_barrier(told(made, "storage-read"), begins(made))
        assert blamed(diagnose(told(made, "storage-read"))) == [2]
        assert (diagnose(evidence).status, blamed(diagnose(evidence))) == ("healthy", [])

    def test_the_first_steps(self):
        verdict = diagnose(told(stood(at=6), "storage-read", at=6))
        assert (verdict.status, blamed(verdict)) == ("healthy", [])
        assert "in the first steps" in doubts(verdict)[0]
        assert blamed(diagnose(told(stood(at=6), "stopped", at=6))) == [2]

    def test_what_comes_back_every_so_many_steps(self):
        made = plan(steps=STEPS, seed=3)
        made.runnable[2, 50::90] += 1_500.0
        assert "stood still" not in diagnose(told(made)).summary
        made = plan(steps=STEPS, seed=3)
        for at in (50, 200, 230):
            made.runnable[2, at] += 1_500.0
        verdict = diagnose(told(made))
        assert blamed(verdict) == [2]
        assert "3 times, for 4.5 s" in verdict.summary

    def test_the_whole_job_stopped(self):
        made = plan(steps=STEPS, seed=3)
        made.asleep[:, AT] += LONG
        evidence = told(made)
        for rank in range(4):
            evidence = with_stop(evidence, rank, begins(made))
        verdict = diagnose(evidence)
        assert (verdict.status, blamed(verdict)) == ("healthy", [])
        assert any("a pause of 6,0" in gap for gap in verdict.not_seen)

    def test_a_transfer_that_took_long_once(self):
        made = plan(steps=STEPS, seed=3)
        made.transfer[AT] += LONG
        verdict = diagnose(told(made))
        assert (verdict.status, blamed(verdict), doubts(verdict)) == ("healthy", [], [])

    def test_less_than_a_second(self):
        verdict = diagnose(told(stood(ms=900), "stopped", ms=900))
        assert "stood still" not in verdict.summary

    def test_less_than_ten_steps(self):
        made = stood(ms=1_800, noise=0.02)
        for state in ("asleep", "running", "transfer"):
            getattr(made, state)[...] *= 7
        made.asleep[2, AT] = 140.0 + 1_800.0
        verdict = diagnose(told(made, "stopped", ms=1_800))
        assert verdict.step_ms is not None
        assert verdict.step_ms > 190
        assert "stood still" not in verdict.summary

    def test_batches_that_are_missing(self):
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
    def test_a_crowded_machine(self, seed):
        verdict = verdict_of(noisy(seed=seed, steps=600))
        assert "stood still" not in verdict.summary
        assert doubts(verdict) == []


def with_barrier(evidence: Evidence, begin_ns: int) -> Evidence:
    """In the step that begins then all but rank 2 wait for it in another group."""
    for number, life in list(evidence.ranks.items()):
        table = life.collectives
        place = int(np.searchsorted(table.enter_ns, begin_ns + 100))
        enter = begin_ns + (int(LONG * MS) if number == 2 else 2 * MS)
        row = {
            "communicator": 1,
            "seq": 0,
            "op": int(Op.BARRIER),
            "bytes": 0,
            "enter_ns": enter,
            "duration_ns": begin_ns + int((LONG + 1) * MS) - enter,
            "failed": False,
        }
        columns = {name: np.insert(getattr(table, name), place, value) for name, value in row.items()}
        pairs = [*life.communicators, Communicator(uid="saving", desc="", rank=number, size=4)]
        evidence = with_rank(evidence, number, collectives=CollectiveTable(**columns), communicators=pairs)
    return evidence


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
