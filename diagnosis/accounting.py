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

from diagnosis.evidence import CollectiveTable, Ints, RankEvidence, ThreadSeries
from diagnosis.exposed import Exposed, computing
from diagnosis.limits import MAX_CUT_GAP_NS
from diagnosis.steps import Bools, Floats, Steps
from diagnosis.verdict import Layer
from probes.records import Role

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
THREAD_PARTS = ("running", "interrupted", "stolen", "runnable", "blocked", "communication", "waiting")
"""Parts of a watched driving thread."""
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
    values = np.zeros((len(THREAD_PARTS), len(steps.ranks), steps.count))
    seen = np.zeros(steps.seen.shape, np.bool_)
    for row, rank in enumerate(steps.ranks):
        bounds = steps.start_ns[row], steps.end_ns[row], steps.seen[row]
        seen[row] = _account_rank(ranks[rank], *bounds, values[:, row])
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


def _account_rank(rank: RankEvidence, start_ns: Ints, end_ns: Ints, seen: Bools, into: Floats) -> Bools:
    """One rank's steps that are known; their parts (ms) go into ``into``, parts × steps. ``start_ns``, ``end_ns``:
    the rank's clock."""
    known = np.zeros(len(seen), np.bool_)
    waits: tuple[Ints, Ints] | None = None
    for thread in rank.threads:
        if thread.role != Role.DRIVING or len(thread.at_ns) < 2:
            continue
        covered = seen & ~known & _covered(thread, start_ns, end_ns)
        if covered.any():
            waits = waits or waiting_intervals(rank.collectives, rank.last_ns)
            chosen = slice(None) if covered.all() else covered
            into[:, chosen] = _split(rank, thread, waits, start_ns[chosen], end_ns[chosen])
            known |= covered
    return known


def _covered(thread: ThreadSeries, start_ns: Ints, end_ns: Ints) -> Bools:
    """Steps that lie between two cuts, neither end inside a stretch where batches are missing."""
    at = thread.at_ns
    inside: Bools = (start_ns >= at[0]) & (end_ns <= at[-1])
    wide = at[1:] - at[:-1] > MAX_CUT_GAP_NS
    if wide.any():
        for instant in (start_ns, end_ns):
            place = np.clip(np.searchsorted(at, instant, side="left") - 1, 0, len(wide) - 1)
            inside &= ~(wide[place] & (at[place + 1] != instant))
    return inside


def _split(
    rank: RankEvidence, driving: ThreadSeries, waits: tuple[Ints, Ints], start_ns: Ints, end_ns: Ints
) -> Floats:
    """Parts × steps, ms, in the order of ``THREAD_PARTS``."""
    # UTC nanoseconds do not fit a float: count from the first cut.
    origin = int(driving.at_ns[0])
    waited_until = _length_within(waits[0] - origin, waits[1] - origin)
    curves = _curves(driving, origin, waited_until)
    if np.array_equal(start_ns[1:], end_ns[:-1]):  # each instant once
        instants = np.append(start_ns, end_ns[-1:]) - origin
        first, last = slice(0, -1), slice(1, None)
    else:
        instants = np.concatenate([start_ns, end_ns]) - origin
        first, last = slice(0, len(start_ns)), slice(len(start_ns), None)
    until = curves(instants.astype(np.float64))

    def grown(curve: Floats) -> Floats:
        return np.asarray(curve[last] - curve[first])

    on_cpu, asleep = grown(until.running), grown(until.waiting)
    interrupted = np.minimum(grown(until.interrupted), on_cpu)
    stolen = np.minimum(grown(_stolen(driving, origin, curves, until)), on_cpu - interrupted)
    communication = np.zeros(len(start_ns))
    for thread in rank.threads:
        if thread.role == Role.COMMUNICATION and len(thread.at_ns) > 1:
            communication += grown(_runnable_inside(thread, origin, waited_until, until.waits))
    if communication.any():
        # Only the share in which the driving thread sleeps is exposed: while it runs, nothing waits for them.
        communication *= _share(asleep, grown(until.waits))
        np.minimum(communication, asleep, out=communication)
    parts = {
        "running": on_cpu - interrupted - stolen,
        "interrupted": interrupted,
        "stolen": stolen,
        "runnable": grown(until.runnable),
        "blocked": grown(until.blocked) - asleep,
        "communication": communication,
        "waiting": asleep - communication,
    }
    return np.stack([parts[part] for part in THREAD_PARTS]) / 1e6


@dataclass(frozen=True)
class _Until:
    """Cumulative ns of a driving thread at instants."""

    running: Floats
    interrupted: Floats
    runnable: Floats
    blocked: Floats
    waiting: Floats
    """The part of ``blocked`` within waits."""
    waits: Floats
    """Length of the waits themselves."""


def _curves(driving: ThreadSeries, origin: int, waited_until: Curve) -> Callable[[Floats], _Until]:
    """The driving thread's cumulative curves, at any instants (ns since ``origin``) between its first and last cut.

    Cuts less than 5 ms apart are merged, so a short wait lies somewhere between two cuts. A thread that waits
    in a collective sleeps: between two cuts, what it slept goes to the wait first, as far as it fits, and the
    other states share the rest evenly. So within a gap all curves follow from two lengths: how far the instant is
    from the cut before it, and how much of that lies in waits.
    """
    cuts = (driving.at_ns - origin).astype(np.float64)
    waits = waited_until(cuts)
    whole, waited = cuts[1:] - cuts[:-1], waits[1:] - waits[:-1]
    slept = (driving.blocked_ns[1:] - driving.blocked_ns[:-1]).astype(np.float64)
    fits = np.minimum(waited, slept)
    waiting = np.zeros(len(cuts))
    np.cumsum(fits, out=waiting[1:])

    def until(at: Floats) -> _Until:
        gap = np.minimum(np.searchsorted(cuts, at, side="right"), len(whole)) - 1
        since, waits_at = at - cuts[gap], waited_until(at)
        in_waits, slept_here, fits_here, waited_here = (
            waits_at - waits[gap],
            slept[gap],
            fits[gap],
            waited[gap],
        )
        asleep = _share(in_waits, waited_here) * fits_here
        blocked = asleep + _share(since - in_waits, whole[gap] - waited_here) * (slept_here - fits_here)
        awake = _share(since - blocked, whole[gap] - slept_here)

        def of(total: Ints) -> Floats:
            before = total[gap]
            return np.asarray((before - total[0]) + awake * (total[gap + 1] - before))

        return _Until(
            running=of(driving.running_ns),
            interrupted=of(driving.interrupted_ns),
            runnable=of(driving.runnable_ns),
            blocked=(driving.blocked_ns[gap] - driving.blocked_ns[0]) + blocked,
            waiting=waiting[gap] + asleep,
            waits=waits_at,
        )

    return until


def _share(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _stolen(driving: ThreadSeries, origin: int, curves: Callable[[Floats], _Until], until: _Until) -> Floats:
    """Stolen time is known per batch only: it falls on the running time of that batch evenly."""
    if not driving.stolen_ns.any():
        return np.zeros(len(until.running))
    bounds = np.append(origin, np.clip(driving.stolen_at_ns, origin, driving.at_ns[-1])) - origin
    total = np.concatenate([[0.0], np.cumsum(driving.stolen_ns).astype(np.float64)])
    return np.asarray(np.interp(until.running, curves(bounds.astype(np.float64)).running, total))


def _runnable_inside(thread: ThreadSeries, origin: int, waited_until: Curve, waits: Floats) -> Floats:
    """Runnable time of a communication thread, spread between two of its cuts over the time that the rank
    spent inside collectives (the thread is cut when a collective ends, long after the wait began); what was
    runnable while no collective was under way is left out. Cumulative, where waits are as long as ``waits``."""
    grew = thread.runnable_ns[1:] - thread.runnable_ns[:-1]
    if not grew.any():
        return np.zeros(len(waits))
    inside = waited_until((thread.at_ns - origin).astype(np.float64))
    total = np.concatenate([[0.0], np.cumsum(np.where(np.diff(inside) > 0, grew, 0)).astype(np.float64)])
    return np.asarray(np.interp(waits, inside, total))


def waiting_intervals(table: CollectiveTable, last_ns: int) -> tuple[Ints, Ints]:
    """Disjoint intervals [begin, end), in order, in which a rank's driving thread can wait in collectives.

    Between one arrival and the next, from the arrival to the last completion in between: a thread that
    arrives at the next collective while an earlier one (an overlapped bucket) is under way did not wait for
    that one. A collective that has not ended, or whose end was lost, lasts until the next arrival, at most.
    """
    if not len(table.enter_ns):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    enter, duration = table.enter_ns, table.duration_ns
    if (enter[1:] < enter[:-1]).any():
        order = np.argsort(enter, kind="stable")
        enter, duration = enter[order], duration[order]
    until = enter + duration
    if (lost := duration < 0).any():
        until[lost] = np.append(enter[1:], max(last_ns, int(enter[-1])))[lost]
    late = np.flatnonzero(until[:-1] > enter[1:])
    if len(late):
        # These end past the next arrival: they are waited for after the last one before their end.
        ends = until[late]
        if (ends[1:] < ends[:-1]).any():
            order = np.argsort(ends, kind="stable")
            late, ends = late[order], ends[order]
        until[late] = enter[late]
        gap = np.searchsorted(enter, ends, side="left") - 1
        last = np.append(gap[1:] != gap[:-1], True)
        gap = gap[last]
        until[gap] = np.maximum(until[gap], ends[last])
    waits = until > enter
    return enter[waits], until[waits]


def _length_within(begin: Floats | Ints, end: Floats | Ints) -> Curve:
    """How much of the time up to an instant lies in disjoint intervals in order; exact for whole numbers."""
    if not len(begin):
        return lambda times: np.zeros(np.shape(times))
    corners, length = np.empty(2 * len(begin)), np.zeros(2 * len(begin))
    corners[::2], corners[1::2] = begin, end
    np.cumsum(end - begin, out=length[1::2])
    length[2::2] = length[1:-1:2]
    return lambda times: np.interp(times, corners, length)
