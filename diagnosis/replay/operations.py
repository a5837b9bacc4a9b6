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
from diagnosis.layers import pipeline, slower, transfers, uneven
from diagnosis.layers.pipeline import Case, Costs
from diagnosis.limits import (
    ALIKE_SHARE,
    MIN_COST_SHARE,
    OCCASIONAL_COST_SHARE,
    REPLAYED_OPERATIONS,
    STRAGGLING,
)
from diagnosis.replay.trace import RECV, Trace, trace_of
from diagnosis.replay.whatif import what_if
from diagnosis.replay.workers import (
    Change,
    Compute,
    Slow,
    compute_of,
    everybody,
    excess,
    slow_ranks,
    too_fast,
)
from diagnosis.steps import Floats
from diagnosis.verdict import Verdict


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
        return slower.against(case, known)
    named = frozenset(one.row for one in case.minor)
    over = excess(case.compute.total, trace.stage, named)
    if odd := [row for row in too_fast(case.compute, over, case.step_ms) if row not in named]:
        who = wording.ranks([case.rank(row) for row in odd])
        gap = f"{who} computed shorter than the others of the stage: without a run that is known to be good, "
        gap += "peers do not tell whether most are slow or the few have less to do"
        return _insufficient(known, gap, "Compare with a run that is known to be good.")
    if case.links and case.link_ms >= MIN_COST_SHARE * case.mean_ms:
        return slower.beside(case, transfers.slow_link(case, known))
    groups, group_ms = transfers.slow_groups(case.replayed)
    if groups and group_ms >= MIN_COST_SHARE * case.mean_ms:
        return transfers.slow_group(case, known, groups, group_ms)
    if case.change is not None and case.change.after >= (1 + ALIKE_SHARE) * case.change.before:
        return _everybody(case, known, case.change)
    if case.costs.slowdown_left >= STRAGGLING:
        return slower.beside(case, uneven.job_owns(case, known))
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
    part = Compute(
        compute.forward[:, sample],
        compute.backward[:, sample],
        compute.other[:, sample],
        compute.shape,
        compute.replica,
    )

    links, unlinked = transfers.slow_links(replayed)

    def price(slow: list[Slow]) -> Costs:
        part_of = [dataclasses.replace(one, steps=one.steps[sample]) for one in slow]
        return pipeline.costs(replayed, part, part_of, unlinked)

    slow, minor = slow_ranks(trace, compute, step_ms), []
    costs = price(slow)
    least = OCCASIONAL_COST_SHARE if all(one.occasional for one in slow) else MIN_COST_SHARE
    if slow and costs.slow < least * costs.replayed:
        slow, minor, costs = [], slow, price([])
    order = sorted(range(len(slow)), key=lambda place: (-costs.alone[place], -slow[place].excess_ms))
    slow = [slow[place] for place in order]
    costs = dataclasses.replace(costs, alone=tuple(costs.alone[place] for place in order))
    change = everybody(compute) if not slow else None
    return Case(evidence, trace, compute, step_ms, slow, minor, replayed, costs, links, change)


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
    unseen = sorted(set(evidence.ranks) - set(trace.ranks))
    if unseen:
        gaps.append(f"no operations of {wording.ranks(unseen)}: neither blamed nor healthy")
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


def _everybody(case: Case, known: Verdict, change: Change) -> Verdict:
    grown = change.after / change.before - 1
    since, baseline = pipeline.level_before(case, change.column)
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
    if case.minor:
        who = wording.ranks([case.rank(one.row) for one in case.minor])
        words += f" ({who} does, at the worst, and the job hardly notices)"
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
