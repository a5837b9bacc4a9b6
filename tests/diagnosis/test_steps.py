"""Steps found from collectives equal the loop's own."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from bench.pipelines import Layout, healthy, simulate
from bench.synthetic import T0, build, noisy, plan, rows, with_clock_offset, with_rank
from diagnosis.engine import diagnose
from diagnosis.evidence import CollectiveTable, RankEvidence
from diagnosis.pairing import all_steps
from diagnosis.peers import peer_groups
from diagnosis.steps import Steps, find_steps, join
from probes.records import Communicator, Op

WORLD = Communicator(uid="world", desc="", rank=0, size=2)


def steps_of(ranks: dict[int, RankEvidence]) -> Steps:
    steps = find_steps(join(ranks))
    assert steps is not None
    return steps


def table(
    tokens: list[tuple[int, int]],
    enter_ms: list[float],
    *,
    seq: list[int] | None = None,
    communicator: list[int] | None = None,
) -> CollectiveTable:
    """Collectives (op, bytes) at instants, each 1 ms long."""
    count = len(tokens)
    return CollectiveTable(
        communicator=np.array(communicator or [0] * count, np.int64),
        seq=np.array(seq if seq is not None else range(count), np.int64),
        op=np.array([op for op, _ in tokens], np.int64),
        bytes=np.array([size for _, size in tokens], np.int64),
        enter_ns=T0 + (np.array(enter_ms) * 1e6).astype(np.int64),
        duration_ns=np.full(count, 1_000_000, np.int64),
        failed=np.zeros(count, np.bool_),
    )


def rank_with(
    number: int, collectives: CollectiveTable, communicators: list[Communicator] | None = None
) -> RankEvidence:
    evidence, _ = build(plan(ranks=1, steps=2))
    return replace(
        evidence.ranks[0], rank=number, collectives=collectives, communicators=communicators or [WORLD]
    )


def both(
    collectives: CollectiveTable, communicators: list[Communicator] | None = None
) -> dict[int, RankEvidence]:
    return {number: rank_with(number, collectives, communicators) for number in (0, 1)}


def per_step(steps: Steps) -> set[int]:
    """How many collectives a step holds."""
    return set((steps.next_seq - steps.seq).tolist())


@pytest.mark.parametrize("buckets", [1, 2, 3])
@pytest.mark.parametrize("make", [plan, noisy])
def test_steps_equal_the_loops_own_within_two_per_cent(make, buckets):
    made = make(steps=700, seed=5)
    made.buckets = buckets
    evidence, truth = build(made)
    steps = steps_of(evidence.ranks)
    assert per_step(steps) == {buckets}
    assert steps.count == pytest.approx(len(truth.step), abs=2)
    assert steps.wall_ms().mean() == pytest.approx(truth.step.mean(), rel=0.02)
    assert steps.seen.all()


def test_a_fault_on_every_third_step_does_not_merge_steps():
    made = plan(steps=600)
    made.asleep[1, ::3] += 40
    evidence, _ = build(made)
    assert per_step(steps_of(evidence.ranks)) == {1}


def test_broadcasts_and_a_rebuilt_bucket_before_the_loop_are_no_steps():
    start = [
        (Op.BROADCAST, 64),
        (Op.BROADCAST, 4096),
        (Op.ALLREDUCE, 1000),
        (Op.ALLREDUCE, 500),
        (Op.ALLGATHER, 8),
    ]
    loop = [(Op.ALLREDUCE, 700), (Op.ALLREDUCE, 800)] * 50
    enter = [*np.arange(5) * 3.0, *(100.0 + 40.0 * np.repeat(np.arange(50), 2) + np.tile([0.0, 2.0], 50))]
    steps = steps_of(both(table(start + loop, enter)))
    assert per_step(steps) == {2}
    assert steps.count == 49
    assert np.allclose(steps.wall_ms(), 40.0)
    assert steps.seq[0] == 5, (
        "the anchor is the collective after the long gap, in which the step's work is done"
    )


@pytest.mark.parametrize(
    ("gaps", "anchor"),
    [
        ((38.0, 2.0), 700),
        ((2.0, 38.0), 800),
        ((20.0, 20.00002), 800),  # 20 ns: instants in UTC as floats would differ by more than that
        ((20.00002, 20.0), 700),
    ],
)
def test_the_anchor_is_the_collective_after_the_steps_own_work(gaps, anchor):
    enter = np.cumsum(np.tile(gaps, 50))
    collectives = table([(Op.ALLREDUCE, 700), (Op.ALLREDUCE, 800)] * 50, enter.tolist())
    steps = steps_of(both(collectives))
    assert set(collectives.bytes[steps.seq].tolist()) == {anchor}


def test_a_pattern_that_changes_midway_gives_steps_of_both():
    first = [(Op.ALLREDUCE, 700), (Op.ALLREDUCE, 800), (Op.BARRIER, 0)] * 40
    second = [(Op.ALLREDUCE, 900), (Op.ALLGATHER, 800)] * 40
    enter = [
        *(30.0 * np.repeat(np.arange(40), 3) + np.tile([0.0, 2.0, 4.0], 40)),
        *(1200.0 + 50.0 * np.repeat(np.arange(40), 2) + np.tile([0.0, 2.0], 40)),
    ]
    steps = steps_of(both(table(first + second, enter)))
    wall = steps.wall_ms()[0]
    assert (np.isclose(wall, 30.0).sum(), np.isclose(wall, 50.0).sum()) == (39, 39)
    assert per_step(steps) == {3, 2}
    assert steps.count == 78, "no step spans the change"


def test_a_pause_is_no_step_and_is_kept_apart():
    enter = [*np.arange(60) * 30.0, *(1770 + 60_030 + np.arange(60) * 30.0)]
    steps = steps_of(both(table([(Op.ALLREDUCE, 700)] * 120, enter)))
    assert steps.count == 118
    assert steps.wall_ms().max() == pytest.approx(30.0)
    assert steps.pauses is not None
    assert steps.pauses.wall_ms().tolist() == [[pytest.approx(60_030.0)]] * 2


def test_a_fault_on_every_fiftieth_step_is_no_pause():
    enter = np.cumsum(np.where(np.arange(400) % 50 == 49, 530.0, 30.0)).tolist()
    steps = steps_of(both(table([(Op.ALLREDUCE, 700)] * 400, enter)))
    assert (steps.count, steps.pauses) == (399, None)


def test_no_step_spans_collectives_that_nobody_saw():
    lost = [seq for seq in range(200) if not 80 <= seq < 110]
    steps = steps_of(both(table([(Op.ALLREDUCE, 700)] * 170, [seq * 30.0 for seq in lost], seq=lost)))
    assert steps.wall_ms().max() == pytest.approx(30.0)
    assert steps.count == 79 + 89


def test_collectives_lost_on_one_rank_cost_only_its_steps():
    evidence, _ = build(plan(steps=300))
    mine = evidence.ranks[2].collectives
    gap = (mine.seq < 100) | (mine.seq > 110)
    steps = steps_of(with_rank(evidence, 2, collectives=rows(mine, gap)).ranks)
    assert steps.seen[[0, 1, 3]].all()
    assert (~steps.seen[2]).sum() == 12, "eleven collectives bound twelve steps"


def test_a_rank_attached_late_misses_the_head_and_is_matched_in_the_tail():
    evidence, _ = build(plan(steps=400))
    mine = evidence.ranks[1].collectives
    late = with_rank(evidence, 1, collectives=rows(mine, mine.seq >= 203))
    whole, cut = steps_of(evidence.ranks), steps_of(late.ranks)
    assert np.array_equal(whole.seq, cut.seq)
    assert np.array_equal(cut.seen[1], whole.seq >= 203)
    assert np.array_equal(whole.start_ns[1, cut.seen[1]], cut.start_ns[1, cut.seen[1]])


def test_communicators_without_a_uid_are_matched_by_size_and_order():
    evidence, _ = build(plan(steps=200), uid="")
    steps = steps_of(evidence.ranks)
    assert steps.ranks == (0, 1, 2, 3)
    assert steps.seen.all()


def test_the_largest_communicator_with_a_pattern_gives_the_steps():
    pair = Communicator(uid="pair", desc="", rank=0, size=1)
    tokens = [(Op.ALLREDUCE, 10), (Op.ALLREDUCE, 20), (Op.ALLREDUCE, 700)] * 50
    enter = (30.0 * np.repeat(np.arange(50), 3) + np.tile([0.0, 2.0, 4.0], 50)).tolist()
    seq = np.stack([2 * np.arange(50), 2 * np.arange(50) + 1, np.arange(50)], axis=1).reshape(-1).tolist()
    steps = steps_of(both(table(tokens, enter, seq=seq, communicator=[1, 1, 0] * 50), [WORLD, pair]))
    assert steps.communicator[0] == "world"
    assert steps.count == 49


def test_sends_and_receives_are_no_anchors():
    tokens = [(Op.SEND, 10), (Op.ALLREDUCE, 700), (Op.RECV, 5)] * 50
    enter = (30.0 * np.repeat(np.arange(50), 3) + np.tile([0.0, 2.0, 4.0], 50)).tolist()
    steps = steps_of(both(table(tokens, enter)))
    assert steps.count == 49
    assert np.allclose(steps.wall_ms(), 30.0)


def test_random_collectives_have_no_steps():
    random = np.random.default_rng(1)
    tokens = [(int(Op.ALLREDUCE), int(size)) for size in random.integers(0, 1000, 300)]
    assert find_steps(join(both(table(tokens, (np.arange(300) * 5.0).tolist())))) is None


def test_a_clock_offset_moves_steps_and_changes_no_length():
    evidence, _ = build(plan(steps=200), nodes=["a", "a", "b", "b"])
    moved = steps_of(with_clock_offset(evidence, "b", 7_200_000_000_123).ranks)
    assert np.array_equal(moved.wall_ms(), steps_of(evidence.ranks).wall_ms())


def test_ranks_with_the_same_collectives_are_peers():
    evidence, _ = build(plan(steps=300))
    mine = evidence.ranks[1].collectives
    late = with_rank(evidence, 1, collectives=rows(mine, mine.seq >= 103))
    assert peer_groups(late.ranks, steps_of(late.ranks)) == [(0, 1, 2, 3)]


def test_a_rank_that_saw_only_the_newer_of_two_patterns_is_still_a_peer():
    first = [(Op.ALLREDUCE, 700), (Op.SEND, 1)] * 80
    second = [(Op.ALLREDUCE, 700)] * 60
    enter = (np.arange(len(first + second)) * 10.0).tolist()
    seq = [*np.repeat(np.arange(80), 2).tolist(), *range(80, 140)]
    ranks = both(table(first + second, enter, seq=seq))
    ranks[1] = replace(ranks[1], collectives=rows(ranks[1].collectives, np.array(enter) > 1650.0))
    assert peer_groups(ranks, steps_of(ranks)) == [(0, 1)]


def test_ranks_that_do_the_same_in_many_orders_are_peers():
    tokens = [(int(Op.ALLREDUCE), 700), (int(Op.ALLREDUCE), 800), (int(Op.ALLGATHER), 900)]
    enter = np.cumsum(np.tile([38.0, 2.0, 2.0], 40)).tolist()
    evidence = both(table(tokens * 40, enter))
    steps = steps_of(evidence)
    orders = list(itertools.permutations(tokens))
    ranks = {
        number: rank_with(number, table([*orders[number % 6] * 20, *orders[number // 2] * 20], enter))
        for number in range(12)
    }
    wide = replace(
        steps,
        ranks=tuple(range(12)),
        start_ns=np.repeat(steps.start_ns[:1], 12, axis=0),
        end_ns=np.repeat(steps.end_ns[:1], 12, axis=0),
        seen=np.repeat(steps.seen[:1], 12, axis=0),
    )
    assert peer_groups(ranks, wide) == [tuple(range(12))]
    ranks[9] = rank_with(9, table([*tokens[:2], (int(Op.ALLGATHER), 901)] * 40, enter))
    assert peer_groups(ranks, wide) == [(0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11), (9,)]


def test_ranks_with_other_collectives_between_are_no_peers():
    evidence, _ = build(plan(steps=300))
    for rank in (0, 3):  # a stage of its own: it sends once per step
        mine = evidence.ranks[rank].collectives
        extra = replace(mine, op=np.full_like(mine.op, Op.SEND), enter_ns=mine.enter_ns + 2_000_000)
        mixed = CollectiveTable(**{c: np.concatenate([v, getattr(extra, c)]) for c, v in vars(mine).items()})
        order = np.argsort(mixed.enter_ns, kind="stable")
        evidence = with_rank(evidence, rank, collectives=rows(mixed, order))
    assert peer_groups(evidence.ranks, steps_of(evidence.ranks)) == [(0, 3), (1, 2)]


# --- several communicators ---------------------------------------------------------------------------------


def found_in(layout: Layout) -> tuple[list[Steps], float]:
    """Pieces, and the loop's own mean step."""
    evidence, truth = simulate(layout, healthy(layout))
    return all_steps(join(evidence.ranks), evidence.ranks), float(np.median(truth.step_ms))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=4, micro_batches=8),
        Layout(data=4, tensor=2, micro_batches=2),
        Layout(data=2, stages=4),
        Layout(data=2, stages=2, tensor=2),
        Layout(data=2, stages=2, world_norm=False),
        Layout(data=1, stages=4, world_norm=False),
        Layout(data=4, log_every=10),
        Layout(data=4, evaluate_every=25),
        Layout(data=4, pause_every=50),
        Layout(data=4, evaluate_every=40, pause_every=50, tensor=2),
    ],
    ids=[
        "accumulated",
        "tensor",
        "pipeline",
        "3d",
        "pairs",
        "only-pairs",
        "log",
        "evaluation",
        "pause",
        "all",
    ],
)
def test_a_step_is_the_loops_own_whatever_else_communicates(layout):
    pieces, loop_ms = found_in(layout)
    assert len(pieces) == 1
    (steps,) = pieces
    assert steps.ranks == tuple(range(layout.ranks))
    assert float(np.median(steps.wall_ms()[steps.seen])) == pytest.approx(loop_ms, rel=0.02)
    lost = sum(layout.steps // every for every in (layout.evaluate_every, layout.pause_every) if every)
    assert steps.count == pytest.approx(layout.steps - 1 - lost, abs=2)
    assert steps.wall_ms().max() < 1.5 * loop_ms


def test_steps_of_stages_without_a_common_communicator_are_the_same_steps():
    evidence, _ = simulate(Layout(data=2, stages=3), healthy(Layout(data=2, stages=3)))
    (steps,) = all_steps(join(evidence.ranks), evidence.ranks)
    middle = steps.start_ns[:, 50]
    assert steps.seen[:, 50].all()
    assert np.ptp(middle) / 1e6 < 20, "one clock here: all stages begin a step within the pipeline's depth"


def test_stages_that_nothing_pairs_are_pieces_of_their_own():
    layout = Layout(data=2, stages=2, world_norm=False)
    evidence, _ = simulate(layout, healthy(layout))
    for rank in range(4):  # nobody saw the sends and receives
        mine = evidence.ranks[rank].collectives
        collective = (mine.op != Op.SEND) & (mine.op != Op.RECV)
        evidence = with_rank(evidence, rank, collectives=rows(mine, collective))
    assert [steps.ranks for steps in all_steps(join(evidence.ranks), evidence.ranks)] == [(0, 1), (2, 3)]
    verdict = diagnose(evidence)
    assert any("each is compared by itself: ranks 0 and 1; ranks 2 and 3" in gap for gap in verdict.not_seen)


def test_what_is_no_step_is_said():
    layout = Layout(data=4, evaluate_every=25, pause_every=60, steps=200)
    verdict = diagnose(simulate(layout, healthy(layout))[0])
    assert verdict.status == "healthy"
    assert any("between steps are no training steps" in gap for gap in verdict.not_seen)
    assert any(re.match(r"3 pauses of 6,0\d\d ms .*: not counted as steps", gap) for gap in verdict.not_seen)


def test_steps_that_the_evidence_numbers_win():
    layout = Layout(data=4, numbered=True, steps=12)
    evidence, truth = simulate(layout, healthy(layout))
    (steps,) = all_steps(join(evidence.ranks), evidence.ranks)
    assert steps.given
    assert steps.seq.tolist() == list(range(550, 562))
    assert steps.wall_ms()[0].tolist() == pytest.approx(truth.step_ms.tolist(), rel=1e-3)


def test_pauses_among_numbered_steps_do_not_hide_a_slow_rank():
    layout = Layout(data=4, numbered=True, steps=120, pause_every=50)
    faults = healthy(layout)
    faults.compute[2] *= 1.25
    evidence, truth = simulate(layout, faults)
    verdict = diagnose(evidence)
    assert [culprit.rank for culprit in verdict.culprits] == [2]
    usual = truth.step_ms < 1_000  # without the pauses of 6 s
    assert usual.sum() == 118
    assert verdict.step_ms == pytest.approx(np.median(truth.step_ms[usual]), rel=0.01)
    assert any(gap.startswith("2 pauses of 6,0") for gap in verdict.not_seen)


def test_numbered_steps_of_ranks_that_recorded_different_ones_are_paired_by_number():
    layout = Layout(data=3, numbered=True, steps=12)
    evidence, _ = simulate(layout, healthy(layout))
    table = evidence.ranks[1].operations
    assert table is not None
    later = replace(table, **{c: v[4:] for c, v in vars(table).items() if c != "names"})
    (steps,) = all_steps(
        join(evidence.ranks), {**evidence.ranks, 1: replace(evidence.ranks[1], operations=later)}
    )
    assert steps.seen[1].tolist() == [number >= 554 for number in steps.seq.tolist()]


def test_groups_that_are_made_anew_go_on_where_the_old_ones_ended():
    evidence, _ = build(plan(steps=400))
    for rank in range(4):
        mine = evidence.ranks[rank].collectives
        late = mine.seq >= 200
        again = replace(
            mine, communicator=late.astype(np.int64), seq=np.where(late, mine.seq - 200, mine.seq)
        )
        names = [*evidence.ranks[rank].communicators, Communicator(uid="anew", desc="", rank=rank, size=4)]
        evidence = with_rank(evidence, rank, collectives=again, communicators=names)
    (steps,) = all_steps(join(evidence.ranks), evidence.ranks)
    assert steps.count == pytest.approx(398, abs=2)
    assert (np.diff(steps.start_ns, axis=1) > 0).all()
