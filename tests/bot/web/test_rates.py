"""Token buckets: how much, how often, and how many of them."""

import pytest

from bot.web.rates import Rate


class Moved:
    now = 500.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Moved()


def taken(rate, key="a", tries=100):
    """How many of ``tries`` are allowed now."""
    count = 0
    for _ in range(tries):
        if rate.wait_s(key) == 0:
            rate.take(key)
            count += 1
    return count


def test_at_once_a_burst_then_the_rate(clock):
    rate = Rate(2, 10, clock=clock)
    assert taken(rate) == 10
    assert rate.wait_s("a") == 0.5
    clock.now += 3
    assert taken(rate) == 6
    clock.now += 1000
    assert taken(rate) == 10


def test_keys_do_not_share(clock):
    rate = Rate(1, 3, clock=clock)
    assert (taken(rate, "a"), taken(rate, "b")) == (3, 3)


def test_what_was_taken_beyond_the_burst_is_made_up_for(clock):
    rate = Rate(100, 200, clock=clock)
    rate.take("a", 1000)
    assert rate.wait_s("a") == pytest.approx(8.01)
    clock.now += 8.02
    assert rate.wait_s("a") == 0


def test_of_many_keys_those_of_late_are_kept(clock):
    rate = Rate(1, 1, clock=clock, max_keys=3)
    for key in "abcda":
        rate.take(key)
    assert [key for key in "abcd" if rate.wait_s(key) > 0] == ["a", "c", "d"]
