"""Where a rank's step went: exact parts that sum to the step.

Of a watched driving thread: running, runnable and blocked come from the scheduler and sum to wall time; what this
module adds is the split of blocked time: waiting for peers inside a collective is nobody's own time, all the rest
is. Of a rank of which only timed collectives are known: what it waited in them, what was transferred, and the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    "blocked": Part("os", "asleep outside collectives"),
    "communication": Part("os", "its comm. threads want CPU"),
    "outside": Part("gpu", "outside collectives"),
    "device": Part("gpu", "on the GPU, or waiting"),
    "waiting": Part("nccl", "waiting for peers"),
    "receiving": Part("nccl", "in sends and receives"),
    "transfer": Part("nccl", "the transfers themselves"),
}
"""Every part of a step, in the order of printing. ``runnable`` is the run queue, ``stolen`` an estimate,
``communication`` within a collective, ``waiting`` for peers (of a watched thread: or the transfer) there.
``outside`` to ``transfer`` but ``waiting`` are parts of what is known from collectives alone."""

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

    @property
    def own(self) -> Floats:
        """The step without waiting in collectives: what this rank would take if nobody kept it waiting."""
        rest = [self.parts[part] for part in NOT_OWN if part in self.parts]
        return np.asarray(self.wall - np.sum(rest, axis=0), np.float64)

    @property
    def own_parts(self) -> tuple[str, ...]:
        """The parts that ``own`` is made of, in order."""
        return tuple(part for part in self.parts if part not in NOT_OWN)

    def mean(self, *parts: str) -> Floats:
        """Per rank, ms per step: these parts together; a part that is not told counts as 0."""
        told = [self.parts[part].mean(axis=1) for part in parts if part in self.parts]
        return np.asarray(np.sum(told, axis=0)) if told else np.zeros(len(self.ranks))

    @property
    def unexplained(self) -> Floats:
        return self.wall - sum_parts(self.parts)

    def select(self, rows: list[int], columns: Bools) -> Account:
        pick = np.ix_(np.array(rows), np.flatnonzero(columns))
        return Account(
            ranks=tuple(self.ranks[row] for row in rows),
            wall=self.wall[pick],
            parts={part: values[pick] for part, values in self.parts.items()},
            seen=self.seen[pick],
        )


def sum_parts(parts: Mapping[str, Floats]) -> Floats:
    return np.asarray(np.sum(list(parts.values()), axis=0))


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
    shape = (len(steps.ranks), steps.count)
    parts = {part: np.zeros(shape) for part in THREAD_PARTS}
    seen = np.zeros(shape, np.bool_)
    for row, rank in enumerate(steps.ranks):
        got = account_rank(ranks[rank], steps.start_ns[row], steps.end_ns[row], steps.seen[row])
        seen[row] = got.pop("seen").astype(np.bool_)
        for part, values in got.items():
            parts[part][row] = values
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


def account_rank(rank: RankEvidence, start_ns: Ints, end_ns: Ints, seen: Bools) -> dict[str, Floats]:
    """Parts (ms) of one rank's steps, and ``seen`` (0 or 1). ``start_ns``, ``end_ns``: the rank's clock."""
    got = {name: np.zeros(len(start_ns)) for name in (*THREAD_PARTS, "seen")}
    for thread in rank.threads:
        if thread.role != Role.DRIVING or len(thread.at_ns) < 2:
            continue
        covered = seen & (got["seen"] == 0) & _covered(thread, start_ns, end_ns)
        if covered.any():
            for part, values in _split(rank, thread, start_ns[covered], end_ns[covered]).items():
                got[part][covered] = values
            got["seen"][covered] = 1.0
    return got


def _covered(thread: ThreadSeries, start_ns: Ints, end_ns: Ints) -> Bools:
    """Steps that lie between two cuts, neither end inside a stretch where batches are missing."""
    at = thread.at_ns
    inside: Bools = (start_ns >= at[0]) & (end_ns <= at[-1])
    wide = np.diff(at) > MAX_CUT_GAP_NS
    for instant in (start_ns, end_ns):
        place = np.clip(np.searchsorted(at, instant, side="left") - 1, 0, len(wide) - 1)
        inside &= ~(wide[place] & (at[place + 1] != instant))
    return inside


def _split(rank: RankEvidence, driving: ThreadSeries, start_ns: Ints, end_ns: Ints) -> dict[str, Floats]:
    # UTC nanoseconds do not fit a float: count from the first cut.
    origin = int(driving.at_ns[0])
    ends = np.stack([start_ns - origin, end_ns - origin]).astype(np.float64)
    begin, end = (times - origin for times in waiting_intervals(rank.collectives, rank.last_ns))
    waited_until = _length_within(begin.astype(np.float64), end.astype(np.float64))
    curves = _refine(driving, origin, begin.astype(np.float64), end.astype(np.float64), waited_until)

    place = np.clip(np.searchsorted(curves["at"], ends, side="right"), 1, len(curves["at"]) - 1)
    since = curves["at"][place - 1]
    span = curves["at"][place] - since
    part = np.divide(ends - since, span, out=np.zeros_like(ends), where=span > 0)

    def grown(name: str) -> Floats:
        before = curves[name][place - 1]
        first, last = before + part * (curves[name][place] - before)
        return np.asarray(last - first)

    on_cpu, asleep = grown("running"), grown("waiting")
    interrupted = np.minimum(grown("interrupted"), on_cpu)
    stolen = np.minimum(_stolen(driving, origin, curves, ends), on_cpu - interrupted)
    in_collective = waited_until(ends[1]) - waited_until(ends[0])
    starved = np.zeros(len(start_ns))
    for thread in rank.threads:
        if thread.role == Role.COMMUNICATION and len(thread.at_ns) > 1:
            starved += _runnable_inside(thread, origin, waited_until, ends)
    # Only the share in which the driving thread sleeps is exposed: while it runs, nothing waits for them.
    exposed = np.divide(asleep, in_collective, out=np.zeros_like(asleep), where=in_collective > 0)
    communication = np.minimum(starved * exposed, asleep)
    parts = {
        "running": on_cpu - interrupted - stolen,
        "interrupted": interrupted,
        "stolen": stolen,
        "runnable": grown("runnable"),
        "blocked": grown("blocked") - asleep,
        "communication": communication,
        "waiting": asleep - communication,
    }
    return {part: np.asarray(values / 1e6) for part, values in parts.items()}


def _refine(
    driving: ThreadSeries, origin: int, enter: Floats, leave: Floats, waited_until: Curve
) -> dict[str, Floats]:
    """The driving thread's cumulative curves with corners where it begins and ends to wait.

    Cuts less than 5 ms apart are merged, so a short wait lies somewhere between two cuts. A thread that waits
    in a collective sleeps: between two cuts, what it slept goes to the wait first, as far as it fits, and the
    other states share the rest evenly. Curves: at, running, interrupted, runnable, blocked, and waiting (the
    part of blocked within waits).
    """
    cuts = (driving.at_ns - origin).astype(np.float64)
    # Runs that are sorted each: a merge. The same instant twice does no harm.
    at = np.concatenate(
        [cuts, enter[(enter > 0) & (enter < cuts[-1])], leave[(leave > 0) & (leave < cuts[-1])]]
    )
    at.sort(kind="stable")
    gap = np.searchsorted(cuts, at[1:], side="left") - 1
    length, waits = np.diff(at), np.diff(waited_until(at))
    whole = np.diff(cuts)
    waited = np.asarray(np.bincount(gap, weights=waits, minlength=len(whole)), np.float64)
    slept = np.diff(driving.blocked_ns).astype(np.float64)
    fits = np.minimum(waited, slept)
    in_wait = _share(waits, waited[gap]) * fits[gap]
    outside = _share(length - waits, (whole - waited)[gap]) * (slept - fits)[gap]
    blocked = in_wait + outside
    awake_share = _share(length - blocked, (whole - slept)[gap])
    grew = {"waiting": in_wait, "blocked": blocked}
    for name, total in (
        ("running", driving.running_ns),
        ("interrupted", driving.interrupted_ns),
        ("runnable", driving.runnable_ns),
    ):
        grew[name] = awake_share * np.diff(total).astype(np.float64)[gap]
    return {"at": at, **{name: np.concatenate([[0.0], np.cumsum(values)]) for name, values in grew.items()}}


def _share(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _stolen(driving: ThreadSeries, origin: int, curves: dict[str, Floats], ends: Floats) -> Floats:
    """Stolen time is known per batch only: it falls on the running time of that batch evenly."""
    if not len(driving.stolen_at_ns) or not driving.stolen_ns.any():
        return np.zeros(ends.shape[1])
    bounds = np.concatenate([[0.0], (driving.stolen_at_ns - origin).astype(np.float64)])
    total = np.concatenate([[0.0], np.cumsum(driving.stolen_ns).astype(np.float64)])
    ran, ran_at_ends = (np.interp(times, curves["at"], curves["running"]) for times in (bounds, ends))
    begin, end = np.interp(ran_at_ends, ran, total)
    return np.asarray(end - begin)


def _runnable_inside(thread: ThreadSeries, origin: int, waited_until: Curve, ends: Floats) -> Floats:
    """Runnable time of a communication thread, spread between two of its cuts over the time that the rank
    spent inside collectives (the thread is cut when a collective ends, long after the wait began); what was
    runnable while no collective was under way is left out."""
    inside = waited_until((thread.at_ns - origin).astype(np.float64))
    grew = np.diff(thread.runnable_ns).astype(np.float64)
    total = np.concatenate([[0.0], np.cumsum(np.where(np.diff(inside) > 0, grew, 0.0))])
    begin, end = np.interp(waited_until(ends), inside, total)
    return np.asarray(end - begin)


def waiting_intervals(table: CollectiveTable, last_ns: int) -> tuple[Ints, Ints]:
    """Disjoint intervals [begin, end), in order, in which a rank's driving thread can wait in collectives.

    Between one arrival and the next, from the arrival to the last completion in between: a thread that
    arrives at the next collective while an earlier one (an overlapped bucket) is under way did not wait for
    that one. A collective that has not ended, or whose end was lost, lasts until the next arrival, at most.
    """
    if not len(table.enter_ns):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    enter, duration = table.enter_ns, table.duration_ns
    if (np.diff(enter) < 0).any():
        order = np.argsort(enter, kind="stable")
        enter, duration = enter[order], duration[order]
    following = np.concatenate([enter[1:], [max(last_ns, int(enter[-1]))]])
    ends = np.where(duration >= 0, enter + duration, following)
    # Gap in which each completion falls: from arrival number `gap` to the next.
    gap = np.searchsorted(enter, ends, side="left") - 1
    lost = np.flatnonzero((duration < 0) | (gap < np.arange(len(enter))))
    gap[lost] = lost
    until = enter.copy()
    np.maximum.at(until, gap, ends)
    waits = until > enter
    return enter[waits], until[waits]


def _length_within(begin: Floats | Ints, end: Floats | Ints) -> Curve:
    """How much of the time up to an instant lies in disjoint intervals."""
    if not len(begin):
        return lambda times: np.zeros(np.shape(times))
    before = np.concatenate([[0.0], np.cumsum(end - begin)])

    def length(times: Floats) -> Floats:
        place = np.searchsorted(begin, times, side="right") - 1
        index = np.maximum(place, 0)
        partial = np.minimum(times, end[index]) - begin[index]
        return np.asarray(np.where(place < 0, 0.0, before[index] + partial))

    return length
