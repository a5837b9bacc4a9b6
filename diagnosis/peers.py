"""Who does the same work: ranks of one pipeline stage, as the evidence tells, or as their collectives show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from diagnosis.evidence import Ints, RankEvidence
from diagnosis.joined import Key, communicator_keys, is_point_to_point
from diagnosis.steps import Bools, Steps

Signature = frozenset[tuple[int, int, int, int]]
_Known = tuple[tuple[Ints, ...], Signature]
"""What a rank did in which order, and what that makes its signature."""
_DIFFERENT = 8
"""So many orders are kept to compare the next rank with."""
_ANY = -2
"""In a signature: of any size, the number of all sizes together."""


def peer_groups(ranks: Mapping[int, RankEvidence], steps: Steps) -> list[tuple[int, ...]]:
    """Ranks of ``steps`` in groups that do the same work, the largest group first.

    Ranks that send to each other are of different stages, and no peers; nor are those whose groups do.

    Where the stage of all ranks is told, peers are of one stage. Else two ranks are peers when each step of theirs
    holds the same collectives, sends and receives: op, communicator size and how many of them, and their bytes
    where these are the same in each step. Sizes are left out when some rank's could not be read. What ranks compute
    between collectives is not compared: a longer pipeline stage with the same collectives, and without sends that
    show it to be one, is taken for a peer.
    """
    groups: dict[object, list[int]] = defaultdict(list)
    if all(ranks[rank].place.stage >= 0 for rank in steps.ranks):
        for rank in steps.ranks:
            groups[ranks[rank].place.stage].append(rank)
    else:
        sizes_known = all(bool((ranks[rank].collectives.bytes >= 0).all()) for rank in steps.ranks)
        known: list[_Known] = []
        common = np.flatnonzero(steps.seen.all(axis=0))
        stage = _stages(ranks, steps.ranks)
        for row, rank in enumerate(steps.ranks):
            signature = _signature(ranks[rank], steps, row, sizes_known, common, known)
            groups[signature, stage.get(rank, -1)].append(rank)
    return sorted((tuple(group) for group in groups.values()), key=lambda group: (-len(group), group))


def _stages(ranks: Mapping[int, RankEvidence], chosen: tuple[int, ...]) -> dict[int, int]:
    """Stages, numbered, of ranks in pipelines; empty where nothing is sent, or where it does not tell.

    What sends and receives connect is one pipeline, with one rank of each stage. Communicators that hold no two
    ranks of one pipeline hold ranks of one stage.
    """
    pipeline = {rank: rank for rank in chosen}
    senders: dict[Key, list[int]] = defaultdict(list)
    meeting: dict[Key, list[int]] = defaultdict(list)
    for rank in chosen:
        if len(ranks[rank].communicators) < 2:
            continue  # what one communicator of all does tells no stages
        table = ranks[rank].collectives
        sends = is_point_to_point(table.op)
        keys = communicator_keys(ranks[rank].communicators)
        for index in np.unique(table.communicator[sends]).tolist():
            senders[keys[index]].append(rank)
        for index in np.unique(table.communicator[~sends]).tolist():
            meeting[keys[index]].append(rank)
    groups = [set(members) for members in meeting.values() if 1 < len(members) < len(chosen)]
    for key in sorted(senders):
        # One group for all that is sent in the job tells nothing of pipelines.
        if key not in meeting and not any(group <= set(senders[key]) for group in groups):
            _unite(pipeline, senders[key])
    root = {rank: _root(pipeline, rank) for rank in chosen}
    if len(set(root.values())) == len(chosen):
        return {}
    stage = {rank: rank for rank in chosen}
    for members in groups:
        if len({root[rank] for rank in members}) == len(members):
            _unite(stage, sorted(members))
    return {rank: _root(stage, rank) for rank in chosen}


def _root(parent: dict[int, int], rank: int) -> int:
    while parent[rank] != rank:
        rank = parent[rank]
    return rank


def _unite(parent: dict[int, int], members: list[int]) -> None:
    first = min(_root(parent, rank) for rank in members)
    for rank in members:
        parent[_root(parent, rank)] = first


def by_node(ranks: Mapping[int, RankEvidence], chosen: tuple[int, ...]) -> dict[str, list[int]]:
    """Places in ``chosen`` of the ranks of each node; of nodes without a name each rank is left out."""
    nodes: dict[str, list[int]] = defaultdict(list)
    for place, rank in enumerate(chosen):
        if ranks[rank].node:
            nodes[ranks[rank].node].append(place)
    return dict(nodes)


def by_switch(ranks: Mapping[int, RankEvidence], chosen: tuple[int, ...]) -> dict[str, list[int]]:
    """Places in ``chosen`` of the ranks below each switch that is told."""
    switches: dict[str, list[int]] = defaultdict(list)
    for place, rank in enumerate(chosen):
        if ranks[rank].place.switch:
            switches[ranks[rank].place.switch].append(place)
    return dict(switches)


def _signature(
    rank: RankEvidence,
    steps: Steps,
    row: int,
    sizes_known: bool,
    common: np.typing.NDArray[np.intp],
    known: list[_Known],
) -> Signature:
    # Steps that all have seen, so that a rank watched later is not judged by another pattern.
    mine = common if len(common) else np.flatnonzero(steps.seen[row])
    if not len(mine):
        return frozenset()
    table = rank.collectives
    start, end = int(steps.start_ns[row, mine[0]]), int(steps.end_ns[row, mine[-1]])
    enter = table.enter_ns
    inside: slice | Bools = (enter >= start) & (enter < end)
    if (enter[1:] >= enter[:-1]).all():
        inside = slice(*np.searchsorted(enter, [start, end]).tolist())
    size_of = np.array([key[1] for key in communicator_keys(rank.communicators)], np.int64)
    op, communicator = table.op[inside], table.communicator[inside]
    amount = table.bytes[inside] if sizes_known else np.zeros(len(op), np.int64)
    # Ranks that did the same in the same order need no second look.
    parts = (op, communicator, amount, size_of, np.array([len(mine)]))
    for others, signature in known:
        if all(np.array_equal(one, other) for one, other in zip(parts, others, strict=True)):
            return signature
    signature = _count(op, size_of[communicator], amount, len(mine))
    del known[_DIFFERENT - 1 :]
    known.insert(0, (parts, signature))
    return signature


def _count(
    op: np.typing.NDArray[np.int64],
    size: np.typing.NDArray[np.int64],
    amount: np.typing.NDArray[np.int64],
    steps: int,
) -> Signature:
    found: list[tuple[int, int, int, int]] = []
    for amounts in (amount, np.full_like(amount, _ANY)):
        kinds, counts = np.unique(np.stack([op, size, amounts]), axis=1, return_counts=True)
        # Fewer than one in two steps: a log line, an evaluation, a lost row. Not what a step is made of.
        per_step = np.rint(counts / steps).astype(np.int64)
        found += [
            (int(o), int(s), int(b), int(times))
            for (o, s, b), times in zip(kinds.T, per_step, strict=True)
            if times > 0
        ]
    return frozenset(found)
