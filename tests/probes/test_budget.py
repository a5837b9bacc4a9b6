"""When watching gives something up, what first, and when it comes back: on made-up series."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from probes.budget import LONGEST_OFF_S, OFF_FOR_S, OVER_INTERVALS, Budget, Deed, Limits, Part, Step, Usage

ALL = tuple(Part)
LIMITS = Limits(cpu_share=0.004, memory_bytes=500, events_per_s=1000)
CPUS = 100
MAY = 0.4
"""CPU seconds per second on those CPUs."""


def usage(
    agent: float = 0.01,
    *,
    gloo: float = 0.01,
    thread_time: float = 0.01,
    memory: int = 100,
    events: float = 10,
    **of_the_host: float,
) -> Usage:
    return Usage(agent, {"gloo": gloo, "thread_time": thread_time} | of_the_host, memory, events)


CALM = usage()


class Node:
    """A node whose usage follows from what is given up; a second per interval."""

    def __init__(self, use: Callable[[Collection[Part]], Usage], active: Collection[Part] = ALL) -> None:
        self.budget = Budget(LIMITS, CPUS)
        self.use = use
        self.active = active
        self.now = 0.0
        self.told: list[tuple[float, Step]] = []

    def run(self, seconds: float) -> list[tuple[Deed, Part | None]]:
        """What was done in so many seconds."""
        before = len(self.told)
        for _ in range(int(seconds)):
            self.now += 1
            gone = {part for part, _ in self.budget.shed}
            runs = [part for part in self.active if part not in gone]
            self.told += [(self.now, step) for step in self.budget.decide(self.now, self.use(gone), runs)]
        return [(step.deed, step.part) for _, step in self.told[before:]]


@pytest.mark.parametrize(
    ("cpus", "share", "may"),
    [
        (2, 0.004, 0.040),
        (9, 0.004, 0.040),
        (10, 0.004, 0.040),
        (64, 0.004, 0.256),
        (64, 0.0001, 0.0064),
        (4, 0.05, 0.2),
    ],
)
def test_a_small_node_may_always_take_40_ms_per_second(cpus: int, share: float, may: float) -> None:
    assert Limits(cpu_share=share).cpu(cpus) == pytest.approx(may)


def test_within_its_limits_nothing_happens() -> None:
    node = Node(lambda _: usage(0.2, gloo=0.1, thread_time=0.09, memory=500, events=1000))
    assert node.run(1000) == []
    assert node.budget.shed == []


def test_a_burst_is_no_reason() -> None:
    for at in range(40):
        series = [usage(50.0) if now == at else CALM for now in range(101)]
        budget = Budget(LIMITS, CPUS)
        assert [step for now, one in enumerate(series) for step in budget.decide(now, one, ALL)] == []


def test_over_the_budget_parts_go_in_their_order_each_given_time_to_show() -> None:
    node = Node(lambda _: usage(0.41))
    node.run(5 * OVER_INTERVALS)
    assert [(at, step.deed, step.part) for at, step in node.told] == [
        (15.0, Deed.SHED, Part.CAPTURES),
        (30.0, Deed.SHED, Part.HOST),
        (45.0, Deed.SHED, Part.OCCUPANTS),
        (60.0, Deed.SHED, Part.GLOO),
        (75.0, Deed.SHED, Part.THREAD_TIME),
    ]


def test_what_suffices_is_all_that_goes() -> None:
    def use(gone: Collection[Part]) -> Usage:
        return usage(thread_time=0.2 if Part.OCCUPANTS in gone else 0.5)

    node = Node(use)
    assert node.run(70) == [(Deed.SHED, part) for part in (Part.CAPTURES, Part.HOST, Part.OCCUPANTS)]


def test_the_hosts_probes_cost_what_they_cost_together() -> None:
    """Far over the budget, and two of them are the reason: nothing beyond them goes."""

    def use(gone: Collection[Part]) -> Usage:
        of_the_host = {} if Part.HOST in gone else {"interrupts": 0.6, "cgroup": 0.6}
        return usage(0.1, thread_time=0.2, **of_the_host)

    assert Node(use).run(70) == [(Deed.SHED, Part.CAPTURES), (Deed.SHED, Part.HOST)]


def test_what_does_not_run_is_passed_over() -> None:
    node = Node(lambda _: usage(0.41), active=[Part.GLOO])
    assert node.run(20) == [(Deed.SHED, Part.GLOO)]


def test_far_over_the_budget_parts_go_together_up_to_the_one_that_costs_it() -> None:
    node = Node(lambda gone: usage(gloo=0.0 if Part.GLOO in gone else 3.0))
    assert node.run(30) == [(Deed.SHED, part) for part in list(Part)[: list(Part).index(Part.GLOO) + 1]]
    assert node.told[-1][0] == OVER_INTERVALS


def test_too_many_events_are_a_reason_too() -> None:
    node = Node(lambda _: usage(events=1001))
    node.run(20)
    ((_, step),) = node.told
    assert (step.deed, step.part) == (Deed.SHED, Part.CAPTURES)
    assert step.why == "1001 events per second, above the budget of 1000"


def test_the_reason_has_figures() -> None:
    node = Node(lambda _: usage(0.2, gloo=0.25, thread_time=0.05))
    node.run(15)
    assert node.told[0][1].why == (
        "watching takes 500.0 ms of CPU per second (agent 200.0, gloo 250.0, thread_time 50.0), "
        "above the budget of 400.0 ms"
    )


def test_it_comes_back_in_the_reverse_order_one_part_at_a_time() -> None:
    node = Node(lambda _: usage(0.41) if node.now <= 75 else CALM)
    node.run(75)
    node.told.clear()
    node.run(6 * OFF_FOR_S)
    assert [(at, step.deed, step.part) for at, step in node.told] == [
        (135.0, Deed.RESTORE, Part.THREAD_TIME),
        (195.0, Deed.RESTORE, Part.GLOO),
        (255.0, Deed.RESTORE, Part.OCCUPANTS),
        (315.0, Deed.RESTORE, Part.HOST),
        (375.0, Deed.RESTORE, Part.CAPTURES),
    ]
    assert node.budget.shed == []


def test_what_has_to_go_again_stays_away_twice_as_long_each_time_up_to_an_hour() -> None:
    node = Node(lambda gone: CALM if Part.GLOO in gone else usage(gloo=0.6), active=[Part.GLOO])
    node.run(12 * 3600)
    away = [step.for_s for _, step in node.told if step.deed == Deed.SHED]
    assert away[:8] == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert max(away) == LONGEST_OFF_S


def test_after_a_long_calm_it_is_away_for_a_minute_again() -> None:
    node = Node(
        lambda gone: usage(gloo=0.6) if gone == set() and node.now < 200 else CALM, active=[Part.GLOO]
    )
    node.run(300)
    assert [step.for_s for _, step in node.told if step.deed == Deed.SHED] == [60, 120]
    node.run(2000)
    node.told.clear()
    node.use = lambda gone: CALM if gone else usage(gloo=0.6)
    node.run(20)
    assert [step.for_s for _, step in node.told] == [60]


def test_nothing_comes_back_while_the_budget_is_used_up() -> None:
    node = Node(lambda _: usage(0.41), active=[Part.GLOO])
    assert node.run(2000) == [(Deed.SHED, Part.GLOO)]


def test_too_much_memory_drops_caches_then_loads_anew_then_switches_all_off() -> None:
    node = Node(lambda _: usage(memory=501))
    assert node.run(45) == [
        (Deed.DROP_CACHES, None),
        (Deed.RELOAD, None),
        *[(Deed.SHED, part) for part in ALL],
    ]
    assert node.run(1000) == [], "it stays off while the memory is not given back"


def test_memory_that_came_back_begins_anew() -> None:
    node = Node(lambda _: usage(memory=501 if node.now <= 15 or node.now > 100 else 400))
    assert node.run(125) == [(Deed.DROP_CACHES, None), (Deed.DROP_CACHES, None)]
