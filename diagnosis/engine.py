"""From evidence to a verdict: steps, peers, tests, causes, in this order. Pure and deterministic."""

from __future__ import annotations

import msgspec
import numpy as np

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.blame import Blame, by_history, by_peers, distance_to_peers
from diagnosis.case import account_lines, against, joint_cost, median_row, metrics, rounded
from diagnosis.evidence import Evidence
from diagnosis.layers import job
from diagnosis.limits import ALIKE_SHARE, MIN_COST_SHARE, WAITING_SHARE
from diagnosis.outliers import TooFewBlocksError
from diagnosis.scene import NotComparableError, Scene, observe
from diagnosis.verdict import Verdict


def diagnose(evidence: Evidence) -> Verdict:
    """What holds the job up, since when, why, and what that rests on. Never raises for missing evidence:
    that is status ``insufficient``, and ``not_seen`` says what is missing."""
    unseen = sorted(set(range(evidence.world_size)) - set(evidence.ranks))
    bare = Verdict(
        job=evidence.job,
        window=out.Window(start=wording.instant(evidence.start_ns), end=wording.instant(evidence.end_ns)),
        status="insufficient",
        world_size=evidence.world_size,
        ranks_seen=len(evidence.ranks),
        not_seen=_gaps(evidence, unseen),
    )
    try:
        scene = observe(evidence)
    except NotComparableError as gap:
        return _insufficient(bare, str(gap), ["sysom doctor on each node says what its agent can watch."])
    since = _time_of(scene, scene.history.current.first) if scene.history.baseline else None
    known = msgspec.structs.replace(
        bare,
        since=since,
        baseline=_baseline(scene),
        step_ms=rounded(float(np.median(scene.series_ms[scene.history.current.first :]))),
        steps=int(scene.columns.sum()),
        not_seen=[*bare.not_seen, *scene.left_out, *_horizon(evidence, scene)],
        account=account_lines(scene, None, []),
        unexplained_ms=rounded(float(scene.now.unexplained[median_row(scene)].mean())),
    )
    try:
        blame = _blame(scene)
    except TooFewBlocksError as few:
        return _insufficient(known, f"too few independent steps to tell ranks apart: {few}", [])
    if blame.culprits and joint_cost(scene, blame) >= MIN_COST_SHARE * float(scene.now.wall.mean()):
        return against(evidence, scene, blame, known)
    if scene.history.slowed_by >= ALIKE_SHARE:
        return job.slowed_alike(scene, known, unseen)
    return _nobody(evidence, scene, blame, known)


def _insufficient(bare: Verdict, why: str, actions: list[str]) -> Verdict:
    return msgspec.structs.replace(
        bare,
        status="insufficient",
        summary=f"Not enough evidence: {why}.",
        not_seen=[why, *bare.not_seen],
        actions=actions,
    )


def _gaps(evidence: Evidence, unseen: list[int]) -> list[str]:
    gaps = list(evidence.notes)
    if unseen and evidence.ranks:
        gaps.append(
            f"{wording.ranks(unseen)} of {evidence.world_size} not watched: neither blamed nor healthy "
            f"(is the agent running on their nodes?)"
        )
    for node, probes in sorted(evidence.probes.items()):
        gaps += [f"probe {p.name} on {node}: {p.why or p.state}" for p in probes if p.state == "unavailable"]
        gaps += [f"probe {p.name} on {node} lost {p.lost:,} events" for p in probes if p.lost]
    return gaps


def _horizon(evidence: Evidence, scene: Scene) -> list[str]:
    """What a comparison with the job's own past cannot show."""
    if scene.history.baseline is not None:
        return []
    began = max(evidence.watched_since_ns, evidence.start_ns)
    what = "watching" if evidence.watched_since_ns >= evidence.start_ns else "this window"
    return [
        f"{what} began at {wording.to_the_second(wording.instant(began))}: "
        "a slowdown of all ranks alike before that cannot be seen"
    ]


def _time_of(scene: Scene, step: int) -> str:
    """When a step of the job began: the lower median over ranks, so that one wrong clock does no harm."""
    seen = scene.steps.seen[:, step]
    starts = np.sort(scene.steps.start_ns[seen, step])
    return wording.instant(int(starts[(len(starts) - 1) // 2]))


def _baseline(scene: Scene) -> out.Baseline | None:
    level = scene.history.baseline
    if level is None:
        return None
    return out.Baseline(
        step_ms=rounded(level.ms),
        start=_time_of(scene, level.first),
        end=_time_of(scene, level.last),
        steps=level.last - level.first,
    )


def _blame(scene: Scene) -> Blame:
    """Against peers; where that shows nobody, each rank against its own past."""
    step_ms = float(scene.now.wall.mean())
    blame = by_peers(metrics(scene), scene.groups, step_ms)
    if blame.culprits or scene.before is None:
        return blame
    grown = by_history(scene.before.own, scene.now.own, step_ms)
    if not grown or len(grown) == len(scene.ranks):
        return blame
    return Blame(tuple(sorted(grown)), "history", {(0, row): tested for row, tested in grown.items()})


def _nobody(evidence: Evidence, scene: Scene, blame: Blame, known: Verdict) -> Verdict:
    """No culprit and no change: healthy, unless what was not seen could hide one."""
    hidden = sorted(set(range(evidence.world_size)) - set(scene.ranks))
    if blame.odd:
        fast = wording.ranks([scene.ranks[row] for row in blame.odd])
        apart = -float(distance_to_peers(scene.now.own)[list(blame.odd)].mean())
        return _insufficient(
            known,
            f"most ranks take {wording.ms(apart)} per step longer than {fast}; without a past of this job, "
            f"peers do not tell whether most are slow or {fast} has less to do",
            ["Watch the job from its start, or compare with a run that is known to be good."],
        )
    waiting = float(np.median(scene.now.parts["waiting"].mean(axis=1)))
    if hidden and waiting >= WAITING_SHARE * float(scene.now.wall.mean()):
        who = wording.ranks(hidden)
        late = [f"; rank {rank} comes {wording.ms(ms)} late" for rank, ms in scene.hidden_late if ms >= 1]
        return _insufficient(
            known,
            f"the compared ranks wait {wording.ms(waiting)} of each step and none of them is late: "
            f"the culprit may be among {who}, whose own time is not seen{''.join(late)}",
            [f"Start the agent on the nodes of {who}; sysom doctor says what it can watch."],
        )
    return msgspec.structs.replace(
        known,
        status="healthy",
        since=None,
        baseline=None,
        confidence=round(0.9 * len(scene.ranks) / max(evidence.world_size, len(scene.ranks)), 2),
        summary=_healthy_words(scene, blame, known.step_ms or 0.0),
    )


def _healthy_words(scene: Scene, blame: Blame, step_ms: float) -> str:
    widest = float(np.abs(distance_to_peers(scene.now.own)).max())
    words = f"Healthy: the median step takes {wording.ms(step_ms)}; none of {len(scene.ranks)} ranks "
    words += f"differs from its peers by more than {wording.ms(widest)} per step."
    if blame.culprits:
        who = wording.ranks([scene.ranks[row] for row in blame.culprits])
        words += f" That of {who} costs the job {wording.ms(joint_cost(scene, blame))} per step only."
    if scene.history.baseline is not None:
        since = wording.to_the_second(_time_of(scene, scene.history.current.first))
        words += (
            f" Steps are {wording.percent(scene.history.slowed_by)} slower since {since}, all ranks alike: "
            f"less than the {wording.percent(ALIKE_SHARE)} from which that counts as slow."
        )
    if scene.history.recovered is not None:
        past = scene.history.recovered
        words += (
            f" It was slow ({wording.ms(past.ms)}) from {wording.to_the_second(_time_of(scene, past.first))} "
            f"to {wording.to_the_second(_time_of(scene, past.last))} and has recovered."
        )
    return words
