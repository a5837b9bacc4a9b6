"""The job as a whole: slowdowns that no rank is to blame for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from diagnosis import wording
from diagnosis.accounting import PARTS, Account
from diagnosis.blame import matters
from diagnosis.drift import Drift
from diagnosis.evidence import RankEvidence
from diagnosis.joined import is_point_to_point
from diagnosis.limits import UNEVEN_SAME, UNEVEN_SHARE
from diagnosis.scene import Scene
from diagnosis.verdict import Layer, Owner, Verdict

_TAKES_TURNS = 0.5
"""Where the busiest rank of each step accounts for this share of the growth, the transfer is not what grew."""


def slowed_alike(scene: Scene, known: Verdict, unseen: list[int]) -> Verdict:
    """Steps are slower than before, at once or little by little, and no rank stands out: ``slow``.

    Whose it is depends on what grew: the ranks' own time (the job), or their waiting: for ranks that take turns
    at being late, else for the transfer, or for a rank that nobody watches.
    """
    growth = scene.growth_ms()
    layer: Layer = "job"
    owner: Owner = "job"
    confidence = 0.5
    why = "where the time went before is not known, so what grew is not seen"
    how = "All ranks are slower alike, none holds the others up"
    actions = ["Ask what changed at that time: batch size, sequence lengths, code, data, a shared service."]
    if scene.before is not None:
        own = float(np.median(scene.now.own.mean(axis=1) - scene.before.own.mean(axis=1)))
        inside = ("waiting", "receiving", "transfer", "device")
        waiting = float(np.median(scene.now.mean(*inside) - scene.before.mean(*inside)))
        if own >= waiting:
            confidence = 0.7
            part = max(scene.now.parts, key=lambda p: _growth(scene, p))
            why = (
                f"each rank's own time grew by {wording.ms(own)} per step (most of it: {PARTS[part].label}, "
                f"{wording.ms(_growth(scene, part))}), so it is the job's work or something all ranks share"
            )
        elif (busiest := _busiest_ms(scene.now) - _busiest_ms(scene.before)) >= _TAKES_TURNS * growth:
            owner = "unknown"
            how = "Steps are slower, and no rank holds the others up for long"
            why = (
                f"waiting in collectives grew by {wording.ms(waiting)} per step, and the busiest rank of each "
                f"step, not always the same one, takes {wording.ms(busiest)} longer: they wait for it, not for the "
                "transfer"
            )
        else:
            layer, owner = "nccl", "unknown"
            hidden = f", or {wording.ranks(unseen)}, which nobody watches" if unseen else ""
            why = (
                f"waiting in collectives grew by {wording.ms(waiting)} per step and no watched rank takes "
                f"longer: the transfer itself{hidden}"
            )
            actions = ["Look at the network between the nodes: link speed, retransmits, other traffic."]
    if (drift := scene.history.drift) is not None:
        how = (
            f"Steps become longer little by little, by {_per_step(drift)} with each step, from "
            f"{wording.ms(drift.before_ms)} to {wording.ms(drift.now_ms)} so far, all ranks alike"
        )
        if owner == "job":
            actions = [
                "Look for what grows with each step: memory that is not given back (a list, the allocator, the "
                "cache of files), longer inputs, logs; and for what all nodes share: heat, power, a service that "
                "fills up."
            ]
    return msgspec.structs.replace(
        known,
        status="slow",
        layer=layer,
        owner=owner,
        confidence=confidence,
        cost_ms_per_step=round(growth, 3),
        joint_cost_ms_per_step=round(growth, 3),
        summary=f"{how}: {why}.",
        actions=actions,
    )


def _busiest_ms(account: Account) -> float:
    """Mean over steps of the longest that a rank takes by itself: what all must wait for."""
    return float(account.own.max(axis=0).mean())


def _per_step(drift: Drift) -> str:
    """``0.03 ms (0.1 %)``, with the digits that it takes."""
    share = 100 * drift.per_step_ms / drift.before_ms
    return f"{drift.per_step_ms:.2g} ms ({share:.2g} %)"


@dataclass(frozen=True)
class Uneven:
    """Work that is spread unevenly in each step, and evenly over many."""

    ms: float
    """Mean over steps: how much longer the busiest takes than the median of its peers."""
    same: float
    """Share of steps in which the rank that is the busiest most often is that."""
    part: str
    """Part of the account that differs most."""


def uneven(scene: Scene) -> Uneven | None:
    """Whether the busiest rank holds the others up in most steps, and is another one from step to step. Waiting
    for a CPU and interrupts are no work: where these rotate, machines are crowded."""
    worst: Uneven | None = None
    parts = [part for part in ("running", "blocked", "outside") if part in scene.now.parts]
    work = np.asarray(np.sum([scene.now.parts[part] for part in parts], axis=0))
    for group in scene.groups:
        if len(group) < 3:
            continue
        mine = work[group]
        over = mine.max(axis=0) - np.median(mine, axis=0)
        share = over / np.maximum(scene.now.wall[group].mean(axis=0), 1e-9)
        busiest = np.bincount(mine.argmax(axis=0), minlength=len(group)) / mine.shape[1]
        if float(np.median(share)) < UNEVEN_SHARE or busiest.max() > UNEVEN_SAME:
            continue
        spread = {part: float(np.ptp(scene.now.parts[part][group], axis=0).mean()) for part in parts}
        found = Uneven(
            float(over.mean()), float(busiest.max()), max(parts, key=lambda part: (spread[part], part))
        )
        if worst is None or found.ms > worst.ms:
            worst = found
    return worst


def unevenly(scene: Scene, found: Uneven, known: Verdict) -> Verdict:
    """Status ``slow``, and the job owns it: no rank is the slow one for long."""
    return msgspec.structs.replace(
        known,
        status="slow",
        layer="job",
        owner="job",
        confidence=0.7,
        cost_ms_per_step=round(found.ms, 3),
        joint_cost_ms_per_step=round(found.ms, 3),
        summary=(
            f"No rank is to blame: in each step one has {wording.ms(found.ms)} more to do than its peers "
            f"({PARTS[found.part].label}), and it is another one from step to step (none in more than "
            f"{wording.percent(found.same)} of them). That is uneven work, as of sequences of different length, "
            "and no machine."
        ),
        actions=["Spread the work evenly: group sequences by length, or balance batches by their cost."],
    )


@dataclass(frozen=True)
class LongerStage:
    """A pipeline stage, of several ranks each, that has more to do than the others."""

    ranks: tuple[int, ...]
    ms: float
    """By how much its median rank takes longer than the mean of all stages: what it costs that they differ."""


def longer_stage(scene: Scene, ranks: Mapping[int, RankEvidence]) -> LongerStage | None:
    """Whether all ranks of one stage take longer than those of the others, who send to it or receive from it. A
    stage of one rank could as well be a slow rank."""
    stages = [group for group in scene.groups if len(group) > 1]
    if len(stages) < 2 or len(stages) < len(scene.groups):
        return None
    if not any(is_point_to_point(ranks[rank].collectives.op).any() for rank in scene.ranks):
        return None
    own = scene.now.own.mean(axis=1)
    medians = [float(np.median(own[group])) for group in stages]
    longest = max(range(len(stages)), key=lambda place: (medians[place], place))
    over = medians[longest] - float(np.mean(medians))
    rest = max(float(own[group].max()) for place, group in enumerate(stages) if place != longest)
    if not matters(over, float(scene.now.wall.mean())) or float(own[stages[longest]].min()) <= rest:
        return None
    return LongerStage(tuple(scene.ranks[row] for row in stages[longest]), over)


def of_longer_stage(scene: Scene, found: LongerStage, known: Verdict) -> Verdict:
    """Status ``slow``, and the job owns it: layers are split unevenly among stages."""
    who = wording.ranks(found.ranks)
    return msgspec.structs.replace(
        known,
        status="slow",
        layer="job",
        cause="longer-stage",
        owner="job",
        confidence=0.7,
        cost_ms_per_step=round(found.ms, 3),
        joint_cost_ms_per_step=round(found.ms, 3),
        summary=(
            f"No rank is to blame: the pipeline stage of {who} takes {wording.ms(found.ms)} per step longer than "
            "stages do in the mean, all its ranks alike, and the others wait for it."
        ),
        actions=["Move layers from the longest stage to the others (mind the loss and the embeddings)."],
    )


def _growth(scene: Scene, part: str) -> float:
    if scene.before is None:
        return 0.0
    return float(np.median(scene.now.parts[part].mean(axis=1) - scene.before.parts[part].mean(axis=1)))
