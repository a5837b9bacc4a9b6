"""What the host's probes tell of one rank between two instants, per step: what it slept for, who woke it, metrics.

Pure sums over evidence; which of it makes a cause is the rules' affair (``layers/``).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from diagnosis.evidence import Ints, MetricRow, RankEvidence, ThreadSeries, WakerRow
from diagnosis.findings import REASONS, HostTime, Label, WakerKind, Woken
from diagnosis.steps import Floats
from diagnosis.thread_parts import waiting_intervals
from probes.records import Role

_Key = TypeVar("_Key")
ENDS_WAITS = "futex"
"""A driving thread that waits in a collective of gloo sleeps on a futex: of what it slept for, that goes first."""
HANDS_OVER = ("poll", "pipe-read", "futex", "network-receive")
"""Sleeps that another process of ours can end by handing something over."""
_COMMUNICATION = re.compile(r"gloo_tcp_loop|pt_gloo_runloop|pt_nccl|NCCL")
NOT_SEEN = "not seen"
"""What a helper slept for where nothing tells."""
_IDLE = ("futex", "poll", "pipe-read", "sleep")
"""A helper that sleeps for one of these waits for work, as a rule, and not the rank for it."""
_FREEING = ("reclaim_thread_ns", "compaction_thread_ns")
_TIMES = "ns"
_STATES = ("ratio", "Hz", "B/s")
"""Units of values that are states, not sums over the interval."""
_STATE_NAMES = frozenset(
    {
        *("memory_limit_bytes", "memory_used_bytes", "resident_bytes", "swapped_bytes", "cpuset_cpus"),
        *("cpus_allowed", "ranks_on_these_cpus", "last_cpu", "cpus_idle", "thread_state", "traced"),
        *("clock_source", "cgroup_frozen", "block_depth", "block_oldest_ns", "tcp_round_trip_ns"),
    }
)


def host_time(
    rank: RankEvidence,
    ranks: Container[int],
    probes: Iterable[str],
    start_ns: int,
    end_ns: int,
    steps: float,
    blocked_ms: float,
) -> HostTime:
    """Of the driving thread between two of the rank's own instants, which hold so many steps. ``ranks``: processes
    of the job's ranks on its node; ``probes``: those that watch there. ``blocked_ms``: the account's, per step;
    what is told never exceeds it."""
    driving = [thread for thread in rank.threads if thread.role == Role.DRIVING and thread.blocked_by]
    asleep = _asleep(rank, driving, start_ns, end_ns, steps, blocked_ms)
    tids = {thread.tid for thread in driving}
    woken = _woken(rank, tids, ranks, start_ns, end_ns, steps)
    helpers = [thread for thread in rank.threads if thread.role == Role.HELPER]
    through, by_helper = _through_helpers(woken, helpers, asleep, start_ns, end_ns)
    ended: dict[tuple[str, WakerKind], float] = {}
    for one in woken:
        ended[one.reason, one.kind] = ended.get((one.reason, one.kind), 0.0) + one.ms
    found = HostTime(
        asleep=asleep,
        woken=tuple(woken),
        through_helpers=through,
        helpers=tuple(by_helper),
        metrics=metrics_of(rank.metrics, start_ns, end_ns, steps),
        ended=ended,
        steps=steps,
        told=frozenset(probes) | ({REASONS} if driving else set()),
    )
    of_driving = {str(tid) for tid in tids}
    freed = [
        value for name in _FREEING for labels, value in found.rows(name) if labels.get("tid") in of_driving
    ]
    return replace(found, reclaiming=sum(freed))


def _asleep(
    rank: RankEvidence,
    driving: Sequence[ThreadSeries],
    start_ns: int,
    end_ns: int,
    steps: float,
    blocked_ms: float,
) -> dict[str, float]:
    """ms per step by reason, without waits in collectives."""
    total: dict[str, float] = {}
    begin, until = waiting_intervals(rank.collectives, rank.last_ns)
    corners = np.stack([begin, until], axis=1).ravel()
    length = np.stack([np.zeros(len(begin), np.int64), until - begin], axis=1).ravel().cumsum()
    for thread in driving:
        at = thread.at_ns
        share = _overlap(at, start_ns, end_ns)
        if not share.any():
            continue
        slept = np.diff(thread.blocked_ns).astype(np.float64)
        waited = np.diff(_within(at, corners, length)) if len(corners) else np.zeros(len(slept))
        in_waits = np.minimum(waited, slept)
        grown = {reason: np.diff(column).astype(np.float64) for reason, column in thread.blocked_by.items()}
        left = in_waits
        if ENDS_WAITS in grown:
            taken = np.minimum(grown[ENDS_WAITS], left)
            grown[ENDS_WAITS] = grown[ENDS_WAITS] - taken
            left = left - taken
        known = np.sum(list(grown.values()), axis=0)
        unknown = np.maximum(slept - in_waits - known + left, 0.0)
        # What is left of the waits was slept for something else, or for what is not known: in proportion.
        rest = known + unknown
        keep = 1.0 - np.divide(left, rest, out=np.zeros_like(rest), where=rest > 0).clip(0.0, 1.0)
        for reason, ns in grown.items():
            total[reason] = total.get(reason, 0.0) + float((ns * keep * share).sum()) / 1e6 / steps
    whole = sum(total.values())
    scale = min(1.0, blocked_ms / whole) if whole > 0 else 0.0
    return {reason: ms * scale for reason, ms in total.items() if ms * scale > 0}


def _within(at: Ints, corners: Ints, length: Ints) -> Floats:
    """How much of the time up to each instant lies in waits. UTC nanoseconds fit no float: count from the first."""
    origin = int(at[0])
    return np.asarray(
        np.interp((at - origin).astype(np.float64), (corners - origin).astype(np.float64), length)
    )


def _overlap(at: Ints, start_ns: int, end_ns: int) -> Floats:
    """Which share of each stretch between two cuts lies between two instants."""
    low, high = np.maximum(at[:-1], start_ns), np.minimum(at[1:], end_ns)
    whole = np.diff(at)
    return np.asarray(np.divide(np.maximum(high - low, 0), whole, out=np.zeros(len(whole)), where=whole > 0))


def _woken(
    rank: RankEvidence,
    driving: set[int],
    ranks: Container[int],
    start_ns: int,
    end_ns: int,
    steps: float,
) -> list[Woken]:
    helpers = {thread.tid for thread in rank.threads if thread.role == Role.HELPER}
    total: dict[tuple[str, WakerKind, str, int, int], float] = {}
    for row in rank.wakers:
        overlap = min(row.end_ns, end_ns) - max(row.start_ns, start_ns)
        if overlap <= 0 or row.tid not in driving:
            continue
        key = (row.reason, _kind(row, rank, helpers, ranks), row.name, row.pid, row.waker_tid)
        share = overlap / (row.end_ns - row.start_ns)
        total[key] = total.get(key, 0.0) + row.slept_ns * share / 1e6 / steps
    found = [Woken(*key, ms) for key, ms in total.items()]
    return sorted(found, key=lambda one: (-one.ms, one.name, one.pid, one.tid, one.reason))


def _kind(row: WakerRow, rank: RankEvidence, helpers: set[int], ranks: Container[int]) -> WakerKind:
    if row.pid <= 0:
        return "interrupt" if row.pid == 0 else "rest"
    if row.pid == rank.pid:
        return "communication" if _COMMUNICATION.search(row.name) else "own"
    if row.pid in helpers:
        return "helper"
    return "rank" if row.pid in ranks else "process"


def _through_helpers(
    woken: Iterable[Woken],
    helpers: Sequence[ThreadSeries],
    asleep: dict[str, float],
    start_ns: int,
    end_ns: int,
) -> tuple[dict[str, float], list[Woken]]:
    """What the rank waited for its helpers, by what these did when they had work; taken out of ``asleep``."""
    did = {thread.tid: _did(thread, start_ns, end_ns) for thread in helpers}
    waited: dict[int, float] = {}
    names: dict[int, str] = {}
    for one in woken:
        if one.kind == "helper" and one.reason in HANDS_OVER and did.get(one.pid):
            ms = min(one.ms, asleep.get(one.reason, 0.0))
            asleep[one.reason] = asleep.get(one.reason, 0.0) - ms
            waited[one.pid] = waited.get(one.pid, 0.0) + ms
            names[one.pid] = one.name
    through: dict[str, float] = {}
    rows = []
    for pid, ms in waited.items():
        shares = did[pid]
        for what, share in shares.items():
            through[what] = through.get(what, 0.0) + ms * share
        most = max(shares, key=lambda what: (shares[what], what))
        rows.append(Woken(most, "helper", names[pid], pid, pid, ms))
    return through, sorted(rows, key=lambda row: (-row.ms, row.pid))


def _did(thread: ThreadSeries, start_ns: int, end_ns: int) -> dict[str, float]:
    """Shares of what a helper did while it had work to do; empty where it had none."""
    share = _overlap(thread.at_ns, start_ns, end_ns)

    def grew(column: Ints) -> float:
        return float((np.diff(column) * share).sum())

    did = {"running": grew(thread.running_ns), "runnable": grew(thread.runnable_ns)}
    slept = {reason: grew(column) for reason, column in thread.blocked_by.items()}
    did |= {reason: ns for reason, ns in slept.items() if reason not in _IDLE}
    did[NOT_SEEN] = max(0.0, grew(thread.blocked_ns) - sum(slept.values()))
    whole = sum(did.values())
    return {what: ns / whole for what, ns in did.items() if ns > 0} if whole > 0 else {}


def metrics_of(rows: Iterable[MetricRow], start_ns: int, end_ns: int, steps: float) -> dict[Label, float]:
    """Counters per step, times in ms; states in the mean over the intervals that tell them. What straddles the
    bounds counts by its overlap."""
    total: dict[Label, float] = {}
    weight: dict[Label, float] = {}
    for row in rows:
        overlap = min(row.end_ns, end_ns) - max(row.start_ns, start_ns)
        if overlap <= 0:
            continue
        label = (row.name, row.labels)
        if row.unit in _STATES or row.name in _STATE_NAMES:
            total[label] = total.get(label, 0.0) + row.value * overlap
            weight[label] = weight.get(label, 0.0) + overlap
        else:
            value = row.value * overlap / (row.end_ns - row.start_ns) / steps
            total[label] = total.get(label, 0.0) + (value / 1e6 if row.unit == _TIMES else value)
    return {label: value / weight[label] if label in weight else value for label, value in total.items()}


def mean_of(times: Sequence[HostTime], of: HostTime) -> HostTime:
    """The mean of a rank's peers: of those of whom all is told that is told ``of`` it, or, where there is none, of
    all of them, and then only what is told of each counts as told. No ``woken`` and ``helpers``."""
    like = [one for one in times if one.told >= of.told] or times
    return HostTime(
        asleep=_mean([one.asleep for one in like]),
        through_helpers=_mean([one.through_helpers for one in like]),
        metrics=_mean([one.metrics for one in like]),
        ended=_mean([one.ended for one in like]),
        reclaiming=sum(one.reclaiming for one in like) / len(like),
        steps=sum(one.steps for one in like),
        told=frozenset.intersection(*(one.told for one in like)),
    )


def _mean(tables: Sequence[Mapping[_Key, float]]) -> dict[_Key, float]:
    total: dict[_Key, float] = {}
    for table in tables:
        for key, value in table.items():
            total[key] = total.get(key, 0.0) + value / len(tables)
    return total
