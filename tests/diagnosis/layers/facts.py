"""Made-up facts of one culprit and its peers, for tests of rules; and what the rules make of them."""

from __future__ import annotations

from diagnosis.accounting import THREAD_PARTS
from diagnosis.causes import Named, name_cause
from diagnosis.findings import REASONS, Extra, HostTime, Label, Taker, TakerGroup, WakerKind, Woken

PROBES = frozenset(
    {REASONS, "cgroup", "interrupts", "memory", "on_cpu", "storage", "signals", "process", "tcp"}
)


def metric(name: str, **labels: str) -> Label:
    return name, tuple(sorted(labels.items()))


def told(
    *woken: Woken,
    asleep: dict[str, float] | None = None,
    through: dict[str, float] | None = None,
    helpers: tuple[Woken, ...] = (),
    metrics: dict[Label, float] | None = None,
    reclaiming: float = 0.0,
    steps: float = 0.0,
    by: frozenset[str] = PROBES,
) -> HostTime:
    """What the probes tell of a rank, or of its peers in the mean."""
    ended: dict[tuple[str, WakerKind], float] = {}
    for one in woken:
        ended[one.reason, one.kind] = ended.get((one.reason, one.kind), 0.0) + one.ms
    return HostTime(
        asleep=asleep or {},
        woken=woken,
        through_helpers=through or {},
        helpers=helpers,
        metrics=metrics or {},
        ended=ended,
        reclaiming=reclaiming,
        steps=steps,
        told=by,
    )


def facts(
    *takers: Taker,
    host: HostTime | None = None,
    peers: HostTime | None = None,
    node: dict[Label, float] | None = None,
    peers_took: dict[TakerGroup, float] | None = None,
    peers_idle: float = 0.0,
    **over: float,
) -> Extra:
    """Rank 2 (pid 1002 on node-a) takes longer than its peers' 2 ms in the parts given."""
    return Extra(
        job="job-123",
        rank=2,
        node="node-a",
        pid=1002,
        parts={part: 2.0 + over.get(part, 0.0) for part in THREAD_PARTS},
        peers_parts=dict.fromkeys(THREAD_PARTS, 2.0),
        takers=takers,
        peers_took=peers_took or {},
        peers_idle=peers_idle,
        host=host or told(),
        peers_host=peers or told(),
        node_metrics=HostTime(metrics=node or {}),
    )


def cause(extra: Extra) -> tuple[str | None, float]:
    """Id of the cause that is named, and its share."""
    named = name_cause(extra)
    return named.cause.id if named.cause else None, round(named.share, 3)


def detail(extra: Extra) -> str:
    """The words about what is named."""
    return name_cause(extra).judgement.detail


def why_not(named: Named) -> dict[str, str]:
    """Cause that is ruled out → why."""
    return {one.cause: one.why for one in named.ruled_out}
