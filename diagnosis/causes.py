"""The catalogue of causes. To add one: write its rule in ``layers/``, and add a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diagnosis import wording
from diagnosis.findings import Extra, Judgement
from diagnosis.layers import asleep, host, kept_off, running
from diagnosis.limits import EXPLAINS, EXPLAINS_PART
from diagnosis.verdict import Layer, RuledOut


@dataclass(frozen=True)
class Cause:
    """``judge`` says how much of a culprit's extra time this cause explains."""

    id: str
    layer: Layer
    title: str
    """What a person reads."""
    judge: Callable[[Extra], Judgement]
    always_said: bool = False
    """Whether it is told that it was ruled out even where nothing points to it: the usual suspects."""


WORTH_RULING_OUT = 0.01
"""Share of the extra time from which on it is said that a cause was looked at and is not it."""

CATALOGUE: tuple[Cause, ...] = (
    Cause("cpu-contention", "os", "CPU contention", host.cpu_contention, always_said=True),
    Cause("cpu-quota", "os", "A CPU quota", kept_off.cpu_quota),
    Cause("interrupts", "os", "Interrupts", kept_off.interrupts),
    Cause("hypervisor-steal", "os", "CPU time taken by the hypervisor", kept_off.hypervisor_steal),
    Cause("process-stopped", "os", "A stopped process", kept_off.stopped),
    Cause("storage-read", "os", "Slow reads from storage", asleep.storage_read),
    Cause("storage-write", "os", "Slow writes to storage", asleep.storage_write),
    Cause("page-faults", "os", "Pages that come from a disk", asleep.page_faults),
    Cause("memory-reclaim", "os", "Memory is short", asleep.memory_reclaim),
    Cause("lock-contention", "os", "Locks, or waits for its own threads", asleep.lock_contention),
    Cause("kernel-contention", "os", "Contention in the kernel", asleep.kernel_contention),
    Cause("slow-pipe", "os", "A pipe that is read too slowly", asleep.slow_pipe),
    Cause("slow-workers", "job", "Slow DataLoader workers", asleep.slow_workers),
    Cause("sleeps", "job", "The code sleeps", asleep.sleeps),
    Cause("network-wait", "os", "Waits for the network", asleep.network_wait),
    Cause("waits-for-process", "os", "Waits for another process", asleep.waits_for_process),
    Cause("python-gc", "os", "Python's garbage collector", running.python_gc),
    Cause("slow-python", "os", "Slow Python code", running.slow_python),
    Cause("gil", "os", "Python's lock (GIL)", running.gil),
    Cause("runs-longer", "os", "Runs longer", host.runs_longer, always_said=True),
)
NAMED_ELSEWHERE: dict[str, str] = {
    # by the replay of a trace's operations, or by the collectives' pattern (operations, layers/job, layers/network)
    "uneven-sequences": "Uneven sequences",
    "uneven-pauses": "Uneven pauses",
    "longer-stage": "A longer pipeline stage",
    "slow-link": "A slow link",
    "packet-loss": "A link that loses packets",
    "slow-transfers": "Slow transfers",
    # of a job that stands still (hang)
    "never-came": "A rank that never came",
    "stuck-inside": "Stuck inside a collective",
    "not-begun": "Its GPU has not begun",
    "process-ended": "A process that ended",
    "collective-mismatch": "Ranks that call different collectives",
    "collective-order": "Collectives in another order",
}
"""Causes that are no share of one rank's extra time, by id; their rules stand in the modules named."""
TITLES = {cause.id: cause.title for cause in CATALOGUE} | NAMED_ELSEWHERE


@dataclass(frozen=True)
class Named:
    """The cause of one culprit; ``cause`` None when none explains ``EXPLAINS`` of its extra time."""

    cause: Cause | None
    layer: Layer
    judgement: Judgement
    share: float
    """Share of the extra time explained, 0 to 1; 0 without a cause."""
    ruled_out: list[RuledOut]


def name_cause(extra: Extra) -> Named:
    """The cause that explains most, if it explains enough; and why it is none of the others. Where two explain
    it only together, none is named, and the words say both."""
    judged = [(cause, cause.judge(extra)) for cause in CATALOGUE]
    shares = [
        min(1.0, judgement.explained_ms / extra.own) if extra.own > 0 else 0.0 for _, judgement in judged
    ]
    best = max(range(len(judged)), key=lambda place: shares[place])
    named = shares[best] >= EXPLAINS
    blamed = [best] if named else _together(shares)
    ruled_out = [
        RuledOut(cause=cause.id, why=f"{judgement.otherwise}: {wording.percent(share)} of its extra time")
        for place, ((cause, judgement), share) in enumerate(zip(judged, shares, strict=True))
        if place not in blamed and (cause.always_said or share >= WORTH_RULING_OUT)
    ]
    if named:
        cause, judgement = judged[best]
        return Named(cause, cause.layer, judgement, shares[best], ruled_out)
    if blamed:
        return Named(None, "os", _joined([judged[place] for place in blamed]), 0.0, ruled_out)
    return Named(None, "os", host.unnamed(extra), 0.0, ruled_out)


def _together(shares: list[float]) -> list[int]:
    """Places of the causes that explain enough together and each a good part, the largest first; or none."""
    parts = sorted((p for p, share in enumerate(shares) if share >= EXPLAINS_PART), key=lambda p: -shares[p])
    return parts if len(parts) > 1 and sum(shares[place] for place in parts) >= EXPLAINS else []


def _joined(judged: list[tuple[Cause, Judgement]]) -> Judgement:
    """Two causes in one: the words and the actions of both, the owner only where they agree."""
    owners = {judgement.owner for _, judgement in judged}
    titles = wording.listed([cause.title for cause, _ in judged])
    return Judgement(
        explained_ms=0.0,
        owner=owners.pop() if len(owners) == 1 else "unknown",
        detail=f"{titles} together: {'; '.join(judgement.detail for _, judgement in judged)}",
        actions=tuple(action for _, judgement in judged for action in judgement.actions),
        otherwise="",
    )
