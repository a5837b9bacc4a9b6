"""Peers do the same work: told by the evidence, or by what ranks send, receive and meet in."""

import pytest

from bench.pipelines import Layout, healthy, simulate
from bench.synthetic import renumbered, with_rank
from diagnosis.evidence import Evidence
from diagnosis.peers import by_node, by_switch, peer_groups
from diagnosis.scene import pieces
from probes.records import Place


def groups(evidence: Evidence) -> set[tuple[int, ...]]:
    return set(peer_groups(evidence.ranks, pieces(evidence)[1][0]))


def job(**sizes: int) -> tuple[Layout, Evidence]:
    layout = Layout(**{"steps": 60, **sizes})  # type: ignore[arg-type]
    return layout, simulate(layout, healthy(layout))[0]


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 4},
        {"data": 2, "tensor": 2},
        {"data": 2, "stages": 3},
        {"data": 2, "stages": 4, "tensor": 2},
        {"data": 1, "stages": 4},
    ],
    ids=str,
)
def test_ranks_of_one_stage_are_peers_and_no_others(sizes):
    layout, evidence = job(**sizes)
    stages: dict[int, list[int]] = {}
    for rank in range(layout.ranks):
        stages.setdefault(layout.place(rank)[0], []).append(rank)
    assert groups(evidence) == {tuple(ranks) for ranks in stages.values()}


def test_renumbered_ranks_have_renumbered_peers():
    _, evidence = job(data=2, stages=3)
    number = {rank: (rank + 2) % 6 for rank in range(6)}
    there = {tuple(sorted(number[rank] for rank in group)) for group in groups(evidence)}
    assert groups(renumbered(evidence, number)) == there


def test_stages_that_are_told_are_believed_over_what_collectives_look_like():
    _, evidence = job(data=4)
    for rank in range(4):
        evidence = with_rank(evidence, rank, place=Place(stage=rank % 2))
    assert groups(evidence) == {(0, 2), (1, 3)}


def test_a_stage_that_is_told_of_some_ranks_only_is_not_used():
    _, evidence = job(data=4)
    assert groups(with_rank(evidence, 0, place=Place(stage=1))) == {(0, 1, 2, 3)}


def test_nodes_and_switches_where_they_are_known():
    _, evidence = job(data=6)
    evidence = with_rank(evidence, 5, node="", place=Place(switch="s1"))
    assert by_node(evidence.ranks, (0, 1, 4, 5)) == {"node-0": [0, 1], "node-1": [2]}
    assert by_switch(evidence.ranks, (0, 1, 4, 5)) == {"s1": [3]}
