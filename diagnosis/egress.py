"""What on a rank's own node holds back what it sends: a queueing discipline with a limit, as the kernel counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from diagnosis.evidence import Evidence, MetricRow
from diagnosis.host_time import metrics_of

HELD_BACK = "egress_held_back"
FEWEST = 10.0
"""Packets per second: a queue that holds back fewer limits nothing."""
MORE = 5.0
"""Times those of the ranks compared with."""


class Limit(NamedTuple):
    """The queueing discipline of an interface."""

    interface: str
    qdisc: str
    """``tbf 45 Mbit/s``."""
    per_s: float
    """Packets that it held back."""


def limit_of(
    evidence: Evidence, rank: int, others: Iterable[int], start_ns: int, end_ns: int
) -> Limit | None:
    """The one that holds back what ``rank`` sends; None where those of ``others`` that have interfaces of their own
    are held back, too."""
    mine = _most(evidence, rank, start_ns, end_ns)
    if mine is None or mine.per_s < FEWEST:
        return None
    theirs = [_most(evidence, other, start_ns, end_ns) for other in others if _apart(evidence, rank, other)]
    usual = sorted(one.per_s if one is not None else 0.0 for one in theirs)
    return mine if not usual or mine.per_s >= MORE * usual[(len(usual) - 1) // 2] else None


def _apart(evidence: Evidence, rank: int, other: int) -> bool:
    """Whether two ranks send through interfaces of their own: of two nodes, or in namespaces that are told of."""
    return evidence.ranks[rank].node != evidence.ranks[other].node or _own(evidence, rank)


def _own(evidence: Evidence, rank: int) -> bool:
    return any(row.name == HELD_BACK for row in evidence.ranks[rank].metrics)


def _most(evidence: Evidence, rank: int, start_ns: int, end_ns: int) -> Limit | None:
    life = evidence.ranks[rank]
    rows: Iterable[MetricRow] = [row for row in life.metrics if row.name == HELD_BACK]
    rows = rows or [row for row in evidence.metrics.get(life.node, ()) if row.name == HELD_BACK]
    told = metrics_of(rows, start_ns, end_ns, (end_ns - start_ns) / 1e9)
    found = [
        Limit(dict(tags).get("interface", ""), dict(tags).get("qdisc", ""), value)
        for (_, tags), value in told.items()
    ]
    return max(found, key=lambda one: (one.per_s, one), default=None)
