"""The rank-outlier test: valid on healthy ranks, sharp on slow ones, blind to the order of ranks."""

import numpy as np
import pytest

from diagnosis.growth import growth
from diagnosis.limits import ALPHA
from diagnosis.outliers import own_outliers, rank_outliers
from diagnosis.permutation import TooFewBlocksError, cut
from diagnosis.shift import hodges_lehmann, peer_difference


def healthy(seed: int, *, ranks: int = 4, steps: int = 900, memory: float = 0.9) -> np.ndarray:
    """One metric: autocorrelated noise, heavy-tailed, alike on all ranks. 1 × ranks × steps."""
    random = np.random.default_rng(seed)
    noise = random.normal(0.0, 1.0, (ranks, steps))
    for step in range(1, steps):
        noise[:, step] = memory * noise[:, step - 1] + np.sqrt(1 - memory**2) * noise[:, step]
    spikes = (random.random((ranks, steps)) < 0.005) * random.uniform(20.0, 100.0, (ranks, steps))
    return (30.0 + np.exp(noise) + spikes)[None]


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_difference_to_the_median_of_the_others(ranks):
    values = np.random.default_rng(ranks).integers(0, 5, (ranks, 50)).astype(float)  # with ties
    expected = [
        [values[r, k] - np.median(np.delete(values[:, k], r)) for k in range(50)] for r in range(ranks)
    ]
    assert np.array_equal(peer_difference(values), expected)


@pytest.mark.parametrize("memory", [0.9, 0.96])
def test_p_values_of_healthy_ranks_are_not_too_small(memory):
    smallest = np.array([rank_outliers(healthy(seed, memory=memory), 30.0).q.min() for seed in range(400)])
    # Two standard errors of 400 draws above the nominal levels.
    assert (smallest <= 0.05).mean() <= 0.05 + 0.022
    assert (smallest <= 0.01).mean() <= 0.01 + 0.010


def test_ignoring_autocorrelation_would_find_what_is_not_there():
    """The blocks are what keeps the test honest: on slow noise they are long."""
    slow = peer_difference(healthy(3, memory=0.98))
    fast = peer_difference(healthy(3, memory=0.0))
    assert cut(slow, 30.0).length > 2 * cut(fast, 30.0).length


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_a_slow_rank_is_found(ranks):
    values = healthy(1, ranks=ranks)
    values[0, 1] += 5.0
    test = rank_outliers(values, 30.0)
    assert test.q[0, 1] <= ALPHA
    assert test.effect[0, 1] == pytest.approx(5.0, abs=1.5)
    if ranks > 3:
        assert (np.delete(test.q[0], 1) > ALPHA).all()


def test_the_order_of_ranks_permutes_the_result_exactly():
    values = np.concatenate([healthy(1, ranks=5), healthy(2, ranks=5)])
    values[1, 3] += 3.0
    order = [3, 0, 4, 2, 1]
    here, there = rank_outliers(values, 30.0), rank_outliers(values[:, order], 30.0)
    assert np.array_equal(here.q[:, order], there.q)
    assert np.array_equal(here.effect[:, order], there.effect)


def test_a_constant_metric_is_no_finding_and_does_no_harm():
    values = np.concatenate([healthy(1), np.zeros((1, 4, 900)), np.full((1, 4, 900), 7.0)])
    values[0, 2] += 5.0
    test = rank_outliers(values, 30.0)
    assert (test.q[1:] == 1.0).all()
    assert test.q[0, 2] <= ALPHA


def test_ranks_that_are_all_equal_are_no_outliers():
    values = np.repeat(healthy(1)[:, :1], 4, axis=1)
    assert (rank_outliers(values, 30.0).q == 1.0).all()


def test_of_two_ranks_both_differ_alike():
    values = healthy(1, ranks=2)
    values[0, 0] += 5.0
    test = rank_outliers(values, 30.0)
    assert test.effect[0, 0] == -test.effect[0, 1]
    assert test.q[0, 0] == test.q[0, 1] <= ALPHA


@pytest.mark.parametrize(("ranks", "steps", "step_ms"), [(4, 59, 500.0), (4, 190, 30.0), (2, 80, 500.0)])
def test_too_few_blocks_are_said(ranks, steps, step_ms):
    with pytest.raises(TooFewBlocksError, match="watch longer"):
        rank_outliers(healthy(1, ranks=ranks, steps=steps, memory=0.0), step_ms)


def test_more_metrics_make_the_test_stricter():
    values = healthy(4)
    values[0, 1] += 0.35
    noise = np.concatenate([values, *(healthy(seed) for seed in range(10, 18))])
    assert rank_outliers(noise, 30.0).q[0, 1] > rank_outliers(values, 30.0).q[0, 1]


@pytest.mark.parametrize("memory", [0.0, 0.9, 0.96])
def test_p_values_of_ranks_that_did_not_grow_are_not_too_small(memory):
    series = [healthy(seed, memory=memory, steps=1200)[0] for seed in range(200)]
    smallest = np.array([growth(values[:, :700], values[:, 700:], 30.0).q.min() for values in series])
    assert (smallest <= 0.05).mean() <= 0.05 + 0.031
    assert (smallest <= 0.01).mean() <= 0.01 + 0.014


def test_a_rank_that_grew_is_found_and_the_others_are_not():
    values = healthy(1, steps=1200)[0]
    values[1, 700:] += 5.0
    test = growth(values[:, :700], values[:, 700:], 30.0)
    assert test.effect[1] == pytest.approx(5.0, abs=1.5)
    assert test.q[1] <= ALPHA
    assert (np.delete(test.q, 1) > ALPHA).all()


def test_a_rank_that_always_takes_the_same_did_not_grow():
    assert (growth(np.full((3, 300), 7.0), np.full((3, 300), 7.0), 30.0).q == 1.0).all()


def test_a_past_of_too_few_blocks_is_said():
    values = healthy(1, steps=300, memory=0.0)[0]
    with pytest.raises(TooFewBlocksError, match="watch longer"):
        growth(values[:, :60], values[:, 60:], 1000.0 / 150)  # a block of a second holds 150 steps


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_difference_to_the_others_that_were_seen(ranks):
    random = np.random.default_rng(ranks)
    values = random.integers(0, 5, (ranks, 60)).astype(float)
    values[random.random(values.shape) < 0.3] = np.nan
    for rank, step in np.ndindex(values.shape):
        others = np.delete(values[:, step], rank)
        others = others[~np.isnan(others)]
        expected = values[rank, step] - np.median(others) if len(others) else np.nan
        assert np.array_equal(peer_difference(values)[rank, step], expected, equal_nan=True)


def test_the_shift_is_the_median_of_pairwise_means_with_the_signed_rank_interval():
    values = np.array([-2.0, 1.0, 3.0, 4.0, 5.0, 6.5, 7.0, 9.0, 12.0, 30.0])
    shift = hodges_lehmann(values)
    means = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    assert shift.ms == np.median(means)
    # Hollander and Wolfe 1999, table A.4: P(W <= 3) = 0.0049 for n = 10, so 3 of 55 means are left out at each end.
    assert (shift.low, shift.high) == (means[3], means[-4])


def test_the_shift_of_six_blocks_reaches_from_the_smallest_to_the_largest():
    values = np.array([1.0, 2, 3, 4, 5, 9])
    assert (hodges_lehmann(values).low, hodges_lehmann(values).high) == (1.0, 9.0)


def wrongly_found(make, number: int = 100) -> float:
    """Share of healthy jobs in which anything is found by mean, by single steps or by drift."""
    found = 0
    for seed in range(number):
        test = own_outliers(make(np.random.default_rng(seed)), 100.0)
        found += min(test.q.min(), test.rare_q.min(), test.drift_q.min()) <= ALPHA
    return found / number


@pytest.mark.parametrize(
    "make",
    [
        lambda random: random.standard_t(2, (1, 8, 120)),
        lambda random: np.round(random.normal(0, 1, (1, 6, 200))),
        lambda random: random.normal(0, 1, (1, 4, 200)) * np.array([5, 1, 1, 1])[:, None],
        lambda random: random.normal(0, 1, (6, 4, 120)),
        lambda random: np.where(random.random((1, 6, 200)) < 0.3, np.nan, random.normal(0, 1, (1, 6, 200))),
        lambda random: random.normal(0, 1, (1, 40, 120)),
    ],
    ids=["heavy tails", "ties", "one restless rank", "many groups", "missing steps", "many ranks"],
)
def test_healthy_ranks_are_seldom_found(make):
    assert wrongly_found(make) <= 0.01 + 0.02  # two standard errors of 100 draws


def test_a_restless_rank_does_not_hide_behind_its_noise_when_it_is_slow():
    random = np.random.default_rng(3)
    values = random.normal(30, 1, (1, 4, 600))
    values[0, 2] += 10 + random.normal(0, 5, 600)
    test = own_outliers(values, 100.0)
    assert test.q[0, 2] <= ALPHA
    assert (np.delete(test.q[0], 2) > ALPHA).all()


def test_one_long_pause_is_no_slow_rank_and_hides_none():
    values = np.random.default_rng(4).normal(30, 1, (1, 4, 600))
    values[0, 0, 300:303] += 5_000
    values[0, 1] += 6
    test = own_outliers(values, 100.0)
    assert list(np.flatnonzero(test.q[0] <= ALPHA)) == [1]


def test_ranks_that_were_seen_too_seldom_are_not_judged():
    values = np.random.default_rng(5).normal(30, 1, (1, 5, 600))
    values[0, 1] += 6
    values[0, 3] += 6
    values[0, 3, 100:] = np.nan
    test = own_outliers(values, 100.0)
    assert test.q[0, 1] <= ALPHA
    assert test.q[0, 3] == 1.0


def test_many_ranks_are_relabelled_around_a_circle_and_their_order_does_not_matter():
    values = np.random.default_rng(6).normal(30, 1, (3, 50, 300))
    values[0, 17] += 4
    order = np.random.default_rng(7).permutation(50)
    here, there = rank_outliers(values, 100.0), rank_outliers(values[:, order], 100.0)
    assert np.array_equal(here.q[:, order], there.q)
    assert list(np.flatnonzero(here.q[0] <= ALPHA)) == [17]


def test_a_drifting_rank_does_not_make_the_others_untestable():
    values = np.random.default_rng(8).normal(30, 0.2, (1, 4, 600))
    values[0, 1] += np.linspace(0, 20, 600)
    test = own_outliers(values, 100.0)
    assert test.drift_q[0, 1] <= ALPHA
    assert (np.delete(test.drift_q[0], 1) > ALPHA).all()
    assert test.drift_ms[0, 1] == pytest.approx(20, abs=2)


def test_an_even_rise_is_no_scatter():
    """Else the steadier a drift, the less it would count: 200 steps make some twenty blocks."""
    values = np.random.default_rng(8).normal(30, 0.2, (1, 4, 200))
    values[0, 1] += np.linspace(0, 20, 200)
    assert own_outliers(values, 100.0).drift_q[0, 1] <= ALPHA
