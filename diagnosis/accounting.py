"""Where a rank's step went: exact parts that sum to the step.

Of a watched driving thread: running, runnable and blocked come from the scheduler and sum to wall time; what this
module adds is the split of blocked time: waiting for peers inside a collective is nobody's own time, all the rest
is. Of a rank of which only timed collectives are known: what it waited in them, what was transferred, and the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from diagnosis.evidence import Ints, RankEvidence
from diagnosis.exposed import Exposed, computing
from diagnosis.steps import Bools, Floats, Steps
from diagnosis.thread_parts import THREAD_PARTS, lengths, thread_parts
from diagnosis.verdict import Layer

Curve = Callable[[Floats], Floats]
"""Cumulative value at instants (ns since the first cut)."""


@dataclass(frozen=True)
class Part:
    layer: Layer
    label: str
    """Short words, for sentences and a narrow table."""


PARTS: dict[str, Part] = {
    "running": Part("os", "running on a CPU"),
    "interrupted": Part("os", "interrupts"),
    "stolen": Part("os", "taken by the hypervisor"),
    "runnable": Part("os", "waiting for a CPU"),
    "asleep-storage-read": Part("os", "reading from storage"),
    "asleep-storage-write": Part("os", "writing to storage"),
    "asleep-page-fault": Part("os", "pages from a disk"),
    "asleep-reclaim": Part("os", "freeing memory"),
    "asleep-futex": Part("os", "locks, its own threads"),
    "asleep-kernel-lock": Part("os", "locks of the kernel"),
    "asleep-helpers": Part("os", "waiting for its helpers"),
    "asleep-pipe-read": Part("os", "nothing to read in a pipe"),
    "asleep-pipe-write": Part("os", "a pipe is full"),
    "asleep-network-receive": Part("os", "nothing came by network"),
    "asleep-network-send": Part("os", "network takes no more"),
    "asleep-poll": Part("os", "polling for an event"),
    "asleep-child": Part("os", "waiting for a child"),
    "asleep-sleep": Part("os", "sleeping on purpose"),
    "asleep-stopped": Part("os", "stopped"),
    "asleep-other": Part("os", "asleep for something else"),
    "blocked": Part("os", "asleep outside collectives"),
    "communication": Part("os", "its comm. threads want CPU"),
    "outside": Part("gpu", "outside collectives"),
    "device": Part("gpu", "on the GPU, or waiting"),
    "waiting": Part("nccl", "waiting for peers"),
    "receiving": Part("nccl", "in sends and receives"),
    "transfer": Part("nccl", "the transfers themselves"),
}
"""Every part of a step, in the order of printing. ``runnable`` is the run queue, ``stolen`` an estimate,
``communication`` within a collective, ``waiting`` for peers (of a watched thread: or the transfer) there. What
begins with ``ASLEEP`` is taken out of ``blocked`` where it is known what was waited for (``probes.host.reasons``).
``outside`` to ``transfer`` but ``waiting`` are parts of what is known from collectives alone."""

ASLEEP, HELPERS = "asleep-", "asleep-helpers"

NOT_OWN = ("device", "waiting", "receiving", "transfer")
"""Whoever made the rank wait, it was not itself; nor is the device's work told from waiting for it."""
COLLECTIVE_PARTS = ("outside", "waiting", "receiving", "transfer")
"""Parts of a rank of which only timed collectives are known."""
OWN = tuple(part for part in THREAD_PARTS if part not in NOT_OWN)
"""A watched thread's own time."""


@dataclass(frozen=True)
class Account:
    """ranks × steps, in ms. Rows follow ``ranks``, columns those of the steps it was made from."""

    ranks: tuple[int, ...]
    wall: Floats
    parts: dict[str, Floats]
    seen: Bools

    @cached_property
    def own(self) -> Floats:
        """The step without waiting in collectives: what this rank would take if nobody kept it waiting."""
        rest = sum_parts({part: self.parts[part] for part in NOT_OWN if part in self.parts})
        return np.asarray(self.wall - rest, np.float64)

    @property
    def own_parts(self) -> tuple[str, ...]:
        """The parts that ``own`` is made of, in order."""
        return tuple(part for part in self.parts if part not in NOT_OWN)

    def mean(self, *parts: str) -> Floats:
        """Per rank, ms per step: these parts together; a part that is not told counts as 0."""
        told = [self.parts[part].mean(axis=1) for part in parts if part in self.parts]
        return np.asarray(np.sum(told, axis=0)) if told else np.zeros(len(self.ranks))

    @cached_property
    def unexplained(self) -> Floats:
        return self.wall - sum_parts(self.parts)

    def select(self, rows: list[int], columns: Bools) -> Account:
        if columns.all() and rows == list(range(len(self.ranks))):
            return self
        place = np.flatnonzero(columns)
        pick: tuple[slice, slice] | tuple[Ints, ...] = np.ix_(np.array(rows), place)
        if len(rows) == len(self.ranks) and len(place) and place[-1] - place[0] + 1 == len(place):
            pick = slice(None), slice(int(place[0]), int(place[-1]) + 1)  # a view
        return Account(
            ranks=tuple(self.ranks[row] for row in rows),
            wall=self.wall[pick],
            parts={part: values[pick] for part, values in self.parts.items()},
            seen=self.seen[pick],
        )


def sum_parts(parts: Mapping[str, Floats]) -> Floats:
    first, *others = parts.values()
    total = np.array(first, np.float64)
    for values in others:
        total += values
    return total


def grown(before: Account, now: Account) -> tuple[dict[str, float], float]:
    """The growth of the mean step by part, mean over ranks, and what of it no part explains (which may be
    negative): together exactly the growth of the mean step. Ranks of both must be the same."""
    by_part = {
        part: float(now.parts[part].mean() - before.parts[part].mean())
        for part in now.parts
        if part in before.parts
    }
    growth = float(now.wall.mean() - before.wall.mean())
    return by_part, growth - sum(by_part.values())


def account(ranks: Mapping[int, RankEvidence], steps: Steps, after_last_ms: Floats) -> Account:
    """Account of each step of each rank of ``steps``; ``seen`` is false where the step, or the driving
    thread's time in it, is not known, and all values are 0 there.

    ``after_last_ms``: per step, how long its collectives took once the last rank had come. Starved
    communication threads cost no more than that: before, the rank waits for the last one anyway.
    """
    values, seen = thread_parts(ranks, steps)
    parts = dict(zip(THREAD_PARTS, values, strict=True))
    if parts["communication"].any():
        harmless = np.maximum(parts["communication"] - after_last_ms, 0.0)
        parts["communication"] -= harmless
        parts["waiting"] += harmless
    return Account(steps.ranks, np.where(seen, steps.wall_ms(), 0.0), parts, seen)


def account_collectives(
    ranks: Mapping[int, RankEvidence], steps: Steps, waits: Mapping[int, Exposed]
) -> Account:
    """Account of each step of ranks of which only timed collectives are known. Where a trace shows the rank
    computing meanwhile, communication is not exposed."""
    shape = (len(steps.ranks), steps.count)
    parts = {part: np.zeros(shape) for part in COLLECTIVE_PARTS}
    for row, rank in enumerate(steps.ranks):
        seen = steps.seen[row]
        if not seen.any():
            continue
        mine = waits[rank]
        origin = int(steps.start_ns[row, seen][0])

        def since(instants: Ints, origin: int = origin) -> Floats:
            return (instants - origin).astype(np.float64)

        ends = since(np.stack([steps.start_ns[row, seen], steps.end_ns[row, seen]]))
        busy = _length_within(*map(since, computing(ranks[rank])))
        pairs = mine.receives
        for part, (first, last), chosen in (
            ("waiting", (mine.begin_ns, mine.all_here_ns), ~pairs),
            ("receiving", (mine.begin_ns, mine.all_here_ns), pairs),
            ("transfer", (mine.all_here_ns, mine.end_ns), np.ones_like(pairs)),
        ):
            begin, until = since(first[chosen]), since(last[chosen])
            hidden = np.concatenate([[0.0], np.cumsum(busy(until) - busy(begin))])
            within = _length_within(begin, until)
            exposed = np.diff(within(ends), axis=0)[0]
            if hidden[-1] > 0:
                so_far = np.interp(within(ends), np.concatenate([[0.0], within(until)]), hidden)
                exposed = exposed - np.diff(so_far, axis=0)[0]
            parts[part][row, seen] = exposed / 1e6
    wall = np.where(steps.seen, steps.wall_ms(), 0.0)
    parts["outside"] = wall - parts["waiting"] - parts["receiving"] - parts["transfer"]
    return Account(steps.ranks, wall, parts, steps.seen)


def _length_within(begin: Floats, end: Floats) -> Curve:
    """How much of the time up to an instant lies in disjoint intervals in order; exact for whole numbers."""
    corners, length = lengths(begin, end)
    return lambda times: np.interp(times, corners, length)
