"""What the durations of a collective tell, of all ranks together."""

import numpy as np
import pytest

from diagnosis.joined import AT_ONCE, Joined


def table(enter: np.ndarray, duration: np.ndarray, seen: np.ndarray | None = None) -> Joined:
    ranks, count = enter.shape
    zeros = np.zeros(count, np.int64)
    return Joined(
        ("world", ranks, 0),
        tuple(range(ranks)),
        np.arange(count),
        zeros,
        zeros,
        enter.astype(np.int64),
        duration.astype(np.int64),
        np.ones(enter.shape, np.bool_) if seen is None else seen,
    )


def test_of_many_ranks_the_first_and_the_last_count():
    ranks = 2 * AT_ONCE + 5
    enter = np.tile([0, 1000], (ranks, 1))
    duration = np.full((ranks, 2), 500)
    duration[ranks - 1], duration[AT_ONCE] = [9, 700], [600, 8]
    found = table(enter, duration).durations
    assert found.shortest.tolist() == [9, 8]
    assert found.longest.tolist() == [600, 700]
    assert found.ended.tolist() == [ranks, ranks]
    assert found.overlaps.tolist() == [False]


@pytest.mark.parametrize("row", [0, AT_ONCE + 2])
def test_one_rank_that_goes_on_before_the_end_is_enough_for_an_overlap(row: int):
    ranks = AT_ONCE + 3
    enter = np.tile([0, 1000, 2000], (ranks, 1))
    duration = np.full((ranks, 3), 500)
    duration[row, 1] = 1001
    assert table(enter, duration).durations.overlaps.tolist() == [False, True]
    duration[row, 1] = 1000  # it ends as the next one begins
    assert table(enter, duration).durations.overlaps.tolist() == [False, False]


def test_what_was_not_seen_or_has_not_ended_tells_nothing():
    enter = np.array([[0, 1000, 2000], [0, 0, 2000], [0, 1000, 2000]])
    duration = np.array([[50, 60, -1], [70, -1, -1], [80, 40, -1]])
    seen = np.array([[True, True, True], [True, False, True], [True, True, True]])
    found = table(enter, duration, seen).durations
    assert found.ended.tolist() == [3, 2, 0]
    assert found.shortest.tolist() == [50, 40, np.iinfo(np.int64).max]
    assert found.longest.tolist() == [80, 60, -1]
    assert found.overlaps.tolist() == [False, False], (
        "the second was not seen of rank 1, whose 0 is no instant"
    )


def test_known_is_what_was_seen_to_end():
    enter = np.zeros((2, 2))
    joined = table(enter, np.array([[5, -1], [5, 5]]), np.array([[True, True], [False, True]]))
    assert joined.known().tolist() == [[True, False], [False, True]]
    assert joined.known(slice(1, None)).tolist() == [[False, True]]
