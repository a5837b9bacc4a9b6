"""The case against the culprits: cause, cost, confidence, findings, and who is cleared."""

from __future__ import annotations

import msgspec
import numpy as np

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.accounting import OWN, PARTS
from diagnosis.blame import Blame, cost_ms, distance_to_peers
from diagnosis.causes import Named, name_cause
from diagnosis.evidence import Evidence
from diagnosis.findings import Extra, Taker, TakerGroup, TakerKind, group_of
from diagnosis.layers import host
from diagnosis.limits import ALPHA, MIN_EFFECT_MS
from diagnosis.scene import Scene
from diagnosis.steps import Floats
from diagnosis.verdict import Verdict

METRICS = ("own", *OWN, "lateness")
"""What is tested, in the order of the tests' first axis; against a rank's own past, its ``growth`` in own time."""


def metrics(scene: Scene) -> Floats:
    """Values of ``METRICS``: metrics × ranks × steps, ms."""
    late = scene.lateness if scene.lateness is not None else np.zeros_like(scene.now.wall)
    return np.stack([scene.now.own, *(scene.now.parts[part] for part in OWN), late])


def against(evidence: Evidence, scene: Scene, blame: Blame, known: Verdict) -> Verdict:
    """The verdict ``slow`` with the culprits of ``blame``, on top of what is ``known``."""
    findings: list[tuple[out.Culprit, Named, int]] = []
    for row in blame.culprits:
        named = name_cause(_extra(evidence, scene, row, blame.culprits))
        rank = evidence.ranks[scene.ranks[row]]
        culprit = out.Culprit(
            rank=rank.rank,
            node=rank.node,
            gpu=None,
            layer=named.layer,
            cause=named.cause.id if named.cause else None,
            owner=named.judgement.owner,
            confidence=_confidence(scene, blame, row, named),
            cost_ms_per_step=rounded(cost_ms(_stages(scene), (row,))),
            share_explained=rounded(named.share),
            detail=named.judgement.detail,
        )
        findings.append((culprit, named, row))
    findings.sort(key=lambda found: (-found[0].cost_ms_per_step, -float(scene.now.own[found[2]].mean())))
    worst, cause, row = findings[0]
    joint = joint_cost(scene, blame)
    verdict = msgspec.structs.replace(
        known,
        status="slow",
        culprits=[culprit for culprit, _, _ in findings],
        layer=worst.layer,
        cause=worst.cause,
        owner=worst.owner,
        confidence=worst.confidence,
        cost_ms_per_step=worst.cost_ms_per_step,
        joint_cost_ms_per_step=rounded(joint),
        share_explained=worst.share_explained,
        account=account_lines(scene, row, _peers_of(scene, row, blame.culprits)),
        unexplained_ms=rounded(float(scene.now.unexplained[row].mean())),
        evidence=_findings(scene, blame),
        cleared=_cleared(scene, blame),
        ruled_out=cause.ruled_out,
        actions=list(dict.fromkeys(action for _, named, _ in findings for action in named.judgement.actions)),
        not_seen=[*known.not_seen, *_doubts(scene, blame, joint)],
    )
    return msgspec.structs.replace(verdict, summary=_summary(verdict))


def joint_cost(scene: Scene, blame: Blame) -> float:
    """What all culprits together cost, ms per step."""
    return cost_ms(_stages(scene), blame.culprits)


def _stages(scene: Scene) -> list[Floats]:
    """A step's two stages: up to the arrival, and in the collective once all have come."""
    inside = scene.now.parts["communication"]
    return [scene.now.own - inside, inside]


def median_row(scene: Scene) -> int:
    """The rank with the median own time (the lower of two)."""
    order = np.argsort(scene.now.own.mean(axis=1), kind="stable")
    return int(order[(len(order) - 1) // 2])


def account_lines(scene: Scene, row: int | None, peers: list[int]) -> list[out.AccountLine]:
    """Means over steps, which add up: of ``row`` and of its ``peers``. Without a culprit (None): of the rank
    with the median own time, and of all others."""
    if row is None:
        row = median_row(scene)
        peers = [other for other in range(len(scene.ranks)) if other != row]
    return [
        out.AccountLine(
            part=part,
            layer=PARTS[part].layer,
            ms=rounded(float(scene.now.parts[part][row].mean())),
            peers_ms=rounded(float(scene.now.parts[part][peers].mean())),
        )
        for part in PARTS
    ]


def _peers_of(scene: Scene, row: int, culprits: tuple[int, ...]) -> list[int]:
    """Rows that do the same work as ``row`` and are no culprits; all others when it has no such peer."""
    group = next(group for group in scene.groups if row in group)
    innocent = [other for other in range(len(scene.ranks)) if other not in culprits]
    return [other for other in innocent if other in group] or innocent


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
        peers_took=_mean_taken([taken[other] for other in peers]),
        peers_idle=peers_mean("idle"),
    )


def _mean_taken(peers: list[tuple[Taker, ...]]) -> dict[TakerGroup, float]:
    total: dict[TakerGroup, float] = {}
    for takers in peers:
        for taker in takers:
            total[group_of(taker)] = total.get(group_of(taker), 0.0) + taker.ms / len(peers)
    return total


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


def _findings(scene: Scene, blame: Blame) -> list[out.Evidence]:
    values = metrics(scene).mean(axis=2)
    found = []
    for (metric, row), tested in sorted(blame.tests.items(), key=lambda item: (item[0][1], item[0][0])):
        if tested.q > ALPHA or abs(tested.effect) < MIN_EFFECT_MS:
            continue
        name, mine = METRICS[metric], values[metric]
        others = _peers_of(scene, row, blame.culprits)
        effect = tested.effect
        if blame.by == "history" and scene.before is not None:
            name, mine = "growth", mine - scene.before.own.mean(axis=1)
            effect = float(mine[row] - np.median(mine[others]))
        found.append(
            out.Evidence(
                layer="nccl" if name == "lateness" else "os",
                metric=name,
                rank=scene.ranks[row],
                value=rounded(float(mine[row])),
                peers=rounded(float(np.median(mine[others]))),
                unit="ms/step",
                effect=rounded(effect),
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
        growth = scene.growth_ms()
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


def _summary(verdict: Verdict) -> str:
    worst = verdict.culprits[0]
    where = f"Rank {worst.rank} on {worst.node}"
    if len(verdict.culprits) > 1:
        others = wording.ranks([culprit.rank for culprit in verdict.culprits[1:]])
        where = f"{where}, with {others},"
    holds = "hold" if len(verdict.culprits) > 1 else "holds"
    cost = f"It costs {wording.ms(verdict.joint_cost_ms_per_step)} of each step"
    step = f"the median step takes {wording.ms(verdict.step_ms or 0.0)}"
    if verdict.since and verdict.baseline:
        cost += f" since {wording.to_the_second(verdict.since)}"
        step += f", before {wording.ms(verdict.baseline.step_ms)}"
    cause = "Cause" if worst.cause else "Cause not found"
    return f"{where} {holds} the job up. {cost}: {step}. {cause}: {worst.detail}."


def rounded(value: float) -> float:
    """To the microsecond, in ms: below that is noise of the clock."""
    return round(value, 3) + 0.0  # no −0.0
