"""What is known about one culprit, and what a rule makes of it: the shapes between tests and causes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from diagnosis.accounting import OWN
from diagnosis.verdict import Owner

_Key = TypeVar("_Key")
TakerKind = Literal["process", "kernel", "rank", "helper", "own", "idle"]
OTHERS: tuple[TakerKind, ...] = ("process", "kernel", "rank", "helper")
"""Takers of a CPU that are neither the rank itself nor an idle CPU."""


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


WakerKind = Literal["interrupt", "own", "communication", "helper", "rank", "process", "rest"]
"""Of a futex, an interrupt is a timeout: nothing else wakes it from there. ``rest``: the small ones, as one sum."""
REASONS = "reasons"
"""In ``HostTime.told``: it is known what the driving thread sleeps for."""


@dataclass(frozen=True)
class Woken:
    """Who ended sleeps of a rank's driving thread outside collectives."""

    reason: str
    """What it slept for (``probes.host.reasons``)."""
    kind: WakerKind
    """A thread of its own process, one that moves its collectives, a helper, another rank, a stranger."""
    name: str
    pid: int
    tid: int
    ms: float
    """Slept, per step."""


Label = tuple[str, tuple[tuple[str, str], ...]]
"""A metric by its name and its labels in order."""


@dataclass(frozen=True)
class HostTime:
    """What probes of the host tell of one rank, per step; empty where none does."""

    asleep: Mapping[str, float] = field(default_factory=dict)
    """ms outside collectives by what was waited for, without what it waited for its helpers; together with that at
    most the account's ``blocked``."""
    woken: tuple[Woken, ...] = ()
    """The longest first."""
    through_helpers: Mapping[str, float] = field(default_factory=dict)
    """ms that the rank waited for its helpers (DataLoader workers), by what these did meanwhile: ``running``,
    ``runnable``, what they slept for, or ``not seen``."""
    helpers: tuple[Woken, ...] = ()
    """Helpers that it waited for, one row each; ``reason`` is what each did most."""
    metrics: Mapping[Label, float] = field(default_factory=dict)
    """Counters per step (times in ms), states as they were in the mean."""
    ended: Mapping[tuple[str, WakerKind], float] = field(default_factory=dict)
    """``woken`` by reason and kind, ms."""
    reclaiming: float = 0.0
    """ms that the driving thread spent freeing memory, running or asleep (reclaim and compaction)."""
    steps: float = 0.0
    """How many steps all this is the mean of; of peers, theirs together."""
    told: frozenset[str] = frozenset()
    """``REASONS``, and the probes that watch on its node: what they do not tell of did not happen."""

    def total(self, name: str) -> float:
        """A metric over all its labels."""
        return sum(value for (which, _), value in self.metrics.items() if which == name)

    def rows(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of a metric, the largest first."""
        found = [(dict(labels), value) for (which, labels), value in self.metrics.items() if which == name]
        return sorted(found, key=lambda row: (-row[1], sorted(row[0].items())))


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
    host: HostTime = field(default_factory=HostTime)
    peers_host: HostTime = field(default_factory=HostTime)
    """Means over the peers; of ``woken`` and ``helpers`` it has none."""
    node_metrics: HostTime = field(default_factory=HostTime)
    """Metrics of its node, likewise."""

    def comparable(self, probe: str) -> bool:
        """Whether peers are told of by what tells of this rank. An agent of another version, or a probe that is
        switched off on their nodes, makes nothing of theirs look like little."""
        return probe in self.peers_host.told or probe not in self.host.told

    def asleep_over(self, *reasons: str) -> float:
        """How much longer than its peers it slept for these reasons outside collectives; what it waited for its
        helpers is not in it. 0 where it is not known of its peers, as in all of these; and no more than it slept
        longer in all: what probes tell by the second may lie in a pause between the steps."""
        over = self._over(REASONS, self.host.asleep, self.peers_host.asleep, reasons)
        return min(over, max(0.0, self.over("blocked")))

    def helpers_over(self, *doing: str) -> float:
        """How much longer than its peers it waited for helpers that did this; bounded likewise."""
        over = self._over(REASONS, self.host.through_helpers, self.peers_host.through_helpers, doing)
        return min(over, max(0.0, self.over("blocked")))

    def ended_over(self, reasons: Iterable[str], *kinds: WakerKind) -> float:
        """How much longer than its peers it slept for these reasons until such a waker came, in collectives too."""
        keys = [(reason, kind) for reason in reasons for kind in kinds]
        return self._over(REASONS, self.host.ended, self.peers_host.ended, keys)

    def metric_over(self, name: str, probe: str) -> float:
        """How much more of a probe's metric than its peers have, over all labels."""
        over = self.host.total(name) - self.peers_host.total(name)
        return max(0.0, over) if self.comparable(probe) else 0.0

    def _over(
        self, probe: str, mine: Mapping[_Key, float], theirs: Mapping[_Key, float], keys: Iterable[_Key]
    ) -> float:
        if not self.comparable(probe):
            return 0.0
        return max(0.0, sum(mine.get(key, 0.0) - theirs.get(key, 0.0) for key in keys))

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
