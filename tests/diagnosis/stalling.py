"""A job in which one rank stands still for long, as its evidence would tell of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.synthetic import T0, Plan, build, plan, with_rank
from diagnosis.evidence import CollectiveTable, Evidence, MetricRow
from diagnosis.verdict import Verdict
from probes.records import Communicator, Event, Op, Probe
from tests.diagnosis.test_host_causes import asleep_by

S, MS = 10**9, 10**6
STEPS, AT, LONG = 400, 200, 6_000.0
WATCHING = [Probe(name=name, state="on") for name in ("cgroup", "signals", "storage")]


def stood(state: str = "asleep", rank: int = 2, at: int = AT, ms: float = LONG, **more: int) -> Plan:
    """A healthy job of 29 ms per step but for one step of one rank."""
    made = plan(**{"steps": STEPS, "seed": 3, **more})
    getattr(made, state)[rank, at] += ms
    return made


def told(made: Plan, reason: str = "", rank: int = 2, at: int = AT, ms: float = LONG) -> Evidence:
    """The job's evidence; reasons for sleeping are told: collectives on futexes, else on purpose, and of the rank
    in that step for ``reason``."""
    evidence, truth = build(made)
    for number, life in list(evidence.ranks.items()):
        thread = asleep_by(life, life.threads[0], {"sleep": 1.0})
        if number == rank and reason and reason != "sleep":
            begin = int(truth.begins_ns[at])
            here = np.clip(thread.at_ns - begin, 0, int(ms * MS))
            by = dict(thread.blocked_by)
            by["sleep"] = by["sleep"] - here
            by[reason] = by.get(reason, np.zeros_like(here)) + here
            thread = replace(thread, blocked_by=by)
        evidence = with_rank(evidence, number, threads=[thread, *life.threads[1:]])
    return replace(evidence, probes={"node-a": WATCHING})


def with_stop(evidence: Evidence, rank: int, begin_ns: int, ms: float = LONG) -> Evidence:
    """What the probe of signals tells of it: once a second, and when it ended."""
    end_ns = begin_ns + int(ms * MS)
    first, last = (begin_ns - T0) // S, (end_ns - T0) // S
    rows = [
        MetricRow(
            T0 + at * S,
            T0 + (at + 1) * S,
            "stopped_ns",
            "ns",
            (("by", "gdb"), ("by_pid", "77"), ("process", "rank")),
            float(min(end_ns, T0 + (at + 1) * S) - max(begin_ns, T0 + at * S)),
        )
        for at in range(first, last + 1)
    ]
    event = Event(
        kind="process-stopped", at_ns=begin_ns, detail="stopped by SIGSTOP", job="job-123", rank=rank
    )
    return with_rank(replace(evidence, events=[event]), rank, metrics=rows)


def begins(made: Plan, at: int = AT) -> int:
    return int(build(made)[1].begins_ns[at])


def doubts(verdict: Verdict) -> list[str]:
    return [gap for gap in verdict.not_seen if "kept the others waiting" in gap]


def with_barrier(evidence: Evidence, begin_ns: int) -> Evidence:
    """In the step that begins then all but rank 2 wait for it in another group."""
    for number, life in list(evidence.ranks.items()):
        table = life.collectives
        place = int(np.searchsorted(table.enter_ns, begin_ns + 100))
        enter = begin_ns + (int(LONG * MS) if number == 2 else 2 * MS)
        row = {
            "communicator": 1,
            "seq": 0,
            "op": int(Op.BARRIER),
            "bytes": 0,
            "enter_ns": enter,
            "duration_ns": begin_ns + int((LONG + 1) * MS) - enter,
            "failed": False,
        }
        columns = {name: np.insert(getattr(table, name), place, value) for name, value in row.items()}
        pairs = [*life.communicators, Communicator(uid="saving", desc="", rank=number, size=4)]
        evidence = with_rank(evidence, number, collectives=CollectiveTable(**columns), communicators=pairs)
    return evidence
