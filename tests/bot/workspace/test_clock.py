"""The workspace's clock: moved forward, it fires what became due, in order, and nothing that was called off."""

import asyncio

import pytest

from bot.workspace.clock import Clock


async def test_timers_fire_in_their_order_when_time_is_moved() -> None:
    clock = Clock()
    fired: list[str] = []
    clock.after(30, lambda: fired.append("late"))
    clock.after(10, lambda: fired.append("early"))
    clock.after(99, lambda: fired.append("never"))
    start = clock.now()
    clock.advance(30)
    assert fired == ["early", "late"]
    assert clock.now() - start == pytest.approx(30, abs=1)
    clock.stop()
    clock.advance(100)
    assert fired == ["early", "late"]


async def test_a_timer_that_another_calls_off_never_fires() -> None:
    clock = Clock()
    fired: list[str] = []
    call_off = clock.after(20, lambda: fired.append("called off"))
    clock.after(10, call_off)
    clock.advance(15)
    clock.advance(100)
    assert fired == []


async def test_what_a_timer_sets_anew_waits_for_its_own_time() -> None:
    clock = Clock()
    fired: list[float] = []

    def again() -> None:
        fired.append(clock.now())
        clock.after(60, again)

    clock.after(60, again)
    clock.advance(600)
    assert len(fired) == 1
    clock.advance(60)
    assert len(fired) == 2
    clock.stop()


async def test_real_time_counts_too() -> None:
    clock = Clock()
    over = asyncio.Event()
    clock.after(0.01, over.set)
    await asyncio.wait_for(over.wait(), 5)


async def test_time_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match="backwards"):
        Clock().advance(-1)
