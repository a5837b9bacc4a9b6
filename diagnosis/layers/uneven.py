"""The job's own slowness in a traced pipeline: uneven sequences, longer stages. No machine is to blame for it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from scipy import stats

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.layers.pipeline import Case, grow_together, mean_by
from diagnosis.limits import LEVEL_STEPS, MIN_COST_SHARE, STRAGGLING, UNEVEN_CORRELATION
from diagnosis.replay.trace import OTHER
from diagnosis.replay.workers import excess
from diagnosis.steps import Floats
from diagnosis.verdict import Layer, Owner, Verdict

_HOLDS = 0.5
"""Share of all excess over peers from which the slowest rank did not change from step to step: it is one rank's."""
_UNSURE = 0.4
"""Confidence that it is the job's and no rank's, where one rank holds that much or the steps are few."""


@dataclass(frozen=True)
class Trouble:
    """One thing that makes the job's own steps long."""

    cause: str
    ms: float
    """Per step, from the replay."""
    owner: Owner
    confidence: float
    text: str
    """A sentence on its own."""
    also: str
    """The same behind another finding."""
    action: str


def troubles(case: Case) -> list[Trouble]:
    """What costs ``MIN_COST_SHARE`` of the step at least, the costliest first."""
    found = [_uneven(case), _stage(case), _rest(case)]
    least = MIN_COST_SHARE * case.mean_ms
    # A longest stage may matter though unevenness takes most of what it costs: its own replay tells.
    apart = max(case.costs.by_stage)
    worth = [
        one
        for one in found
        if one is not None and (one.ms >= least or (one.cause == "longer-stage" and apart >= 2 * least))
    ]
    return sorted(worth, key=lambda one: -one.ms)


def job_owns(case: Case, known: Verdict) -> Verdict:
    """Status ``slow`` without a culprit: the job straggles, and no rank or link is to blame."""
    found = troubles(case)
    lost = case.costs.uneven + case.costs.stages + case.costs.rest
    if not found:
        return msgspec.structs.replace(
            known,
            status="slow",
            layer="job",
            owner="unknown",
            confidence=0.4,
            cost_ms_per_step=round(lost, 3),
            joint_cost_ms_per_step=round(lost, 3),
            summary=(
                f"The step is {wording.ms(lost)} longer than it would be without any unevenness, for many small "
                f"reasons; no rank, stage or link stands out. {case.slowdown}"
            ),
        )
    first = found[0]
    doubt = _doubt(case) if any(one.cause.startswith("uneven") for one in found) else ""
    unsure = doubt and first.cause.startswith("uneven")
    nobody = "No rank can be named." if doubt else "No rank is to blame."
    words = [f"{nobody} {first.text}", *(one.also for one in found[1:]), case.slowdown]
    layers: dict[Owner, Layer] = {"job": "job", "network": "nccl"}
    return msgspec.structs.replace(
        known,
        status="slow",
        layer=layers.get(first.owner),
        cause=first.cause,
        also=[one.cause for one in found[1:]],
        owner=first.owner,
        confidence=min(first.confidence, _UNSURE) if unsure else first.confidence,
        cost_ms_per_step=round(first.ms, 3),
        joint_cost_ms_per_step=round(lost, 3),
        share_explained=round(min(1.0, first.ms / lost), 3) if lost > 0 else 0.0,
        summary=" ".join(words),
        evidence=_evidence(case),
        cleared=[] if doubt else _cleared(case),
        ruled_out=[] if doubt else [out.RuledOut(cause="slow-rank", why=_nobody(case))],
        not_seen=[*known.not_seen, *([doubt] if doubt else [])],
        actions=[one.action for one in found],
    )


def _uneven(case: Case) -> Trouble:
    together = grow_together(case.replayed.trace, frozenset(one.row for one in case.slow))
    cost = wording.ms(case.costs.uneven)
    spread = wording.percent(_spread(case))
    slowest = "the slowest rank changes from step to step,"
    if _doubt(case):
        slowest = "ranks of a stage compute differently long, the slowest"
    if together >= UNEVEN_CORRELATION:
        text = (
            f"Sequences are unevenly spread: {slowest} {spread} above its stage's median, and forward and "
            f"backward of a micro batch grow together (correlation {together:.2f}). It costs {cost} per step."
        )
        also = f"Unevenly spread sequences cost another {cost} per step."
        action = (
            "Balance micro batches over data-parallel ranks by the square of sequence lengths, not by tokens."
        )
        return Trouble("uneven-sequences", case.costs.uneven, "job", 0.9, text, also, action)
    text = (
        f"{slowest[:1].upper()}{slowest[1:]} {spread} above its stage's median, most of it in "
        f"{_unevenest(case)}, while forward and backward do not grow together (correlation {together:.2f}): "
        f"garbage collection, recompilation or other pauses rather than sequence lengths. "
        f"It costs {cost} per step."
    )
    also = f"Pauses that hit now this rank and now that cost another {cost} per step."
    action = (
        "Look for pauses that differ between ranks: Python's garbage collection, recompilation, allocator."
    )
    return Trouble("uneven-pauses", case.costs.uneven, "job", 0.6, text, also, action)


def _doubt(case: Case) -> str:
    """Why it may be one rank's all the same, in words; empty where the slowest rank is known to change."""
    row, share = _holder(case)
    steps = len(case.trace.steps)
    if row < 0 or (share <= _HOLDS and steps >= 2 * LEVEL_STEPS):
        return ""
    few = f", and {steps} steps are too few to tell that from chance" if steps < 2 * LEVEL_STEPS else ""
    return (
        f"whether it is rank {case.rank(row)} alone: {wording.percent(share)} of what ranks compute longer than "
        f"their peers is its{few}"
    )


def _holder(case: Case) -> tuple[int, float]:
    """Row that holds most of what ranks compute longer than their stage's others, and its share of all of that."""
    over = np.nan_to_num(excess(case.compute.total, case.trace.stage)).clip(min=0.0).sum(axis=1)
    whole = float(over.sum())
    row = int(over.argmax())
    return (row, float(over[row]) / whole) if whole > 0 else (-1, 0.0)


def _unevenest(case: Case) -> str:
    """Name of the kind of computation whose differences within stages cost most."""
    replayed = case.replayed
    trace = replayed.trace
    saved = {}
    for kind in np.flatnonzero(trace.role <= OTHER).tolist():
        chosen = trace.kind == kind
        if chosen.any():
            even = mean_by(replayed.duration, trace.kind, trace.stage[trace.row], chosen)
            saved[trace.names[kind]] = replayed.replayed_ms - float(replayed.run(even).mean())
    return max(saved, key=lambda name: saved[name])


def _spread(case: Case) -> float:
    """Mean over steps of how far the slowest rank of a stage lies above the median of its others."""
    over = excess(case.compute.total, case.trace.stage, frozenset(one.row for one in case.slow))
    named = [one.row for one in case.slow]
    over[named] = np.nan
    usual = case.compute.total - over
    ratio = np.where(np.isnan(over) | (usual <= 0), 0.0, over / np.where(usual > 0, usual, 1.0))
    return float(ratio.max(axis=0).mean())


def _stage(case: Case) -> Trouble | None:
    trace = case.trace
    if trace.stages == 1:
        return None
    usual = stage_medians(case)
    longest = int(np.nanargmax(usual))
    others = float(np.nanmedian(np.delete(usual, longest)))
    name = f"stage {longest}" + (", the last one," if longest == trace.stages - 1 else "")
    cost, alone = wording.ms(case.costs.stages), wording.ms(case.costs.by_stage[longest])
    ratio = usual[longest] / others if others > 0 else 1.0
    if ratio < STRAGGLING:
        return None
    single = int((trace.stage == longest).sum()) == 1
    why = (
        "its only recorded rank may as well be a slow machine"
        if single
        else "all its ranks alike, so it is the split of layers and not a machine"
    )
    text = (
        f"{name[:1].upper()}{name[1:]} computes {ratio:.2f} times as long as the others per step, {why}. "
        f"It costs {cost} per step; with an ideal stage {longest} alone, {alone} less."
    )
    also = f"{name[:1].upper()}{name[1:]} is longer too: {ratio:.2f} times the others', "
    also += f"which costs another {cost} per step; with an ideal one alone, {alone} less."
    return Trouble(
        "longer-stage",
        case.costs.stages,
        "unknown" if single else "job",
        0.5 if single else 0.85,
        text,
        also,
        f"Move layers off stage {longest}, or give the loss layer its share when splitting.",
    )


def stage_medians(case: Case) -> Floats:
    """Median computation of a rank per step, by stage, the slow ranks aside."""
    named = [one.row for one in case.slow]
    medians = []
    for stage in range(case.trace.stages):
        rows = np.flatnonzero(case.trace.stage == stage)
        values = case.compute.total[rows[~np.isin(rows, named)]]
        medians.append(float(np.nanmedian(values)) if values.size and not np.isnan(values).all() else np.nan)
    return np.array(medians)


def _rest(case: Case) -> Trouble:
    cost = wording.ms(case.costs.rest)
    return Trouble(
        "slow-transfers",
        case.costs.rest,
        "network",
        0.5,
        f"Transfers take longer in some steps than usual, both ends being there: {cost} per step.",
        f"Transfers that vary cost another {cost} per step.",
        "Look at the network: other traffic, retransmits, congestion; and at what else runs between computations.",
    )


def _most_often(case: Case) -> tuple[int, int, int, float]:
    """Row that is the slowest of its stage most often, in how many steps, how many peers, and the chance of it."""
    over = excess(case.compute.total, case.trace.stage)
    best = (0, 0, 1, 1.0)
    for stage in range(case.trace.stages):
        rows = np.flatnonzero(case.trace.stage == stage)
        values = over[rows]
        known = ~np.isnan(values).all(axis=0)
        if len(rows) < 2 or not known.any():
            continue
        hits = np.bincount(np.nanargmax(values[:, known], axis=0), minlength=len(rows))
        q = min(1.0, len(over) * float(stats.binom.sf(hits.max() - 1, int(known.sum()), 1 / len(rows))))
        if hits.max() / known.sum() > best[1] / max(1, over.shape[1]):
            best = (int(rows[hits.argmax()]), int(hits.max()), len(rows), q)
    return best


def _nobody(case: Case) -> str:
    row, hits, peers, _ = _most_often(case)
    if peers < 2:
        return "no stage has two recorded ranks to compare"
    steps = len(case.trace.steps)
    return f"the slowest rank changes: even rank {case.rank(row)} is it in {hits} of {steps} steps only"


def _cleared(case: Case) -> list[out.Cleared]:
    row, hits, peers, _ = _most_often(case)
    if peers < 2:
        return []
    steps = len(case.trace.steps)
    why = f"the slowest of its stage most often, yet in {hits} of {steps} steps only: its turn, not its fault"
    return [out.Cleared(rank=case.rank(row), why=why)]


def _evidence(case: Case) -> list[out.Evidence]:
    row, hits, peers, q = _most_often(case)
    if peers < 2:
        return []
    share = hits / len(case.trace.steps)
    return [
        out.Evidence(
            layer="job",
            metric="steps-as-the-slowest",
            rank=case.rank(row),
            value=round(share, 4),
            peers=round(1 / peers, 4),
            unit="of steps",
            effect=round(share - 1 / peers, 4),
            q=q,
        )
    ]
