"""Ranks that compute longer than their peers: who, by how much, what it costs, and who only waited for them."""

from __future__ import annotations

import re

import msgspec
import numpy as np

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.layers import pipeline, transfers, uneven
from diagnosis.layers.pipeline import Case
from diagnosis.limits import EXPLAINS, MIN_COST_SHARE, STRAGGLING
from diagnosis.replay.trace import BACKWARD, COLLECTIVE, FORWARD, OTHER, RECV
from diagnosis.replay.workers import Slow, excess
from diagnosis.verdict import Verdict

ONE_STEP = 0.5
"""Factor on the confidence where one step was recorded: whatever befell a healthy rank in it looks the same."""
HOST_ONLY = re.compile(
    r"garbage|\bgc\b|data[-_ ]?load|load[-_ ]?(?:data|batch)|next[-_ ]?batch|tokeni|checkpoint|python|log",
    re.I,
)
"""Names of operations that no GPU does."""
_CLEARED = 64
"""Most ranks that are cleared by name: those that waited longest."""


def against(case: Case, known: Verdict) -> Verdict:
    named = [_culprit(case, one, cost) for one, cost in zip(case.slow, case.costs.alone, strict=True)]
    together = _together(case)
    culprits = [one for one in named if one.rank not in together]
    worst = (culprits or named)[0]
    left = uneven.troubles(case) if case.costs.slowdown_left >= STRAGGLING else []
    links = (
        [transfers.blamed_link(case)] if case.links and case.link_ms >= MIN_COST_SHARE * case.mean_ms else []
    )
    since, baseline = _since(case, case.slow[0])
    return msgspec.structs.replace(
        known,
        status="slow",
        since=since,
        baseline=baseline,
        culprits=[*culprits, *(culprit for culprit, _, _ in links)],
        layer=worst.layer,
        also=[*({culprit.cause for culprit, _, _ in links} - {None}), *(trouble.cause for trouble in left)],
        owner=worst.owner,
        confidence=worst.confidence,
        cost_ms_per_step=worst.cost_ms_per_step,
        joint_cost_ms_per_step=round(case.costs.slow, 3),
        summary=" ".join(
            [
                _who(case, worst, together),
                *_undecided(case, together),
                *(text for _, text, _ in links),
                *(trouble.also for trouble in left),
                case.slowdown,
            ]
        ),
        evidence=[line for one in case.slow for line in _tested(case, one)],
        cleared=_cleared(case),
        ruled_out=_ruled_out(case),
        not_seen=[*known.not_seen, *_layers_unseen(culprits or named)],
        actions=[
            f"Look at {_where(one)}: GPU clocks and throttling, errors, other processes on its GPU "
            "and CPUs; or take the node out and see whether the step shortens."
            for one in (culprits or named)[:4]
        ],
    )


def _where(one: out.Culprit) -> str:
    return f"rank {one.rank}" + (f" on {one.node}" if one.node else "")


def _together(case: Case) -> list[int]:
    """Ranks of slow groups whose members work on one batch together (tensor parallel) and are all slow: one of
    them keeps the others, and which is not known."""
    trace, slow = case.trace, {one.row for one in case.slow}
    found: list[int] = []
    for row in sorted(slow):
        mates = np.flatnonzero((trace.stage == trace.stage[row]) & (trace.data == trace.data[row]))
        if trace.data[row] >= 0 and len(mates) > 1 and slow.issuperset(mates.tolist()):
            found.append(case.rank(row))
    return found


def _layers_unseen(culprits: list[out.Culprit]) -> list[str]:
    """Whose layer the operations do not show."""
    unknown = [one.rank for one in culprits if one.layer is None]
    if not unknown:
        return []
    return [
        f"layer of {wording.ranks(unknown)} not seen: operations are timed, and whether a GPU computed longer or "
        "the host kept it waiting takes the agent, or a profile of both"
    ]


def _undecided(case: Case, together: list[int]) -> list[str]:
    if not together:
        return []
    return [
        f"{wording.ranks(together)[:1].upper()}{wording.ranks(together)[1:]} work on the same batches together and "
        "are slow alike: which of them keeps the others, the trace does not tell."
    ]


def beside(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, with the ranks that are slow for good and cost little now only because what it tells of hides
    them: those that would hold up an even job."""
    hidden = [one for one in case.minor if not one.occasional and _would_cost(case, one) >= MIN_COST_SHARE]
    if not hidden:
        return verdict
    too = [_culprit(case, one, 0.0) for one in hidden]
    who = wording.ranks([one.rank for one in too])
    words = (
        f"Besides, {who} computes longer than its stage's others, by "
        f"{wording.ms(hidden[0].excess_ms)} per step: that costs little while the rest hides it."
    )
    named = {one.rank for one in verdict.culprits}
    return msgspec.structs.replace(
        verdict,
        culprits=[*verdict.culprits, *(one for one in too if one.rank not in named)],
        cleared=[line for line in verdict.cleared if line.rank not in {one.rank for one in too}],
        ruled_out=[line for line in verdict.ruled_out if line.cause != "slow-rank"],
        evidence=[*verdict.evidence, *(line for one in hidden for line in _tested(case, one))],
        summary=f"{verdict.summary.removeprefix('No rank is to blame. ')} {words}",
    )


def _would_cost(case: Case, one: Slow) -> float:
    """Share by which an ideal step grows if this rank alone is as slow as it is (S_w − 1 in the paper)."""
    replayed = case.replayed
    trace = replayed.trace
    factor = np.ones(len(trace.row))
    for role, ratio in ((FORWARD, one.forward_ratio), (BACKWARD, one.backward_ratio)):
        factor[(trace.row == one.row) & (trace.roles == role)] = ratio
    if replayed.ideal_ms <= 0:
        return 0.0
    return float(replayed.run(replayed.ideal * factor).mean()) / replayed.ideal_ms - 1


def _culprit(case: Case, one: Slow, cost_ms: float) -> out.Culprit:
    trace = case.trace
    peers = int((trace.stage == trace.stage[one.row]).sum())
    sure = 0.97 * (0.8 if one.by_micro_batch else 1.0) * (0.75 if peers == 2 else 1.0)
    sure *= ONE_STEP if len(trace.steps) == 1 else 1.0
    sure *= 1 - min(0.5, max(0.0, case.costs.unseen / max(case.mean_ms, 1e-9)))
    when = f"in {int(one.steps.sum())} of {len(one.steps)} steps" if one.occasional else "in every step"
    when = when if len(trace.steps) > 1 else "in the only step that was recorded"
    layer, tells = _layer(case, one)
    detail = (
        f"its forward computation takes {one.forward_ratio:.2f} times, its backward {one.backward_ratio:.2f} times "
        f"as long as that of the other ranks of stage {int(trace.stage[one.row])}, {when}; "
        f"{tells}"
    )
    return out.Culprit(
        rank=case.rank(one.row),
        node=trace.nodes[one.row],
        gpu=None,
        layer=layer,
        cause=None,
        owner="node",
        confidence=round(sure, 2),
        cost_ms_per_step=round(cost_ms, 3),
        share_explained=0.0,
        detail=detail,
    )


def _layer(case: Case, one: Slow) -> tuple[out.Layer | None, str]:
    """The layer that the kinds of its slow operations show, and that in words. What only a host does is the host's;
    computation is timed where it was enqueued or where it ran, and a table of operations does not say which."""
    trace = case.trace
    named = frozenset(other.row for other in case.slow)
    over: dict[str, float] = {}
    for kind in np.flatnonzero(trace.role == OTHER).tolist():
        values = trace.sums(trace.kind == kind)
        if HOST_ONLY.search(trace.names[kind]) and not np.isnan(values[one.row, one.steps]).all():
            mine = excess(np.nan_to_num(values), case.compute.shape, named)[one.row, one.steps]
            over[trace.names[kind]] = float(np.nanmean(mine))
    if over and sum(over.values()) >= EXPLAINS * (one.forward_ms + one.backward_ms + one.other_ms):
        most = max(over, key=lambda name: over[name])
        return "os", f"most of it in {most} ({wording.more_ms(over[most])}), which the host does"
    return None, "the trace does not tell whether GPU or host"


def _who(case: Case, worst: out.Culprit, together: list[int]) -> str:
    one = next(slow for slow in case.slow if case.rank(slow.row) == worst.rank)
    others = [case.rank(other.row) for other in case.slow if other is not one]
    if worst.rank in together:
        who = f"One of {wording.ranks(together)} holds the job up"
    else:
        who = f"{_where(worst).capitalize()} holds the job up"
        if others := [rank for rank in others if rank not in together]:
            who += f", and so {'do' if len(others) > 1 else 'does'} {wording.ranks(others)}"
    kinds = {"backward": one.backward_ms, "forward": one.forward_ms, "neither of both": one.other_ms}
    heavier = max(kinds, key=lambda kind: kinds[kind])
    split = f"backward {wording.more_ms(one.backward_ms)}, forward {wording.more_ms(one.forward_ms)}"
    if heavier == "neither of both":
        split += f", other work {wording.more_ms(one.other_ms)}"
    where = f" in {int(one.steps.sum())} of {len(one.steps)} steps" if one.occasional else " in each step"
    where = where if len(one.steps) > 1 else " in the only step that was recorded"
    text = (
        f"{who}: it computes {wording.ms(one.excess_ms)} longer than its stage's other ranks{where}, most of it in "
        f"{heavier} ({split})."
    )
    step = case.costs.replayed
    return (
        f"{text} If {'they' if len(case.slow) > 1 else 'it'} computed like the others, the mean step would take "
        f"{wording.ms(step - case.costs.slow)} and not {wording.ms(step)}."
    )


def _tested(case: Case, one: Slow) -> list[out.Evidence]:
    lines = []
    named = frozenset(other.row for other in case.slow)
    for name, values in (
        ("forward-compute", case.compute.forward),
        ("backward-compute", case.compute.backward),
        ("other-compute", case.compute.other),
    ):
        effect = float(np.mean(excess(values, case.compute.shape, named)[one.row, one.steps]))
        value = float(np.mean(values[one.row, one.steps]))
        if name == "other-compute" and effect < MIN_COST_SHARE * one.excess_ms:
            continue
        lines.append(
            out.Evidence(
                layer="gpu",
                metric=name,
                rank=case.rank(one.row),
                value=round(value, 3),
                peers=round(value - effect, 3),
                unit="ms",
                effect=round(effect, 3),
                q=one.q,
            )
        )
    return sorted(lines, key=lambda line: -line.effect)


def _since(case: Case, one: Slow) -> tuple[str | None, out.Baseline | None]:
    """When the rank turned slow, and the level of steps before, where the trace shows both."""
    if one.onset == 0 or one.occasional:
        return None, None
    return pipeline.level_before(case, one.onset)


def _cleared(case: Case) -> list[out.Cleared]:
    """Ranks that waited for a slow one, in receives along its pipeline or in collectives."""
    trace = case.replayed.trace
    named = {one.row for one in case.slow}
    received, met = pipeline.waited(case.replayed, RECV), pipeline.waited(case.replayed, COLLECTIVE)
    least = MIN_COST_SHARE * case.mean_ms
    found: list[tuple[float, int, str]] = []
    for row, rank in enumerate(trace.ranks):
        if row in named:
            continue
        beside = [one for one in case.slow if trace.replica[one.row] == trace.replica[row]]
        if beside and received[row] >= least:
            other = case.rank(beside[0].row)
            where = "before" if trace.stage[beside[0].row] < trace.stage[row] else "behind"
            why = f"waits {wording.ms(float(received[row]))} per step in receives for rank {other}, "
            why += f"{where} it in its pipeline"
            found.append((float(received[row]), rank, why))
        elif met[row] >= least:
            other = case.rank(case.slow[0].row)
            why = f"waits {wording.ms(float(met[row]))} per step in collectives until "
            why += f"rank {other}'s pipeline has come"
            found.append((float(met[row]), rank, why))
    longest = sorted(found, key=lambda line: (-line[0], line[1]))[:_CLEARED]
    return [out.Cleared(rank=rank, why=why) for _, rank, why in sorted(longest, key=lambda line: line[1])]


def _ruled_out(case: Case) -> list[out.RuledOut]:
    one = case.slow[0]
    number = int(one.steps.sum())
    found = []
    if not one.occasional:
        why = f"the same rank is among the slowest of its stage in {one.slowest_in} of {number} steps"
        found.append(out.RuledOut(cause="uneven-sequences", why=why))
    if case.costs.stages < MIN_COST_SHARE * case.mean_ms:
        why = f"stages of different length cost {wording.ms(case.costs.stages)} per step"
        found.append(out.RuledOut(cause="longer-stage", why=why))
    why = (
        f"slow transfers cost {wording.ms(case.link_ms)} per step"
        if case.links
        else "no link is slower than its peers"
    )
    return [*found, out.RuledOut(cause="slow-link", why=why)]
