"""Who does the same work: members of the anchor communicator with the same collectives in each step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from diagnosis.evidence import RankEvidence
from diagnosis.steps import Steps, communicator_keys

Signature = frozenset[tuple[int, int, int, int]]


def peer_groups(ranks: Mapping[int, RankEvidence], steps: Steps) -> list[tuple[int, ...]]:
    """Ranks of ``steps`` in groups that do the same work, the largest group first.

    Two ranks are peers when each step of theirs holds the same collectives: op, communicator size, bytes and
    how many of them. Sizes are left out when some rank's could not be read. What ranks compute between
    collectives is not compared: a longer pipeline stage with the same collectives is taken for a peer.
    """
    sizes_known = all(bool(np.all(ranks[rank].collectives.bytes >= 0)) for rank in steps.ranks)
    groups: dict[Signature, list[int]] = {}
    for row, rank in enumerate(steps.ranks):
        signature = _signature(ranks[rank], steps, row, sizes_known)
        groups.setdefault(signature, []).append(rank)
    return sorted((tuple(group) for group in groups.values()), key=lambda group: (-len(group), group))


def _signature(rank: RankEvidence, steps: Steps, row: int, sizes_known: bool) -> Signature:
    # Steps that all have seen, so that a rank watched later is not judged by another pattern.
    common = steps.seen.all(axis=0)
    mine = common if common.any() else steps.seen[row]
    if not mine.any():
        return frozenset()
    table = rank.collectives
    start, end = int(steps.start_ns[row, mine].min()), int(steps.end_ns[row, mine].max())
    inside = (table.enter_ns >= start) & (table.enter_ns < end)
    size_of = np.array([key[1] for key in communicator_keys(rank.communicators)], np.int64)
    kinds = np.stack(
        [
            table.op[inside],
            size_of[table.communicator[inside]],
            table.bytes[inside] if sizes_known else np.zeros(int(inside.sum()), np.int64),
        ]
    )
    found, counts = np.unique(kinds, axis=1, return_counts=True)
    per_step = np.rint(counts / int(mine.sum())).astype(np.int64)
    # Fewer than one in two steps: a log line, an evaluation, a lost row. Not what a step is made of.
    return frozenset(
        (int(op), int(size), int(amount), int(times))
        for (op, size, amount), times in zip(found.T, per_step, strict=True)
        if times > 0
    )
