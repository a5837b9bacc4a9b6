"""Slow transfers as a verdict: which link or port, as far as collectives tell it."""

from __future__ import annotations

import msgspec

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.evidence import Evidence
from diagnosis.limits import MIN_COST_SHARE
from diagnosis.links import SlowTransfer
from diagnosis.scene import Scene
from diagnosis.verdict import Verdict

CAUSE = "slow-link"
_SURE = {"sender": 0.85, "receiver": 0.85, "port": 0.8, "link": 0.8, "node": 0.75, "unknown": 0.6}


def costs_enough(found: SlowTransfer, scene: Scene) -> bool:
    """Whether it is worth a verdict."""
    return found.ms >= MIN_COST_SHARE * float(scene.now.wall.mean())


def slow_transfer(evidence: Evidence, scene: Scene, found: SlowTransfer, known: Verdict) -> Verdict:
    """Status ``slow`` for the network: all had come in time, and the transfer was long."""
    where = place_in_words(found)
    took = f"{wording.ms(found.value_ms)} per step"
    usual = "the others'" if found.against == "peers" else "before"
    culprits = culprits_of(evidence, found)
    confidence = culprits[0].confidence if culprits else _SURE["unknown"]
    ring = "" if culprits else _ring(scene, found)
    named = f"{where[0].upper()}{where[1:]}"
    text = f"{named} is slow: once all have come, the transfer takes {took}, {usual} {wording.ms(found.usual_ms)}. "
    text += f"No rank comes late for it. It costs {wording.ms(found.ms)} of each step.{ring}"
    look = where if culprits else "the links between these ranks' nodes"
    first = found.routes[0].ranks[0]
    rank = found.ranks[0] if found.ranks else min(min(route.ranks) for route in found.routes)
    return msgspec.structs.replace(
        known,
        status="slow",
        culprits=culprits,
        layer="nccl",
        cause=CAUSE if culprits else None,
        owner="network",
        confidence=confidence,
        cost_ms_per_step=round(found.ms, 3),
        joint_cost_ms_per_step=round(found.ms, 3),
        share_explained=1.0 if culprits else 0.0,
        summary=text,
        evidence=[
            out.Evidence(
                layer="nccl",
                metric="transfer",
                rank=rank if found.ranks or len(found.routes) > 1 else first,
                value=round(found.value_ms, 3),
                peers=round(found.usual_ms, 3),
                unit="ms/step",
                effect=round(found.ms, 3),
                q=float(f"{found.q:.2g}"),
            )
        ],
        ruled_out=[
            out.RuledOut(
                cause="late-rank",
                why=(
                    f"collectives are long after the last rank has come, not before: "
                    f"{wording.percent(found.late_share)} of their extra time is waiting for a late rank"
                ),
            )
        ],
        not_seen=[*known.not_seen, *([] if culprits else [_doubt(found)])],
        actions=[
            f"Look at {look}: port speed, errors, retransmits and other traffic, on both ends and between."
        ],
    )


def culprits_of(evidence: Evidence, found: SlowTransfer) -> list[out.Culprit]:
    """The rank at the slow end (of a link: its sender); none where the place is not known."""
    if found.place in ("unknown", "node") and not found.ranks:
        return []
    named = found.ranks if found.place == "node" else found.ranks[:1]
    return [
        out.Culprit(
            rank=rank,
            node=evidence.ranks[rank].node,
            gpu=None,
            layer="nccl",
            cause=CAUSE,
            owner="network",
            confidence=_SURE[found.place],
            cost_ms_per_step=round(found.ms, 3),
            share_explained=1.0,
            detail=(
                f"{place_in_words(found)}: {wording.ms(found.value_ms)} per step, usual "
                f"{wording.ms(found.usual_ms)}; no rank comes late for it"
            ),
        )
        for rank in named
    ]


def place_in_words(found: SlowTransfer) -> str:
    """``the link from rank 1 to rank 2``, or as much as is known."""
    ranks = found.ranks
    if found.place == "link":
        return f"the link from rank {ranks[0]} to rank {ranks[1]}"
    if found.place in ("sender", "receiver"):
        what = "sends" if found.place == "sender" else "receives"
        return f"what rank {ranks[0]} {what}"
    if found.place == "port":
        return f"everything to and from rank {ranks[0]}"
    if found.place == "node":
        return f"the network of the node of {wording.ranks(ranks)}"
    return f"the transfer among {wording.ranks(sorted({rank for route in found.routes for rank in route.ranks}))}"


def _doubt(found: SlowTransfer) -> str:
    return (
        "which link it is collectives do not tell: all their members wait for the slowest one alike (sends and "
        "receives of pairs, or a second communicator over some of these ranks, would)"
    )


def _ring(scene: Scene, found: SlowTransfer) -> str:
    """On a ring the neighbour behind a slow link gets its last piece last, so it is the last to come to the next
    collective: a hint, and no proof of anything against it."""
    if scene.lateness is None or len(found.routes) != 1 or len(found.routes[0].ranks) < 3:
        return ""
    late = scene.lateness
    last = late.argmax(axis=0)
    row = max(range(len(late)), key=lambda r: (int((last == r).sum()), -r))
    if (last == row).mean() < 0.8 or late[row].mean() > 0.5 * found.ms:
        return ""
    return (
        f" Rank {scene.ranks[row]} is the last to come to {wording.percent(float((last == row).mean()))} of the "
        "collectives, by little: on a ring that is the neighbour behind the slow link, so look first at what it "
        "receives."
    )
