"""Who holds the job up, in numbers."""

import numpy as np
import pytest

from diagnosis.blame import Blame, by_history, by_peers, cost_ms


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
    """Groups are tested together; a difference that just shows in one of two no longer does in one of forty."""
    noise = own(*[30.0] * 80, seed=7)
    noise[0] *= 100
    noise[0, 1] += 5.0
    step_ms = 50.0
    one, many = (
        by_peers(noise[:, : 2 * groups], [[2 * g, 2 * g + 1] for g in range(groups)], step_ms)
        for groups in (1, 40)
    )
    assert (one.culprits, many.culprits) == ((1,), ())


def test_a_rank_without_peers_is_not_judged():
    assert found(own(30, 30, 30, 90), [0, 1, 2], [3]) == ((), ())


def nodes(ranks: int, size: int) -> dict[str, dict[str, list[int]]]:
    return {
        "node": {f"node-{n}": list(range(n * size, (n + 1) * size)) for n in range(ranks // size)},
        "switch": {f"s{n}": list(range(n * 4 * size, (n + 1) * 4 * size)) for n in range(ranks // size // 4)},
    }


def in_sets(values: np.ndarray, size: int = 4) -> Blame:
    ranks = values.shape[1]
    return by_peers(values, [list(range(ranks))], 40.0, nodes(ranks, size))


def told(blame: Blame) -> list[tuple[str, str]]:
    return [(one.level, one.name) for one in blame.sets]


def test_a_node_whose_ranks_are_all_slow_is_one_finding():
    blame = in_sets(own(*[45 if rank in (4, 5, 6, 7) else 30 for rank in range(32)]))
    assert (blame.culprits, told(blame)) == ((4, 5, 6, 7), [("node", "node-1")])
    node = blame.sets[0]
    assert (node.rows, node.effect) == ((4, 5, 6, 7), pytest.approx(15.0, abs=0.1))
    assert node.shift.ms == pytest.approx(15.0, abs=0.1)
    assert node.shift.low < node.shift.ms < node.shift.high
    assert node.q <= 0.01


def test_one_slow_rank_is_not_its_nodes_fault():
    blame = in_sets(own(*[90 if rank == 5 else 30 for rank in range(32)]))
    assert (blame.culprits, told(blame)) == ((5,), [])


def test_the_smallest_set_that_explains_is_told():
    """Two of the switch's four nodes: the nodes. All four: the switch, and nothing beside it."""
    half = in_sets(own(*[45 if rank < 8 else 30 for rank in range(64)]))
    whole = in_sets(own(*[45 if rank < 16 else 30 for rank in range(64)]))
    assert told(half) == [("node", "node-0"), ("node", "node-1")]
    assert told(whole) == [("switch", "s0")]


def test_a_slow_node_beside_a_slow_rank():
    blame = in_sets(own(*[45 if rank in (8, 9, 10, 11, 20) else 30 for rank in range(32)]))
    assert (blame.culprits, told(blame)) == ((8, 9, 10, 11, 20), [("node", "node-2")])


def test_a_node_is_found_by_what_its_ranks_share_though_each_alone_is_too_noisy():
    random = np.random.default_rng(8)
    values = 30 + random.normal(0, 15.0, (1, 64, 300))
    values[0, 8:16] += 4.5
    alone = by_peers(values, [list(range(64))], 40.0)
    together = by_peers(values, [list(range(64))], 40.0, {"node": nodes(64, 8)["node"]})
    assert set(alone.culprits) < set(range(8, 16))
    assert (together.culprits, told(together)) == (tuple(range(8, 16)), [("node", "node-1")])


def test_a_node_that_is_a_whole_stage_has_nothing_to_compare_with():
    values = own(*[45] * 4, *[30] * 4)
    blame = by_peers(values, [[0, 1, 2, 3], [4, 5, 6, 7]], 40.0, nodes(8, 4))
    assert (blame.culprits, blame.sets) == ((), ())


def test_ranks_of_many_stages_are_tested_together():
    """256 groups of four: corrected one by one, no p-value of 2,000 relabellings would survive."""
    values = own(*[30] * 1024, steps=400)
    values[0, 401] += 8
    assert by_peers(
        values, [list(range(first, first + 4)) for first in range(0, 1024, 4)], 40.0
    ).culprits == (401,)


def test_a_rank_that_is_slow_in_every_fiftieth_step_is_told():
    values = own(30, 30, 30, 30)
    values[0, 2, ::50] += 60
    blame = by_peers(values, [[0, 1, 2, 3]], 40.0)
    assert blame.culprits == ()
    (rare,) = blame.rare
    assert (rare.row, rare.share) == (2, pytest.approx(0.02))
    assert rare.cost_ms == pytest.approx(1.2, abs=0.05)


def test_pauses_that_hit_all_ranks_in_turns_are_nobodys():
    values = own(30, 30, 30, 30, steps=1200)
    for step in range(0, 1200, 25):
        values[0, step // 25 % 4, step] += 60
    assert by_peers(values, [[0, 1, 2, 3]], 40.0).rare == ()


def test_a_rank_that_slows_little_by_little_is_told_before_its_mean_matters():
    values = own(30, 30, 30, 30)
    values[0, 1] += np.linspace(-1, 5, 900)
    blame = by_peers(values, [[0, 1, 2, 3]], 40.0)
    assert blame.culprits == ()
    (drift,) = blame.drifts
    assert (drift.row, drift.ms) == (1, pytest.approx(6.0, abs=0.3))


def test_what_all_drift_by_and_who_becomes_as_fast_as_the_others_is_no_drift():
    everybody = own(30, 30, 30, 30) + np.linspace(0, 10, 900)
    catching_up = own(30, 30, 30, 30)
    catching_up[0, 1] -= np.linspace(6, 0, 900)
    assert by_peers(everybody, [[0, 1, 2, 3]], 40.0).drifts == ()
    assert by_peers(catching_up, [[0, 1, 2, 3]], 40.0).drifts == ()


def test_missing_steps_and_a_missing_rank_do_no_harm():
    values = own(30, 45, 30, 30, 30)
    values[0, 3, :500] = np.nan  # came late
    values[0, 4] = np.nan  # never came
    values[0, :, 700:720] = np.nan  # nobody was watched
    values[0, 1, np.random.default_rng(0).random(900) < 0.2] = np.nan
    blame = by_peers(values, [[0, 1, 2, 3, 4]], 40.0)
    assert (blame.culprits, blame.odd, blame.rare, blame.drifts) == ((1,), (), (), ())
    assert blame.tests[0, 1].effect == pytest.approx(15.0, abs=0.1)


def test_a_culprit_is_found_though_too_few_ranks_are_left_to_test_again():
    """Of three ranks one is slow; two alone need more blocks than there are."""
    values = own(30, 60, 30, steps=70, seed=3)
    assert by_peers(values, [[0, 1, 2]], 110.0).culprits == (1,)


def test_the_robust_shift_and_its_interval_stand_beside_the_mean():
    values = own(30, 45, 30, 30)
    values[0, 1, 100:104] += 2000  # a pause: the mean moves by 9 ms, the shift hardly
    tested = by_peers(values, [[0, 1, 2, 3]], 40.0).tests[0, 1]
    assert tested.effect == pytest.approx(15 + 8000 / 900, abs=0.1)
    assert tested.shift is not None
    assert tested.shift.ms == pytest.approx(15.0, abs=0.3)
    assert tested.shift.low < 15.0 < tested.shift.high


def test_other_metrics_are_tested_on_culprits_only():
    values = np.concatenate([own(30, 45, 30, 30), own(5, 12, 5, 5, seed=1), own(9, 9, 9, 9, seed=2)])
    tests = by_peers(values, [[0, 1, 2, 3]], 40.0).tests
    assert sorted(tests) == [(0, 1), (1, 1), (2, 1)]
    assert tests[1, 1].effect == pytest.approx(7.0, abs=0.1)
    assert tests[1, 1].q <= 0.01 < tests[2, 1].q


def test_a_culprits_other_metrics_are_held_against_the_median_of_its_peers():
    levels = [1.0, 20.0, 2.0, 3.0, 9.0, 30.0]
    values = np.concatenate([own(30, 45, 30, 30, 30, 30), own(*levels, seed=1)])
    tests = by_peers(values, [list(range(6))], 40.0).tests
    assert tests[1, 1].effect == pytest.approx(20.0 - 3.0, abs=0.2)


def test_testing_nodes_as_well_makes_the_test_of_ranks_stricter():
    values = own(*[45 if rank == 5 else 30 for rank in range(16)])
    alone = by_peers(values, [list(range(16))], 40.0).tests[0, 5].q
    assert (
        by_peers(values, [list(range(16))], 40.0, {"node": nodes(16, 4)["node"]}).tests[0, 5].q == 2 * alone
    )


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
