"""Waiting and transfer from durations, and what both leave as a rank's own: the parts sum to the step."""

import numpy as np
import pytest

from bench.pipelines import Layout, healthy, simulate
from diagnosis.accounting import account_collectives, grown, sum_parts
from diagnosis.evidence import CollectiveTable, OperationTable, RankEvidence
from diagnosis.exposed import exposed_of, transfers_of
from diagnosis.joined import join, join_pairs
from diagnosis.scene import observe, pieces
from diagnosis.steps import Steps
from probes.records import Communicator, Lane, Op

MS = 1_000_000


def rank(
    number: int, enter: list[int], duration: list[int], computes: tuple[int, int] | None = None
) -> RankEvidence:
    """All-reduces of two ranks, in ms; and a stretch in which a trace shows it computing."""
    count = len(enter)
    zeros = np.zeros(count, np.int64)
    operations = None
    if computes is not None:
        one = np.zeros(1, np.int64)
        operations = OperationTable(
            names=["kernel"], kind=one, lane=one + int(Lane.COMPUTE), step=one - 1,
            start_ns=np.array([computes[0] * MS]), duration_ns=np.array([(computes[1] - computes[0]) * MS]),
            seq=one - 1, micro_batch=one - 1, chunk=one - 1,
        )  # fmt: skip
    return RankEvidence(
        rank=number, node="a", pid=1, local_rank=0, name="", threads=[], occupants=[], first_ns=0, last_ns=10**9,
        communicators=[Communicator(uid="w", desc="", rank=number, size=2)],
        collectives=CollectiveTable(
            communicator=zeros, seq=np.arange(count), op=zeros + int(Op.ALLREDUCE), bytes=zeros + 8,
            enter_ns=np.array(enter) * MS, duration_ns=np.array(duration) * MS, failed=zeros.astype(np.bool_),
        ),
        operations=operations,
    )  # fmt: skip


def parts(*ranks: RankEvidence) -> dict[str, list[float]]:
    """Of one step from 0 to 100 ms."""
    by_number = {one.rank: one for one in ranks}
    ends = np.full((len(ranks), 1), 100 * MS)
    seen = np.ones((len(ranks), 1), np.bool_)
    steps = Steps(("w", 2, 0), tuple(by_number), np.array([0]), np.array([1]), 0 * ends, ends, seen)
    transfers = transfers_of(join(by_number), join_pairs(by_number))
    waits = {number: exposed_of(one, transfers, one.last_ns) for number, one in by_number.items()}
    got = account_collectives(by_number, steps, waits)
    assert np.allclose(sum_parts(got.parts), got.wall)
    return {part: values[:, 0].tolist() for part, values in got.parts.items()}


def test_what_is_beyond_the_shortest_duration_was_waiting():
    got = parts(rank(0, [20], [30]), rank(1, [45], [5]))
    assert got["waiting"] == [25.0, 0.0]
    assert got["transfer"] == [5.0, 5.0]
    assert got["outside"] == [70.0, 95.0]


def test_overlapping_buckets_count_once():
    # Both begin at 20 on rank 0 and end at 50 and 60: 40 ms, not 70.
    got = parts(rank(0, [20, 22], [30, 38]), rank(1, [45, 47], [5, 13]))
    assert got["waiting"][0] + got["transfer"][0] == 40.0
    assert got["outside"] == [60.0, 85.0]


def test_communication_behind_computing_is_not_exposed():
    got = parts(rank(0, [20], [30], (10, 40)), rank(1, [45], [5]))
    assert got["waiting"] == [5.0, 0.0], "of 20 to 45, the trace shows it computing until 40"
    assert got["outside"][0] == 90.0


def test_one_that_has_not_ended_lasts_until_the_next():
    got = parts(rank(0, [20, 50], [30, 5]), rank(1, [45, 50], [-1, 5]))
    assert got["outside"][1] == 90.0


def test_parts_of_a_pipeline_sum_to_its_steps_and_own_time_is_what_it_computed():
    layout = Layout(data=2, stages=3, tensor=2, steps=120)
    evidence, truth = simulate(layout, healthy(layout))
    tables, found = pieces(evidence)
    scene = observe(evidence, tables, found[0])
    assert np.allclose(sum_parts(scene.now.parts), scene.now.wall)
    assert scene.now.own.mean(axis=1).tolist() == pytest.approx(truth.own_ms.mean(axis=1).tolist(), rel=0.01)


def test_the_growth_is_split_exactly_and_what_is_left_is_said():
    layout = Layout(data=4, steps=300)
    made = healthy(layout)
    made.compute[1, 150:] *= 1.5
    evidence, truth = simulate(layout, made)
    tables, found = pieces(evidence)
    scene = observe(evidence, tables, found[0])
    assert scene.before is not None
    by_part, unexplained = grown(scene.before, scene.now)
    growth = scene.now.wall.mean() - scene.before.wall.mean()
    assert sum(by_part.values()) + unexplained == pytest.approx(growth)
    assert unexplained == pytest.approx(0.0, abs=1e-6)
    waited = truth.own_ms.max(axis=0) - truth.own_ms
    for part, values in (("waiting", waited), ("outside", truth.own_ms)):
        assert by_part[part] == pytest.approx(values[:, 150:].mean() - values[:, :150].mean(), rel=0.02)
