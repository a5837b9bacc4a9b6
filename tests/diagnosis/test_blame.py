"""Who holds the job up, in numbers."""

import numpy as np
import pytest

from diagnosis.blame import by_history, by_peers, cost_ms


def own(*levels: float, steps: int = 900, seed: int = 0) -> np.ndarray:
    """One metric: a level per rank with small noise. 1 × ranks × steps."""
    random = np.random.default_rng(seed)
    return np.array(levels)[None, :, None] + random.normal(0, 0.5, (1, len(levels), steps))


def found(
    values: np.ndarray, *groups: list[int], step_ms: float = 40.0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    blame = by_peers(values, list(groups) or [list(range(values.shape[1]))], step_ms)
    return blame.culprits, blame.odd


def test_half_of_the_ranks_can_be_slow_and_not_more():
    assert found(own(30, 45, 30, 45)) == ((1, 3), ())
    assert found(own(45, 45, 30, 45)) == ((), (2,))
    assert found(own(90, 60, 45, 30)) == ((0, 1), ())


def test_significant_is_not_enough():
    assert found(own(30, 33.5, 30, 30)) == ((), ())  # 3.5 ms is less than a tenth of the step
    assert found(own(3, 3.9, 3, 3, steps=3000), step_ms=4.0) == ((), ())  # 0.9 ms is less than a millisecond
    assert found(own(30, 34.5, 30, 30)) == ((1,), ())


def test_peers_are_compared_within_their_group():
    assert found(own(30, 30, 30, 60, 60, 60), [0, 1, 2], [3, 4, 5]) == ((), ())
    assert found(own(30, 38, 30, 60, 60, 60), [0, 1, 2], [3, 4, 5]) == ((1,), ())


def test_more_groups_make_the_test_stricter():
    one = by_peers(own(30, 38, 30), [[0, 1, 2]], 40.0)
    two = by_peers(own(30, 38, 30, 60, 60, 60), [[0, 1, 2], [3, 4, 5]], 40.0)
    assert two.tests[0, 1].q == 2 * one.tests[0, 1].q


def test_a_rank_without_peers_is_not_judged():
    assert found(own(30, 30, 30, 90), [0, 1, 2], [3]) == ((), ())


def test_history_finds_ranks_that_grew():
    before, after = own(30, 30, 30)[0], own(45, 30, 45, seed=1)[0]
    found = by_history(before, after, 47.0)
    assert list(found) == [0, 2]
    assert found[0].effect == pytest.approx(15.0, abs=0.1)
    assert found[0].q == pytest.approx(0.0005)  # 1 / 2,000: no relabelling reaches it
    assert by_history(before, own(33, 30, 30, seed=1)[0], 47.0) == {}


def test_history_blames_nobody_when_the_others_grew_nearly_as_much():
    before = own(30, 30, 30, 30)[0]
    assert by_history(before, own(36, 36, 33, 33, seed=1)[0], 47.0) == {}
    assert list(by_history(before, own(36, 36, 36, 30, seed=1)[0], 47.0)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("without", "cost"),
    [((0,), 10.0), ((1,), 0.0), ((0, 1), 25.0), ((0, 1, 2), 25.0), ((0, 1, 2, 3), 0.0)],
)
def test_cost_is_the_step_less_what_it_would_be(without, cost):
    values = np.repeat([[50.0], [40.0], [25.0], [25.0]], 60, axis=1)
    assert cost_ms([values], without) == cost


def test_stages_that_all_must_finish_cost_one_after_the_other():
    arriving = np.repeat([[50.0], [30.0], [25.0]], 60, axis=1)
    inside = np.repeat([[1.0], [9.0], [5.0]], 60, axis=1)
    assert cost_ms([arriving, inside], (0,)) == 20.0
    assert cost_ms([arriving, inside], (1,)) == 4.0
    assert cost_ms([arriving, inside], (0, 1)) == 25.0 + 4.0
