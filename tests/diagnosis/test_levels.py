"""Sets of ranks that are slow together, and which of them explains the most with the least."""

import numpy as np
import pytest

from diagnosis.levels import SetFinding, comparable, explaining, found_sets
from diagnosis.shift import Shift


def differences(*levels: float, steps: int = 600) -> np.ndarray:
    """Ranks × steps, to peers, with small noise."""
    return np.array(levels)[:, None] + np.random.default_rng(1).normal(0, 0.5, (len(levels), steps))


NODES = {"node": {f"n{n}": [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3] for n in range(5)}}


def names(*levels: float, slow: dict[int, float] | None = None) -> list[str]:
    found = found_sets(differences(*levels), NODES, 40.0, 4.0, 2, slow or {})
    return [one.name for one in found]


def test_a_set_is_found_when_most_of_its_ranks_are_alike():
    assert names(*[15] * 4, *[0] * 16) == ["n0"]
    assert names(60, 0, 0, 0, *[0] * 16) == []  # one rank makes the mean
    assert names(*[3] * 4, *[0] * 16) == []  # too little to matter


def test_a_set_whose_ranks_were_found_one_by_one_needs_no_test_of_its_own():
    """Two sets and few steps: too few blocks for sets, enough for ranks."""
    two = {"node": {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}}
    slow = dict.fromkeys(range(4), 0.001)
    values = differences(*[15] * 4, *[-15] * 4, steps=60)
    assert [one.name for one in found_sets(values, two, 100.0, 10.0, 2, slow)] == ["a"]
    assert found_sets(values, two, 100.0, 10.0, 2, {}) == []


def test_only_sets_with_peers_outside_are_comparable():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    sets = {
        "node": {"stage": [0, 1, 2, 3], "half": [4, 5, 6], "other": [7, 8, 9], "alone": [11]},
        "rack": {"r": [4, 5]},
    }
    assert comparable(sets, groups) == {"node": {"half": [4, 5, 6], "other": [7, 8, 9]}}


def finding(name: str, *rows: int) -> SetFinding:
    return SetFinding("node", name, rows, 10.0, 0.001, Shift(10.0, 9.0, 11.0))


@pytest.mark.parametrize(
    ("slow", "told"),
    [
        ({0, 1}, ["a"]),
        ({0, 1, 2, 3}, ["ab"]),
        ({0, 1, 4, 5}, ["a", "c"]),
        ({0, 5}, []),
        ({0, 1, 2, 3, 4}, ["ab"]),  # the fifth is a finding of its own
    ],
)
def test_the_fewest_sets_that_explain(slow, told):
    sets = [finding("a", 0, 1), finding("b", 2, 3), finding("ab", 0, 1, 2, 3), finding("c", 4, 5)]
    assert sorted(one.name for one in explaining(sets, slow)) == told
    overlapping = [*sets, finding("wide", 1, 2, 3, 4, 5)]
    assert [one.name for one in explaining(overlapping, {1, 2, 3, 4, 5})] == ["wide"]


def test_a_set_that_adds_one_rank_only_is_not_told():
    crossing = [finding("a", 0, 1), finding("x", 1, 2)]
    assert [one.name for one in explaining(crossing, {0, 1, 2})] == ["a"]
