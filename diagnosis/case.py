"""The case against the culprits: cause, cost, confidence, findings, and who is cleared."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.accounting import PARTS, grown
from diagnosis.blame import Blame, cost_ms, distance_to_peers
from diagnosis.causes import Named, name_cause
from diagnosis.evidence import Evidence, Ints
from diagnosis.exposed import computing
from diagnosis.extra import by_reason, extra_of
from diagnosis.findings import Extra, HostTime, Judgement
from diagnosis.limits import ALPHA, EXPLAINS, MIN_EFFECT_MS
from diagnosis.scene import Scene
from diagnosis.steps import Floats
from diagnosis.upstream import Upstream, words
from diagnosis.verdict import Verdict


def metric_names(scene: Scene) -> tuple[str, ...]:
    """What is tested, in the order of the tests' first axis; against a rank's own past, its ``growth`` in own
    time."""
    return ("own", *scene.now.own_parts, "lateness")


def metrics(scene: Scene) -> list[Floats]:
    """Values of :func:`metric_names`: of each ranks × steps, ms."""
    late = scene.lateness if scene.lateness is not None else np.zeros_like(scene.now.wall)
    return [scene.now.own, *(scene.now.parts[part] for part in scene.now.own_parts), late]


def against(
    evidence: Evidence,
    scene: Scene,
    blame: Blame,
    known: Verdict,
    upstream: Upstream | None = None,
    excused: Mapping[int, str] | None = None,
) -> Verdict:
    """The verdict ``slow`` with the culprits of ``blame``, on top of what is ``known``. ``upstream``: whom each
    rank waited for, where more than one thing can make it wait. ``excused``: rows that stand out, and why they are
    innocent all the same."""
    findings: list[tuple[out.Culprit, Named, int, Extra | None]] = []
    known_times: dict[int, HostTime] = {}
    for row in blame.culprits:
        peers = _peers_of(scene, row, blame.culprits)
        extra = extra_of(evidence, scene, row, peers, known_times) if scene.by == "threads" else None
        named = name_cause(extra) if extra else _from_collectives(evidence, scene, row, peers)
        rank = evidence.ranks[scene.ranks[row]]
        culprit = out.Culprit(
            rank=rank.rank,
            node=rank.node,
            gpu=None,
            layer=named.layer if scene.by == "threads" or named.layer != "job" else None,
            cause=named.cause.id if named.cause else None,
            owner=named.judgement.owner,
            confidence=_confidence(scene, blame, row, named),
            cost_ms_per_step=rounded(cost_ms(_stages(scene), (row,))),
            share_explained=rounded(named.share),
            detail=named.judgement.detail,
        )
        findings.append((culprit, named, row, extra))
    findings.sort(key=lambda found: (-found[0].cost_ms_per_step, -float(scene.now.own[found[2]].mean())))
    worst, cause, row, extra = findings[0]
    joint = joint_cost(scene, blame)
    verdict = msgspec.structs.replace(
        known,
        status="slow",
        culprits=[culprit for culprit, *_ in findings],
        layer=worst.layer,
        cause=worst.cause,
        owner=worst.owner,
        confidence=worst.confidence,
        cost_ms_per_step=worst.cost_ms_per_step,
        joint_cost_ms_per_step=rounded(joint),
        share_explained=worst.share_explained,
        account=by_reason(account_lines(scene, row, _peers_of(scene, row, blame.culprits)), extra),
        unexplained_ms=rounded(float(scene.now.unexplained[row].mean())),
        evidence=_findings(scene, blame),
        cleared=_cleared(scene, blame, upstream, excused or {}),
        ruled_out=cause.ruled_out,
        actions=list(
            dict.fromkeys(action for _, named, *_ in findings for action in named.judgement.actions)
        ),
        not_seen=[*known.not_seen, *_doubts(scene, blame, joint)],
    )
    return msgspec.structs.replace(verdict, summary=_summary(verdict))


def joint_cost(scene: Scene, blame: Blame) -> float:
    """What all culprits together cost, ms per step."""
    return cost_ms(_stages(scene), blame.culprits)


def _stages(scene: Scene) -> list[Floats]:
    """A step's two stages: up to the arrival, and in the collective once all have come."""
    inside = scene.now.parts.get("communication", np.zeros_like(scene.now.wall))
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
        if part in scene.now.parts
    ]


def slowdown_lines(scene: Scene) -> tuple[list[out.Growth], float]:
    """What the slowdown against the baseline went to, largest first, and what of it no part explains."""
    if scene.before is None:
        return [], 0.0
    by_part, unexplained = grown(scene.before, scene.now)
    lines = [
        out.Growth(part=part, layer=PARTS[part].layer, ms=rounded(ms))
        for part, ms in by_part.items()
        if part in PARTS
    ]
    return sorted(lines, key=lambda line: -line.ms), rounded(unexplained)


def _peers_of(scene: Scene, row: int, culprits: tuple[int, ...]) -> list[int]:
    """Rows that do the same work as ``row`` and are no culprits; all others when it has no such peer."""
    group = next(group for group in scene.groups if row in group)
    guilty = set(culprits)
    peers = sorted(other for other in group if other not in guilty)
    return peers or [other for other in range(len(scene.ranks)) if other not in guilty]


def _from_collectives(evidence: Evidence, scene: Scene, row: int, peers: list[int]) -> Named:
    """What timed collectives tell of a culprit: that it keeps the others waiting and nothing makes it wait. Where a
    trace shows when it computed: whether that took longer, or the GPU had nothing to do."""
    outside = scene.now.mean("outside")
    over = float(outside[row] - outside[peers].mean())
    detail = (
        f"outside collectives {wording.ms(float(outside[row]))} per step, its peers "
        f"{wording.ms(float(outside[peers].mean()))}, and nothing made it wait; collectives do not tell what it did"
    )
    layer: out.Layer = "job"
    computes = {other: _computes(evidence, scene, other) for other in (row, *peers)}
    if all(ms is not None for ms in computes.values()):
        mine, theirs = computes[row] or 0.0, float(np.mean([computes[other] or 0.0 for other in peers]))
        if mine - theirs >= EXPLAINS * over:
            layer = "gpu"
            detail = f"its kernels run {wording.ms(mine)} per step, its peers' {wording.ms(theirs)}"
        elif mine - theirs <= (1 - EXPLAINS) * over:
            layer = "os"
            detail = (
                f"its GPU has nothing to do for {wording.ms(float(outside[row]) - mine)} per step, its peers' for "
                f"{wording.ms(float(outside[peers].mean()) - theirs)}: the host is late to give it work"
            )
    node = evidence.ranks[scene.ranks[row]].node
    where = f" on {node}" if node else ""
    actions = (
        f"Watch rank {scene.ranks[row]}{where} with the agent: CPU, GPU clocks and what its driving thread does.",
    )
    return Named(None, layer, Judgement(0.0, "node", detail, actions, ""), 0.0, [])


def _computes(evidence: Evidence, scene: Scene, row: int) -> float | None:
    """How long a rank computed per step, by its trace, in ms; None where none tells."""
    begin, end = computing(evidence.ranks[scene.ranks[row]])
    if not len(begin):
        return None
    mine, columns = scene.rows[row], np.flatnonzero(scene.columns)
    total = np.concatenate([[0], np.cumsum(end - begin)])

    def until(at: Ints) -> Ints:
        place = np.searchsorted(begin, at, side="right")
        last = np.maximum(place - 1, 0)
        return np.asarray(total[place] - np.where(place > 0, np.maximum(end[last] - at, 0), 0), np.int64)

    start, stop = scene.steps.start_ns[mine, columns], scene.steps.end_ns[mine, columns]
    return float((until(stop) - until(start)).mean() / 1e6)


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

    inside = scene.now.parts.get("communication")
    outside = over(scene.now.own) - (over(inside) if inside is not None else 0.0)
    if outside <= MIN_EFFECT_MS:
        return 0.5
    return float(np.clip(over(scene.lateness) / outside, 0.0, 1.0))


def _findings(scene: Scene, blame: Blame) -> list[out.Evidence]:
    names, values = metric_names(scene), [values.mean(axis=1) for values in metrics(scene)]
    found = []
    for (metric, row), tested in sorted(blame.tests.items(), key=lambda item: (item[0][1], item[0][0])):
        if tested.q > ALPHA or abs(tested.effect) < MIN_EFFECT_MS:
            continue
        name, mine = names[metric], values[metric]
        others = _peers_of(scene, row, blame.culprits)
        effect = tested.effect
        if blame.by == "history" and scene.before is not None:
            name, mine = "growth", mine - scene.before.own.mean(axis=1)
            effect = float(mine[row] - np.median(mine[others]))
        found.append(
            out.Evidence(
                layer="nccl" if name == "lateness" or scene.by == "collectives" else "os",
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


def _cleared(
    scene: Scene, blame: Blame, upstream: Upstream | None, excused: Mapping[int, str]
) -> list[out.Cleared]:
    """Victims: what they waited for, and how near their own time is to their peers'."""
    culprits = set(blame.culprits)
    victims = [row for row in range(len(scene.ranks)) if row not in culprits]
    apart = _apart(scene, victims)
    for_whom = wording.ranks([scene.ranks[row] for row in blame.culprits])
    waiting = scene.now.mean("waiting", "receiving", "transfer")
    guilty = frozenset(scene.ranks[row] for row in blame.culprits)
    cleared = []
    for row, distance in zip(victims, apart, strict=True):
        own = (
            f"its own time is {wording.ms(abs(float(distance)))} from its peers'"
            if np.isfinite(distance)
            else f"its own time is {wording.ms(float(scene.now.own[row].mean()))} per step"
        )
        waited = words(upstream, scene.ranks[row], guilty) if upstream is not None else ""
        waited = (
            waited or f"waited {wording.ms(float(waiting[row]))} per step for {for_whom} and the transfer"
        )
        cleared.append(out.Cleared(rank=scene.ranks[row], why=excused.get(row, f"{waited}; {own}")))
    return cleared


def _apart(scene: Scene, victims: list[int]) -> Floats:
    """Per victim: its own time less that of the victims among its peers, ms; NaN where it has none."""
    apart = np.full(len(scene.ranks), np.nan)
    innocent = set(victims)
    for group in scene.groups:
        left = [row for row in group if row in innocent]
        if len(left) > 1:
            apart[left] = distance_to_peers(scene.now.own[left])
    return apart[victims]


def _doubts(scene: Scene, blame: Blame, joint: float) -> list[str]:
    doubts = [
        f"rank {scene.ranks[one.row]} is slow in {wording.percent(one.share)} of the steps only"
        for one in blame.rare
        if one.row in blame.culprits
    ]
    doubts += [
        f"rank {scene.ranks[one.row]} became slower little by little, by {wording.ms(one.ms)} per step in the end"
        for one in blame.drifts
        if one.row in blame.culprits
    ]
    doubts += [
        f"all ranks of {one.level} {one.name} are slow together"
        for one in blame.sets
        if set(one.rows) <= set(blame.culprits) and len(one.rows) > 1
    ]
    if (drift := scene.history.drift) is not None:
        doubts.append(
            f"steps became longer little by little, from {wording.ms(drift.before_ms)} to "
            f"{wording.ms(drift.now_ms)}: what is compared are the newest {int(scene.columns.sum()):,}"
        )
    if scene.history.baseline is not None:
        growth = scene.growth_ms()
        if joint < 0.5 * growth:
            who = wording.ranks([scene.ranks[row] for row in blame.culprits])
            doubts.append(
                f"steps grew by {wording.ms(growth)} and {who} "
                f"cost {wording.ms(joint)} of it: the rest slows all ranks alike and is not explained"
            )
    if blame.by == "history":
        lone = set(blame.culprits) <= set(scene.alone)
        if lone:
            why = "there are no peers"
        elif 2 * len(blame.culprits) > len(scene.ranks):
            why = "most ranks are slow, so peers prove nothing"
        else:
            why = "the slow steps are too few, or too unlike each other, for a comparison with peers"
        doubts.append(f"{why}: ranks are named against their own past")
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
