"""From timed operations of a trace to a verdict: who computes longer than its peers, who waits, what it costs.

Order: ranks against the ranks of their stage (``workers``), the replay for what each trouble costs
(``whatif``), then links (``layers.transfers``), uneven work and longer stages (``layers.uneven``). What was not
recorded is never blamed and never called healthy.
"""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.evidence import Evidence, Ints
from diagnosis.layers import pipeline, transfers, uneven
from diagnosis.layers.pipeline import Case, Costs
from diagnosis.limits import (
    ALIKE_SHARE,
    MIN_COST_SHARE,
    OCCASIONAL_COST_SHARE,
    REPLAYED_OPERATIONS,
    STRAGGLING,
)
from diagnosis.steps import Floats
from diagnosis.trace import COLLECTIVE, RECV, Trace, trace_of
from diagnosis.verdict import Verdict
from diagnosis.whatif import what_if
from diagnosis.workers import Change, Compute, Slow, compute_of, everybody, excess, slow_ranks, too_fast

_CLEARED = 64
"""Most ranks that are cleared by name: those that waited longest."""


def diagnose_operations(evidence: Evidence, bare: Verdict) -> Verdict | None:
    """The verdict that the operations of a trace give, or None where there are none to compare.

    ``bare``: a verdict with job, window, world size and what is known to be missing; its other fields are
    replaced.
    """
    trace = trace_of(evidence)
    if trace is None:
        return None
    if gap := _incomparable(evidence, trace):
        return _insufficient(bare, gap, "Record all ranks, with their data-parallel rank and stage.")
    case = _case(evidence, trace)
    known = _known(case, bare)
    if case.slow:
        return _against(case, known)
    if odd := too_fast(case.compute, excess(case.compute.total, trace.stage), case.step_ms):
        who = wording.ranks([case.rank(row) for row in odd])
        gap = f"{who} computes shorter than all the others of its stage: without a run that is known to be good, "
        gap += "peers do not tell whether most are slow or it has less to do"
        return _insufficient(known, gap, "Compare with a run that is known to be good.")
    if case.links and case.link_ms >= MIN_COST_SHARE * case.mean_ms:
        return transfers.slow_link(case, known)
    groups, group_ms = transfers.slow_groups(case.replayed)
    if groups and group_ms >= MIN_COST_SHARE * case.mean_ms:
        return transfers.slow_group(case, known, groups, group_ms)
    if case.change is not None and case.change.after >= (1 + ALIKE_SHARE) * case.change.before:
        return _everybody(case, known, case.change)
    if case.costs.slowdown_left >= STRAGGLING:
        return uneven.job_owns(case, known)
    if case.costs.unseen >= MIN_COST_SHARE * case.mean_ms:
        gap = f"each step waits {wording.ms(case.costs.unseen)} for ranks that were not recorded: "
        gap += "the culprit may be among them"
        return _insufficient(known, gap, "Record the missing ranks too.")
    return _healthy(case, known)


def _incomparable(evidence: Evidence, trace: Trace) -> str:
    if len(trace.ranks) < 2:
        return f"operations of rank {trace.ranks[0]} alone: there is nobody to compare it with"
    if trace.stages == 1 and (trace.role == RECV).any() and not _told(evidence, trace):
        return (
            "ranks send to each other, and the trace does not tell which stage each is: peers are not known"
        )
    return ""


def _told(evidence: Evidence, trace: Trace) -> bool:
    return all(evidence.ranks[rank].place.stage >= 0 for rank in trace.ranks)


def _case(evidence: Evidence, trace: Trace) -> Case:
    compute = compute_of(trace)
    step_ms = np.asarray(np.nanmax(trace.wall, axis=0))
    sample = _sample(trace, step_ms)
    replayed = what_if(trace if len(sample) == len(step_ms) else trace.select(sample))
    part = Compute(compute.forward[:, sample], compute.backward[:, sample], compute.shape)

    def price(slow: list[Slow]) -> Costs:
        return pipeline.costs(
            replayed, part, [dataclasses.replace(one, steps=one.steps[sample]) for one in slow]
        )

    slow = slow_ranks(trace, compute, step_ms)
    costs = price(slow)
    least = OCCASIONAL_COST_SHARE if all(one.occasional for one in slow) else MIN_COST_SHARE
    if slow and costs.slow < least * costs.replayed:
        slow, costs = [], price([])
    links, link_ms = transfers.slow_links(replayed)
    order = sorted(range(len(slow)), key=lambda place: -costs.alone[place])
    slow = [slow[place] for place in order]
    costs = dataclasses.replace(costs, alone=tuple(costs.alone[place] for place in order))
    change = everybody(compute) if not slow else None
    return Case(evidence, trace, compute, step_ms, slow, replayed, costs, links, link_ms, change)


def _sample(trace: Trace, step_ms: Floats) -> Ints:
    """Columns to replay: all, or evenly spaced in the order of their length, so that rare long steps count."""
    count = len(step_ms)
    fits = max(4, REPLAYED_OPERATIONS * count // max(1, len(trace.row)))
    if fits >= count:
        return np.arange(count)
    by_length = np.argsort(step_ms, kind="stable")
    places = (np.arange(fits) * count + count // 2) // fits
    return np.sort(by_length[np.minimum(places, count - 1)])


def _known(case: Case, bare: Verdict) -> Verdict:
    """What holds whoever is to blame: steps, the account of the job, what was not recorded."""
    trace, evidence = case.trace, case.evidence
    parts = pipeline.phases(trace)
    front = pipeline.frontier(parts, case.step_ms)
    exposed = front.exposed.mean(axis=1)
    rows = _peers_of_worst(case)
    theirs = [float(np.nanmean(part)) for part in parts[:, rows]]
    gaps = list(bare.not_seen)
    unseen = sorted(set(range(evidence.world_size)) - set(trace.ranks))
    if unseen:
        gaps.append(
            f"operations of {wording.ranks(unseen)} of {evidence.world_size}: neither blamed nor healthy"
        )
    if case.costs.unseen >= 0.01 * case.mean_ms:
        gaps.append(
            f"{wording.ms(case.costs.unseen)} of each step is waiting for ranks that were not recorded"
        )
    if len(case.replayed.trace.steps) < len(trace.steps):
        gaps.append(f"costs come from {len(case.replayed.trace.steps)} of {len(trace.steps)} steps")
    if abs(case.replayed.error) >= MIN_COST_SHARE:
        gaps.append(
            f"the replay takes {wording.percent(case.replayed.error)} of the step longer than the recording: "
            "costs are that uncertain"
        )
    singles = [s for s in range(trace.stages) if (trace.stage == s).sum() == 1]
    if singles:
        gaps.append(
            f"stage {wording.listed([str(s) for s in singles])} has one recorded rank: no peers to compare with"
        )
    return msgspec.structs.replace(
        bare,
        step_ms=round(float(np.median(case.step_ms)), 3),
        steps=len(trace.steps),
        account=[
            out.AccountLine(part=part, layer=layer, ms=round(float(ms), 3), peers_ms=round(peers, 3))
            for (part, layer), ms, peers in zip(pipeline.PHASES.items(), exposed, theirs, strict=True)
        ],
        unexplained_ms=round(float(front.unexplained.mean()), 3),
        not_seen=gaps,
    )


def _peers_of_worst(case: Case) -> Ints:
    """Rows whose mean the account shows beside the frontier: the peers of the worst rank, or everybody."""
    if not case.slow:
        return np.arange(len(case.trace.ranks))
    named = [one.row for one in case.slow]
    peers = np.flatnonzero(case.trace.stage == case.trace.stage[named[0]])
    return np.asarray(peers[~np.isin(peers, named)])


def _against(case: Case, known: Verdict) -> Verdict:
    culprits = [_culprit(case, place) for place in range(len(case.slow))]
    worst = culprits[0]
    left = uneven.troubles(case)
    since, baseline = _since(case, case.slow[0])
    return msgspec.structs.replace(
        known,
        status="slow",
        since=since,
        baseline=baseline,
        culprits=culprits,
        layer=worst.layer,
        owner=worst.owner,
        confidence=worst.confidence,
        cost_ms_per_step=worst.cost_ms_per_step,
        joint_cost_ms_per_step=round(case.costs.slow, 3),
        summary=" ".join(
            [_who(case, worst), *(t.also for t in left if case.costs.slowdown_left >= STRAGGLING)]
        ),
        evidence=[line for one in case.slow for line in _tested(case, one)],
        cleared=_cleared(case),
        ruled_out=_ruled_out(case),
        actions=[
            f"Look at rank {one.rank} on {one.node}: GPU clocks and throttling, errors, other processes on its GPU "
            "and CPUs; or take the node out and see whether the step shortens."
            for one in culprits[:4]
        ],
    )


def _culprit(case: Case, place: int) -> out.Culprit:
    one, trace = case.slow[place], case.trace
    peers = int((trace.stage == trace.stage[one.row]).sum())
    sure = 0.97 * (0.8 if one.by_micro_batch else 1.0) * (0.75 if peers == 2 else 1.0)
    sure *= 1 - min(0.5, max(0.0, case.costs.unseen / max(case.mean_ms, 1e-9)))
    when = f"in {int(one.steps.sum())} of {len(one.steps)} steps" if one.occasional else "in every step"
    detail = (
        f"its forward computation takes {one.forward_ratio:.2f} times, its backward {one.backward_ratio:.2f} times "
        f"as long as that of the other ranks of stage {int(trace.stage[one.row])}, {when}; "
        "the trace does not tell whether GPU or host"
    )
    return out.Culprit(
        rank=case.rank(one.row),
        node=trace.nodes[one.row],
        gpu=None,
        layer=None,
        cause=None,
        owner="node",
        confidence=round(sure, 2),
        cost_ms_per_step=round(case.costs.alone[place], 3),
        share_explained=0.0,
        detail=detail,
    )


def _who(case: Case, worst: out.Culprit) -> str:
    one = case.slow[0]
    who = f"Rank {worst.rank} on {worst.node} holds the job up"
    if len(case.slow) > 1:
        others = wording.ranks([case.rank(other.row) for other in case.slow[1:]])
        who += f", and so {'do' if len(case.slow) > 2 else 'does'} {others}"
    heavier = "backward" if one.backward_ms > one.forward_ms else "forward"
    where = f" in {int(one.steps.sum())} of {len(one.steps)} steps" if one.occasional else " in each step"
    text = (
        f"{who}: it computes {wording.ms(one.excess_ms)} longer than its stage's other ranks{where}, most of it in "
        f"{heavier} (backward {wording.more_ms(one.backward_ms)}, forward {wording.more_ms(one.forward_ms)})."
    )
    step = case.costs.replayed
    return (
        f"{text} If {'they' if len(case.slow) > 1 else 'it'} computed like the others, the mean step would take "
        f"{wording.ms(step - case.costs.slow)} and not {wording.ms(step)}. {case.slowdown}"
    )


def _tested(case: Case, one: Slow) -> list[out.Evidence]:
    lines = []
    named = frozenset(other.row for other in case.slow)
    for name, values in (
        ("forward-compute", case.compute.forward),
        ("backward-compute", case.compute.backward),
    ):
        effect = float(np.mean(excess(values, case.compute.shape, named)[one.row, one.steps]))
        value = float(np.mean(values[one.row, one.steps]))
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
    return _level_before(case, one.onset)


def _level_before(case: Case, column: int) -> tuple[str, out.Baseline]:
    begin, last = (wording.instant(_instant(case, c)) for c in (column, column - 1))
    before = case.step_ms[:column]
    first = wording.instant(_instant(case, 0))
    return begin, out.Baseline(
        step_ms=round(float(np.median(before)), 3), start=first, end=last, steps=len(before)
    )


def _instant(case: Case, column: int) -> int:
    """UTC ns at which a step began: the lower median over ranks, so that one wrong clock does no harm."""
    number = int(case.trace.steps[column])
    starts = []
    for rank in case.trace.ranks:
        table = case.evidence.ranks[rank].operations
        if table is not None and (mine := table.step == number).any():
            starts.append(int(table.start_ns[mine].min()))
    starts.sort()
    return starts[(len(starts) - 1) // 2]


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


def _everybody(case: Case, known: Verdict, change: Change) -> Verdict:
    grown = change.after / change.before - 1
    since, baseline = _level_before(case, change.column)
    cost = float(np.median(case.step_ms[change.column :]) - np.median(case.step_ms[: change.column]))
    return msgspec.structs.replace(
        known,
        status="slow",
        since=since,
        baseline=baseline,
        step_ms=round(float(np.median(case.step_ms[change.column :])), 3),
        layer="job",
        owner="job",
        confidence=0.7,
        cost_ms_per_step=round(cost, 3),
        joint_cost_ms_per_step=round(cost, 3),
        summary=(
            f"All ranks compute {wording.percent(grown)} longer since {wording.to_the_second(since)}, all alike; "
            "none holds the others up: it is the job's work or something that all ranks share."
        ),
        actions=[
            "Ask what changed at that time: batch size, sequence lengths, code, data, clocks of all nodes."
        ],
    )


def _healthy(case: Case, known: Verdict) -> Verdict:
    trace = case.trace
    over = excess(case.compute.total, trace.stage)
    compared = np.flatnonzero(~np.isnan(over).all(axis=1))
    seen = len(trace.ranks) / max(case.evidence.world_size, len(trace.ranks))
    words = f"Healthy: the median step takes {wording.ms(known.step_ms or 0.0)}"
    if len(compared):
        widest = float(np.nanmax(np.abs(np.nanmedian(over[compared], axis=1))))
        words += f"; none of {len(compared)} ranks computes over {wording.ms(widest)} per step longer than "
        words += "its stage's others for good"
    spared = wording.ms(case.costs.replayed - case.costs.ideal)
    words += f". Without any unevenness the step would be {spared} shorter."
    return msgspec.structs.replace(
        known, status="healthy", confidence=round(0.9 * (0.6 + 0.4 * seen), 2), summary=words
    )


def _insufficient(bare: Verdict, why: str, action: str) -> Verdict:
    return msgspec.structs.replace(
        bare,
        status="insufficient",
        summary=f"Not enough evidence: {why}.",
        not_seen=[why, *bare.not_seen],
        actions=[action],
    )
