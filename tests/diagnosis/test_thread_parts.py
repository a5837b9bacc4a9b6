"""Threads are accounted many at a time, and each gets what it would get alone."""

from dataclasses import replace

import numpy as np
import pytest

from bench.synthetic import T0, build, noisy, with_rank
from diagnosis.evidence import Evidence, Ints, ThreadSeries
from diagnosis.steps import Steps, find_steps, join
from diagnosis.thread_parts import THREAD_PARTS, thread_parts

RANKS = 40
COLUMNS = ("at_ns", "running_ns", "runnable_ns", "blocked_ns", "uninterruptible_ns", "interrupted_ns")


def rows(thread: ThreadSeries, keep: np.ndarray | slice) -> ThreadSeries:
    return replace(thread, **{column: getattr(thread, column)[keep] for column in COLUMNS})


def job() -> Evidence:
    """Of many ranks, one of each kind: watched late, with a gap, robbed, starved, with two driving threads."""
    made = noisy(ranks=RANKS, steps=60, seed=5)
    made.buckets = 3
    made.starved[20] = 4.0
    evidence = build(made)[0]
    late, robbed, torn, twice = (evidence.ranks[rank].threads for rank in (7, 11, 33, 39))
    half = len(twice[0].at_ns) // 2
    evidence = with_rank(evidence, 7, threads=[rows(late[0], slice(70, None)), late[1]])
    stolen = replace(robbed[0], stolen_ns=np.full_like(robbed[0].stolen_ns, 50_000_000))
    evidence = with_rank(evidence, 11, threads=[stolen, robbed[1]])
    apart = (torn[0].at_ns < T0 + 10**9) | (torn[0].at_ns > T0 + 4 * 10**9)
    evidence = with_rank(evidence, 33, threads=[rows(torn[0], apart), torn[1]])
    first, second = rows(twice[0], slice(None, half)), rows(twice[0], slice(half - 1, None))
    return with_rank(evidence, 39, threads=[first, twice[1], replace(second, tid=77)])


def steps_of(evidence: Evidence) -> Steps:
    steps = find_steps(join(evidence.ranks))
    assert steps is not None
    return steps


def alone(evidence: Evidence, steps: Steps, rank: int) -> tuple[np.ndarray, np.ndarray]:
    row = [steps.row_of[rank]]
    mine = replace(
        steps, ranks=(rank,), start_ns=steps.start_ns[row], end_ns=steps.end_ns[row], seen=steps.seen[row]
    )
    parts, known = thread_parts({rank: evidence.ranks[rank]}, mine)
    return parts[:, 0], known[0]


def test_each_rank_gets_what_it_would_get_alone():
    evidence = job()
    steps = steps_of(evidence)
    parts, known = thread_parts(evidence.ranks, steps)
    for row, rank in enumerate(steps.ranks):
        mine, seen = alone(evidence, steps, rank)
        assert np.array_equal(parts[:, row], mine), rank
        assert known[row].tolist() == seen.tolist(), rank
    of = dict(zip(THREAD_PARTS, parts, strict=True))
    assert np.flatnonzero(of["stolen"].any(axis=1)).tolist() == [11]
    assert np.flatnonzero(of["communication"].any(axis=1)).tolist() == [20]
    assert 0 < known[7].sum() < known[0].sum()
    assert 0 < known[33].sum() < known[0].sum()
    assert (parts[:, ~known] == 0).all()


def test_steps_that_do_not_touch_are_accounted_the_same():
    evidence = job()
    steps = steps_of(evidence)
    whole, _ = thread_parts(evidence.ranks, steps)
    odd = np.arange(1, steps.count, 2)
    parts, _ = thread_parts(evidence.ranks, steps.columns(odd))
    assert np.allclose(parts, whole[:, :, odd], atol=1e-9)


def years_before(enter_ns: Ints) -> Ints:
    return np.concatenate([enter_ns[:1] - 10**17, enter_ns[1:]])


def set_back(at_ns: Ints) -> Ints:
    return np.concatenate([at_ns[:40], at_ns[40:-5] - 10**9, at_ns[-5:]])


@pytest.mark.parametrize("fault", ["a collective of years ago", "a clock that was set back for a while"])
def test_an_impossible_clock_of_one_rank_is_no_other_ranks_matter(fault: str):
    evidence = job()
    steps = steps_of(evidence)
    here, _ = thread_parts(evidence.ranks, steps)
    rank = evidence.ranks[3]
    if fault == "a collective of years ago":
        table = rank.collectives
        spoilt = with_rank(evidence, 3, collectives=replace(table, enter_ns=years_before(table.enter_ns)))
    else:
        driving = replace(rank.threads[0], at_ns=set_back(rank.threads[0].at_ns))
        spoilt = with_rank(evidence, 3, threads=[driving, rank.threads[1]])
    there, _ = thread_parts(spoilt.ranks, steps)
    others = [row for row in range(RANKS) if row != 3]
    assert np.array_equal(here[:, others], there[:, others])


def test_a_communication_thread_that_was_watched_longer_than_the_driving_one_counts_only_beside_it():
    evidence = job()
    steps = steps_of(evidence)
    here, _ = thread_parts(evidence.ranks, steps)
    driving, thread = evidence.ranks[20].threads
    later = np.append(thread.at_ns, thread.at_ns[-1] + np.arange(1, 4) * 10**12)
    grown = {
        column: np.append(getattr(thread, column), getattr(thread, column)[-1] + np.arange(1, 4) * 10**7)
        for column in COLUMNS
        if column != "at_ns"
    }
    longer = replace(thread, at_ns=later, **grown)
    there, _ = thread_parts(with_rank(evidence, 20, threads=[driving, longer]).ranks, steps)
    assert np.array_equal(here, there)
    # Its last own cuts are missing: what it waited until the next, long after, falls on what is left of the waits.
    torn = rows(longer, np.r_[: len(thread.at_ns) - 20, len(thread.at_ns) : len(later)])
    evidence = with_rank(evidence, 20, threads=[driving, torn])
    there, _ = thread_parts(evidence.ranks, steps)
    assert np.array_equal(there[:, steps.row_of[20]], alone(evidence, steps, 20)[0])
    assert not np.array_equal(here, there)


def test_counters_that_began_long_ago_change_nothing():
    evidence = job()
    steps = steps_of(evidence)
    here, _ = thread_parts(evidence.ranks, steps)
    for rank in range(0, RANKS, 2):  # their threads slept for a month before
        threads = [
            replace(thread, blocked_ns=thread.blocked_ns + 30 * 86_400 * 10**9)
            for thread in evidence.ranks[rank].threads
        ]
        evidence = with_rank(evidence, rank, threads=threads)
    assert np.array_equal(here, thread_parts(evidence.ranks, steps)[0])


def test_of_two_driving_threads_at_once_the_first_counts():
    evidence = job()
    steps = steps_of(evidence)
    here, _ = thread_parts(evidence.ranks, steps)
    first, other = evidence.ranks[0].threads
    idle = replace(first, tid=77, running_ns=first.running_ns * 0, blocked_ns=first.at_ns - T0)
    there, _ = thread_parts(with_rank(evidence, 0, threads=[first, other, idle]).ranks, steps)
    assert np.array_equal(here, there)
