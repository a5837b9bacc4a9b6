"""What a verdict says of ranks that stood still for long: who is named, who is not though the others waited for it,
and how that stands beside what goes on now. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from diagnosis import verdict as out
from diagnosis import wording
from diagnosis.accounting import PARTS
from diagnosis.evidence import Evidence
from diagnosis.limits import (
    EXPLAINS_PART,
    OCCASIONAL_STEPS,
    PAUSE_MS,
    PAUSE_STEPS,
    STOOD_APART,
    STOOD_EVERY,
    STOOD_IN_A_ROW,
    STOOD_WARM_UP,
)
from diagnosis.meanwhile import Meanwhile, meanwhile
from diagnosis.stalls import Stall, find_stalls
from diagnosis.steps import Steps
from diagnosis.verdict import Verdict

_SURE = 0.95
"""How sure it is that a rank stood still that was stopped, if that explains all of it …"""
_LESS_SURE = 0.9
"""… times this, where it was held up: that the steps lacked nothing of what a pause has rests on counts;"""
_NO_CAUSE = 0.6
"""… and times this, where no one cause explains it, as for culprits in every step."""
_MEAN = re.compile(r", [\d.,]+ m?s per step in the mean")
"""A length that is told of the stall itself."""


@dataclass(frozen=True)
class Standing:
    """The stalls of one rank, in the order of time, and what it did in each."""

    rank: int
    stalls: tuple[Stall, ...]
    did: tuple[Meanwhile, ...]

    @property
    def longest(self) -> int:
        """Its place."""
        return max(range(len(self.stalls)), key=lambda place: self.stalls[place].ms)

    @property
    def lost_ms(self) -> float:
        return sum(stall.lost_ms for stall in self.stalls)


@dataclass(frozen=True)
class Stood:
    """Ranks that are named, the costliest first; and stalls of others, which are not steps either."""

    named: tuple[Standing, ...] = ()
    doubted: tuple[Standing, ...] = ()

    @property
    def stalls(self) -> list[Stall]:
        return [stall for one in (*self.named, *self.doubted) for stall in one.stalls]


def stood_still(evidence: Evidence, steps: Steps) -> Stood:
    """Who stood still in these steps.

    A process that was stopped is named always. Who was held up otherwise (for want of a CPU, by reads) is named
    where the steps are like all others, after the first ones. Whoever ran, wrote, sent, slept on purpose or waited
    for its own threads may have saved the job's state or evaluated it: that is told, and nobody is blamed for it.
    No stall is what comes back regularly (but for what is as long as a pause and looks like a checkpoint), and what
    is little beside other long steps: the tests of steps tell of that.
    """
    found: dict[int, list[tuple[Stall, Meanwhile]]] = {}
    stalls, restless_ms = find_stalls(evidence, steps)
    for stall in stalls:
        did = meanwhile(evidence, stall.rank, stall.span, stall.ms, stall.waited)
        found.setdefault(stall.rank, []).append((stall, did))
    named, doubted = [], []
    for rank, all_ in found.items():
        stopped = [one for one in all_ if one[1].kind == "stopped"]
        rest = [
            one
            for one in all_
            if one[1].kind != "stopped"
            and one[0].calm
            and restless_ms <= STOOD_APART * one[0].ms
            and len(one[0].columns) <= STOOD_IN_A_ROW + 1  # with the one in which the others waited
        ]
        if _regular([stall for stall, _ in rest]) and not all(map(_may_be_saving, rest)):
            rest = []
        held = [
            one
            for one in rest
            if one[1].kind == "held" and one[0].usual and one[0].columns[0] >= STOOD_WARM_UP
        ]
        if sure := sorted(stopped + held, key=lambda one: one[0].columns):
            named.append(_standing(rank, sure))
        if doubts := [one for one in rest if one not in held]:
            doubted.append(_standing(rank, doubts))
    named.sort(key=lambda one: (-one.lost_ms, -sum(stall.ms for stall in one.stalls), one.rank))
    return Stood(tuple(named), tuple(doubted))


def _may_be_saving(one: tuple[Stall, Meanwhile]) -> bool:
    stall, did = one
    return did.kind == "busy" and stall.ms >= PAUSE_MS and stall.usual_steps >= PAUSE_STEPS


def _standing(rank: int, told: Sequence[tuple[Stall, Meanwhile]]) -> Standing:
    return Standing(rank, tuple(stall for stall, _ in told), tuple(did for _, did in told))


def _regular(stalls: Sequence[Stall]) -> bool:
    """Whether they come back every so many steps, as often as nothing does by chance."""
    if len(stalls) < OCCASIONAL_STEPS:
        return False
    apart = np.diff([stall.columns[0] for stall in stalls])
    return bool((np.abs(apart - np.median(apart)) <= STOOD_EVERY * np.median(apart)).all())


def with_stalls(evidence: Evidence, stood: Stood, verdict: Verdict) -> Verdict:
    """``verdict``, which was made without these stalls, with them. What goes on now leads; where nothing does, the
    stalls are the verdict."""
    not_seen = [*verdict.not_seen, *(_doubt(evidence, one) for one in stood.doubted)]
    verdict = msgspec.structs.replace(verdict, not_seen=not_seen)
    if not stood.named:
        return verdict
    words = " ".join(_sentences(evidence, one) for one in stood.named)
    tested = [*verdict.evidence, *(_evidence(one) for one in stood.named)]
    besides = f"{verdict.summary} Besides: {words}"
    if verdict.step_ms is None or (verdict.status == "slow" and not verdict.culprits):
        return msgspec.structs.replace(verdict, summary=besides, evidence=tested)
    culprits = [_culprit(evidence, one) for one in stood.named]
    told = msgspec.structs.replace(
        verdict,
        evidence=tested,
        actions=list(dict.fromkeys([*verdict.actions, *_actions(stood)])),
        cleared=[one for one in verdict.cleared if one.rank not in {who.rank for who in culprits}],
        summary=besides,
    )
    if verdict.status == "slow" and _costs_more(verdict, stood):
        now = verdict.culprits[0]
        more = f"Besides, it costs {wording.ms(now.cost_ms_per_step)} of each step: {now.detail}"
        first = msgspec.structs.replace(culprits[0], detail=f"{culprits[0].detail}. {more}")
        return _led_by(
            [first, *culprits[1:]],
            msgspec.structs.replace(told, summary=f"{words} Besides: {verdict.summary}"),
        )
    if verdict.status == "slow":
        apart = {one.rank: one for one in culprits}
        same = [
            msgspec.structs.replace(one, detail=f"{one.detail}. Besides, {apart.pop(one.rank).detail}")
            if one.rank in apart
            else one
            for one in verdict.culprits
        ]
        return msgspec.structs.replace(told, culprits=[*same, *apart.values()])
    worst = stood.named[0]
    return msgspec.structs.replace(
        _led_by(culprits, told),
        status="slow",
        account=[],
        unexplained_ms=0.0,
        cleared=_cleared(stood),
        ruled_out=[
            msgspec.structs.replace(one, why=_at_once(one.why))
            for one in worst.did[worst.longest].named.ruled_out
        ],
        actions=list(dict.fromkeys([*_actions(stood), *verdict.actions])),
        summary=f"{words} {_apart_from_that(verdict)}",
    )


def _costs_more(verdict: Verdict, stood: Stood) -> bool:
    """Whether the one rank that is slow now stood still, too, for what cost more in all, and why it is slow now is
    not known: then the stall leads, which hides nobody."""
    now, lost = verdict.culprits, stood.named[0].lost_ms
    alone = len(now) == 1 and now[0].rank == stood.named[0].rank and now[0].cause is None
    return alone and lost >= verdict.joint_cost_ms_per_step * verdict.steps


def _led_by(culprits: list[out.Culprit], verdict: Verdict) -> Verdict:
    first = culprits[0]
    return msgspec.structs.replace(
        verdict,
        culprits=culprits,
        layer=first.layer,
        cause=first.cause,
        owner=first.owner,
        confidence=first.confidence,
        share_explained=first.share_explained,
        cost_ms_per_step=first.cost_ms_per_step,
    )


def _apart_from_that(verdict: Verdict) -> str:
    if verdict.status == "insufficient":
        rest = verdict.summary.removeprefix("Not enough evidence: ")
        return f"Whether the job is healthy apart from that is not known: {rest}"
    return f"Apart from that, {verdict.summary.removeprefix('Healthy: ')}"


def _culprit(evidence: Evidence, one: Standing) -> out.Culprit:
    did = one.did[one.longest]
    named = did.named
    confidence = _SURE * (named.share if named.cause else _NO_CAUSE)
    return out.Culprit(
        rank=one.rank,
        node=evidence.ranks[one.rank].node,
        gpu=None,
        layer=named.layer,
        cause=named.cause.id if named.cause else None,
        owner=named.judgement.owner,
        confidence=round(confidence if did.kind == "stopped" else _LESS_SURE * confidence, 2),
        cost_ms_per_step=0.0,
        share_explained=round(named.share, 3),
        detail=f"{_at_once(named.judgement.detail)}; it stood still {_when(one)}, and the job lost "
        f"{_seconds(one.lost_ms)} by it",
    )


def _sentences(evidence: Evidence, one: Standing) -> str:
    node = evidence.ranks[one.rank].node
    named = one.did[one.longest].named
    cause = "Cause" if named.cause else "Cause not found"
    return (
        f"Rank {one.rank}{f' on {node}' if node else ''} stood still {_when(one)}; the others waited for it, and "
        f"the job lost {_seconds(one.lost_ms)}. {cause}: {_at_once(named.judgement.detail)}."
    )


def _when(one: Standing) -> str:
    """How often, how long, and when."""
    stalls = one.stalls
    if len(stalls) == 1:
        return f"once, for {_seconds(stalls[0].ms)} {_between(stalls[0])}"
    whole = _seconds(sum(stall.ms for stall in stalls))
    return (
        f"{len(stalls)} times, for {whole} together, the longest time for {_seconds(stalls[one.longest].ms)} "
        f"{_between(stalls[one.longest])}"
    )


def _between(stall: Stall) -> str:
    begin, end = (
        wording.to_the_second(wording.instant(at)) for at in (stall.span.start_ns, stall.span.end_ns)
    )
    return f"from {begin} to {end}" if begin != end else f"at {begin}"


def _at_once(words: str) -> str:
    """A rule's words, which are of a mean step, of a single stretch of time."""
    return _MEAN.sub("", words).replace(" per step", "")


def _seconds(ms: float) -> str:
    """All that is said of one stall rounds alike: ``6.5 s``."""
    return f"{ms / 1000:,.1f} s"


def _doubt(evidence: Evidence, one: Standing) -> str:
    stall, did = one.stalls[one.longest], one.did[one.longest]
    most = [part for part, ms in did.did.items() if ms >= EXPLAINS_PART * stall.ms]
    what = wording.listed(
        [f"{PARTS[part].label} ({_seconds(did.did[part])})" for part in most] or ["unknown"]
    )
    node = evidence.ranks[one.rank].node
    early = ", in the first steps," if stall.columns[0] < STOOD_WARM_UP else ""
    return (
        f"rank {one.rank}{f' on {node}' if node else ''}{early} kept the others waiting {_when(one)}, and the job "
        f"lost {_seconds(one.lost_ms)}; meanwhile it was {what}: a checkpoint or an evaluation on one rank looks "
        "like that, so it is not blamed, and these steps are not counted"
    )


def _evidence(one: Standing) -> out.Evidence:
    stall = one.stalls[one.longest]
    peers = float(np.median([sum(span.parts.values()) for span in stall.waited.values()]))
    mine = sum(stall.span.parts.values())
    return out.Evidence(
        layer="os",
        metric="stall",
        rank=one.rank,
        value=round(mine, 3),
        peers=round(peers, 3),
        unit="ms",
        effect=round(mine - peers, 3),
        q=None,
    )


def _cleared(stood: Stood) -> list[out.Cleared]:
    """Who waited for whom, and never stood still itself."""
    stood_too = {one.rank for one in (*stood.named, *stood.doubted)}
    waits: dict[int, dict[int, float]] = {}
    for one in stood.named:
        for stall in one.stalls:
            for rank in set(stall.waited) - stood_too:
                of = waits.setdefault(rank, {})
                of[one.rank] = of.get(one.rank, 0.0) + stall.lost_ms
    return [
        out.Cleared(
            rank=rank,
            why=f"waited {_seconds(max(of.values()))} for {wording.ranks(list(of))}, and did nothing itself for "
            "longer than usual meanwhile",
        )
        for rank, of in sorted(waits.items())
    ]


def _actions(stood: Stood) -> list[str]:
    return [
        _at_once(action) for one in stood.named for action in one.did[one.longest].named.judgement.actions
    ]
