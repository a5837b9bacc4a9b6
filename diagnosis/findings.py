"""What is known about one culprit, and what a rule makes of it: the shapes between tests and causes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diagnosis.accounting import OWN
from diagnosis.verdict import Owner

TakerKind = Literal["process", "kernel", "rank", "helper", "own", "idle"]


@dataclass(frozen=True)
class Taker:
    """Who had the CPU while a rank wanted one. One process, or all of one name and cgroup."""

    kind: TakerKind
    name: str
    pids: tuple[int, ...]
    cgroup: str
    ms: float
    """Per step of the rank that waited: its driving and communication threads together."""
    communication_ms: float = 0.0
    """Of ``ms``, while communication threads waited."""
    job: str = ""
    rank: int = -1


TakerGroup = tuple[TakerKind, str, str]
"""Takers that are one and the same from a rank's point of view, whichever CPU it has: (kind, name, cgroup)."""


def group_of(taker: Taker) -> TakerGroup:
    """Ranks are one group, helpers another: who shares a CPU with whom differs from rank to rank. A kernel
    thread that every CPU has (ksoftirqd/3) counts as one over all CPUs."""
    if taker.kind in ("rank", "helper"):
        return (taker.kind, "", "")
    name = taker.name.partition("/")[0] if taker.kind == "kernel" else taker.name
    return (taker.kind, name, taker.cgroup)


@dataclass(frozen=True)
class Extra:
    """What one culprit takes longer than its peers. All times in ms per step, means over the same steps."""

    job: str
    rank: int
    node: str
    pid: int
    parts: dict[str, float]
    peers_parts: dict[str, float]
    """Mean of the peers that are no culprits."""
    takers: tuple[Taker, ...]
    """The largest first; they explain ``runnable`` and ``communication``."""
    peers_took: dict[TakerGroup, float]
    """What each group of takers takes from a peer, in the mean."""
    peers_idle: float

    def over(self, *parts: str) -> float:
        """How much longer than its peers in these parts together."""
        return sum(self.parts[part] - self.peers_parts[part] for part in parts)

    @property
    def own(self) -> float:
        """How much longer in all that is its own; the causes share this among them."""
        return self.over(*OWN)

    def took(self, *kinds: TakerKind) -> float:
        return sum(taker.ms for taker in self.takers if taker.kind in kinds)

    def excess(self, *kinds: TakerKind) -> dict[TakerGroup, float]:
        """How much longer each group had the CPU than it has it from a peer; only those that had it longer."""
        mine: dict[TakerGroup, float] = {}
        for taker in self.takers:
            if taker.kind in kinds:
                mine[group_of(taker)] = mine.get(group_of(taker), 0.0) + taker.ms
        over = {group: ms - self.peers_took.get(group, 0.0) for group, ms in mine.items()}
        return {group: ms for group, ms in over.items() if ms > 0}


@dataclass(frozen=True)
class Judgement:
    """What one rule says of one culprit."""

    explained_ms: float
    """Of ``Extra.own``."""
    owner: Owner
    detail: str
    """The thing at fault, in words a person can act on."""
    actions: tuple[str, ...]
    otherwise: str
    """Why it is not this, for the case that it explains too little."""
