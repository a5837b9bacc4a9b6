"""Slow transfers: links and groups whose transfers take long though all ends were there in time."""

from __future__ import annotations

import msgspec
import numpy as np

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.evidence import Ints
from diagnosis.layers.pipeline import Case, Link
from diagnosis.limits import SLOW_GROUP, SLOW_LINK
from diagnosis.replay.trace import COLLECTIVE, RECV, SEND
from diagnosis.replay.whatif import Replayed
from diagnosis.steps import Floats
from diagnosis.verdict import Verdict

_MANY = 64
"""From so many links on, one more or less does not move their median."""


def slow_links(replayed: Replayed) -> tuple[list[Link], Floats]:
    """Links whose transfers take ``SLOW_LINK`` times as long as those of links between the same stages (of all,
    where these are fewer than three), the slowest first; and all durations as they would be without that."""
    trace, graph = replayed.trace, replayed.graph
    roles = trace.roles
    pairs = graph.members == 2
    sends, receives = np.flatnonzero(pairs & (roles == SEND)), np.flatnonzero(pairs & (roles == RECV))
    ordered = receives[np.argsort(graph.of_row[receives])]
    at = np.searchsorted(graph.of_row[ordered], graph.of_row[sends])
    hit = at < len(ordered)
    sends, at = sends[hit], at[hit]
    same = graph.of_row[ordered[at]] == graph.of_row[sends]
    sends, receives = sends[same], ordered[at[same]]
    if not len(sends):
        return [], replayed.duration
    moved = replayed.duration[sends]
    link = trace.row[sends] * len(trace.ranks) + trace.row[receives]
    by_link = np.argsort(link, kind="stable")
    names, first = np.unique(link[by_link], return_index=True)
    typical = np.array([np.median(part) for part in np.split(moved[by_link], first[1:])])
    sender, receiver = names // len(trace.ranks), names % len(trace.ranks)
    boundary = trace.stage[sender] * trace.stages + trace.stage[receiver]
    peers = _peers_typical(typical, boundary)
    slow = typical >= SLOW_LINK * np.maximum(peers, 1e-9)
    found = [
        Link(
            int(sender[p]), int(receiver[p]), float(typical[p] / peers[p]), float(typical[p]), float(peers[p])
        )
        for p in np.flatnonzero(slow & (peers > 0)).tolist()
    ]
    if not found:
        return [], replayed.duration
    place = np.searchsorted(names, link)
    better = replayed.duration.copy()
    for ends in (sends, receives):
        better[ends] = np.where(slow[place], np.minimum(peers[place], better[ends]), better[ends])
    return sorted(found, key=lambda one: -one.ratio), better


def _peers_typical(typical: Floats, boundary: Ints) -> Floats:
    """Per link the median of the others between the same stages; of all others where these are fewer than two; 0
    where there are none."""
    out = np.zeros(len(typical))
    for place in range(len(typical)):
        if out[place]:
            continue
        same = np.flatnonzero(boundary == boundary[place])
        others = same if len(same) > 2 else np.arange(len(typical))
        if len(others) > _MANY:
            out[same] = np.median(typical[others])
        elif len(others) > 2:
            out[place] = np.median(typical[others[others != place]])
    return out


def slow_groups(replayed: Replayed) -> tuple[list[tuple[str, Ints, float]], float]:
    """Collectives that take ``SLOW_GROUP`` times as long in one group of ranks as in the others, all members being
    there: name, rows of the members, ratio; and what they cost together, ms per step. Three groups at least."""
    trace, graph = replayed.trace, replayed.graph
    better = replayed.duration.copy()
    found: list[tuple[str, Ints, float]] = []
    for kind, (name, role) in enumerate(zip(trace.names, trace.role, strict=True)):
        rows = np.flatnonzero((trace.kind == kind) & (graph.members > 2))
        if role != COLLECTIVE or not len(rows):
            continue
        stages = np.unique(trace.stage[trace.row[rows]])
        at = [rows[trace.stage[trace.row[rows]] == stage] for stage in stages]
        typical = np.array([np.median(replayed.duration[part]) for part in at])
        for place, part in enumerate(at):
            others = np.median(np.delete(typical, place)) if len(at) > 2 else 0.0
            if 0 < others * SLOW_GROUP <= typical[place]:
                better[part] = np.minimum(better[part], others)
                found.append((name, np.unique(trace.row[part]), float(typical[place] / others)))
    return found, replayed.replayed_ms - float(replayed.run(better).mean()) if found else 0.0


def blamed_link(case: Case) -> tuple[out.Culprit, str, str]:
    """The slow link, or the port that all slow links share: as a culprit (the sender's rank, owner network), in a
    sentence, and what to do. ``case.links`` must not be empty."""
    pairs = {frozenset((one.sender, one.receiver)): one for one in reversed(case.links)}
    port = _port(case, set(pairs))
    worst = case.links[0]
    ends = wording.ranks([case.rank(worst.sender), case.rank(worst.receiver)])
    blamed = port if port is not None else worst.sender
    if port is not None:
        what = f"all links of rank {case.rank(port)}"
    else:
        what = (
            f"the link between {ends}" if len(pairs) == 1 else f"{len(pairs)} links, the worst between {ends}"
        )
    text = (
        f"Transfers over {what} take {worst.ratio:.1f} times as long as over the others ({wording.ms(worst.ms)} "
        f"against {wording.ms(worst.peers_ms)}) though both ends are there in time. "
        f"It costs {wording.ms(case.link_ms)} per step."
    )
    culprit = out.Culprit(
        rank=case.rank(blamed),
        node=case.trace.nodes[blamed],
        gpu=None,
        layer="nccl",
        cause="slow-link",
        owner="network",
        confidence=0.85 if port is not None or len(pairs) == 1 else 0.7,
        cost_ms_per_step=round(case.link_ms, 3),
        share_explained=1.0,
        detail=f"{what}: {wording.ms(worst.ms)} per transfer, others {wording.ms(worst.peers_ms)}",
    )
    action = (
        f"Look at {what}: port speed, lanes, errors and retransmits on both nodes and the switch between."
    )
    return culprit, text, action


def slow_link(case: Case, known: Verdict) -> Verdict:
    """A transfer is slow though both ends were there in time, and no rank computes longer than its peers."""
    culprit, text, action = blamed_link(case)
    return msgspec.structs.replace(
        known,
        status="slow",
        culprits=[culprit],
        layer="nccl",
        cause="slow-link",
        owner="network",
        confidence=culprit.confidence,
        cost_ms_per_step=culprit.cost_ms_per_step,
        joint_cost_ms_per_step=culprit.cost_ms_per_step,
        share_explained=1.0,
        summary=text,
        ruled_out=[
            out.RuledOut(cause="slow-rank", why="no rank computes longer than its stage's others for good")
        ],
        actions=[action],
    )


def _port(case: Case, pairs: set[frozenset[int]]) -> int | None:
    """The one rank at which all slow links end, if it has several and all of its links are slow."""
    common = frozenset.intersection(*pairs) if len(pairs) > 1 else frozenset()
    if len(common) != 1:
        return None
    (row,) = common
    trace = case.trace
    mates = (trace.replica == trace.replica[row]) & (np.abs(trace.stage - trace.stage[row]) == 1)
    return row if len(pairs) == int(mates.sum()) else None


def slow_group(case: Case, known: Verdict, groups: list[tuple[str, Ints, float]], cost: float) -> Verdict:
    name, rows, ratio = max(groups, key=lambda group: group[2])
    who = wording.ranks([case.rank(row) for row in rows.tolist()])
    return msgspec.structs.replace(
        known,
        status="slow",
        layer="nccl",
        cause="slow-link",
        owner="network",
        confidence=0.6,
        cost_ms_per_step=round(cost, 3),
        joint_cost_ms_per_step=round(cost, 3),
        summary=(
            f"{name} among {who} takes {ratio:.1f} times as long as in the other stages once all members have "
            f"come, and costs {wording.ms(cost)} per step. Which of their links is slow, the collective of one "
            "group does not tell."
        ),
        ruled_out=[
            out.RuledOut(cause="slow-rank", why="no rank computes longer than its stage's others for good")
        ],
        actions=[f"Look at the network of the nodes of {who}: port speed, errors, retransmits."],
    )
