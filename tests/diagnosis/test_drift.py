"""Steps that become longer little by little: told with since when and by how much; healthy noise is none."""

import numpy as np
import pytest
from scipy.signal import lfilter

from diagnosis.changes import history
from diagnosis.drift import drift

COUNT = 900


def noise(seed: int, *, memory: float = 0.5, spread: float = 0.05, count: int = COUNT) -> np.ndarray:
    """AR(1) around 1, stationary from the first step on."""
    random = np.random.default_rng(seed)
    white = random.normal(0.0, 1.0, count)
    white[0] /= np.sqrt(1 - memory**2)
    return 1 + spread * lfilter([np.sqrt(1 - memory**2)], [1, -memory], white)


def rising(per_step: float, *, since: int = 0, count: int = COUNT) -> np.ndarray:
    return 1 + per_step * np.clip(np.arange(count) - since, 0, None)


def drifts(steps: np.ndarray) -> bool:
    return history(steps).drift is not None


@pytest.mark.parametrize("seed", range(5))
def test_a_tenth_of_a_per_cent_with_each_step_is_told(seed: int):
    found = history(30.0 * rising(0.001) * noise(seed))
    assert found.drift is not None
    assert (found.since, found.drift.first) == (0, 0)
    assert found.drift.per_step_ms == pytest.approx(0.03, rel=0.05)
    assert found.drift.before_ms == pytest.approx(30.0, rel=0.03)
    assert found.drift.now_ms == pytest.approx(57.0, rel=0.03)
    assert found.slowed_by == pytest.approx(0.9, abs=0.07)
    assert found.drift.p < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_where_it_began_is_told_and_what_was_before_is_the_baseline(seed: int):
    found = history(30.0 * rising(0.001, since=400) * noise(seed))
    assert found.drift is not None
    assert found.since == pytest.approx(400, abs=60)
    assert found.baseline is not None
    assert found.baseline.ms == pytest.approx(30.0, rel=0.02)
    assert found.current.ms == pytest.approx(30.0 * 1.4, rel=0.05)
    assert (found.current.first, found.current.last) == (675, 900)


def test_of_a_job_that_warmed_up_first_the_drift_after_that_is_told():
    warm = np.where(np.arange(COUNT) < 150, 2.0, 1.0)
    found = history(30.0 * warm * rising(0.0005, since=150) * noise(1))
    assert found.drift is not None
    assert found.since == pytest.approx(150, abs=40)
    assert found.drift.before_ms == pytest.approx(30.0, rel=0.03)


def test_twice_the_time_is_the_same_drift():
    steps = 300.0 * rising(0.001) * noise(3)
    here, there = drift(steps), drift(2 * steps)
    assert here is not None
    assert there is not None
    assert (there.first, there.now_ms) == (here.first, pytest.approx(2 * here.now_ms, rel=1e-6))


def test_a_step_is_a_step_and_no_drift():
    for seed in range(20):
        at = int(np.random.default_rng(seed).integers(150, 750))
        found = history(30.0 * np.where(np.arange(COUNT) < at, 1.0, 1.3) * noise(seed))
        assert found.drift is None
        assert found.since == pytest.approx(at, abs=60)


def test_a_drift_that_ended_is_none():
    steps = 30.0 * rising(0.001, count=600) * noise(0, count=600)
    assert not drifts(np.concatenate([steps, 30.0 * noise(1, count=300)]))


def test_less_than_what_matters_is_none():
    assert not drifts(30.0 * rising(0.0001) * noise(0))


def test_too_few_steps_are_none():
    assert drift(200.0 * rising(0.01, count=100) * noise(0, count=100)) is None


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9, 0.97])
def test_steps_that_resemble_their_neighbours_are_no_drift(memory: float):
    """They make runs that look like trends: 200 healthy jobs, of which one at most may be taken for one."""
    healthy = [30.0 * noise(seed, memory=memory, spread=0.10) for seed in range(200)]
    assert sum(map(drifts, healthy)) <= 1


def test_a_warm_up_a_pause_heavy_tails_and_bursts_are_no_drift():
    for seed in range(40):
        random = np.random.default_rng(seed)
        steps = 30.0 * noise(seed)
        paused, bursts = steps.copy(), steps.copy()
        paused[random.integers(COUNT)] = 60_000.0
        hit = random.random(COUNT) < 0.02
        bursts[hit] += random.uniform(20, 100, int(hit.sum()))
        made = {
            "warm-up": steps * (1 + np.exp(-np.arange(COUNT) / 90)),
            "slow warm-up": steps * (1 + 0.5 * np.exp(-np.arange(COUNT) / 300)),
            "pause": paused,
            "bursts": bursts,
            "heavy tails": 30.0 * (1 + 0.05 * np.abs(random.standard_t(1.5, COUNT))),
        }
        assert [name for name, one in made.items() if drifts(one)] == [], seed
