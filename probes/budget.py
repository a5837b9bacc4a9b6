"""What watching may cost, and what is given up when it costs more: decisions only, no clock, no I/O.

The order is fixed: captures, then the other probes of the host, then who had the CPU, then gloo, then thread_time.
What is left without probes are the ranks and the node's metrics. It comes back in the reverse order, one by one.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

OVER_INTERVALS = 15
"""Averages are over so many intervals, the dearest one left out: a burst, as when a job starts, is no reason."""
OFF_FOR_S = 60.0
"""What was given up comes back after this, …"""
LONGEST_OFF_S = 3600.0
"""… or after twice the last time if it had to go again, at most this."""
STEADY_S = 600.0
"""A part that was back for so long without a step starts anew at ``OFF_FOR_S``."""
FAR_OVER = 2.0
"""This many times over a budget several parts go at once, as many as their own costs say."""
SMALL_NODE_CPUS = 10


@dataclass(frozen=True)
class Limits:
    """What watching may take of a node."""

    cpu_share: float = 0.004
    """Of the node's CPU time: the agent's own, the programs' run time, and traps."""
    memory_bytes: int = 512 << 20
    """That the agent's process holds (resident)."""
    events_per_s: float = 20_000
    """That probes hand to user space: events of ring buffers and rows of maps."""
    least_cpu: float = 0.040
    """CPU seconds per second that may always be taken on a node below ten CPUs. Watching costs what ranks and
    steps cost, not what CPUs there are, and 0.4 % of two CPUs would be too little to watch one rank."""

    def cpu(self, cpus: int) -> float:
        """CPU seconds per second on a node of so many CPUs."""
        share = self.cpu_share * cpus
        return max(share, self.least_cpu) if cpus < SMALL_NODE_CPUS else share


class Part(enum.StrEnum):
    """What can be given up, in this order."""

    CAPTURES = "captures"
    HOST = "host"
    OCCUPANTS = "occupants"
    GLOO = "gloo"
    THREAD_TIME = "thread_time"


WORDS = {
    Part.CAPTURES: "captures",
    Part.HOST: "the other probes of the host",
    Part.OCCUPANTS: "who had the CPU",
    Part.GLOO: "the probe gloo",
    Part.THREAD_TIME: "the probe thread_time",
}


class Deed(enum.Enum):
    """What a step does."""

    SHED = "shed"
    RESTORE = "restore"
    DROP_CACHES = "drop caches"
    RELOAD = "reload"


@dataclass(frozen=True)
class Usage:
    """What watching took in one interval."""

    agent: float
    """CPU seconds per second of the agent's process, without what compiling the programs took."""
    probes: Mapping[str, float]
    """By probe: CPU seconds per second of its programs, traps, and reading files, as far as it is known."""
    memory_bytes: int
    events_per_s: float

    @property
    def cpu(self) -> float:
        return self.agent + sum(self.probes.values())

    def of(self, part: Part) -> float:
        """CPU seconds per second that are known to go with a part; of one probe's cost its parts have no share that
        is known, the probe itself has."""
        if part == Part.HOST:
            return sum(
                cost for name, cost in self.probes.items() if name not in (Part.GLOO, Part.THREAD_TIME)
            )
        return self.probes.get(part, 0.0)


@dataclass(frozen=True)
class Step:
    """One thing to do now, and why, in words with figures."""

    deed: Deed
    why: str
    part: Part | None = None
    for_s: float = 0.0
    """How long a part stays away at least."""


@dataclass
class Budget:
    """Decides once per interval. ``cpus``: of the node."""

    limits: Limits
    cpus: int
    shed: list[tuple[Part, str]] = field(default_factory=list)
    """What is given up now and why, in the order in which it went."""
    _window: deque[Usage] = field(default_factory=lambda: deque(maxlen=OVER_INTERVALS))
    _back_at: float = 0.0
    _off_for: float = field(default_factory=lambda: OFF_FOR_S)
    _restored_at: float | None = None
    _memory_deeds: int = 0

    def decide(self, now: float, usage: Usage, active: Collection[Part]) -> list[Step]:
        """What to do now (seconds), after one more interval of ``usage`` while ``active`` parts ran."""
        self._window.append(usage)
        if len(self._window) < OVER_INTERVALS:
            return []
        steps = self._within_memory(now, active) or self._within_rates(now, active)
        if not steps and self.shed and now >= self._back_at and not self._memory_deeds and not self._over():
            steps = [self._restore(now)]
        if steps:  # what was before says nothing of what is now
            self._window.clear()
        return steps

    def near(self) -> bool:
        """Whether a decision may be close: figures should be fresh."""
        cpu = _steady([usage.cpu for usage in self._window] or [0.0])
        return bool(self.shed) or cpu > 0.8 * self.limits.cpu(self.cpus)

    def _within_memory(self, now: float, active: Collection[Part]) -> list[Step]:
        held = _steady([float(usage.memory_bytes) for usage in self._window])
        if held <= self.limits.memory_bytes:
            self._memory_deeds = 0
            return []
        why = f"the agent holds {held / 1e6:.0f} MB, above the budget of {self.limits.memory_bytes / 1e6:.0f} MB"
        self._memory_deeds += 1
        if self._memory_deeds == 1:
            return [Step(Deed.DROP_CACHES, why)]
        probes = [part for part in (Part.HOST, Part.GLOO, Part.THREAD_TIME) if part in active]
        if self._memory_deeds == 2 and probes:
            return [Step(Deed.RELOAD, why)]
        return self._give_up(now, [part for part in Part if part in active], why)

    def _within_rates(self, now: float, active: Collection[Part]) -> list[Step]:
        why = self._over()
        if not why:
            return []
        parts = [part for part in Part if part in active]
        cpu = self._excess("cpu")
        events = self._excess("events")
        going: list[Part] = []
        for part in parts:
            going.append(part)
            cpu -= _steady([usage.of(part) for usage in self._window]) / self.limits.cpu(self.cpus)
            if part == Part.GLOO:
                events = 0.0
            if max(cpu, events) <= FAR_OVER:
                break
        return self._give_up(now, going, why)

    def _excess(self, what: str) -> float:
        """How many times a budget is used."""
        if what == "cpu":
            return _steady([usage.cpu for usage in self._window]) / self.limits.cpu(self.cpus)
        return _steady([usage.events_per_s for usage in self._window]) / self.limits.events_per_s

    def _over(self) -> str:
        """Which budget of a rate is passed, in words; empty when none is."""
        window = list(self._window)
        may = self.limits.cpu(self.cpus)
        if self._excess("cpu") > 1:
            took = {name: _steady([u.probes.get(name, 0.0) for u in window]) for name in window[-1].probes}
            parts = [f"agent {_steady([u.agent for u in window]) * 1e3:.1f}"]
            parts += [f"{name} {rate * 1e3:.1f}" for name, rate in sorted(took.items())]
            return (
                f"watching takes {_steady([u.cpu for u in window]) * 1e3:.1f} ms of CPU per second "
                f"({', '.join(parts)}), above the budget of {may * 1e3:.1f} ms"
            )
        if self._excess("events") > 1:
            rate = _steady([u.events_per_s for u in window])
            return f"{rate:.0f} events per second, above the budget of {self.limits.events_per_s:.0f}"
        return ""

    def _give_up(self, now: float, parts: list[Part], why: str) -> list[Step]:
        if not parts:
            return []
        if self._restored_at is not None:  # a new episode
            again = now - self._restored_at < max(STEADY_S, self._off_for)
            self._off_for = min(2 * self._off_for, LONGEST_OFF_S) if again else OFF_FOR_S
            self._restored_at = None
        self._back_at = now + self._off_for
        self.shed += [(part, why) for part in parts]
        return [Step(Deed.SHED, why, part, self._off_for) for part in parts]

    def _restore(self, now: float) -> Step:
        part, why = self.shed.pop()
        self._restored_at = now
        self._back_at = now + self._off_for
        return Step(Deed.RESTORE, f"it was given up because {why}", part)


def _steady(values: list[float]) -> float:
    """The mean without the largest value."""
    if len(values) < 2:
        return values[0]
    return (sum(values) - max(values)) / (len(values) - 1)
