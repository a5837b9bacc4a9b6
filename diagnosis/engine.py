"""From evidence to a verdict: steps, peers, tests, causes, in this order. Pure and deterministic."""

from __future__ import annotations

import msgspec
import numpy as np

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.accounting import OWN, PARTS
from diagnosis.blame import Blame, Tested, by_history, by_peers, cost_ms, distance_to_peers
from diagnosis.causes import Named, name_cause
from diagnosis.evidence import Evidence
from diagnosis.findings import Extra, Taker, TakerKind
from diagnosis.layers import host, job
from diagnosis.limits import ALPHA, MIN_COST_SHARE, MIN_EFFECT_MS, WAITING_SHARE
from diagnosis.outliers import TooFewBlocksError
from diagnosis.scene import NotComparableError, Scene, observe
from diagnosis.steps import Floats
from diagnosis.verdict import Verdict

METRICS = ("own", *OWN, "lateness")
"""What is tested, in the order of the tests' first axis."""


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
        step_ms=_round(float(np.median(scene.series_ms[scene.history.current.first :]))),
        steps=int(scene.columns.sum()),
        not_seen=[*bare.not_seen, *scene.left_out, *_horizon(evidence, scene)],
        account=_account(scene, None, []),
    )
    try:
        blame = _blame(scene)
    except TooFewBlocksError as few:
        return _insufficient(known, f"too few independent steps to tell ranks apart: {few}", [])
    if blame.culprits and _joint_cost(scene, blame) >= MIN_COST_SHARE * float(scene.now.wall.mean()):
        return _slow_ranks(evidence, scene, blame, known)
    if scene.history.baseline is not None:
        return job.slowed_alike(scene, known, unseen)
    return _nobody(scene, blame, known, unseen)


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
        f"{what} began at {wording.instant(began)}: a slowdown of all ranks alike before that cannot be seen"
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
        step_ms=_round(level.ms),
        start=_time_of(scene, level.first),
        end=_time_of(scene, level.last),
        steps=level.last - level.first,
    )


def _metrics(scene: Scene) -> Floats:
    late = scene.lateness if scene.lateness is not None else np.zeros_like(scene.now.wall)
    return np.stack([scene.now.own, *(scene.now.parts[part] for part in OWN), late])


def _blame(scene: Scene) -> Blame:
    """Against peers; where that shows nobody, each rank against its own past."""
    step_ms = float(scene.now.wall.mean())
    blame = by_peers(_metrics(scene), scene.groups, step_ms)
    if blame.culprits or scene.before is None:
        return blame
    grown = by_history(scene.before.own, scene.now.own, step_ms)
    if not grown or len(grown) == len(scene.ranks):
        return blame
    growth = scene.now.own.mean(axis=1) - scene.before.own.mean(axis=1)
    tests = {(0, row): Tested(float(growth[row]), ALPHA) for row in grown}
    return Blame(grown, "history", tests)


def _joint_cost(scene: Scene, blame: Blame) -> float:
    return cost_ms(scene.now.own, blame.culprits, _peers_of(scene, blame.culprits[0], blame.culprits))


def _peers_of(scene: Scene, row: int, culprits: tuple[int, ...]) -> list[int]:
    """Rows that do the same work as ``row`` and are no culprits; all others when it has no such peer."""
    group = next(group for group in scene.groups if row in group)
    innocent = [other for other in range(len(scene.ranks)) if other not in culprits]
    return [other for other in innocent if other in group] or innocent


def _slow_ranks(evidence: Evidence, scene: Scene, blame: Blame, known: Verdict) -> Verdict:
    findings: list[tuple[out.Culprit, Named, int]] = []
    for row in blame.culprits:
        named = name_cause(_extra(evidence, scene, row, blame.culprits))
        peers = _peers_of(scene, row, blame.culprits)
        rank = evidence.ranks[scene.ranks[row]]
        culprit = out.Culprit(
            rank=rank.rank,
            node=rank.node,
            gpu=None,
            layer=named.layer,
            cause=named.cause.id if named.cause else None,
            owner=named.judgement.owner,
            confidence=_confidence(scene, blame, row, named),
            cost_ms_per_step=_round(cost_ms(scene.now.own, (row,), peers)),
            share_explained=_round(named.share),
            detail=named.judgement.detail,
        )
        findings.append((culprit, named, row))
    findings.sort(key=lambda found: (-found[0].cost_ms_per_step, -float(scene.now.own[found[2]].mean())))
    worst, cause, row = findings[0]
    joint = _joint_cost(scene, blame)
    verdict = msgspec.structs.replace(
        known,
        status="slow",
        culprits=[culprit for culprit, _, _ in findings],
        layer=worst.layer,
        cause=worst.cause,
        owner=worst.owner,
        confidence=worst.confidence,
        cost_ms_per_step=worst.cost_ms_per_step,
        joint_cost_ms_per_step=_round(joint),
        share_explained=worst.share_explained,
        account=_account(scene, row, _peers_of(scene, row, blame.culprits)),
        unexplained_ms=_round(float(scene.now.unexplained[row].mean())),
        evidence=_findings(scene, blame),
        cleared=_cleared(scene, blame),
        ruled_out=cause.ruled_out,
        actions=list(dict.fromkeys(action for _, named, _ in findings for action in named.judgement.actions)),
        not_seen=[*known.not_seen, *_doubts(scene, blame, joint)],
    )
    return msgspec.structs.replace(verdict, summary=_summary(verdict))


def _extra(evidence: Evidence, scene: Scene, row: int, culprits: tuple[int, ...]) -> Extra:
    peers = _peers_of(scene, row, culprits)
    means = {part: scene.now.parts[part].mean(axis=1) for part in PARTS}
    taken = {other: _takers(evidence, scene, other) for other in (row, *peers)}

    def peers_mean(*kinds: TakerKind) -> float:
        return float(np.mean([sum(t.ms for t in taken[other] if t.kind in kinds) for other in peers]))

    rank = evidence.ranks[scene.ranks[row]]
    return Extra(
        job=evidence.job,
        rank=rank.rank,
        node=rank.node,
        pid=rank.pid,
        parts={part: float(values[row]) for part, values in means.items()},
        peers_parts={part: float(values[peers].mean()) for part, values in means.items()},
        takers=taken[row],
        peers_contended=peers_mean(*host.OTHERS),
        peers_idle=peers_mean("idle"),
    )


def _takers(evidence: Evidence, scene: Scene, row: int) -> tuple[Taker, ...]:
    place, columns = scene.rows[row], np.flatnonzero(scene.columns)
    start = int(scene.steps.start_ns[place, columns].min())
    end = int(scene.steps.end_ns[place, columns].max())
    mean_step = float(scene.now.wall[row].mean())
    return host.takers(
        evidence.ranks[scene.ranks[row]],
        evidence.job,
        start,
        end,
        (end - start) / 1e6 / mean_step,
        float(scene.now.parts["runnable"][row].mean()),
        float(scene.now.parts["communication"][row].mean()),
    )


def _confidence(scene: Scene, blame: Blame, row: int, named: Named) -> float:
    """How sure rank and cause are, 0 to 1: a product of what each link of the chain is worth.

    The test (1 − q), the number of steps n (n / (n + 20)), how far collectives agree that this rank came late
    (0.7 at none, 1 at full agreement), the share that the cause explains (0.6 without a cause: the rank is
    known, the cause is not), and 0.8 where only direction decides: two ranks, or history without peers.
    """
    steps = int(scene.columns.sum())
    trust = (1 - blame.tests[0, row].q) * steps / (steps + 20)
    trust *= 0.7 + 0.3 * _late_agreement(scene, blame, row)
    trust *= named.share if named.cause else 0.6
    if blame.by == "history" or (len(scene.ranks) == 2 and scene.before is None):
        trust *= 0.8
    return round(float(np.clip(trust, 0.0, 0.99)), 2)


def _late_agreement(scene: Scene, blame: Blame, row: int) -> float:
    """Share of a culprit's extra time that its late arrivals confirm; starved communication threads make it
    late inside the collective, where no arrival shows it."""
    if scene.lateness is None:
        return 0.0
    peers = _peers_of(scene, row, blame.culprits)

    def over(values: Floats) -> float:
        return float((values[row] - values[peers].mean(axis=0)).mean())

    outside = over(scene.now.own) - over(scene.now.parts["communication"])
    if outside <= MIN_EFFECT_MS:
        return 0.5
    return float(np.clip(over(scene.lateness) / outside, 0.0, 1.0))


def _account(scene: Scene, row: int | None, peers: list[int]) -> list[out.AccountLine]:
    """Means over steps, which add up. Without a culprit: of the rank with the median own time."""
    if row is None:
        order = np.argsort(scene.now.own.mean(axis=1), kind="stable")
        row = int(order[(len(order) - 1) // 2])
        peers = [other for other in range(len(order)) if other != row]
    return [
        out.AccountLine(
            part=part,
            layer=PARTS[part].layer,
            ms=_round(float(scene.now.parts[part][row].mean())),
            peers_ms=_round(float(scene.now.parts[part][peers].mean())),
        )
        for part in PARTS
    ]


def _findings(scene: Scene, blame: Blame) -> list[out.Evidence]:
    values = _metrics(scene).mean(axis=2)
    found = []
    for (metric, row), tested in sorted(blame.tests.items(), key=lambda item: (item[0][1], item[0][0])):
        if tested.q > ALPHA or abs(tested.effect) < MIN_EFFECT_MS:
            continue
        name = METRICS[metric]
        others = _peers_of(scene, row, blame.culprits)
        found.append(
            out.Evidence(
                layer="nccl" if name == "lateness" else "os",
                metric=name,
                rank=scene.ranks[row],
                value=_round(float(values[metric, row])),
                peers=_round(float(np.median(values[metric, others]))),
                unit="ms/step",
                effect=_round(tested.effect),
                q=float(f"{tested.q:.2g}"),
            )
        )
    return found


def _cleared(scene: Scene, blame: Blame) -> list[out.Cleared]:
    """Victims: what they waited, and how near their own time is to their peers'."""
    victims = [row for row in range(len(scene.ranks)) if row not in blame.culprits]
    apart = distance_to_peers(scene.now.own[victims])
    for_whom = wording.ranks([scene.ranks[row] for row in blame.culprits])
    waiting = scene.now.parts["waiting"].mean(axis=1)
    cleared = []
    for row, distance in zip(victims, apart, strict=True):
        own = (
            f"its own time is {wording.ms(abs(float(distance)))} from its peers'"
            if len(victims) > 1
            else f"its own time is {wording.ms(float(scene.now.own[row].mean()))} per step"
        )
        waited = f"waited {wording.ms(float(waiting[row]))} per step for {for_whom} and the transfer"
        cleared.append(out.Cleared(rank=scene.ranks[row], why=f"{waited}; {own}"))
    return cleared


def _doubts(scene: Scene, blame: Blame, joint: float) -> list[str]:
    doubts = []
    if scene.history.baseline is not None:
        growth = float(scene.series_ms[scene.history.current.first :].mean()) - scene.history.baseline.ms
        if joint < 0.5 * growth:
            who = wording.ranks([scene.ranks[row] for row in blame.culprits])
            doubts.append(
                f"steps grew by {wording.ms(growth)} and {who} "
                f"cost {wording.ms(joint)} of it: the rest slows all ranks alike and is not explained"
            )
    if blame.by == "history":
        doubts.append("most ranks are slow, so peers prove nothing: ranks are named against their own past")
    elif len(scene.ranks) == 2 and scene.before is None:
        doubts.append(
            "two ranks and no past: which of them is wrong rests on one taking longer than the other"
        )
    if scene.lateness is None:
        doubts.append("late arrivals could not confirm this: durations of collectives are missing")
    return doubts


def _nobody(scene: Scene, blame: Blame, known: Verdict, unseen: list[int]) -> Verdict:
    """No culprit and no change: healthy, unless what was not seen could hide one."""
    step = f"steps of {wording.ms(known.step_ms or 0.0)}"
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
    if unseen and waiting >= WAITING_SHARE * float(scene.now.wall.mean()):
        return _insufficient(
            known,
            f"the watched ranks wait {wording.ms(waiting)} of their {step} and none of them is late: the "
            f"culprit may be among the unwatched {wording.ranks(unseen)}",
            [f"Start the agent on the nodes of {wording.ranks(unseen)}."],
        )
    spread = distance_to_peers(scene.now.own)
    widest = float(np.abs(spread).max())
    summary = f"Healthy: {step}; no rank differs from its peers by more than {wording.ms(widest)} per step."
    if scene.history.recovered is not None:
        past = scene.history.recovered
        summary += (
            f" It was slow ({wording.ms(past.ms)}) from {_time_of(scene, past.first)} to "
            f"{_time_of(scene, past.last)} and has recovered."
        )
    return msgspec.structs.replace(known, status="healthy", confidence=0.9, summary=summary)


def _summary(verdict: Verdict) -> str:
    worst = verdict.culprits[0]
    where = f"Rank {worst.rank} on {worst.node}"
    if len(verdict.culprits) > 1:
        others = wording.ranks([culprit.rank for culprit in verdict.culprits[1:]])
        where = f"{where}, with {others},"
    holds = "hold" if len(verdict.culprits) > 1 else "holds"
    since = ""
    if verdict.since and verdict.baseline:
        since = f", since {verdict.since} ({wording.ms(verdict.baseline.step_ms)} before)"
    cost = wording.ms(verdict.joint_cost_ms_per_step)
    first = f"{where} {holds} the job up: {cost} of each {wording.ms(verdict.step_ms or 0.0)} step{since}."
    return f"{first} {'Cause' if worst.cause else 'Cause not found'}: {worst.detail}."


def _round(value: float) -> float:
    return round(value, 3)
