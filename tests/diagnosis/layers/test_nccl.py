"""Late arrivals, without synchronised clocks."""

from dataclasses import replace

import numpy as np
import pytest

from bench.synthetic import build, plan, with_clock_offset
from diagnosis.layers.nccl import after_last_arrival, ends_at_enqueue, lateness, lateness_per_step, timing
from diagnosis.steps import Joined, Steps, find_steps, join
from probes.records import Op, TimedBy


def table(enter: list[list[int]], duration: list[list[int]], op: Op = Op.ALLREDUCE) -> Joined:
    """Ranks × collectives, in ms."""
    count = len(enter[0])
    return Joined(
        key=("world", len(enter), 0),
        ranks=tuple(range(len(enter))),
        seq=np.arange(count),
        op=np.full(count, op, np.int64),
        bytes=np.full(count, 8, np.int64),
        enter_ns=np.array(enter) * 1_000_000,
        duration_ns=np.where(np.array(duration) < 0, -1, np.array(duration) * 1_000_000),
        seen=np.ones((len(enter), count), np.bool_),
    )


def step(joined: Joined, first: int, last: int) -> Steps:
    return Steps(
        communicator=joined.key,
        ranks=joined.ranks,
        seq=np.array([first]),
        next_seq=np.array([last]),
        start_ns=joined.enter_ns[:, [first]],
        end_ns=joined.enter_ns[:, [last]],
        seen=np.ones((len(joined.ranks), 1), np.bool_),
    )


def test_the_last_to_arrive_has_the_shortest_duration():
    late, known = lateness(table([[100, 200], [122, 201]], [[25, 5], [3, 4]]))
    assert late.tolist() == [[0, 0], [22, 1]]
    assert known.all()


@pytest.mark.parametrize("op", [Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER, Op.SEND])
def test_collectives_that_ranks_leave_alone_say_nothing(op):
    assert not lateness(table([[100], [122]], [[25], [3]], op))[1].any()


def test_one_that_has_not_ended_says_nothing():
    late, known = lateness(table([[100], [122], [101]], [[25], [-1], [24]]))
    assert known[:, 0].tolist() == [True, False, True]
    assert late[:, 0].tolist() == [0, 0, 1]


def test_overlapping_buckets_count_once():
    # Rank 1 comes 20 ms late to the first bucket, 22 to the second, which both enter before the first ends.
    joined = table([[0, 100, 110, 200], [0, 120, 132, 200]], [[5, 25, 30, 5], [5, 5, 8, 5]])
    per_step, known = lateness_per_step(joined, step(joined, 0, 3))
    assert per_step[:, 0].tolist() == [0, 22]
    assert known.all()


def test_collectives_one_after_the_other_add_up():
    joined = table([[0, 100, 200, 300], [0, 120, 207, 300]], [[5, 25, 12, 5], [5, 5, 5, 5]])
    per_step, _ = lateness_per_step(joined, step(joined, 0, 3))
    assert per_step[:, 0].tolist() == [0, 27]


@pytest.mark.parametrize("overlapping", [False, True])
def test_of_many_ranks_each_is_as_late_as_it_came(overlapping):
    """All leave 1 ms after the last arrival; rank r comes r ms late to the first of two, 2 r to the second."""
    ranks = 70
    late = np.arange(ranks)[:, None] * [0, 1, 2, 0]
    begin = np.array([0, 100, 110, 500] if overlapping else [0, 100, 300, 500])
    enter = begin + late
    end = enter.max(axis=0) + 1
    joined = table(enter.tolist(), (end - enter).tolist())
    per_step, known = lateness_per_step(joined, step(joined, 0, 3))
    assert known.all()
    # A rank that is late in the first bucket is late in the second, too: that counts once.
    assert per_step[:, 0].tolist() == [r * (2 if overlapping else 3) for r in range(ranks)]


def test_lateness_follows_the_ranks_of_the_steps():
    joined = table([[0, 100, 200], [0, 120, 200], [0, 105, 200]], [[5, 25, 5], [5, 5, 5], [5, 20, 5]])
    asked = replace(step(joined, 0, 2), ranks=(2, 0, 1))
    assert lateness_per_step(joined, asked)[0][:, 0].tolist() == [5, 0, 20]


def test_one_rank_whose_end_was_lost_leaves_only_itself_unknown_and_only_in_that_step():
    ranks, count = 70, 5
    enter = np.tile(np.arange(count) * 100, (ranks, 1))
    enter[50] += 7
    duration = np.full((ranks, count), 10)
    duration[50] -= 7
    duration[69, 2] = -1
    joined = table(enter.tolist(), duration.tolist())
    one, another = step(joined, 0, 2), step(joined, 2, 4)
    late, known = lateness_per_step(joined, one)
    assert np.flatnonzero(~known[:, 0]).tolist() == [69]
    assert np.flatnonzero(late[:, 0]).tolist() == [50]
    assert late[50, 0] == 14
    assert lateness_per_step(joined, another)[1].all()


def test_after_the_last_arrival_the_shortest_duration_is_left():
    joined = table([[0, 100, 200], [0, 120, 200]], [[7, 25, 5], [6, 5, 5]])
    assert after_last_arrival(joined, step(joined, 0, 2)).tolist() == [11.0]


def test_of_overlapping_buckets_the_last_is_left():
    joined = table([[0, 100, 110, 200], [0, 120, 132, 200]], [[5, 25, 30, 5], [5, 5, 8, 5]])
    assert after_last_arrival(joined, step(joined, 1, 3)).tolist() == [8.0]


@pytest.mark.parametrize(("duration", "op"), [([[25], [-1]], Op.ALLREDUCE), ([[25], [3]], Op.BROADCAST)])
def test_where_the_last_arrival_is_not_known_there_is_no_limit(duration, op):
    joined = table([[0, 50], [22, 50]], [[*row, 5] for row in duration], op)
    limit = after_last_arrival(joined, step(joined, 0, 1))
    assert limit.tolist() == ([25.0] if op == Op.ALLREDUCE else [np.inf])


def test_on_a_job_the_sleeper_is_late_whatever_the_clocks_say():
    made = plan(steps=200, buckets=2)
    made.asleep[2] += 20.0
    evidence, _ = build(made, nodes=["a", "b", "c", "c"])
    evidence = with_clock_offset(evidence, "c", 5_000_000_000)
    joined = join(evidence.ranks)
    steps = find_steps(joined)
    assert steps is not None
    per_step, known = lateness_per_step(joined[steps.communicator], steps)
    assert known.all()
    assert per_step[2].mean() == pytest.approx(20.0, abs=1.5)
    assert per_step[[0, 1, 3]].mean() < 1.5


def test_over_several_communicators_lateness_adds_up_in_the_ranks_own_steps():
    world = table([[0, 100, 200], [0, 120, 200]], [[5, 25, 5], [5, 5, 5]])
    pair = table([[50, 150], [50, 157]], [[3, 10], [3, 3]])
    steps = step(world, 0, 2)
    got = timing([world, pair], steps)
    assert got.late_ms[:, 0].tolist() == [0.0, 27.0]
    assert got.after_last_ms[:, 0].tolist() == [16.0, 16.0], "5 + 5 and 3 + 3"


@pytest.mark.parametrize(
    ("uid", "size", "duration_us", "timed_by", "enqueued"),
    [
        ("w", 50_000_000, 20, TimedBy.HOST, True),  # 2.5 TB/s
        ("w", 50_000_000, 9_000, TimedBy.HOST, False),
        ("w", 50_000_000, 20, TimedBy.DEVICE, False),
        ("w", 8, 20, TimedBy.HOST, False),  # too small to tell
        ("nccl:0", 8, 20, TimedBy.HOST, True),
    ],
)
def test_durations_that_no_transfer_can_have_end_at_enqueue(uid, size, duration_us, timed_by, enqueued):
    evidence, _ = build(plan(steps=50), uid=uid)
    rank = evidence.ranks[0]
    count = len(rank.collectives.seq)
    collectives = replace(
        rank.collectives,
        bytes=np.full(count, size),
        duration_ns=np.full(count, duration_us * 1000),
        op=np.full(count, int(Op.ALLREDUCE)),
    )
    assert ends_at_enqueue(replace(rank, collectives=collectives, timed_by=timed_by)) == enqueued
