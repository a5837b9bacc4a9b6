"""The job as a whole: slowdowns that no rank is to blame for."""

from __future__ import annotations

import msgspec
import numpy as np

from diagnosis import wording
from diagnosis.accounting import PARTS
from diagnosis.scene import Scene
from diagnosis.verdict import Layer, Owner, Verdict


def slowed_alike(scene: Scene, known: Verdict, unseen: list[int]) -> Verdict:
    """Steps are slower than before and no rank stands out: ``slow`` without a culprit.

    Whose it is depends on what grew: the ranks' own time (the job), or their waiting (the transfer, or a rank
    that nobody watches).
    """
    growth = scene.growth_ms()
    layer: Layer = "job"
    owner: Owner = "job"
    confidence = 0.5
    why = "where the time went before is not known, so what grew is not seen"
    actions = ["Ask what changed at that time: batch size, sequence lengths, code, data, a shared service."]
    if scene.before is not None:
        own = float(np.median(scene.now.own.mean(axis=1) - scene.before.own.mean(axis=1)))
        waiting = float(
            np.median(scene.now.parts["waiting"].mean(axis=1) - scene.before.parts["waiting"].mean(axis=1))
        )
        if own >= waiting:
            confidence = 0.7
            part = max(scene.now.parts, key=lambda p: _growth(scene, p))
            why = (
                f"each rank's own time grew by {wording.ms(own)} per step (most of it: {PARTS[part].label}, "
                f"{wording.ms(_growth(scene, part))}), so it is the job's work or something all ranks share"
            )
        else:
            layer, owner = "nccl", "unknown"
            hidden = f", or {wording.ranks(unseen)}, which nobody watches" if unseen else ""
            why = (
                f"waiting in collectives grew by {wording.ms(waiting)} per step and no watched rank comes "
                f"late: the transfer itself{hidden}"
            )
            actions = ["Look at the network between the nodes: link speed, retransmits, other traffic."]
    return msgspec.structs.replace(
        known,
        status="slow",
        layer=layer,
        owner=owner,
        confidence=confidence,
        cost_ms_per_step=round(growth, 3),
        joint_cost_ms_per_step=round(growth, 3),
        summary=f"All ranks are slower alike, none holds the others up: {why}.",
        actions=actions,
    )


def _growth(scene: Scene, part: str) -> float:
    if scene.before is None:
        return 0.0
    return float(np.median(scene.now.parts[part].mean(axis=1) - scene.before.parts[part].mean(axis=1)))
