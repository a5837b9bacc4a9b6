"""Who waited for whom: from each rank upstream, through collectives and receives, to one that nothing made wait.

In a blocking collective everybody waits for the last to come, who has the shortest duration; in a receive the
receiver waits for the sender. Both are told by durations alone, so no clocks are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from diagnosis import wording
from diagnosis.evidence import RankEvidence
from diagnosis.exposed import shortest
from diagnosis.joined import POINT_TO_POINT, Joined, Key, communicator_keys, is_point_to_point
from diagnosis.layers.nccl import TOGETHER
from diagnosis.pairing import step_index
from diagnosis.scene import Scene

_LEAST_SHARE = 0.3
"""A rank is waited for, if at least this share of a wait was for it; what is below is spread over many."""
_WORTH_MS = 1.0


@dataclass(frozen=True)
class Wait:
    """One rank's waiting for another, ms per step."""

    ms: float
    receive: bool
    """In sends and receives; else in collectives to which the other came last."""


@dataclass(frozen=True)
class Upstream:
    """Per rank (number): whom it waited for, and what it waited in receives whose sender is not known."""

    waits: dict[int, dict[int, Wait]]
    unknown_sender_ms: dict[int, float] = field(default_factory=dict)

    def most(self, rank: int) -> tuple[int, Wait] | None:
        """The rank that this one waited for longest, if that is a good part of all that it waited."""
        mine = self.waits.get(rank, {})
        if not mine:
            return None
        total = sum(wait.ms for wait in mine.values()) + self.unknown_sender_ms.get(rank, 0.0)
        other = min(mine, key=lambda one: (-mine[one].ms, one))
        return (other, mine[other]) if mine[other].ms >= _LEAST_SHARE * total else None

    def chain(self, rank: int, stop: frozenset[int]) -> list[tuple[int, Wait]]:
        """From ``rank`` to whom it waited for, whom that waited for, and so on: until a rank of ``stop``, one that
        waited for nobody in particular, or one that was there before (a ring of waits has no first)."""
        found: list[tuple[int, Wait]] = []
        been = {rank}
        while rank not in stop and (step := self.most(rank)) is not None and step[1].ms >= _WORTH_MS:
            rank = step[0]
            if rank in been:
                break
            been.add(rank)
            found.append(step)
        return found


def waited_for(scene: Scene, ranks: Mapping[int, RankEvidence]) -> Upstream:
    """Over the steps that are compared. How much a rank waits its account says, for whom durations tell."""
    count = int(scene.columns.sum())
    in_collectives: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    in_receives: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for tables, found, ops in (
        (scene.tables.joined, in_collectives, TOGETHER),
        (scene.tables.pairs, in_receives, POINT_TO_POINT),
    ):
        for table in tables.values():
            _of_table(scene, table, ops, found, count)
    unknown = _unknown_senders(scene, ranks, in_receives, count)
    waiting, receiving = scene.now.mean("waiting"), scene.now.mean("receiving")
    waits: dict[int, dict[int, Wait]] = {}
    for row, rank in enumerate(scene.ranks):
        mine: dict[int, Wait] = {}
        told = sum(in_collectives[rank].values()) + (
            sum(in_receives[rank].values()) if scene.by == "threads" else 0.0
        )
        scale = min(1.0, float(waiting[row]) / told) if told > 0 else 0.0
        for other, ms in in_collectives[rank].items():
            mine[other] = Wait(ms * scale, False)
        if scene.by == "collectives":
            told = sum(in_receives[rank].values())
            scale = min(1.0, float(receiving[row]) / told) if told > 0 else 0.0
        for other, ms in in_receives[rank].items():
            if ms * scale >= (mine[other].ms if other in mine else 0.0):
                mine[other] = Wait(ms * scale, True)
        waits[rank] = mine
    return Upstream(waits, unknown)


def _of_table(
    scene: Scene, table: Joined, ops: tuple[int, ...], found: dict[int, dict[int, float]], count: int
) -> None:
    compared = set(scene.ranks)
    rows = [row for row, rank in enumerate(table.ranks) if rank in compared]
    least = shortest(table)
    told = (least >= 0) & np.isin(table.op, ops)
    if not rows or not told.any():
        return
    steps = scene.steps
    mine = steps.row_of[table.ranks[rows[0]]]
    step = step_index(
        steps.start_ns[mine], steps.end_ns[mine], steps.seen[mine], table.enter_ns[rows[0]], closing=True
    )
    told &= (step >= 0) & scene.columns[np.maximum(step, 0)]
    known = table.known() & told
    last = np.where(known, table.duration_ns, np.iinfo(np.int64).max).argmin(axis=0)
    wait = np.where(known, table.duration_ns - least, 0) / 1e6 / count
    for row in rows:
        for_whom = np.bincount(last[told], wait[row, told], len(table.ranks))
        for other in np.flatnonzero(for_whom > 0).tolist():
            if other != row:
                found[table.ranks[row]][table.ranks[other]] += float(for_whom[other])


def _unknown_senders(
    scene: Scene, ranks: Mapping[int, RankEvidence], found: dict[int, dict[int, float]], count: int
) -> dict[int, float]:
    """Waits in sends and receives of communicators of more than two: with whom, no record says. In a pipeline of
    two ranks that were seen it is the other one; else the waits are kept without a name."""
    members: dict[Key, list[int]] = defaultdict(list)
    for rank in scene.ranks:
        for key in communicator_keys(ranks[rank].communicators):
            members[key].append(rank)
    unknown: dict[int, float] = {}
    for row, rank in enumerate(scene.ranks):
        table = ranks[rank].collectives
        pairs = is_point_to_point(table.op) & (table.duration_ns >= 0)
        if not pairs.any():
            continue
        mine = scene.rows[row]
        step = step_index(
            scene.steps.start_ns[mine], scene.steps.end_ns[mine], scene.steps.seen[mine], table.enter_ns
        )
        pairs &= (step >= 0) & scene.columns[np.maximum(step, 0)]
        for index, key in enumerate(communicator_keys(ranks[rank].communicators)):
            here = pairs & (table.communicator == index)
            if key in scene.tables.pairs or not here.any():
                continue
            duration = table.duration_ns[here]
            ms = float((duration - np.quantile(duration, 0.1)).clip(0).sum() / 1e6 / count)
            others = [other for other in members[key] if other != rank]
            if key[1] == 2 and len(others) == 1:
                found[rank][others[0]] += ms
            else:
                unknown[rank] = unknown.get(rank, 0.0) + ms
    return unknown


def words(upstream: Upstream, rank: int, culprits: frozenset[int]) -> str:
    """What a victim waited for: ``waited 12.0 ms per step in a send to or receive from rank 3, which
    waited for rank 1``; empty
    where nothing in particular is known."""
    chain = upstream.chain(rank, culprits)
    direct = {other: wait for other, wait in upstream.waits.get(rank, {}).items() if other in culprits}
    if direct and (not chain or chain[-1][0] not in culprits):
        other = min(direct, key=lambda one: (-direct[one].ms, one))
        chain = [(other, direct[other])] if direct[other].ms >= _WORTH_MS else chain[:1]
    if not chain:
        unknown = upstream.unknown_sender_ms.get(rank, 0.0)
        if unknown >= _WORTH_MS:
            return f"waited {wording.ms(unknown)} per step in sends and receives, with whom is not recorded"
        return ""
    first, wait = chain[0]
    text = f"waited {wording.ms(wait.ms)} per step "
    text += (
        f"in a send to or receive from rank {first}"
        if wait.receive
        else f"in collectives that rank {first} came to last"
    )
    for other, _ in chain[1:] if chain[-1][0] in culprits else []:
        text += f", which waited for rank {other}"
    return text
