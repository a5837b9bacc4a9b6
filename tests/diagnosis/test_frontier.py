"""The frontier's phases sum to the longest rank's step, whoever leads where."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from diagnosis.frontier import frontier


def test_the_published_rule_on_two_ranks():
    # Rank 0 takes 5 and 1, rank 1 takes 2 and 6: the front moves to 5, then to 8.
    got = frontier(np.array([[[5.0], [1.0]], [[2.0], [6.0]]]))
    assert got.exposed[:, 0].tolist() == [5.0, 3.0]
    assert got.leader[:, 0].tolist() == [0, 1]
    assert got.share.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_two_that_lead_by_turns_are_co_critical():
    durations = np.ones((3, 1, 10))
    durations[0, 0, ::2] = durations[1, 0, 1::2] = 9.0
    got = frontier(durations)
    assert got.co_critical[0].tolist() == [True, True, False]
    assert got.share[0].tolist() == [0.5, 0.5, 0.0]


def test_one_that_always_leads_is_not():
    durations = np.ones((3, 2, 10))
    durations[2, 1] = 4.0
    assert frontier(durations).co_critical[1].tolist() == [False, False, True]


@given(arrays(np.float64, (4, 3, 5), elements=st.floats(0.0, 1e4)))
def test_phases_sum_to_the_step_of_the_longest(durations):
    got = frontier(durations)
    assert np.allclose(got.exposed.sum(axis=0), durations.sum(axis=1).max(axis=0))
    assert (got.exposed >= -1e-9).all(), "time does not run back"
