"""The verdict on a job that hangs: who holds it, of which layer, how sure, who is cleared, what to do."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.evidence import Evidence
from diagnosis.hang.find import Hang, Holder, Kind
from diagnosis.hang.pending import queues
from diagnosis.verdict import Verdict


@dataclass(frozen=True)
class _Reading:
    """What a kind of hang means. ``confidence`` is that of rank and layer together, with all ranks seen."""

    cause: str | None
    layer: out.Layer | None
    owner: out.Owner
    confidence: float
    action: str
    """``{rank}``, ``{node}`` and ``{pid}`` are filled in."""


# Confidences: a dead process and a call that differs are seen; that a rank is missing is seen, and why is not;
# where all are inside, the layer is all that is known. Lowered below for what was not seen.
_READINGS: dict[Kind, _Reading] = {
    "never-came": _Reading(
        "never-came",
        "os",
        "unknown",
        0.9,
        "See where rank {rank} is: py-spy dump --pid {pid} on {node} (a lock, a data loader, an exception handler, "
        "a stopped process), before the job is restarted.",
    ),
    "stuck-inside": _Reading(
        "stuck-inside",
        "gpu",
        "node",
        0.85,
        "Look at the GPU of rank {rank} on {node}: dmesg for Xid messages, nvidia-smi -q for ECC, row remapping "
        "and NVLink errors; drain the node if there are any.",
    ),
    "not-begun": _Reading(
        "not-begun",
        "gpu",
        "unknown",
        0.7,
        "See what the GPU of rank {rank} on {node} runs before this collective: a kernel that does not end, or a "
        "GPU that another process holds.",
    ),
    "died": _Reading(
        "process-ended",
        "os",
        "unknown",
        0.95,
        "See why rank {rank} on {node} ended: its log, dmesg for the OOM killer, the scheduler's events.",
    ),
    "silent": _Reading(
        None,
        None,
        "node",
        0.7,
        "See whether {node} is reachable: neither rank {rank} nor the agent there was heard of since.",
    ),
    "mismatch": _Reading(
        "collective-mismatch",
        "job",
        "job",
        0.9,
        "Find the branch in the training script in which rank {rank} calls something else than its peers; "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL stops at the first such call.",
    ),
    "order": _Reading(
        "collective-order",
        "job",
        "job",
        0.7,
        "Make all ranks call collectives on several communicators in one order; rank {rank} does not.",
    ),
    "together": _Reading(
        None,
        "nccl",
        "unknown",
        0.5,
        "All ranks are inside: look at the links between their nodes (NIC counters, switch, NCCL's log).",
    ),
    "unseen": _Reading(None, None, "unknown", 0.3, "Get evidence of the ranks that were not seen."),
}
_UNSEEN_FACTOR = 0.8
"""With ranks that nobody saw among those waited for, there may be more culprits, and another one at their root."""
_SNAPSHOT_FACTOR = 0.9
"""Dumps do not tell how long: one written while the job ran may show a rank that was only late."""


def verdict_of_hang(evidence: Evidence, hang: Hang, bare: Verdict) -> Verdict:
    """The verdict ``hang``, on top of what ``bare`` says of job and window. Costs per step are 0."""
    factor = (_UNSEEN_FACTOR if hang.unseen else 1.0) * (_SNAPSHOT_FACTOR if hang.snapshot else 1.0)
    culprits = [_culprit(evidence, holder, factor) for holder in hang.holders]
    culprits.sort(key=lambda culprit: (-culprit.confidence, culprit.rank))
    reading = _READINGS[hang.kind]
    worst = culprits[0] if culprits else None
    return msgspec.structs.replace(
        bare,
        status="hang",
        since=wording.instant(hang.since_ns),
        culprits=culprits,
        layer=worst.layer if worst else reading.layer,
        cause=worst.cause if worst else reading.cause,
        owner=worst.owner if worst else reading.owner,
        confidence=worst.confidence if worst else round(reading.confidence * factor, 3),
        summary=_summary(hang),
        evidence=_findings(hang),
        cleared=[out.Cleared(rank=rank, why=why) for rank, why in sorted(hang.victims.items())],
        ruled_out=_ruled_out(hang),
        not_seen=[*_not_seen(hang), *bare.not_seen],
        actions=_actions(evidence, hang),
    )


def _culprit(evidence: Evidence, holder: Holder, factor: float) -> out.Culprit:
    reading = _READINGS[holder.kind]
    return out.Culprit(
        rank=holder.rank,
        node=evidence.ranks[holder.rank].node,
        gpu=None,
        layer=reading.layer,
        cause=reading.cause,
        owner=reading.owner,
        confidence=round(reading.confidence * factor, 3),
        cost_ms_per_step=0.0,
        share_explained=0.0,
        detail=holder.reason,
    )


def _summary(hang: Hang) -> str:
    where = f"{hang.op} {hang.seq:,} on {hang.communicator}"
    if not hang.holders:
        return f"The job hangs in {where}: {hang.reason}. No rank can be named."
    who = wording.ranks([holder.rank for holder in hang.holders])
    words = f"The job hangs: {who} hold{'s' if len(hang.holders) == 1 else ''} it up."
    first, *more = hang.holders
    words += f" Rank {first.rank} {first.reason}."
    alike = [holder for holder in more if holder.kind == first.kind]
    if alike:
        words += f" Likewise {wording.ranks([holder.rank for holder in alike])}."
    words += "".join(f" Rank {one.rank} {one.reason}." for one in more if one.kind != first.kind)
    them = "it" if len(hang.holders) == 1 else "them"
    if hang.victims:
        waiting = (
            "1 other rank waits" if len(hang.victims) == 1 else f"{len(hang.victims):,} other ranks wait"
        )
        words += f" {waiting} for {them}, directly or through others."
    if hang.unseen:
        words += f" {_title(wording.ranks(hang.unseen))} {_were(hang.unseen)} not seen and may hold it too."
    return words


def _title(words: str) -> str:
    return words[:1].upper() + words[1:]


def _were(ranks: tuple[int, ...]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _findings(hang: Hang) -> list[out.Evidence]:
    """Pending collectives beside those of all other ranks: counted, so no chance is in it (q 0)."""
    culprits = {holder.rank for holder in hang.holders}
    others = [count for rank, count in hang.pending.items() if rank not in culprits]
    peers = float(np.median(others)) if others else 0.0
    return [
        out.Evidence(
            layer=_READINGS[holder.kind].layer or "nccl",
            metric="pending_collectives",
            rank=holder.rank,
            value=float(holder.pending),
            peers=peers,
            unit="collectives",
            effect=holder.pending - peers,
            q=None,
        )
        for holder in hang.holders
    ]


def _ruled_out(hang: Hang) -> list[out.RuledOut]:
    kinds = {holder.kind for holder in hang.holders} or {hang.kind}
    told = []
    if "stuck-inside" not in kinds and kinds & {"never-came", "died", "silent"}:
        told.append(out.RuledOut(cause="stuck-inside", why="nothing that its peers ended is pending on it"))
    if "never-came" not in kinds and "stuck-inside" in kinds:
        told.append(
            out.RuledOut(
                cause="never-came", why="it enqueued collectives that its peers ended and it does not end"
            )
        )
    if hang.kind not in ("mismatch", "unseen"):
        told.append(
            out.RuledOut(
                cause="collective-mismatch",
                why="wherever several members' calls were seen at one number, op, size and element type agree, as "
                "far as they are known",
            )
        )
    return told


def undecided(evidence: Evidence, verdict: Verdict) -> Verdict:
    """A verdict without findings on dumps in which collectives are pending though nothing shows a standstill: says
    so, and where evidence lacks, first of all, since whoever has only dumps asks whether the job hangs."""
    dumps = {one.source for one in evidence.ranks.values()} == {"flight-recorder"}
    if not dumps or verdict.status not in ("healthy", "insufficient"):
        return verdict
    waits = [wait for standing in queues(evidence).ranks.values() for wait in standing.waits]
    if not waits:
        return verdict
    count = len({(wait.key, wait.seq, wait.op) for wait in waits})
    many = f"{count:,} collectives are" if count > 1 else "1 collective is"
    on = wording.ranks(sorted({wait.rank for wait in waits}))
    words = f"{many} pending on {on}, which cannot be told from a running job"
    told = msgspec.structs.replace(
        verdict,
        not_seen=[f"whether the job hangs: {words}", *verdict.not_seen],
        actions=["Dump all ranks again a minute later: what is pending in both hangs.", *verdict.actions],
    )
    if verdict.status == "healthy":
        return told
    rest = verdict.summary.removeprefix("Not enough evidence: ")
    summary = f"Not enough evidence: {words}. {rest[:1].upper()}{rest[1:]}"
    return msgspec.structs.replace(told, summary=summary)


def _not_seen(hang: Hang) -> list[str]:
    gaps = []
    if hang.unseen:
        gaps.append(
            f"{wording.ranks(hang.unseen)}: not seen; others wait for them, so they may hold the job as well"
        )
    if hang.snapshot:
        gaps.append(
            "how long collectives have been pending: dumps do not tell; in a dump that was written while the job "
            "ran, a rank may only have been late"
        )
    return gaps


def _actions(evidence: Evidence, hang: Hang) -> list[str]:
    if not hang.holders:
        return [_READINGS[hang.kind].action] if "{" not in _READINGS[hang.kind].action else [_LOOK]
    actions = []
    for holder in hang.holders:
        rank = evidence.ranks[holder.rank]
        actions.append(
            _READINGS[holder.kind].action.format(
                rank=holder.rank, node=rank.node or "its node", pid=rank.pid or "PID"
            )
        )
    return list(dict.fromkeys(actions))


_LOOK = (
    "Find where the training script makes ranks call different collectives; TORCH_DISTRIBUTED_DEBUG=DETAIL "
    "stops at the first such call."
)
