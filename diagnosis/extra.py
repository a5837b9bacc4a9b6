"""What a culprit takes longer than its peers, gathered from all that is known of the host: facts for the rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diagnosis import verdict as out
from diagnosis.accounting import ASLEEP, HELPERS, PARTS
from diagnosis.evidence import Evidence
from diagnosis.findings import REASONS, Extra, HostTime, Label, Taker, TakerGroup, TakerKind, group_of
from diagnosis.host_time import host_time, mean_of, metrics_of
from diagnosis.layers import host
from diagnosis.limits import EVIDENCE_PEERS
from diagnosis.scene import Scene
from diagnosis.thread_parts import THREAD_PARTS

_WORTH_A_LINE_MS = 0.5
"""A reason that took less of the rank's step, and of its peers', stays in the line of what it slept in all."""


def extra_of(
    evidence: Evidence, scene: Scene, row: int, peers: Sequence[int], known: dict[int, HostTime]
) -> Extra:
    """Of a row of the scene against its peers' rows; times are means over the compared steps, in ms per step.

    What is told rank by rank (who had its CPU, what the host's probes saw) is taken of ``EVIDENCE_PEERS`` of the
    peers, the same ones whatever numbers the ranks have. ``known``: what the host's probes tell of rows so far, for
    the next culprit."""
    means = {part: scene.now.parts[part].mean(axis=1) for part in THREAD_PARTS}
    some = scene.some(peers, EVIDENCE_PEERS)
    taken = {other: _takers(evidence, scene, other) for other in (row, *some)}
    witnesses = _witnesses(evidence, scene, row, peers)
    for other in (row, *witnesses):
        if other not in known:
            known[other] = _host_time(evidence, scene, other)

    def peers_mean(*kinds: TakerKind) -> float:
        return float(np.mean([sum(t.ms for t in taken[other] if t.kind in kinds) for other in some]))

    rank = evidence.ranks[scene.ranks[row]]
    return Extra(
        job=evidence.job,
        rank=rank.rank,
        node=rank.node,
        pid=rank.pid,
        parts={part: float(values[row]) for part, values in means.items()},
        peers_parts={part: float(values[list(peers)].mean()) for part, values in means.items()},
        takers=taken[row],
        peers_took=mean_taken([taken[other] for other in some]),
        peers_idle=peers_mean("idle"),
        host=known[row],
        peers_host=mean_of([known[other] for other in witnesses], known[row]),
        node_metrics=HostTime(metrics=_node_metrics(evidence, scene, row)),
    )


def _witnesses(evidence: Evidence, scene: Scene, row: int, peers: Sequence[int]) -> list[int]:
    """Peers whose probes are looked at: of those on whose nodes all that watches this rank's node watches, if there
    are any, so many as are looked at."""
    mine = watching(evidence, _node(evidence, scene, row))
    told = {
        node: watching(evidence, node) >= mine for node in {life.node for life in evidence.ranks.values()}
    }
    like = [other for other in peers if told[_node(evidence, scene, other)]] or list(peers)
    return scene.some(like, EVIDENCE_PEERS)


def watching(evidence: Evidence, node: str) -> set[str]:
    """Probes that are on there."""
    return {probe.name for probe in evidence.probes.get(node, ()) if probe.state == "on"}


def _host_time(evidence: Evidence, scene: Scene, row: int) -> HostTime:
    start, end, steps = _span(scene, row)
    node = _node(evidence, scene, row)
    return host_time(
        evidence.ranks[scene.ranks[row]],
        {life.pid for life in evidence.ranks.values() if life.node == node},
        watching(evidence, node),
        start,
        end,
        steps,
        float(scene.now.parts["blocked"][row].mean()),
    )


def _node_metrics(evidence: Evidence, scene: Scene, row: int) -> dict[Label, float]:
    start, end, steps = _span(scene, row)
    return metrics_of(evidence.metrics.get(_node(evidence, scene, row), ()), start, end, steps)


def _node(evidence: Evidence, scene: Scene, row: int) -> str:
    return evidence.ranks[scene.ranks[row]].node


def _span(scene: Scene, row: int) -> tuple[int, int, float]:
    """First and last instant of the compared steps by the rank's clock, and how many steps lie between them."""
    place, columns = scene.rows[row], np.flatnonzero(scene.columns)
    start = int(scene.steps.start_ns[place, columns].min())
    end = int(scene.steps.end_ns[place, columns].max())
    return start, end, (end - start) / 1e6 / float(scene.now.wall[row].mean())


def mean_taken(peers: list[tuple[Taker, ...]]) -> dict[TakerGroup, float]:
    """What each group of takers takes of a peer, in the mean."""
    total: dict[TakerGroup, float] = {}
    for takers in peers:
        for taker in takers:
            total[group_of(taker)] = total.get(group_of(taker), 0.0) + taker.ms / len(peers)
    return total


def _takers(evidence: Evidence, scene: Scene, row: int) -> tuple[Taker, ...]:
    return host.takers(
        evidence.ranks[scene.ranks[row]],
        evidence.job,
        *_span(scene, row),
        float(scene.now.parts["runnable"][row].mean()),
        float(scene.now.parts["communication"][row].mean()),
    )


def by_reason(lines: Sequence[out.AccountLine], extra: Extra | None) -> list[out.AccountLine]:
    """The account with what the rank slept outside collectives by what it waited for, where that is known of the
    rank and of its peers; what is not known, and what is little, stays where it was. The sum is the same."""
    if extra is None or REASONS not in extra.host.told & extra.peers_host.told:
        return list(lines)
    mine, theirs = _slept(extra.host), _slept(extra.peers_host)
    split: list[out.AccountLine] = []
    for line in lines:
        if line.part != "blocked":
            split.append(line)
            continue
        parts = [
            out.AccountLine(
                part=part,
                layer=PARTS[part].layer,
                ms=round(mine.get(part, 0.0), 3),
                peers_ms=round(theirs.get(part, 0.0), 3),
            )
            for part in PARTS
            if max(mine.get(part, 0.0), theirs.get(part, 0.0)) >= _WORTH_A_LINE_MS
        ]
        # Each was rounded: what is left is what makes the sum what it was.
        left = round(line.ms - sum(part.ms for part in parts), 3) + 0.0  # no −0.0
        peers_left = round(line.peers_ms - sum(part.peers_ms for part in parts), 3) + 0.0
        split += [*parts, out.AccountLine(part=line.part, layer=line.layer, ms=left, peers_ms=peers_left)]
    return split


def _slept(of: HostTime) -> dict[str, float]:
    """ms per step by part of the account."""
    slept = {ASLEEP + reason: ms for reason, ms in of.asleep.items()}
    return slept | {HELPERS: sum(of.through_helpers.values())}
