"""The catalogue of causes. To add one: write its rule in ``layers/``, and add a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diagnosis.findings import Extra, Judgement
from diagnosis.layers import host
from diagnosis.limits import EXPLAINS
from diagnosis.verdict import Layer, RuledOut


@dataclass(frozen=True)
class Cause:
    """``judge`` says how much of a culprit's extra time this cause explains."""

    id: str
    layer: Layer
    title: str
    judge: Callable[[Extra], Judgement]


CATALOGUE: tuple[Cause, ...] = (
    Cause("cpu-contention", "os", "Other processes take the rank's CPU", host.cpu_contention),
    Cause("runs-longer", "os", "The rank computes longer on its CPU", host.runs_longer),
)


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
    """The cause that explains most, if it explains enough; and why it is none of the others."""
    judged = [(cause, cause.judge(extra)) for cause in CATALOGUE]
    shares = [
        min(1.0, judgement.explained_ms / extra.own) if extra.own > 0 else 0.0 for _, judgement in judged
    ]
    best = max(range(len(judged)), key=lambda place: shares[place])
    named = shares[best] >= EXPLAINS
    ruled_out = [
        RuledOut(cause=cause.id, why=f"{judgement.otherwise}: {share:.0%} of its extra time")
        for place, ((cause, judgement), share) in enumerate(zip(judged, shares, strict=True))
        if not (named and place == best)
    ]
    if not named:
        return Named(None, "os", host.unnamed(extra), 0.0, ruled_out)
    cause, judgement = judged[best]
    return Named(cause, cause.layer, judgement, shares[best], ruled_out)
