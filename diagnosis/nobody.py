"""Nobody is to blame, and nothing changed: healthy, or not enough evidence to say so. Pure."""

from __future__ import annotations

import msgspec
import numpy as np

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.blame import Blame, distance_to_peers, matters
from diagnosis.case import joint_cost
from diagnosis.evidence import Evidence
from diagnosis.limits import ALIKE_SHARE, WAITING_SHARE
from diagnosis.scene import Scene
from diagnosis.verdict import Verdict


def nobody(evidence: Evidence, scene: Scene, blame: Blame, known: Verdict) -> Verdict:
    """No culprit and no change: healthy, unless what was not seen could hide one."""
    hidden = sorted(set(range(evidence.world_size)) - set(scene.ranks))
    if blame.odd:
        fast = wording.ranks([scene.ranks[row] for row in blame.odd])
        apart = -float(distance_to_peers(scene.now.own)[list(blame.odd)].mean())
        return insufficient(
            known,
            f"most ranks take {wording.ms(apart)} per step longer than {fast}; without a past of this job, "
            f"peers do not tell whether most are slow or {fast} has less to do",
            ["Watch the job from its start, or compare with a run that is known to be good."],
        )
    if scene.alone and scene.before is None:
        own = scene.now.own.mean(axis=1)
        most = max(scene.alone, key=lambda row: (float(own[row]), -row))
        over = float(own[most] - np.median(np.delete(own, most))) if len(own) > 1 else 0.0
        if matters(over, float(scene.now.wall.mean())):
            return insufficient(
                known,
                f"rank {scene.ranks[most]} takes {wording.ms(over)} per step longer than the others, but it has no "
                "peers and no past: its stage may have more to do, or it may be slow",
                ["Watch the job from its start, or compare with a run that is known to be good."],
            )
    waiting = float(np.median(scene.now.mean("waiting", "receiving")))
    if hidden and waiting >= WAITING_SHARE * float(scene.now.wall.mean()):
        who = wording.ranks(hidden)
        late = [f"; rank {rank} comes {wording.ms(ms)} late" for rank, ms in scene.hidden_late if ms >= 1]
        return insufficient(
            known,
            f"the compared ranks wait {wording.ms(waiting)} of each step and none of them is late: "
            f"the culprit may be among {who}, whose own time is not seen{''.join(late)}",
            [f"Start the agent on the nodes of {who}; sysom doctor says what it can watch."],
        )
    if (suspected := _unsteady(scene, blame, known)) is not None:
        return suspected
    return msgspec.structs.replace(
        known,
        status="healthy",
        since=None,
        baseline=None,
        slowdown=[],
        slowdown_unexplained_ms=0.0,
        confidence=round(0.9 * len(scene.ranks) / max(evidence.world_size, len(scene.ranks)), 2),
        summary=_healthy_words(scene, blame, known.step_ms or 0.0),
    )


def _unsteady(scene: Scene, blame: Blame, known: Verdict) -> Verdict | None:
    """A rank that is slower than its peers by what matters, where no test shows it: that is not healthy."""
    over = {
        row: float(ms)
        for group in scene.groups
        for row, ms in zip(group, distance_to_peers(scene.now.own[group]), strict=True)
        if row not in blame.culprits  # those are significant, and cost too little
    }
    row = max(over, key=lambda row: (over[row], -row), default=-1)
    if row < 0 or not matters(over[row], known.step_ms or 0.0):
        return None
    return insufficient(
        known,
        f"rank {scene.ranks[row]} takes {wording.ms(over[row])} per step longer than its peers, too unsteadily "
        f"to be sure of it: the median step takes {wording.ms(known.step_ms or 0.0)}",
        ["Watch longer."],
    )


def _healthy_words(scene: Scene, blame: Blame, step_ms: float) -> str:
    widest = float(np.abs(distance_to_peers(scene.now.own)).max())
    words = f"Healthy: the median step takes {wording.ms(step_ms)}; none of {len(scene.ranks)} ranks "
    words += f"differs from its peers by more than {wording.ms(widest)} per step."
    if blame.culprits:
        who = wording.ranks([scene.ranks[row] for row in blame.culprits])
        words += f" That of {who} costs the job {wording.ms(joint_cost(scene, blame))} per step only."
    if scene.history.since is not None:
        since = wording.to_the_second(time_of(scene, scene.history.since))
        slower = f"are {wording.percent(scene.history.slowed_by)} slower since {since}"
        if scene.history.drift is not None:
            slower = (
                f"became {wording.percent(scene.history.slowed_by)} slower little by little since {since}"
            )
        words += (
            f" Steps {slower}, all ranks alike: "
            f"less than the {wording.percent(ALIKE_SHARE)} from which that counts as slow."
        )
    if scene.history.recovered is not None:
        past = scene.history.recovered
        words += (
            f" It was slow ({wording.ms(past.ms)}) from {wording.to_the_second(time_of(scene, past.first))} "
            f"to {wording.to_the_second(time_of(scene, past.last))} and has recovered."
        )
    return words


def insufficient(
    bare: Verdict, why: str, actions: list[str], evidence: list[out.Evidence] | None = None
) -> Verdict:
    """The verdict that something is missing: ``why`` in words, without a full stop."""
    return msgspec.structs.replace(
        bare,
        status="insufficient",
        summary=f"Not enough evidence: {why}.",
        not_seen=[why, *bare.not_seen],
        evidence=evidence or [],
        actions=actions,
    )


def time_of(scene: Scene, step: int) -> str:
    """When a step of the job began: the lower median over ranks, so that one wrong clock does no harm."""
    seen = scene.steps.seen[:, step]
    starts = np.sort(scene.steps.start_ns[seen, step])
    return wording.instant(int(starts[(len(starts) - 1) // 2]))
