"""A rank whose connections are slow, as a verdict: a slow link, or one that loses packets."""

from __future__ import annotations

import shlex

import msgspec

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.case import account_lines, rounded
from diagnosis.connections import SlowConnection
from diagnosis.evidence import Evidence
from diagnosis.scene import Scene
from diagnosis.verdict import Verdict

SLOW, LOSES = "slow-link", "packet-loss"
_SURE_OF_END, _SURE_OF_LINK = 0.9, 0.75


def slow_connection(evidence: Evidence, scene: Scene, found: SlowConnection, known: Verdict) -> Verdict:
    """Status ``slow`` for the network: nobody came late, and one rank's data was on its way for longer."""
    sender = scene.ranks[found.row]
    blamed = sender if found.end is None else found.end
    row = scene.ranks.index(blamed)
    node = evidence.ranks[blamed].node
    cause = LOSES if found.lost else SLOW
    detail = f"{place_in_words(scene, found)}: {_how(found)}{_limited(found)}"
    culprit = out.Culprit(
        rank=blamed,
        node=node,
        gpu=None,
        layer="nccl",
        cause=cause,
        owner="network",
        confidence=round((1 - found.q) * (_SURE_OF_LINK if found.end is None else _SURE_OF_END), 2),
        cost_ms_per_step=round(found.cost_ms, 3),
        share_explained=1.0,
        detail=detail,
    )
    return msgspec.structs.replace(
        known,
        status="slow",
        culprits=[culprit],
        layer="nccl",
        cause=cause,
        owner="network",
        confidence=culprit.confidence,
        cost_ms_per_step=culprit.cost_ms_per_step,
        joint_cost_ms_per_step=culprit.cost_ms_per_step,
        share_explained=1.0,
        account=account_lines(scene, row, [other for other in range(len(scene.ranks)) if other != row]),
        unexplained_ms=rounded(float(scene.now.unexplained[row].mean())),
        summary=(
            f"The network holds the job up at rank {blamed} on {node}: {detail}. No rank comes late for it: "
            f"all wait alike. It costs {wording.ms(found.cost_ms)} of each step."
        ),
        evidence=_evidence(sender, found),
        cleared=[
            out.Cleared(rank=rank, why="comes in time, and waits for that transfer like all others")
            for rank in scene.ranks
            if rank != blamed
        ],
        ruled_out=_ruled_out(found),
        not_seen=[*known.not_seen, *_doubts(scene, found)],
        actions=_actions(scene, found, blamed, node),
    )


def place_in_words(scene: Scene, found: SlowConnection) -> str:
    """``what leaves rank 2``, ``what comes to rank 1``, or the link between both."""
    sender, peer = scene.ranks[found.row], found.connection.peer_rank
    if found.end is not None:
        return f"what leaves rank {sender}" if found.end == sender else f"what comes to rank {found.end}"
    return f"the link from rank {sender} to {_peer(found.connection.peer, peer)}"


def _peer(address: str, rank: int | None) -> str:
    return f"{address} (rank {rank})" if rank is not None else address


def _how(found: SlowConnection) -> str:
    one = found.connection
    to = _peer(one.peer, one.peer_rank)
    text = (
        f"data for {to} is on its way for {wording.ms(found.sending_ms)} of each step, of other ranks "
        f"{wording.ms(found.usual_ms)}, at {_rate(found.bytes_per_s)} against {_rate(found.usual_bytes_per_s)}"
    )
    if found.lost:
        text += (
            f"; {_share(found.lost_share)} of its segments had to be sent again, of theirs "
            f"{_share(found.usual_lost_share)}"
        )
        if one.timeouts >= 1:
            text += f", and {one.timeouts:,.0f} times it waited in vain for an answer"
        return text
    trips = wording.ms(found.round_trip_ms), wording.ms(found.usual_round_trip_ms)
    return f"{text}; a round trip takes {trips[0]}, theirs {trips[1]}"


def _limited(found: SlowConnection) -> str:
    if found.limit is None:
        return ""
    return (
        f"; {found.limit.qdisc} on its interface {found.limit.interface} holds back "
        f"{found.limit.per_s:,.0f} packets per second"
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.1f} MB/s"


def _share(share: float) -> str:
    return f"{share * 100:.2g} %"


def _evidence(rank: int, found: SlowConnection) -> list[out.Evidence]:
    rows = [
        out.Evidence(
            layer="nccl",
            metric="sending",
            rank=rank,
            value=round(found.sending_ms, 3),
            peers=round(found.usual_ms, 3),
            unit="ms/step",
            effect=round(found.sending_ms - found.usual_ms, 3),
            q=float(f"{found.q:.2g}"),
        )
    ]
    if found.lost:
        rows.append(
            out.Evidence(
                layer="nccl",
                metric="segments sent again",
                rank=rank,
                value=round(100 * found.lost_share, 4),
                peers=round(100 * found.usual_lost_share, 4),
                unit="%",
                effect=round(100 * (found.lost_share - found.usual_lost_share), 4),
                q=None,
            )
        )
    return rows


def _ruled_out(found: SlowConnection) -> list[out.RuledOut]:
    rows = [
        out.RuledOut(
            cause="late-rank",
            why="all ranks wait alike, and none takes longer on its own: what is slow is the transfer",
        ),
        out.RuledOut(
            cause="slow-receiver",
            why="time in which the other end had no room for more does not count, and no thread that moves its "
            "collectives lacked a CPU",
        ),
    ]
    if found.lost:
        rows.append(
            out.RuledOut(
                cause=SLOW,
                why=f"packets are lost: {_share(found.lost_share)} of its segments had to be sent again",
            )
        )
    else:
        rows.append(
            out.RuledOut(
                cause=LOSES,
                why=f"{_share(found.lost_share)} of its segments had to be sent again, of other ranks' "
                f"{_share(found.usual_lost_share)}",
            )
        )
    return rows


def _doubts(scene: Scene, found: SlowConnection) -> list[str]:
    if found.end is not None:
        return []
    ends = f"rank {scene.ranks[found.row]}'s or {_peer(found.connection.peer, found.connection.peer_rank)}'s"
    return [
        f"at which end of the link it is ({ends}) other connections of both do not tell: the sender's is named"
    ]


def _actions(scene: Scene, found: SlowConnection, blamed: int, node: str) -> list[str]:
    ends = f"rank {scene.ranks[found.row]} and {_peer(found.connection.peer, found.connection.peer_rank)}"
    if found.lost:
        return [
            f"Look for errors and drops between {ends}, first at {node}: ip -s link, ethtool -S, nft list ruleset, "
            "the switch port's counters; change cable, transceiver or port.",
            f"It helped when rank {scene.ranks[found.row]} sends no more segments again than other ranks.",
        ]
    if found.limit is not None:
        where = f"{found.limit.interface} of rank {blamed} on {node}"
        device = shlex.quote(found.limit.interface)  # a container names it, and somebody may paste this
        return [
            f"Raise or take away the limit on {where}: tc qdisc show dev {device}, in the network "
            "namespace of the rank where it has one; find what sets it (the container's network, a QoS policy).",
            f"It helped when {found.limit.qdisc} holds nothing back, and round trips are as short as others'.",
        ]
    return [
        f"Look at the rate of the link between {ends}, first at {node}: tc -s qdisc, ethtool (negotiated speed), "
        "limits of the virtual network, other traffic on the port.",
        f"It helped when a round trip of rank {blamed} takes what it takes of others.",
    ]
