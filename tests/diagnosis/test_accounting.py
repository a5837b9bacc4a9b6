"""Every millisecond of a step is somebody's, and what is waited for others is not the rank's own."""

from dataclasses import replace

import numpy as np
import pytest

from bench.synthetic import T0, build, noisy, plan, with_clock_offset, with_rank
from diagnosis.accounting import THREAD_PARTS, Account, account, sum_parts
from diagnosis.evidence import CollectiveTable, Evidence
from diagnosis.layers.nccl import after_last_arrival
from diagnosis.steps import find_steps, join
from diagnosis.thread_parts import waiting_intervals


def accounted(evidence: Evidence) -> Account:
    steps = find_steps(join(evidence.ranks))
    assert steps is not None
    return account(evidence.ranks, steps, after_last_arrival(join(evidence.ranks)[steps.communicator], steps))


def means(got: Account) -> dict[str, list[float]]:
    return {part: values.mean(axis=1).tolist() for part, values in got.parts.items()}


@pytest.mark.parametrize("make", [plan, noisy])
def test_parts_sum_to_the_step(make):
    got = accounted(build(make(steps=400))[0])
    assert got.seen.all()
    assert np.allclose(sum_parts(got.parts), got.wall, atol=1e-3)
    assert all((values > -1e-3).all() for values in got.parts.values())


@pytest.mark.parametrize("buckets", [1, 2, 3])
def test_parts_are_those_of_the_simulation(buckets):
    made = plan(steps=400, buckets=buckets)
    made.runnable[1] += 7.0
    made.asleep[2] += 12.0
    got = accounted(build(made)[0])
    for part, truth in (("running", made.running), ("runnable", made.runnable), ("blocked", made.asleep)):
        assert means(got)[part] == pytest.approx(truth.mean(axis=1).tolist(), abs=0.15), part
    own = (made.running + made.runnable + made.asleep).mean(axis=1)
    assert got.own.mean(axis=1).tolist() == pytest.approx(own.tolist(), abs=0.15)


def test_a_wait_shorter_than_the_merged_cuts_is_still_found():
    made = plan(steps=300, noise=0.0)  # all arrive together and wait 2 ms: no cut marks its end
    assert means(accounted(build(made)[0]))["waiting"] == pytest.approx([2.0] * 4, abs=0.02)


def test_starved_communication_threads_are_the_ranks_own_time():
    made = plan(steps=300, noise=0.0)
    made.starved[3] = 15.0
    got = means(accounted(build(made)[0]))
    assert got["communication"] == pytest.approx([0, 0, 0, 15.0], abs=0.1)
    assert got["waiting"] == pytest.approx([17.0, 17.0, 17.0, 2.0], abs=0.1)


def test_communication_threads_starved_while_the_last_rank_is_still_to_come_cost_nothing():
    made = plan(steps=300, noise=0.0)
    made.asleep[0] += 30.0
    evidence, _ = build(made)
    driving, thread = evidence.ranks[3].threads
    runnable = np.arange(len(thread.at_ns)) * 12_000_000  # 12 ms in each collective, which takes 32 ms here
    starved = replace(thread, runnable_ns=runnable, blocked_ns=thread.at_ns - T0 - runnable)
    got = means(accounted(with_rank(evidence, 3, threads=[driving, starved])))
    assert got["communication"][3] == pytest.approx(2.0, abs=0.01), "the transfer took 2 ms once all had come"
    assert got["waiting"][3] == pytest.approx(30.0, abs=0.1)


def test_communication_threads_that_want_a_cpu_while_nobody_waits_cost_nothing():
    evidence, _ = build(plan(steps=300, noise=0.0))
    driving, thread = evidence.ranks[3].threads
    # One more cut 20 ms after each completion, at 10 ms of run-queue wait: all before the next arrival.
    at = np.sort(np.concatenate([thread.at_ns, thread.at_ns[:-1] + 20_000_000]))
    runnable = np.repeat(np.arange(len(thread.at_ns)), 2)[1:] * 10_000_000
    busy = replace(
        thread,
        at_ns=at,
        runnable_ns=runnable,
        **{
            name: np.zeros_like(at)
            for name in ("running_ns", "blocked_ns", "uninterruptible_ns", "interrupted_ns")
        },
    )
    got = means(accounted(with_rank(evidence, 3, threads=[driving, busy])))
    assert got["communication"] == [0, 0, 0, 0]


def test_stolen_and_interrupted_time_leave_running():
    evidence, _ = build(plan(steps=300, noise=0.0))
    thread, other = evidence.ranks[0].threads
    thread = replace(
        thread,
        interrupted_ns=thread.running_ns // 8,
        stolen_ns=np.full_like(thread.stolen_ns, 60_000_000),  # in each of 9 s, over 300 steps
    )
    got = means(accounted(with_rank(evidence, 0, threads=[thread, other])))
    assert got["interrupted"][0] == pytest.approx(1.0, abs=0.01)
    assert got["stolen"][0] == pytest.approx(9 * 60 / 300, rel=0.03)
    assert got["running"][0] == pytest.approx(8.0 - 1.0 - 9 * 60 / 300, rel=0.03)
    assert got["running"][1] == pytest.approx(8.0, abs=0.01)


def test_a_step_across_missing_batches_is_not_accounted():
    evidence, _ = build(plan(steps=600, noise=0.0))
    thread, other = evidence.ranks[0].threads
    keep = (thread.at_ns < T0 + 5 * 10**9) | (thread.at_ns > T0 + 9 * 10**9)
    columns = ("at_ns", "running_ns", "runnable_ns", "blocked_ns", "uninterruptible_ns", "interrupted_ns")
    cut = replace(thread, **{column: getattr(thread, column)[keep] for column in columns})
    got = accounted(with_rank(evidence, 0, threads=[cut, other]))
    assert (~got.seen[0]).sum() == pytest.approx(4000 / 29, abs=2)
    assert got.seen[1:].all()
    assert got.parts["running"][0][~got.seen[0]].sum() == 0
    assert got.parts["running"][0][got.seen[0]].mean() == pytest.approx(8.0, abs=0.01)


def test_a_driving_thread_that_is_replaced_is_followed():
    evidence, _ = build(plan(steps=400, noise=0.0))
    thread, other = evidence.ranks[0].threads
    columns = ("at_ns", "running_ns", "runnable_ns", "blocked_ns", "uninterruptible_ns", "interrupted_ns")
    half = len(thread.at_ns) // 2
    first = replace(thread, **{column: getattr(thread, column)[:half] for column in columns})
    second = replace(thread, tid=77, **{column: getattr(thread, column)[half - 1 :] for column in columns})
    got = accounted(with_rank(evidence, 0, threads=[first, other, second]))
    assert (~got.seen[0]).sum() <= 1
    assert np.allclose(sum_parts(got.parts), got.wall, atol=1e-3)


def test_a_rank_without_a_driving_thread_is_not_seen():
    evidence, _ = build(plan(steps=200))
    got = accounted(with_rank(evidence, 2, threads=evidence.ranks[2].threads[1:]))
    assert got.seen.any(axis=1).tolist() == [True, True, False, True]


def test_another_clock_changes_nothing():
    evidence, _ = build(noisy(steps=300), nodes=["a", "b", "b", "a"])
    here, there = accounted(evidence), accounted(with_clock_offset(evidence, "b", -3_600_000_000_007))
    for part in THREAD_PARTS:
        assert np.array_equal(here.parts[part], there.parts[part])


def collectives(enter: list[int], duration: list[int]) -> CollectiveTable:
    zeros = np.zeros(len(enter), np.int64)
    return CollectiveTable(
        zeros,
        np.arange(len(enter)),
        zeros,
        zeros,
        np.array(enter),
        np.array(duration),
        zeros.astype(np.bool_),
    )


@pytest.mark.parametrize(
    ("enter", "duration", "intervals"),
    [
        ([10, 100], [5, 5], [(10, 15), (100, 105)]),
        ([10, 12], [40, 38], [(12, 50)]),  # buckets: nobody waits before the last one is on its way
        ([10, 20, 60], [45, 5, 5], [(20, 25), (25, 55), (60, 65)]),  # one may be waited for after a later one
        ([10, 100], [-1, 5], [(10, 100), (100, 105)]),  # its end was lost
        ([10, 100], [5, -1], [(10, 15), (100, 999)]),  # still under way
        ([], [], []),
    ],
)
def test_where_a_thread_can_wait(enter, duration, intervals):
    begin, end = waiting_intervals(collectives(enter, duration), 999)
    merged: list[tuple[int, int]] = []
    expected: list[tuple[int, int]] = []
    for target, source in ((merged, zip(begin.tolist(), end.tolist(), strict=True)), (expected, intervals)):
        for first, last in source:
            if target and target[-1][1] == first:
                target[-1] = (target[-1][0], last)
            else:
                target.append((first, last))
    assert merged == expected
