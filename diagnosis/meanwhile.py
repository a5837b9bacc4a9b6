"""What a rank did while it stood still and the others waited for it: facts for the rules, and whether a checkpoint
looks alike. Pure sums over evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from diagnosis.causes import Named, name_cause
from diagnosis.evidence import Evidence, RankEvidence
from diagnosis.extra import mean_taken, watching
from diagnosis.findings import Extra, HostTime, Taker
from diagnosis.host_time import host_time, mean_of, metrics_of
from diagnosis.layers import host
from diagnosis.limits import EVIDENCE_PEERS, EXPLAINS
from diagnosis.thread_parts import THREAD_PARTS
from probes.records import Role

Kind = Literal["stopped", "held", "busy"]
"""Of a stall: the process was stopped; something held it up that nobody asks for; or it did what a checkpoint or an
evaluation does, too, or nothing tells what it did."""
_HELD = ("runnable", "stolen", "interrupted")
_HELD_ASLEEP = ("storage-read", "page-fault")
"""What a rank that saves its state, or evaluates it alone, does not do for long: it runs, writes, sends, waits for
locks and for its own threads, sleeps until somebody else is done. Reading is no part of it."""
_STOPPED = "stopped"


@dataclass(frozen=True)
class Span:
    """Of one rank: between which of its instants, and what it did meanwhile outside collectives, ms."""

    start_ns: int
    end_ns: int
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Meanwhile:
    """What a rank did in a stall."""

    kind: Kind
    named: Named
    did: dict[str, float]
    """ms by part of the account, what it slept for told apart; the largest first."""


def meanwhile(
    evidence: Evidence, rank: int, span: Span, stood_ms: float, waited: Mapping[int, Span]
) -> Meanwhile:
    """What ``rank`` did in ``span``, in which it stood still for ``stood_ms``. ``waited``: who waited for it, one
    rank at least."""
    life = evidence.ranks[rank]
    mine, mine_taken = _host_time(evidence, life, span), _takers(evidence, life, span)
    stopped = min(stopped_ms(life, span.start_ns, span.end_ns), span.parts["blocked"])
    mine = _with_stopped(mine, stopped, span.parts["blocked"])
    peers = [(evidence.ranks[other], waited[other]) for other in list(waited)[:EVIDENCE_PEERS]]
    extra = Extra(
        job=evidence.job,
        rank=rank,
        node=life.node,
        pid=life.pid,
        parts=dict(span.parts),
        peers_parts={
            part: float(np.mean([theirs.parts[part] for _, theirs in peers])) for part in THREAD_PARTS
        },
        takers=mine_taken,
        peers_took=mean_taken([_takers(evidence, peer, theirs) for peer, theirs in peers]),
        peers_idle=0.0,
        host=mine,
        peers_host=mean_of([_host_time(evidence, peer, theirs) for peer, theirs in peers], mine),
        node_metrics=HostTime(
            metrics=metrics_of(evidence.metrics.get(life.node, ()), span.start_ns, span.end_ns, 1)
        ),
    )
    did = {part: ms for part, ms in span.parts.items() if part != "blocked"}
    helpers = mine.through_helpers
    did |= {f"asleep-{reason}": ms for reason, ms in mine.asleep.items()}
    did["asleep-helpers"] = sum(helpers.values())
    did["blocked"] = max(0.0, span.parts["blocked"] - sum(mine.asleep.values()) - sum(helpers.values()))
    held = stopped + sum(span.parts[part] for part in _HELD) - _taken_by_itself(mine_taken)
    held += sum(mine.asleep.get(reason, 0.0) + helpers.get(reason, 0.0) for reason in _HELD_ASLEEP)
    if stopped >= EXPLAINS * stood_ms:
        kind: Kind = "stopped"
    else:
        kind = "held" if held >= EXPLAINS * stood_ms else "busy"
    return Meanwhile(kind, name_cause(extra), dict(sorted(did.items(), key=lambda one: (-one[1], one[0]))))


def _taken_by_itself(takers: Iterable[Taker]) -> float:
    """How long a rank's driving thread wanted a CPU that its own threads and helpers had, ms: whoever compresses a
    checkpoint with all its threads is held up by nobody."""
    return sum(one.ms - one.communication_ms for one in takers if one.kind in ("own", "helper"))


def tells_of_stops(evidence: Evidence, rank: RankEvidence) -> bool:
    """Whether it would be known if this rank's process had been stopped."""
    return "signals" in watching(evidence, rank.node) or any(
        thread.role == Role.DRIVING and thread.blocked_by for thread in rank.threads
    )


def stopped_ms(rank: RankEvidence, start_ns: int, end_ns: int) -> float:
    """How long a rank's process was stopped or frozen between two of its instants: the most that signals, what its
    driving thread slept for, or its control group tell."""
    signals, frozen = 0.0, set()
    for row in rank.metrics:
        overlap = min(row.end_ns, end_ns) - max(row.start_ns, start_ns)
        if overlap <= 0:
            continue
        if row.name == "stopped_ns" and dict(row.labels).get("process") != "helper":
            # Not in proportion: nothing tells where in its second it was stopped.
            signals += min(row.value, overlap)
        elif row.name == "cgroup_frozen" and row.value > 0:
            frozen.add((row.start_ns, overlap))
    slept = 0.0
    for thread in rank.threads:
        if thread.role == Role.DRIVING and len(thread.at_ns) > 1 and _STOPPED in thread.blocked_by:
            at = (thread.at_ns - thread.at_ns[0]).astype(np.float64)
            bounds = np.array([start_ns, end_ns]) - thread.at_ns[0]
            slept += float(np.diff(np.interp(bounds, at, thread.blocked_by[_STOPPED]))[0])
    return max(signals, slept, float(sum(overlap for _, overlap in frozen))) / 1e6


def _with_stopped(of: HostTime, stopped: float, blocked: float) -> HostTime:
    """So that it was stopped for so long, and what else it slept for has room beside it."""
    others = {reason: ms for reason, ms in of.asleep.items() if reason != _STOPPED}
    whole = sum(others.values())
    scale = min(1.0, max(0.0, blocked - stopped) / whole) if whole > 0 else 0.0
    return replace(of, asleep={reason: ms * scale for reason, ms in others.items()} | {_STOPPED: stopped})


def _host_time(evidence: Evidence, life: RankEvidence, span: Span) -> HostTime:
    return host_time(
        life,
        {other.pid for other in evidence.ranks.values() if other.node == life.node},
        watching(evidence, life.node),
        span.start_ns,
        span.end_ns,
        1,
        span.parts["blocked"],
    )


def _takers(evidence: Evidence, life: RankEvidence, span: Span) -> tuple[Taker, ...]:
    return host.takers(
        life, evidence.job, span.start_ns, span.end_ns, 1, span.parts["runnable"], span.parts["communication"]
    )
