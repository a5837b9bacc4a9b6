"""From evidence to a verdict: steps, peers, tests, causes, in this order. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.blame import Blame, Tested, by_history, by_peers
from diagnosis.case import account_lines, against, joint_cost, median_row, metrics, rounded, slowdown_lines
from diagnosis.connections import slow_connection
from diagnosis.evidence import Evidence
from diagnosis.few import in_all_steps
from diagnosis.hang.case import undecided, verdict_of_hang
from diagnosis.hang.find import find_hang
from diagnosis.innocent import beside_a_culprit, cleared_of, victims_of_unseen_receives
from diagnosis.layers import connections, job, network
from diagnosis.limits import (
    ALIKE_SHARE,
    EXPLAINS_PART,
    MIN_COST_SHARE,
    MIN_EFFECT_MS,
    TAIL_COST_SHARE,
)
from diagnosis.links import SlowTransfer, slow_transfer
from diagnosis.nobody import insufficient, nobody, time_of
from diagnosis.permutation import TooFewBlocksError
from diagnosis.replay.operations import diagnose_operations
from diagnosis.scene import NotComparableError, Scene, Tables, observe, pieces
from diagnosis.stalls import without
from diagnosis.standing import stood_still, with_stalls
from diagnosis.steps import Steps
from diagnosis.upstream import Upstream, waited_for
from diagnosis.verdict import Verdict
from probes.records import Probe


def diagnose(evidence: Evidence) -> Verdict:
    """What holds the job up, since when, why, and what that rests on. Never raises for missing evidence:
    that is status ``insufficient``, and ``not_seen`` says what is missing."""
    verdict = _diagnose(evidence)
    # Last: what a machine never tells seldom hides a culprit.
    return msgspec.structs.replace(verdict, not_seen=[*verdict.not_seen, *_in_part(evidence)])


def _diagnose(evidence: Evidence) -> Verdict:
    unseen = sorted(set(range(evidence.world_size)) - set(evidence.ranks))
    bare = Verdict(
        job=evidence.job,
        window=out.Window(start=wording.instant(evidence.start_ns), end=wording.instant(evidence.end_ns)),
        status="insufficient",
        world_size=evidence.world_size,
        ranks_seen=len(evidence.ranks),
        not_seen=_gaps(evidence, unseen),
    )
    if (hang := find_hang(evidence)) is not None:
        return verdict_of_hang(evidence, hang, bare)
    if (of_trace := diagnose_operations(evidence, bare)) is not None:
        return of_trace
    return undecided(evidence, _compared(evidence, bare, unseen))


def _compared(evidence: Evidence, bare: Verdict, unseen: list[int]) -> Verdict:
    try:
        tables, found = pieces(evidence)
    except NotComparableError as gap:
        return insufficient(bare, str(gap), [_more(evidence)])
    verdicts = [_of_piece(evidence, tables, steps, bare, unseen) for steps in found]
    return verdicts[0] if len(verdicts) == 1 else _together(verdicts, found, bare)


def _of_piece(evidence: Evidence, tables: Tables, steps: Steps, bare: Verdict, unseen: list[int]) -> Verdict:
    """Without the stretches in which one rank stood still; these are said with what goes on now."""
    stood = stood_still(evidence, steps)
    verdict = _of_steps(evidence, tables, without(steps, stood.stalls), bare, unseen)
    return with_stalls(evidence, stood, verdict)


def _of_steps(evidence: Evidence, tables: Tables, steps: Steps, bare: Verdict, unseen: list[int]) -> Verdict:
    try:
        scene = observe(evidence, tables, steps)
    except NotComparableError as gap:
        return insufficient(bare, str(gap), [_more(evidence)])
    since = None if scene.history.since is None else time_of(scene, scene.history.since)
    slowdown, unexplained = slowdown_lines(scene)
    known = msgspec.structs.replace(
        bare,
        since=since,
        slowdown=slowdown,
        slowdown_unexplained_ms=unexplained,
        baseline=_baseline(scene),
        step_ms=rounded(float(np.median(scene.series_ms[scene.history.current.first :]))),
        steps=int(scene.columns.sum()),
        not_seen=[*bare.not_seen, *scene.left_out, *_horizon(evidence, scene), *_alone(scene)],
        account=account_lines(scene, None, []),
        unexplained_ms=rounded(float(scene.now.unexplained[median_row(scene)].mean())),
    )
    step_ms = float(scene.now.wall.mean())
    try:
        blame, least = _blame(scene)
    except TooFewBlocksError as few:
        if scene.by == "threads":
            return insufficient(known, f"too few independent steps to tell ranks apart: {few}", [])
        blame, least = in_all_steps(scene.now.own, scene.groups, step_ms), MIN_COST_SHARE
        if not blame.culprits or unseen:
            return _of_few(scene, blame, known, few)
    slow = _of_the_network(scene, slow_transfer(scene, evidence.ranks))
    upstream = _upstream(evidence, scene)
    if blame.culprits and joint_cost(scene, blame) >= least * step_ms:
        innocent = victims_of_unseen_receives(scene, blame)
        if len(innocent) == len(blame.culprits):
            return _co_critical(scene, blame, known)
        accused = cleared_of(blame, innocent)
        beside = beside_a_culprit(scene, accused)
        accused, innocent = cleared_of(accused, beside), innocent | beside
        verdict = against(evidence, scene, accused, known, upstream, innocent)
        return _with_network(evidence, scene, slow, verdict)
    if (sends := slow_connection(evidence, scene)) is not None:
        return connections.slow_connection(evidence, scene, sends, known)
    if slow is not None and network.costs_enough(slow, scene):
        return network.slow_transfer(evidence, scene, slow, known)
    if scene.history.slowed_by >= ALIKE_SHARE:
        return _suspected(scene, known) or job.slowed_alike(scene, known, unseen)
    if (spread := job.uneven(scene)) is not None:
        return job.unevenly(scene, spread, known)
    if (longer := job.longer_stage(scene, evidence.ranks)) is not None:
        return job.of_longer_stage(scene, longer, known)
    return nobody(evidence, scene, blame, known)


def _upstream(evidence: Evidence, scene: Scene) -> Upstream | None:
    """Whom each rank waited for, where that is not plain: one communicator has one last rank, and that is it."""
    several = len(scene.tables.joined) > 1 or bool(scene.tables.pairs) or scene.by == "collectives"
    return waited_for(scene, evidence.ranks) if several else None


def _of_the_network(scene: Scene, slow: SlowTransfer | None) -> SlowTransfer | None:
    """None for a transfer that is slow because a rank's communication threads wanted a CPU and had none: that is
    an end's fault, which the account of that rank has already, and no link's."""
    starved = scene.now.parts.get("communication")
    if slow is None or starved is None:
        return slow
    more = starved.mean(axis=1)
    if scene.before is not None:
        more = more - scene.before.parts["communication"].mean(axis=1)
    return None if float(more.max()) >= EXPLAINS_PART * slow.ms else slow


def _with_network(evidence: Evidence, scene: Scene, slow: SlowTransfer | None, verdict: Verdict) -> Verdict:
    """A late rank and a slow transfer at once: both are said, the costlier first."""
    if slow is None or not network.costs_enough(slow, scene):
        return verdict
    too = network.slow_transfer(evidence, scene, slow, verdict)
    first, second = (too, verdict) if slow.ms > verdict.cost_ms_per_step else (verdict, too)
    blamed = {culprit.rank for culprit in too.culprits}
    return msgspec.structs.replace(
        first,
        culprits=sorted([*first.culprits, *second.culprits], key=lambda one: -one.cost_ms_per_step),
        joint_cost_ms_per_step=rounded(slow.ms + verdict.joint_cost_ms_per_step),
        evidence=[*first.evidence, *second.evidence],
        cleared=[one for one in verdict.cleared if one.rank not in blamed],
        ruled_out=verdict.ruled_out,
        actions=[*first.actions, *second.actions],
        summary=f"{first.summary} Besides: {second.summary}",
    )


def _suspected(scene: Scene, known: Verdict) -> Verdict | None:
    """A rank that took longer than its peers, where that is too unsteady to be significant: not all are alike."""
    for group in scene.groups:
        own = scene.now.own[group].mean(axis=1)
        over = own - np.median(own)
        row = int(np.argmax(over))
        if len(group) > 2 and over[row] >= max(0.5 * scene.growth_ms(), MIN_EFFECT_MS):
            return insufficient(
                known,
                f"steps grew by {wording.ms(scene.growth_ms())}, and rank {scene.ranks[group[row]]} takes "
                f"{wording.ms(float(over[row]))} longer than its peers, too unsteadily to be sure of it",
                ["Watch longer."],
            )
    return None


def _co_critical(scene: Scene, blame: Blame, known: Verdict) -> Verdict:
    who = wording.ranks([scene.ranks[row] for row in blame.culprits])
    return insufficient(
        known,
        f"{who} of different stages sleep longer than their peers outside collectives, in the same steps: each may "
        "wait for the other in sends and receives, which are not seen here, so they are co-critical",
        ["Time sends and receives too (a profile with CUDA activities), to see who waits for whom."],
    )


def _together(verdicts: list[Verdict], found: list[Steps], bare: Verdict) -> Verdict:
    """Pieces of a job that share nothing: each was analysed by itself; the costliest trouble comes first."""
    order = sorted(
        range(len(verdicts)),
        key=lambda place: (
            _URGENCY[verdicts[place].status],
            -verdicts[place].joint_cost_ms_per_step,
            -len(found[place].ranks),
            found[place].ranks,
        ),
    )
    first = verdicts[order[0]]
    groups = "; ".join(wording.ranks(found[place].ranks) for place in sorted(order))
    words = (
        f"no communicator pairs the steps of these groups of ranks, so each is compared by itself: {groups}"
    )
    others = [verdicts[place] for place in order[1:]]
    slow = [verdict for verdict in others if verdict.status == "slow"]
    gaps = [
        f"{wording.ranks(found[place].ranks)}: {verdicts[place].summary}"
        for place in order[1:]
        if verdicts[place].status not in ("slow", first.status)
    ]
    return msgspec.structs.replace(
        first,
        culprits=[*first.culprits, *(culprit for verdict in slow for culprit in verdict.culprits)],
        evidence=[*first.evidence, *(found for verdict in slow for found in verdict.evidence)],
        cleared=[*first.cleared, *(one for verdict in slow for one in verdict.cleared)],
        actions=list(dict.fromkeys(action for v in (first, *slow) for action in v.actions)),
        not_seen=list(
            dict.fromkeys([words, *first.not_seen, *gaps, *(gap for v in others for gap in v.not_seen)])
        ),
        summary=" ".join([first.summary, *(verdict.summary for verdict in slow)]),
    )


_URGENCY: dict[out.Status, int] = {"hang": 0, "slow": 1, "insufficient": 2, "healthy": 3}


def _gaps(evidence: Evidence, unseen: list[int]) -> list[str]:
    gaps = list(evidence.notes)
    if unseen and evidence.ranks:
        gaps.append(
            f"{wording.ranks(unseen)} of {evidence.world_size} not watched: neither blamed nor healthy "
            f"({'no file tells of them' if _imported(evidence) else 'is the agent running on their nodes?'})"
        )
    gaps += _of_probes(
        evidence, lambda one: f": {one.why or one.state}" if one.state == "unavailable" else ""
    )
    gaps += _of_probes(evidence, lambda one: f" lost {one.lost:,} events" if one.lost else "")
    return gaps


def _in_part(evidence: Evidence) -> list[str]:
    """Probes that work, but for a part that their kernel or machine does not have."""
    return _of_probes(
        evidence, lambda one: f"{wording.IN_PART}{one.why}" if one.state == "on" and one.why else ""
    )


def _of_probes(evidence: Evidence, said: Callable[[Probe], str]) -> list[str]:
    """What is said of each probe, if anything, nodes of which the same is said together."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for node, probes in sorted(evidence.probes.items()):
        for one in probes:
            if words := said(one):
                nodes.setdefault((one.name, words), []).append(node)
    return [
        f"probe {name} on {wording.listed(at) if len(at) <= 3 else f'{len(at)} nodes'}{words}"
        for (name, words), at in nodes.items()
    ]


def _imported(evidence: Evidence) -> bool:
    return any(rank.source != "agent" for rank in evidence.ranks.values())


def _more(evidence: Evidence) -> str:
    """How to get more evidence of this kind."""
    if _imported(evidence):
        return (
            "Import the files of all ranks, over more steps, with collectives that name their process group."
        )
    return "sysom doctor on each node says what its agent can watch."


def _horizon(evidence: Evidence, scene: Scene) -> list[str]:
    """What a comparison with the job's own past cannot show."""
    if (drift := scene.history.drift) is not None and drift.first == 0:
        return ["steps become longer from the first one that was seen on: it may have begun before"]
    if scene.history.baseline is not None:
        return []
    began = max(evidence.watched_since_ns, evidence.start_ns)
    what = "watching" if evidence.watched_since_ns >= evidence.start_ns else "this window"
    return [
        f"{what} began at {wording.to_the_second(wording.instant(began))}: "
        "a slowdown of all ranks alike before that cannot be seen"
    ]


def _alone(scene: Scene) -> list[str]:
    """Ranks that no other does the same work as."""
    lone = sorted(scene.ranks[row] for row in scene.alone)
    if not lone or len(lone) == len(scene.ranks) == 1:
        return []
    do, their = ("does", "its") if len(lone) == 1 else ("do", "their")
    past = f"compared with {their} own past only" if scene.before is not None else "and no past: not compared"
    return [f"{wording.ranks(lone)} {do} work that no other rank does, so there are no peers: {past}"]


def _baseline(scene: Scene) -> out.Baseline | None:
    level = scene.history.baseline
    if level is None:
        return None
    return out.Baseline(
        step_ms=rounded(level.ms),
        start=time_of(scene, level.first),
        end=time_of(scene, level.last),
        steps=level.last - level.first,
    )


def _of_few(scene: Scene, blame: Blame, known: Verdict, few: TooFewBlocksError) -> Verdict:
    """Not enough steps, or ranks: what can be said is said, and nobody is named a culprit."""
    gap = f"too few independent steps to tell ranks apart: {few}"
    words = [
        f"rank {scene.ranks[row]} takes {wording.ms(tested.effect)} longer than its peers in each of the "
        f"{scene.now.wall.shape[1]} steps, but not all ranks were seen"
        for (_, row), tested in sorted(blame.tests.items())
    ]
    verdict = insufficient(known, gap, ["Record more steps, of all ranks."])
    return msgspec.structs.replace(verdict, not_seen=[*verdict.not_seen, *words])


def _blame(scene: Scene) -> tuple[Blame, float]:
    """Against peers; where that shows nobody, each rank against its own past; then who is slow now and then
    only, or becomes slow little by little. And the share of the step that it must cost."""
    step_ms = float(scene.now.wall.mean())
    blame = by_peers(metrics(scene), scene.groups, step_ms, scene.partitions)
    if blame.culprits:
        return blame, MIN_COST_SHARE
    if scene.before is not None:
        grown = by_history(scene.before.own, scene.now.own, step_ms)
        if grown and len(grown) < len(scene.ranks):
            tests = {(0, row): tested for row, tested in grown.items()}
            return Blame(tuple(sorted(grown)), "history", tests), MIN_COST_SHARE
    rare = [one for one in blame.rare if one.cost_ms >= MIN_EFFECT_MS]
    now_and_then = {one.row: Tested(one.cost_ms, one.q) for one in rare}
    drifting = {one.row: Tested(one.ms, one.q) for one in blame.drifts}
    found = now_and_then | drifting
    if not found:
        return blame, MIN_COST_SHARE
    tests = {(0, row): tested for row, tested in found.items()}
    return replace(blame, culprits=tuple(sorted(found)), tests=tests), TAIL_COST_SHARE
