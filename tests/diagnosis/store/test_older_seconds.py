"""Seconds that older versions of the store wrote are read as they were, also among new ones."""

import msgspec
import pytest

from diagnosis.store import seconds
from diagnosis.store.columns import OPERATIONS, THREAD, ThreadKey, Who
from probes.records import Waker
from tests.diagnosis.store import older
from tests.diagnosis.store.drawn_seconds import blocked_by, rows
from tests.probes.batches import SECOND, a_rank


def test_a_second_that_an_older_version_wrote_is_read_as_it_was():
    read = seconds.unpack([older.RECORDED_SECOND])
    assert rows(read.batches, "start_ns", "end_ns") == [(3 * SECOND, 4 * SECOND)]
    assert read.dtypes == ["bf16", "f32"]
    names = ("enter_ns", "communicator", "seq", "op", "duration_ns", "failed", "bytes", "dtype")
    assert rows(read.collectives, *names) == [
        (3 * SECOND + 1, 0, 6, 1, 5, 6, 4096, 1),
        (3 * SECOND + 2, 0, 7, 1, 6, 1, -1, 0),
        (3 * SECOND + 3, 0, 8, 1, -1, 4, 1 << 40, 1),
    ]
    driving, communication = ThreadKey(101, 0, 7), ThreadKey(0, 1, 8)
    assert list(read.threads) == [communication, driving]
    assert rows(read.threads[communication], *THREAD) == []
    assert rows(read.threads[driving], *THREAD) == [
        (3 * SECOND + 4, 10, 20, 30, 0, 1),
        (3 * SECOND + 5, 11, 20, -(1 << 62), 0, 2),
    ]
    assert rows(read.stolen[driving], "at_ns", "stolen_ns") == [(4 * SECOND, 40)]
    assert read.details().who == [
        Who(0, 7, "stress", "/user", "", -1, kernel=False),
        Who(1, 0, "swapper/0", "", "job-2", 1, kernel=True),
    ]
    assert rows(read.details().occupants, "start_ns", "end_ns", "who", "took_ns") == [
        (3 * SECOND, 4 * SECOND, 0, 30),
        (3 * SECOND, 4 * SECOND, 1, 5),
    ]
    assert read.kinds == ["a", "b"]
    assert rows(read.operations, *OPERATIONS) == [
        (3 * SECOND, 0, 0, 1, 2, 0, -1, 0),
        (3 * SECOND + 1, 1, 1, -1, 3, 1, 4, 0),
    ]


def test_a_second_of_the_version_before_is_read_as_it_was():
    read = seconds.unpack([older.RECORDED_SECOND_2])
    driving, communication = ThreadKey(101, 0, 0), ThreadKey(0, 1, 9)
    assert list(read.threads) == [communication, driving]
    assert len(read.threads[communication]) == 0
    assert rows(read.threads[driving], "at_ns", "running_ns") == [
        (3_250_000_000, 1_625_000_000),
        (3_750_000_000, 1_875_000_000),
    ]
    assert read.collectives["seq"].tolist() == [6, 7]
    assert read.details().who == [Who(0, 7, "stress", "/user", "", -1, kernel=False)]
    assert [len(told) for told in read.details()[2:]] == [0, 0, 0, 0, 0]
    waker = Waker(tid=101, reason="futex", pid=7, waker_tid=8, name="w", slept_ns=9)
    thread = msgspec.structs.replace(a_rank(4).threads[0], blocked_by={"futex": [4, 5]})
    new = seconds.pack(4 * SECOND, 5 * SECOND, a_rank(4, threads=[thread], wakers=[waker])).columns
    both = seconds.unpack([new, older.RECORDED_SECOND_2])
    assert blocked_by(both) == {driving: {"futex": [0, 0, 4, 5]}}
    assert rows(both.details().wakers, "start_ns", "slept_ns") == [(4 * SECOND, 9)]


@pytest.mark.parametrize("second", [0, 3, 127, 128, 1 << 40])
def test_seconds_of_old_and_new_stand_together(second):
    """An instant of any size stands where the newer format has its number."""
    start = second
    old = older.second(start, start + 1, a_rank(3))
    new = seconds.pack(start + 1, start + 2, a_rank(4)).columns
    read = seconds.unpack([new, old])
    assert rows(read.batches, "start_ns", "end_ns") == [(start, start + 1), (start + 1, start + 2)]
    assert read.collectives["seq"].tolist() == [6, 7, 8, 9]
    assert read.threads[ThreadKey(101, 0, 0)]["at_ns"].tolist() == [
        int(at * SECOND) for at in (3.25, 3.75, 4.25, 4.75)
    ]
