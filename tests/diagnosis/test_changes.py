"""When the steps turned slow."""

import numpy as np
import pytest

from diagnosis.changes import history, since_as_now


def series(*stretches: tuple[int, float], seed: int = 0) -> np.ndarray:
    """Steps around a level each, with noise of 5 % and a hiccup of 100 ms in one of 100 steps."""
    random = np.random.default_rng(seed)
    levels = np.concatenate([np.full(count, ms) for count, ms in stretches])
    return levels * random.lognormal(0, 0.05, len(levels)) + (random.random(len(levels)) < 0.01) * 100.0


def test_the_step_at_which_it_turned_slow():
    found = history(series((700, 30.0), (400, 50.0)))
    assert found.current.first == pytest.approx(700, abs=2)
    assert found.current.ms == pytest.approx(50.0, rel=0.02)
    assert found.baseline is not None
    assert found.baseline.ms == pytest.approx(30.0, rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_few_steps_that_are_much_longer_are_seen_as_soon_as_they_last(seed):
    """Sixteen seconds of steps four times as long are as many blocks as those of seventy steps before."""
    found = history(series((306, 48.0), (80, 200.0), seed=seed))
    assert found.current.first == pytest.approx(306, abs=2)
    assert found.baseline is not None


@pytest.mark.parametrize("seed", range(30))
def test_a_steady_job_has_no_change(seed):
    found = history(series((1500, 30.0), seed=seed))
    assert (found.current.first, found.baseline, found.recovered) == (0, None, None)


def test_less_than_what_matters_is_no_change():
    assert history(series((700, 30.0), (400, 32.0))).baseline is None


def test_one_long_pause_is_no_change():
    steps = series((1000, 30.0))
    steps[500] = 120_000.0
    assert history(steps).baseline is None


def test_a_slow_stretch_that_ended_is_recovered():
    found = history(series((600, 30.0), (300, 60.0), (600, 30.0)))
    assert found.baseline is None
    assert found.recovered is not None
    assert found.recovered.first == pytest.approx(600, abs=2)
    assert found.recovered.last == pytest.approx(900, abs=2)


def test_a_slow_start_is_no_recovery():
    found = history(series((300, 60.0), (900, 30.0)))
    assert (found.baseline, found.recovered) == (None, None)
    assert found.current.first == pytest.approx(300, abs=2)


def test_slow_in_two_stages_is_as_slow_as_now_since_the_second():
    found = history(series((600, 30.0), (400, 40.0), (400, 60.0)))
    assert found.current.first == pytest.approx(1000, abs=2)
    assert found.baseline is not None
    assert found.baseline.ms == pytest.approx(30.0, rel=0.02)


def test_a_slow_stretch_that_was_once_slower_is_one_stretch():
    found = history(series((600, 30.0), (400, 80.0), (400, 60.0)))
    assert found.current.first == pytest.approx(600, abs=2)


def test_too_few_steps_are_one_level():
    found = history(series((40, 30.0), (20, 90.0)))
    assert (found.current.first, found.baseline) == (0, None)


def test_twice_the_time_is_the_same_history():
    steps = series((700, 300.0), (400, 500.0))
    here, there = history(steps), history(2 * steps)
    assert here.baseline is not None
    assert there.baseline is not None
    assert there.current.first == pytest.approx(here.current.first, abs=2)
    assert there.baseline.ms == pytest.approx(2 * here.baseline.ms, rel=1e-3)


def own_times(*, ranks: int = 6, steps: int = 800) -> np.ndarray:
    return np.random.default_rng(3).lognormal(0, 0.05, (ranks, steps)) * 30.0


def test_ranks_that_stay_as_they_are_to_each_other_are_so_since_the_first_step():
    own = own_times()
    own[2] += 30.0
    own[:, 400:] += 20.0  # of all alike
    assert since_as_now(60.0, own) == 0


def test_a_hand_over_is_where_the_last_of_the_two_changed():
    own = own_times()
    own[2, :400] += 30.0
    own[4, 400:] += 30.0
    assert since_as_now(60.0, own) == pytest.approx(400, abs=2)
    own[4, 400:450] -= 30.0
    assert since_as_now(60.0, own) == pytest.approx(450, abs=2)


def test_who_is_slow_still_though_less_than_before_handed_over_to_nobody():
    own = own_times()
    own[2, :400] += 60.0
    own[2, 400:] += 30.0
    assert since_as_now(60.0, own) == 0


def test_a_change_in_the_last_moment_is_none_yet():
    own = own_times(steps=300)
    own[2, 250:] += 30.0
    assert since_as_now(60.0, own) == 0


def test_of_a_thousand_ranks_the_one_that_changed_is_found_whatever_its_number():
    own = own_times(ranks=1000, steps=400)
    own[777, 200:] += 20.0
    assert since_as_now(60.0, own) == pytest.approx(200, abs=2)


def test_one_rank_has_no_peers_to_stand_to():
    own = own_times(ranks=1)
    own[0, 400:] += 30.0
    assert since_as_now(60.0, own) == 0
