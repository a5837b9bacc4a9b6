"""What the steps of watched driving threads went to, many ranks at a time: on the cuts of a single one, calling
NumPy takes longer than what it does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosis.evidence import CollectiveTable, Ints, RankEvidence, ThreadSeries
from diagnosis.limits import MAX_CUT_GAP_NS
from diagnosis.steps import Bools, Floats, Steps
from probes.records import Role

THREAD_PARTS = ("running", "interrupted", "stolen", "runnable", "blocked", "communication", "waiting")
"""Parts of a watched driving thread."""
_AT_ONCE = 32
"""Threads that are laid one after the other: what is worked on then stays in a core's cache."""
_EXACT_NS = 2**52
"""Whole numbers up to this are exact as floats."""


@dataclass(frozen=True)
class _Watched:
    """A driving thread of a rank in the steps that it covers."""

    row: int
    """Of the steps."""
    rank: RankEvidence
    thread: ThreadSeries


def thread_parts(ranks: Mapping[int, RankEvidence], steps: Steps) -> tuple[Floats, Bools]:
    """Parts × ranks × steps, ms, in the order of ``THREAD_PARTS``; and which steps of which ranks a driving thread
    covers: values of the others are 0."""
    values = np.zeros((len(THREAD_PARTS), len(steps.ranks), steps.count))
    known = np.zeros(steps.seen.shape, np.bool_)
    alike: dict[bytes, list[_Watched]] = defaultdict(list)
    for row, number in enumerate(steps.ranks):
        for thread in ranks[number].threads:
            if thread.role != Role.DRIVING or len(thread.at_ns) < 2:
                continue
            covered = steps.seen[row] & ~known[row]
            covered &= _covered(thread, steps.start_ns[row], steps.end_ns[row])
            if covered.any():
                alike[covered.tobytes()].append(_Watched(row, ranks[number], thread))
                known[row] |= covered
    for covers, watched in alike.items():
        columns = np.flatnonzero(np.frombuffer(covers, np.bool_))
        for first in range(0, len(watched), _AT_ONCE):
            some = watched[first : first + _AT_ONCE]
            cells = _cells(np.array([one.row for one in some]), columns)
            for place, part in enumerate(_split(some, steps.start_ns[cells], steps.end_ns[cells])):
                values[place][cells] = part
    return values, known


def _cells(
    rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]
) -> tuple[slice, slice] | tuple[npt.NDArray[np.intp], ...]:
    """Rows × columns, in order, as an index: where they lie side by side of slices, which are copied at once."""
    first, last = (rows[0], columns[0]), (rows[-1], columns[-1])
    if last[0] - first[0] < len(rows) and last[1] - first[1] < len(columns):
        return slice(int(first[0]), int(last[0]) + 1), slice(int(first[1]), int(last[1]) + 1)
    return np.ix_(rows, columns)


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


def _split(watched: list[_Watched], start_ns: Ints, end_ns: Ints) -> list[Floats]:
    """Of each of ``THREAD_PARTS``: threads × steps, ms."""
    line = _line_up(watched)
    if line is None:
        apart = [_split([one], start_ns[[place]], end_ns[[place]]) for place, one in enumerate(watched)]
        return [np.concatenate(part) for part in zip(*apart, strict=True)]
    count = start_ns.shape[1]
    if np.array_equal(start_ns[:, 1:], end_ns[:, :-1]):  # each instant once
        instants = np.concatenate([start_ns, end_ns[:, -1:]], axis=1)
        first, last = slice(0, count), slice(1, None)
    else:
        instants = np.concatenate([start_ns, end_ns], axis=1)
        first, last = slice(0, count), slice(count, None)
    until = _until(line, (instants - line.origin_ns[:, None] + line.shift[:, None]).astype(np.float64))

    def grown(curve: Floats) -> Floats:
        return np.asarray(curve[:, last] - curve[:, first])

    on_cpu, asleep = grown(until.running), grown(until.waiting)
    interrupted = np.minimum(grown(until.interrupted), on_cpu)
    stolen, starved = np.zeros((2, *until.waits.shape))
    for place, one in enumerate(watched):
        if one.thread.stolen_ns.any():
            stolen[place] = _stolen(line, place, one.thread, until.running[place])
        for thread in one.rank.threads:
            if thread.role == Role.COMMUNICATION and len(thread.at_ns) > 1:
                starved[place] += _runnable_inside(line, place, thread, until.waits[place])
    taken = np.minimum(grown(stolen), on_cpu - interrupted)
    communication = grown(starved)
    if communication.any():
        # Only the share in which the driving thread sleeps is exposed: while it runs, nothing waits for them.
        communication *= _share(asleep, grown(until.waits))
        np.minimum(communication, asleep, out=communication)
    parts = {
        "running": on_cpu - interrupted - taken,
        "interrupted": interrupted,
        "stolen": taken,
        "runnable": grown(until.runnable),
        "blocked": grown(until.blocked) - asleep,
        "communication": communication,
        "waiting": asleep - communication,
    }
    return [parts[part] / 1e6 for part in THREAD_PARTS]


@dataclass(frozen=True)
class _Line:
    """Threads laid one after the other on one axis of time, in ns, so far apart that none reaches into another's.

    Cuts less than 5 ms apart are merged, so a short wait lies somewhere between two cuts. A thread that waits in a
    collective sleeps: between two cuts, what it slept goes to the wait first, as far as it fits, and the other
    states share the rest evenly. So within a gap all curves follow from two lengths: how far the instant is from
    the cut before it, and how much of that lies in waits.
    """

    origin_ns: Ints
    """Per thread: its first cut. UTC nanoseconds do not fit a float."""
    shift: Ints
    """Per thread: where that lies on the axis."""
    low: int
    """Per thread, all that happens lies from ``shift + low`` to ``shift + high``."""
    high: int
    opens: npt.NDArray[np.intp]
    """Per thread: its first cut among all cuts; the gap from there on has that number, too."""
    last: npt.NDArray[np.intp]
    """Per thread: its last gap."""
    cuts: Floats
    corners: Floats
    """Where waits begin and end, in turn; ``waited`` is how much of the axis up to there lies in waits."""
    waited: Floats
    waits: Floats
    """Per cut: likewise."""
    whole: Floats
    """Per gap: how long it is; of it in waits, asleep, asleep in waits, and the latter in all gaps before it."""
    inside: Floats
    slept: Floats
    fits: Floats
    waiting: Floats
    running_ns: Ints
    interrupted_ns: Ints
    runnable_ns: Ints
    blocked_ns: Ints


def _line_up(watched: list[_Watched]) -> _Line | None:
    """None where several threads must not stand together: they lie too far apart for exact numbers (a clock that is
    years off), or the clock of one ran backwards."""
    threads = [one.thread for one in watched]
    count = np.array([len(thread.at_ns) for thread in threads])
    after = np.cumsum(count)
    opens = after - count
    origin = np.array([thread.at_ns[0] for thread in threads])
    at = np.concatenate([thread.at_ns for thread in threads]) - np.repeat(origin, count)
    found = [waiting_intervals(one.rank.collectives, one.rank.last_ns) for one in watched]
    waits_of = np.array([len(begin) for begin, _ in found])
    begin, end = (np.concatenate(times) - np.repeat(origin, waits_of) for times in zip(*found, strict=True))
    low = min(0, int(begin.min(initial=0)))
    high = max(int(at.max()), int(end.max(initial=0)))
    width = high - low + 1
    if len(watched) > 1 and width * len(watched) > _EXACT_NS:
        return None
    shift = np.arange(len(watched)) * width
    cuts = (at + np.repeat(shift, count)).astype(np.float64)
    if len(watched) > 1 and (cuts[1:] < cuts[:-1]).any():
        return None
    moved = np.repeat(shift, waits_of)
    corners, waited = lengths(begin + moved, end + moved)
    waits = np.interp(cuts, corners, waited)
    blocked = np.concatenate([thread.blocked_ns for thread in threads])
    inside = waits[1:] - waits[:-1]
    slept = (blocked[1:] - blocked[:-1]).astype(np.float64)
    fits = np.minimum(inside, slept)
    fits[after[:-1] - 1] = 0.0  # from one thread to the next
    waiting = np.zeros(len(cuts))
    np.cumsum(fits, out=waiting[1:])
    return _Line(
        origin_ns=origin,
        shift=shift,
        low=low,
        high=high,
        opens=opens,
        last=after - 2,
        cuts=cuts,
        corners=corners,
        waited=waited,
        waits=waits,
        whole=cuts[1:] - cuts[:-1],
        inside=inside,
        slept=slept,
        fits=fits,
        waiting=waiting,
        running_ns=np.concatenate([thread.running_ns for thread in threads]),
        interrupted_ns=np.concatenate([thread.interrupted_ns for thread in threads]),
        runnable_ns=np.concatenate([thread.runnable_ns for thread in threads]),
        blocked_ns=blocked,
    )


@dataclass(frozen=True)
class _Until:
    """Cumulative ns of driving threads at instants; threads × instants."""

    running: Floats
    interrupted: Floats
    runnable: Floats
    blocked: Floats
    waiting: Floats
    """The part of ``blocked`` within waits."""
    waits: Floats
    """Length of the waits themselves; what is before the thread on the axis counts, too."""


def _until(line: _Line, at: Floats, threads: slice = slice(None)) -> _Until:
    """The curves of ``threads`` at instants on the axis (threads × instants), each between the thread's first and
    last cut."""
    opens, last = line.opens[threads, None], line.last[threads, None]
    flat = at.reshape(-1)
    gap = np.searchsorted(line.cuts, flat, side="right").reshape(at.shape) - 1
    np.minimum(gap, last, out=gap)
    waits = np.interp(flat, line.corners, line.waited).reshape(at.shape)
    since, in_waits = at - line.cuts[gap], waits - line.waits[gap]
    slept, fits, inside = line.slept[gap], line.fits[gap], line.inside[gap]
    whole = line.whole[gap]
    asleep = _share(in_waits, inside) * fits
    blocked = asleep + _share(since - in_waits, whole - inside) * (slept - fits)
    awake = _share(since - blocked, whole - slept)
    after = gap + 1

    def of(total: Ints) -> Floats:
        before = total[gap]
        return np.asarray((before - total[opens]) + awake * (total[after] - before))

    return _Until(
        running=of(line.running_ns),
        interrupted=of(line.interrupted_ns),
        runnable=of(line.runnable_ns),
        blocked=(line.blocked_ns[gap] - line.blocked_ns[opens]) + blocked,
        waiting=(line.waiting[gap] - line.waiting[opens]) + asleep,
        waits=waits,
    )


def _share(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _stolen(line: _Line, place: int, driving: ThreadSeries, running: Floats) -> Floats:
    """Stolen time is known per batch only: it falls on the running time of that batch evenly. Cumulative, where the
    thread at ``place`` ran as long as ``running``."""
    origin = line.origin_ns[place]
    bounds = np.append(origin, np.clip(driving.stolen_at_ns, origin, driving.at_ns[-1])) - origin
    at = (bounds + line.shift[place]).astype(np.float64)
    total = np.concatenate([[0.0], np.cumsum(driving.stolen_ns).astype(np.float64)])
    ran = _until(line, at[None], slice(place, place + 1)).running[0]
    return np.asarray(np.interp(running, ran, total))


def _runnable_inside(line: _Line, place: int, thread: ThreadSeries, waits: Floats) -> Floats:
    """Runnable time of a communication thread, spread between two of its cuts over the time that the rank
    spent inside collectives (the thread is cut when a collective ends, long after the wait began); what was
    runnable while no collective was under way is left out. Cumulative, where waits are as long as ``waits``."""
    grew = thread.runnable_ns[1:] - thread.runnable_ns[:-1]
    if not grew.any():
        return np.zeros(len(waits))
    # Beyond its own stretch of the axis another thread waits.
    at = np.clip(thread.at_ns - line.origin_ns[place], line.low, line.high) + line.shift[place]
    inside = np.interp(at.astype(np.float64), line.corners, line.waited)
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
    following = np.append(enter[1:], max(last_ns, int(enter[-1])))
    if (lost := duration < 0).any():
        until[lost] = following[lost]
    # The first is no completion, and before all of them.
    ends = np.concatenate([enter[:1], until[until > enter]])
    if (ends[1:] < ends[:-1]).any():
        ends.sort()
    following[-1] = np.iinfo(np.int64).max
    last = ends[np.searchsorted(ends, following, side="right") - 1]
    waits = last > enter
    return enter[waits], last[waits]


def lengths(begin: Ints | Floats, end: Ints | Floats) -> tuple[Floats, Floats]:
    """Corners of disjoint intervals in order, and how much of the time up to each lies in them; whole numbers."""
    if not len(begin):
        return np.zeros(1), np.zeros(1)
    corners, length = np.empty(2 * len(begin)), np.zeros(2 * len(begin))
    corners[::2], corners[1::2] = begin, end
    np.cumsum(end - begin, out=length[1::2])
    length[2::2] = length[1:-1:2]
    return corners, length
