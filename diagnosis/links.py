"""Slow transfers, told from late ranks, and where they are: a sender, a receiver, a link, or one cannot tell.

What a collective takes once all have come is the transfer (its shortest duration): a late rank does not touch it,
a slow link does. CCL-D's P (``layers.nccl.compute_or_communication``) says the same of one collective.
Communicators that move the same are peers; over pairs they make C4D's delay matrix: a slow row is a sender, a slow
column a receiver, a single cell a link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from diagnosis.blame import by_history, by_peers
from diagnosis.evidence import Ints, RankEvidence
from diagnosis.exposed import shortest
from diagnosis.joined import POINT_TO_POINT, Joined, Key, communicator_keys
from diagnosis.layers.nccl import TOGETHER, compute_or_communication, transfer_ms
from diagnosis.limits import SLOW_LINK
from diagnosis.pairing import step_index
from diagnosis.permutation import TooFewBlocksError
from diagnosis.scene import Scene
from diagnosis.steps import Bools, Floats
from probes.records import Op

_FEWEST_PEERS = 3
"""Of two links of which one is slower, either may be the odd one."""
_IS_TRANSFER = 0.5
"""Below this P the transfer made the collectives long, above it somebody who came late."""
_NEARLY_ALL = 0.8


@dataclass(frozen=True, eq=False)
class Route:
    """One way that data takes: from one rank to another, or among the members of a communicator."""

    key: Key
    ranks: tuple[int, ...]
    """(sender, receiver) of a directed one, else all members that were seen."""
    directed: bool
    now_ms: Floats
    """Transfer per step, over the steps that are compared."""
    before_ms: Floats
    """… and over those of the baseline; empty without one."""
    moved: tuple[tuple[int, int, int], ...]
    """Op, bytes and how often per step: routes that move the same are peers."""
    late_share: float
    """P: 1 when late ranks made its collectives long, 0 when the transfer did; NaN when nothing did."""


@dataclass(frozen=True)
class SlowTransfer:
    """Routes whose transfers are slow, and what can be said of the place."""

    routes: list[Route]
    against: str
    """``peers`` or ``past``."""
    ms: float
    """What they add to the step, together."""
    value_ms: float
    usual_ms: float
    q: float
    place: str
    """``sender``, ``receiver``, ``port`` (both), ``link``, ``node``, or ``unknown``."""
    ranks: tuple[int, ...]
    """The rank, or the two ends of the link; none where the place is not known."""
    late_share: float


def routes_of(scene: Scene, ranks: Mapping[int, RankEvidence]) -> list[Route]:
    """All ways on which the transfer is told: members that leave together, pairs that send and receive. Members
    that nobody watches may be the late ones, so a communicator tells its transfer when all of it is seen."""
    found = []
    for key, table in scene.tables.joined.items():
        told = np.isin(table.op, TOGETHER) & (shortest(table) >= 0)
        if told.any() and len(table.ranks) >= key[1]:
            found.append(_route(scene, key, table, told, table.ranks, directed=False))
    for key, table in scene.tables.pairs.items():
        sender = _sender(table, key, ranks)
        told = np.isin(table.op, POINT_TO_POINT) & (shortest(table) >= 0)
        for row in (0, 1):
            if (told & (sender == row)).any():
                ends = table.ranks[row], table.ranks[1 - row]
                found.append(_route(scene, key, table, told & (sender == row), ends, directed=True))
    return [route for route in found if route is not None and route.now_ms.any()]


def _route(
    scene: Scene, key: Key, table: Joined, told: Bools, ranks: tuple[int, ...], *, directed: bool
) -> Route | None:
    mine = next((row for row, rank in enumerate(table.ranks) if rank in scene.ranks), None)
    if mine is None:
        return None
    steps, row = scene.steps, scene.steps.row_of[table.ranks[mine]]
    step = step_index(steps.start_ns[row], steps.end_ns[row], steps.seen[row], table.enter_ns[mine])
    inside = told & (step >= 0) & table.seen[mine]
    ms = np.maximum(shortest(table), 0) / 1e6 if directed else transfer_ms(table)
    series = np.asarray(np.bincount(step[inside], ms[inside], steps.count), np.float64)
    compared = inside & scene.columns[np.maximum(step, 0)]
    if not compared.any():
        return None
    count = int(scene.columns.sum())
    kinds, times = np.unique(np.stack([table.op, table.bytes])[:, compared], axis=1, return_counts=True)
    moved = tuple(
        (int(op), int(size), int(per_step))
        for (op, size), per_step in zip(kinds.T, np.rint(times / count), strict=True)
        if per_step > 0
    )
    longest = np.maximum(table.durations.longest, 0)[compared] / 1e6
    least = shortest(table)[compared] / 1e6
    base = np.quantile(shortest(table)[inside] / 1e6, 0.05)
    p = compute_or_communication(longest, least, np.full_like(least, base))
    p = p[np.isfinite(p)]
    before = series[scene.past] if scene.past is not None else np.zeros(0)
    return Route(
        key,
        ranks,
        directed,
        series[scene.columns],
        before,
        moved,
        float(np.median(p)) if len(p) else float("nan"),
    )


def _sender(table: Joined, key: Key, ranks: Mapping[int, RankEvidence]) -> Ints:
    """Per column of a pair, the row of the rank that sends."""
    rank = ranks[table.ranks[0]]
    index = communicator_keys(rank.communicators).index(key)
    rows = np.flatnonzero(
        (rank.collectives.communicator == index) & np.isin(rank.collectives.op, POINT_TO_POINT)
    )
    op = np.full(len(table.seq), int(Op.RECV), np.int64)
    op[np.searchsorted(table.seq, rank.collectives.seq[rows])] = rank.collectives.op[rows]
    return np.where(op == int(Op.SEND), 0, 1)


def slow_transfer(scene: Scene, ranks: Mapping[int, RankEvidence]) -> SlowTransfer | None:
    """Routes that are slower than those that move the same, else than they were themselves; None when there are
    none, or what tells them is too little."""
    routes = routes_of(scene, ranks)
    step_ms = float(scene.now.wall.mean())
    try:
        return _against_peers(routes, step_ms, ranks) or _against_past(routes, step_ms, ranks)
    except TooFewBlocksError:
        return None


def _against_peers(
    routes: list[Route], step_ms: float, ranks: Mapping[int, RankEvidence]
) -> SlowTransfer | None:
    classes: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, route in enumerate(routes):
        classes[route.directed, route.key[1], route.moved].append(place)
    groups = [group for group in classes.values() if len(group) >= _FEWEST_PEERS]
    if not groups:
        return None
    series = np.stack([route.now_ms for route in routes])
    blame = by_peers(series[None], groups, step_ms)
    slow = []
    usual: dict[int, float] = {}
    for place in blame.culprits:
        group = next(group for group in groups if place in group)
        others = [float(series[other].mean()) for other in group if other not in blame.culprits]
        usual[place] = float(np.median(others))
        if series[place].mean() >= SLOW_LINK * usual[place]:
            slow.append(place)
    if not slow:
        return None
    worst = max(slow, key=lambda place: (float(series[place].mean()) - usual[place], routes[place].ranks))
    return _placed(
        [routes[place] for place in slow],
        routes,
        [float(series[place].mean()) - usual[place] for place in slow],
        "peers",
        float(series[worst].mean()),
        usual[worst],
        blame.tests[0, worst].q,
        ranks,
    )


def _against_past(
    routes: list[Route], step_ms: float, ranks: Mapping[int, RankEvidence]
) -> SlowTransfer | None:
    if not routes or not len(routes[0].before_ms):
        return None
    grown: dict[int, float] = {}
    for place, route in enumerate(routes):
        # One by one: where all grow, none stands out, and all are slow.
        for tested in by_history(route.before_ms[None], route.now_ms[None], step_ms).values():
            grown[place] = min(1.0, tested.q * len(routes))
    slow = [
        place
        for place in grown
        if routes[place].now_ms.mean() >= SLOW_LINK * max(float(routes[place].before_ms.mean()), 1e-9)
    ]
    if not slow:
        return None
    worst = max(
        slow, key=lambda place: (float(routes[place].now_ms.mean() - routes[place].before_ms.mean()), place)
    )
    route = routes[worst]
    return _placed(
        [routes[place] for place in slow],
        routes,
        [float(routes[place].now_ms.mean() - routes[place].before_ms.mean()) for place in slow],
        "past",
        float(route.now_ms.mean()),
        float(route.before_ms.mean()),
        grown[worst],
        ranks,
    )


def _placed(
    slow: list[Route],
    routes: list[Route],
    over: list[float],
    against: str,
    value: float,
    usual: float,
    q: float,
    ranks: Mapping[int, RankEvidence],
) -> SlowTransfer | None:
    told = [route.late_share for route in slow if np.isfinite(route.late_share)]
    late_share = float(np.median(told)) if told else 0.0
    if against == "past" and late_share > _IS_TRANSFER:
        return None
    place, where = _place(slow, routes, ranks)
    return SlowTransfer(slow, against, _cost(slow, over), value, usual, q, place, where, late_share)


def _cost(slow: list[Route], over: list[float]) -> float:
    """What slow routes add to the step: those that one rank goes through come one after the other, those of
    different ranks at once."""
    total: dict[int, float] = defaultdict(float)
    for route, ms in zip(slow, over, strict=True):
        for rank in route.ranks:
            total[rank] += ms
    return max(total.values())


def _place(
    slow: list[Route], routes: list[Route], ranks: Mapping[int, RankEvidence]
) -> tuple[str, tuple[int, ...]]:
    """What all slow routes have in common and no quick one has."""
    quick = [route for route in routes if route not in slow and route.moved]
    directed = [route for route in slow if route.directed]
    if len(slow) == 1 and directed:
        return "link", slow[0].ranks
    if len(directed) == len(slow):
        for name, end in (("sender", 0), ("receiver", 1)):
            ends = {route.ranks[end] for route in slow}
            beside = [route for route in quick if route.directed and route.ranks[end] in ends]
            if len(ends) == 1 and len(beside) <= (1 - _NEARLY_ALL) * len(slow):
                return name, tuple(ends)
        if len({frozenset(route.ranks) for route in slow}) == 1:
            return "link", slow[0].ranks
    alike = [route for route in quick if len(route.ranks) == len(slow[0].ranks)]
    common = set.intersection(*(set(route.ranks) for route in slow))
    common = {rank for rank in common if not any(rank in route.ranks for route in alike)}
    if len(common) == 1 and len(slow) > 1:
        return "port", tuple(common)
    nodes = set.intersection(*({ranks[rank].node for rank in route.ranks} for route in slow))
    nodes = {node for node in nodes if not any(ranks[rank].node == node for r in alike for rank in r.ranks)}
    if len(nodes) == 1 and len(slow) > 1 and nodes != {""}:
        node = nodes.pop()
        return "node", tuple(
            sorted({rank for route in slow for rank in route.ranks if ranks[rank].node == node})
        )
    return "unknown", ()
