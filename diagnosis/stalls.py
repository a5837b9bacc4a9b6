"""Where one rank stood still for long, once or now and then, while the others waited for it in collectives. Pure.

Its step is long by what it did itself; the others arrive at the next collective as they always do and wait there,
in the same step or the one after. A pause that all take part in does not look like that, nor one in which some are
busy longer than others. What the rank did meanwhile, and whether a checkpoint looks alike: ``meanwhile.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from diagnosis.evidence import Evidence, Ints, RankEvidence
from diagnosis.limits import (
    EXPLAINS,
    MANY_RANKS,
    MAX_PAUSES,
    RARE_COLLECTIVES,
    STOOD_MS,
    STOOD_OTHERS,
    STOOD_STEPS,
    STOOD_WAITED,
)
from diagnosis.meanwhile import Span, stopped_ms, tells_of_stops
from diagnosis.steps import Bools, Floats, Steps
from diagnosis.thread_parts import THREAD_PARTS, thread_parts

_WAITS = [THREAD_PARTS.index(part) for part in ("communication", "waiting")]
_OWN = [place for place in range(len(THREAD_PARTS)) if place not in _WAITS]
"""What a driving thread does outside collectives."""
_RUNNING = THREAD_PARTS.index("running")
_FEW = 4
"""Long steps that a window can have however short it is: two stalls, each of which shows in two steps."""
_LONG = 2.0
"""Steps that take so many times as long as usual are those of a slowdown."""
_LOOKED_AT = 15
"""Ranks whose collectives are counted."""


@dataclass(frozen=True)
class Stall:
    """One rank that stood still, in some steps of the job."""

    rank: int
    columns: tuple[int, ...]
    """Of the steps with their pauses: those in which it stood still, and in which the others waited for it."""
    span: Span
    """The steps in which it stood still."""
    ms: float
    """How long, beyond a usual step."""
    usual_steps: float
    """… in usual steps."""
    lost_ms: float
    """How much later all ranks are by it: the median over them."""
    waited: dict[int, Span]
    """Ranks that waited for it, in these steps and the one after. The longest waits first."""
    inside: bool
    """It stood still within a collective: only the host tells of it."""
    usual: bool
    """Each of these steps holds as many collectives as many others do."""
    calm: bool
    """The steps just before and just after are not long, as those of a slowdown are."""


@dataclass(frozen=True)
class _Look:
    """Steps that are looked at closely."""

    whole: Steps
    usual_ms: float
    least_ms: float
    columns: Ints
    """Of ``whole``, in order; ``values`` (parts × ranks × these) and ``known`` are of them."""
    values: Floats
    known: Bools

    def stood(self) -> Floats:
        """Ranks × columns: how much longer than a usual step a rank was busy outside collectives, ms."""
        return np.where(self.known, self.values[_OWN].sum(axis=0) - self.usual_ms, 0.0)

    def places(self, columns: Iterable[int]) -> list[int]:
        return [int(place) for place in np.flatnonzero(np.isin(self.columns, list(columns)))]


def all_of(steps: Steps) -> Steps:
    """The steps and the pauses between them."""
    return steps.whole or steps


def find_stalls(evidence: Evidence, steps: Steps) -> tuple[list[Stall], float]:
    """All of them, in the order of time; none where the evidence tells nothing of threads. And how much longer than
    usual the longest other step took in which not most ranks were busy for long, ms: what all do together (an
    evaluation, a checkpoint of all) makes steps no more restless."""
    look = _look(evidence, steps)
    if look is None:
        return [], 0.0
    found = _before_collectives(evidence, look)
    # The longest first: a rank that was stopped for long is in the next window, too, for a part of it.
    starts = {at for column in look.columns.tolist() for at in (column - 1, column)}
    windows = [[at, at + 1] for at in sorted(starts) if at >= 0 and at + 2 < look.whole.count]
    for window in sorted(windows, key=lambda window: -_lost(look, window)[1]):
        if not any(column in stall.columns for stall in found for column in window):
            found += _inside_collectives(evidence, look, window)
    return sorted(found, key=lambda stall: (stall.columns, stall.rank)), _longest_beside(look, found)


def _longest_beside(look: _Look, stalls: Sequence[Stall]) -> float:
    over = look.whole.series_ms - look.usual_ms
    busy = (look.stood() >= over[look.columns] / 2) & look.known
    over[look.columns[2 * busy.sum(axis=0) > look.known.sum(axis=0)]] = 0.0
    over[sorted({column for stall in stalls for column in stall.columns})] = 0.0
    return float(over.max())


def without(steps: Steps, stalls: Sequence[Stall]) -> Steps:
    """The steps, and the pauses apart from them, without those of the stalls."""
    columns = sorted({column for stall in stalls for column in stall.columns})
    if not columns:
        return steps
    keep = np.ones(all_of(steps).count, np.bool_)
    keep[columns] = False
    if steps.paused is None or steps.pauses is None:
        return steps.columns(keep)
    kept, pauses = steps.columns(keep[~steps.paused]), steps.pauses.columns(keep[steps.paused])
    if not pauses.count:
        return replace(kept, pauses=None, whole=None, paused=None)
    return replace(kept, pauses=pauses)


def _look(evidence: Evidence, steps: Steps) -> _Look | None:
    """The few long steps, and those before them; None where there are none, or so many that this is what the job
    does."""
    whole = all_of(steps)
    if steps.given or whole.count < 2 * STOOD_STEPS or len(whole.ranks) < 2:
        return None
    series = whole.series_ms
    usual_ms = float(np.median(series))
    least_ms = max(STOOD_MS, STOOD_STEPS * usual_ms)
    over = series - usual_ms
    # Of two ranks, and of two halves that wait in different steps, the median is only half as long.
    long = np.flatnonzero(over >= least_ms / 2)
    if not len(long) or (over >= least_ms).sum() > max(_FEW, MAX_PAUSES * whole.count):
        return None
    columns = np.unique(np.concatenate([np.maximum(long - 1, 0), long]))
    many = len(whole.ranks) > MANY_RANKS
    if many and not _hinted(evidence) and not _waits(evidence, whole, columns, STOOD_WAITED * least_ms):
        return None
    values, known = thread_parts(evidence.ranks, whole.columns(columns))
    return _Look(whole, usual_ms, least_ms, columns, values, known) if known.any() else None


def _hinted(evidence: Evidence) -> set[int]:
    """Ranks that events tell were stopped."""
    return {event.rank for event in evidence.events if event.kind == "process-stopped"}


def _waits(evidence: Evidence, whole: Steps, columns: Ints, ms: float) -> bool:
    """Whether any rank was in a collective for so long, or in one whose end is not known, in these steps. Of many
    ranks that pause together none is, and this is quicker to see than what their threads did."""
    for row, rank in enumerate(whole.ranks):
        table = evidence.ranks[rank].collectives
        begin = np.searchsorted(table.enter_ns, whole.start_ns[row, columns])
        end = np.searchsorted(table.enter_ns, whole.end_ns[row, columns])
        for first, last in zip(begin.tolist(), end.tolist(), strict=True):
            took = table.duration_ns[first:last]
            if len(took) and (took.max() >= ms * 1e6 or took.min() < 0):
                return True
    return False


def _before_collectives(evidence: Evidence, look: _Look) -> list[Stall]:
    """Who came late to a collective for which the others waited."""
    stood = look.stood()
    late = stood >= look.least_ms
    for place in range(len(look.columns)):
        mine = late[:, place]
        if not mine.any():
            continue
        others = look.known[:, place] & ~mine
        busy = stood[others, place] > STOOD_OTHERS * stood[mine, place].max()
        if busy.any() or 2 * int(mine.sum()) > int(look.known[:, place].sum()):
            late[:, place] = False
    found = []
    for row in np.flatnonzero(late.any(axis=1)).tolist():
        for columns in _runs(look.columns[late[row]].tolist()):
            stall = _stall(evidence, look, row, columns)
            if stall is not None:
                found.append(stall)
    return found


def _runs(columns: list[int]) -> list[list[int]]:
    """Neighbours together."""
    runs: list[list[int]] = []
    for column in columns:
        if runs and runs[-1][-1] == column - 1:
            runs[-1].append(column)
        else:
            runs.append([column])
    return runs


def _stall(evidence: Evidence, look: _Look, row: int, columns: list[int]) -> Stall | None:
    """None where the others did not wait for it, or where it is not over yet."""
    whole, after = look.whole, columns[-1] + 1
    if after >= whole.count:
        return None
    window = [*columns, after]
    there, lost_ms = _lost(look, window)
    if not there[row]:
        return None
    stood, mine, both = look.stood(), look.places(columns), look.places(window)
    ms = float(stood[row, mine].sum())
    if lost_ms < max(STOOD_WAITED * ms, look.least_ms / 2):
        return None
    waits = look.values[_WAITS][:, :, both].sum(axis=(0, 2))
    late, late_after = (stood[:, places].max(axis=1) >= look.least_ms for places in (mine, both))
    waiting = look.known[:, both].all(axis=1) & there & ~late & (waits >= STOOD_WAITED * ms)
    # Who stood still right after is no measure of what is usual, if there is another.
    waiting = waiting & ~late_after if (waiting & ~late_after).any() else waiting
    if not waiting.any():
        return None
    waited = sorted(np.flatnonzero(waiting).tolist(), key=lambda other: (-float(waits[other]), other))
    return Stall(
        rank=whole.ranks[row],
        columns=tuple(window),
        span=_spans(look, [row], columns)[0],
        ms=ms,
        usual_steps=ms / look.usual_ms,
        # In these steps all may have waited for another, too.
        lost_ms=min(lost_ms, ms),
        waited=dict(zip([whole.ranks[other] for other in waited], _spans(look, waited, window), strict=True)),
        inside=False,
        usual=_usual(evidence, whole, waited, window),
        calm=_calm(look, window),
    )


def _lost(look: _Look, window: list[int]) -> tuple[Bools, float]:
    """Which ranks were seen in neighbouring steps, and how much later these ended than they usually do, ms."""
    whole = look.whole
    there = np.asarray(whole.seen[:, window].all(axis=1), np.bool_)
    for one, next_ in itertools.pairwise(window):
        there &= whole.end_ns[:, one] == whole.start_ns[:, next_]
    if not there.any():
        return there, 0.0
    wall = (whole.end_ns[there, window[-1]] - whole.start_ns[there, window[0]]) / 1e6
    return there, float(np.median(wall)) - len(window) * look.usual_ms


def _inside_collectives(evidence: Evidence, look: _Look, window: list[int]) -> list[Stall]:
    """Who was stopped while all were in the collective, or, where the GPU makes ranks wait, while all others slept:
    the host tells of it."""
    whole = look.whole
    # Two steps: where the others got out of the collective they wait in the next one.
    there, lost_ms = _lost(look, window)
    if lost_ms < look.least_ms:
        return []
    begin, end = whole.start_ns[:, window[0]], whole.end_ns[:, window[-1]]
    hinted = _hinted(evidence)
    stood: dict[int, float] = {}
    for row in np.flatnonzero(there).tolist():
        rank = whole.ranks[row]
        if len(whole.ranks) <= MANY_RANKS or rank in hinted:
            ms = stopped_ms(evidence.ranks[rank], int(begin[row]), int(end[row]))
            if ms >= EXPLAINS * lost_ms:
                stood[row] = ms
    mine = look.places(window)
    others = [row for row in np.flatnonzero(there).tolist() if row not in stood]
    ran = np.where(look.known[:, mine], look.values[_RUNNING][:, mine], 0.0).sum(axis=1)
    if not stood or len(stood) > len(others) or (ran[others] > STOOD_OTHERS * lost_ms).any():
        return []
    # Whoever slept outside collectives as well was perhaps stopped, too, where nothing would tell.
    slept = look.stood()[others][:, mine].max(axis=1) > STOOD_OTHERS * lost_ms
    if not all(
        tells_of_stops(evidence, evidence.ranks[whole.ranks[other]])
        for other, long in zip(others, slept, strict=True)
        if long
    ):
        return []
    nothing = dict.fromkeys(THREAD_PARTS, 0.0)
    return [
        Stall(
            rank=whole.ranks[row],
            columns=tuple(window),
            span=Span(int(begin[row]), int(end[row]), nothing | {"blocked": ms}),
            ms=ms,
            usual_steps=ms / look.usual_ms,
            lost_ms=lost_ms,
            waited={
                whole.ranks[other]: Span(int(begin[other]), int(end[other]), nothing) for other in others
            },
            inside=True,
            usual=True,
            calm=_calm(look, window),
        )
        for row, ms in stood.items()
    ]


def _spans(look: _Look, rows: list[int], columns: list[int]) -> list[Span]:
    """Without what lies in collectives: their communication threads may have wanted a CPU there, while they
    waited."""
    parts = look.values[:, :, look.places(columns)].sum(axis=2)
    parts[_WAITS] = 0.0
    return [
        Span(
            int(look.whole.start_ns[row, columns[0]]),
            int(look.whole.end_ns[row, columns[-1]]),
            dict(zip(THREAD_PARTS, parts[:, row].tolist(), strict=True)),
        )
        for row in rows
    ]


def _calm(look: _Look, window: list[int]) -> bool:
    series = look.whole.series_ms
    around = (series[max(0, window[0] - STOOD_STEPS) : window[0]], series[window[-1] + 1 :][:STOOD_STEPS])
    return all(not len(some) or np.median(some) <= _LONG * look.usual_ms for some in around)


def _usual(evidence: Evidence, whole: Steps, rows: list[int], window: list[int]) -> bool:
    """Whether the steps in which ranks waited hold as many collectives, of all communicators, as others do."""
    for row in rows[:_LOOKED_AT]:
        seen = np.flatnonzero(whole.seen[row])
        held = _held(evidence.ranks[whole.ranks[row]], whole.start_ns[row, seen], whole.end_ns[row, seen])
        for count in held[np.isin(seen, window)]:
            if np.mean(held == count) < RARE_COLLECTIVES:
                return False
    return True


def _held(rank: RankEvidence, start_ns: Ints, end_ns: Ints) -> Ints:
    """How many collectives began in each step."""
    enter = np.sort(rank.collectives.enter_ns)
    return np.asarray(np.searchsorted(enter, end_ns) - np.searchsorted(enter, start_ns))
