"""What can be compared in the evidence: steps, which ranks, since when. Or why nothing can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from diagnosis import wording
from diagnosis.accounting import Account, account, account_collectives
from diagnosis.changes import History, history, since_as_now
from diagnosis.evidence import Evidence, RankEvidence
from diagnosis.exposed import exposed_of, transfers_of
from diagnosis.joined import Joined, Key, join_all
from diagnosis.layers.nccl import (
    Timing,
    after_last_arrival,
    ends_at_enqueue,
    lateness_per_step,
    timing,
)
from diagnosis.limits import BLOCK_STEPS, MIN_BLOCKS, STALL_MS, STALL_STEPS
from diagnosis.pairing import all_steps
from diagnosis.peers import by_node, by_switch, peer_groups
from diagnosis.permutation import canonical_order
from diagnosis.steps import Bools, Floats, Steps
from probes.records import Role, TimedBy

MIN_STEPS = MIN_BLOCKS * BLOCK_STEPS
FEW_STEPS = 4
"""A trace has few steps; from these on, what is the same in all of them is said."""
_SAMPLED = 16
"""Ranks of one job time their collectives alike: so many are looked at."""
_PAUSED = 0.5
"""A rank that spends this share of a pause on its own made the others wait, or paused like them."""


class NotComparableError(ValueError):
    """The evidence does not allow a verdict; the message says precisely what is missing."""


@dataclass(frozen=True)
class Tables:
    """Collectives, and sends and receives of pairs, of all ranks side by side."""

    joined: Mapping[Key, Joined]
    pairs: Mapping[Key, Joined]


@dataclass(frozen=True)
class Scene:
    """Arrays are ranks × steps in ms, and cover the steps of the newest level that all ``ranks`` share, since the
    last time that one of them changed against its peers."""

    steps: Steps
    tables: Tables
    series_ms: Floats
    """The job's step times over the whole window."""
    history: History
    ranks: tuple[int, ...]
    rows: list[int]
    """Rows of ``ranks`` in ``steps``."""
    columns: Bools
    """Which of the steps are compared."""
    now: Account
    before: Account | None
    """The same ranks in the baseline."""
    past: Bools | None
    """Which of the steps ``before`` covers."""
    lateness: Floats | None
    """0 in the few steps where it is not known of all; None when that is more than a tenth of them."""
    groups: list[list[int]]
    """Peers, as rows of ``now``."""
    partitions: dict[str, dict[str, list[int]]]
    """Nodes and switches with the rows of their ranks."""
    hidden_late: list[tuple[int, float]]
    """Ranks that take part in the steps and are not compared, with their mean lateness in ms."""
    left_out: list[str]
    """Ranks that were seen and are not compared, and time that belongs to no step, in words."""
    by: Literal["threads", "collectives"] = "threads"
    """What the account rests on: the times of driving threads, or timed collectives alone."""
    device_unsplit: bool = False
    """Collectives end at enqueue: the GPU's work is not told from waiting for it."""

    def growth_ms(self) -> float:
        """How much longer the job's mean step is than in the baseline; 0 without one."""
        level = self.history.baseline
        if level is None:
            return 0.0
        now = self.series_ms[self.history.current.first :]
        return float(now.mean() - self.series_ms[level.first : level.last].mean())

    def some(self, rows: Sequence[int], count: int) -> list[int]:
        """So many of the rows at most, in their order; the same ones whatever numbers the ranks have."""
        if len(rows) <= count:
            return list(rows)
        chosen = set(sorted(rows, key=self._drawn.__getitem__)[:count])
        return [row for row in rows if row in chosen]

    @cached_property
    def _drawn(self) -> dict[int, int]:
        """Row → its place in an order that means nothing."""
        return {row: place for place, row in enumerate(canonical_order(self.now.own))}

    @property
    def alone(self) -> list[int]:
        """Rows without a peer."""
        return [group[0] for group in self.groups if len(group) == 1]


def pieces(evidence: Evidence) -> tuple[Tables, list[Steps]]:
    """All steps that can be paired, in pieces that nothing bridges. Raises :class:`NotComparableError`."""
    ranks = evidence.ranks
    if not ranks:
        raise NotComparableError("no rank of this job sent anything in this window")
    if len(ranks) == 1:
        raise NotComparableError(
            f"only rank {next(iter(ranks))} was watched; a late rank shows only against others"
        )
    if not any(len(rank.collectives.seq) for rank in ranks.values()):
        raise NotComparableError(
            f"no collective was seen on any of {len(ranks)} ranks: the collectives probe may be "
            f"off (sysom doctor), or the job does not communicate"
        )
    tables = Tables(*join_all(ranks))
    found = all_steps(tables.joined, ranks, tables.pairs)
    if not found:
        seen = max((len(table.seq) for table in tables.joined.values()), default=0)
        raise NotComparableError(
            f"no repeating pattern in the collectives ({seen} on the busiest communicator): "
            f"the window is too short, or the job does not train in steps"
        )
    return tables, found


def observe(evidence: Evidence, tables: Tables, steps: Steps) -> Scene:
    """One piece of the job. Raises :class:`NotComparableError`."""
    ranks = evidence.ranks
    left_out = [
        f"rank {rank} took part in no step on the common communicator: not compared"
        for rank in sorted(set(ranks) - set(steps.ranks))
    ]
    timed = _timing(tables, steps)
    by = _rests_on(ranks, steps)
    full = _account(ranks, tables, steps, timed.after_last_ms, by)
    unsplit = by == "threads" and _most_end_at_enqueue(ranks, steps)
    if unsplit:
        full = _unsplit(full)
    left_out += _unaccounted(ranks, steps, full)
    series = steps.series_ms
    left_out += _beside_steps(ranks, tables, steps, by, float(series.sum()))
    least = FEW_STEPS if by == "collectives" and len(series) < MIN_STEPS else MIN_STEPS
    if len(series) < least:
        raise NotComparableError(f"{len(series)} steps seen, {MIN_STEPS} are needed: watch longer")
    _check_stall(evidence, steps, series)
    past = history(series)
    newest = np.arange(steps.count) >= past.current.first
    rows, columns, dropped = _common(full, newest, least)
    left_out += dropped
    now = full.select(rows, columns)
    place_of = {rank: row for row, rank in enumerate(now.ranks)}
    groups = [
        [place_of[rank] for rank in group if rank in place_of]
        for group in peer_groups(ranks, steps)
        if any(rank in place_of for rank in group)
    ]
    if past.drift is None and (changed := _since_as_now(now, groups)):
        first = int(np.flatnonzero(columns)[changed])
        newest &= np.arange(steps.count) >= first
        columns = columns & newest
        now = full.select(rows, columns)
        left_out.append(
            f"a rank became slower or faster than its peers at "
            f"{wording.to_the_second(wording.instant(_median_start(steps, first)))}: only the "
            f"{int(columns.sum()):,} steps since then are compared"
        )
    before, earlier = None, None
    if past.baseline is not None:
        place = np.arange(steps.count)
        shared = (place >= past.baseline.first) & (place < past.baseline.last) & full.seen[rows].all(axis=0)
        if shared.sum() >= least:
            before, earlier = full.select(rows, shared), shared
    late, known = timed.late_ms, timed.known
    compared = set(rows)
    hidden_late = [
        (rank, float(late[row, known[row] & newest].mean()))
        for row, rank in enumerate(steps.ranks)
        if row not in compared and (known[row] & newest).any()
    ]
    if len(rows) < len(steps.ranks):
        late, known = late[rows], known[rows]
    late, known_by_all = late[:, columns], known[:, columns].all(axis=0)
    return Scene(
        steps=steps,
        tables=tables,
        series_ms=series,
        history=past,
        ranks=now.ranks,
        rows=rows,
        columns=columns,
        now=now,
        before=before,
        past=earlier,
        lateness=np.where(known_by_all, late, 0.0) if known_by_all.mean() > 0.9 else None,
        groups=groups,
        partitions={"node": by_node(ranks, now.ranks), "switch": by_switch(ranks, now.ranks)},
        hidden_late=hidden_late,
        left_out=left_out,
        by=by,
        device_unsplit=unsplit,
    )


def _since_as_now(now: Account, groups: list[list[int]]) -> int:
    """The first of the compared steps from which on peers stand to each other as they do now."""
    step_ms = float(np.median(now.wall))
    return max((since_as_now(step_ms, now.own[group]) for group in groups), default=0)


def _timing(tables: Tables, steps: Steps) -> Timing:
    table = tables.joined.get(steps.communicator)
    if table is None or set(table.ranks) != set(steps.ranks) or (steps.seq < 0).any() or steps.given:
        return timing(tables.joined.values(), steps)
    late, known = lateness_per_step(table, steps)
    return Timing(late, known, after_last_arrival(table, steps))


def _rests_on(ranks: Mapping[int, RankEvidence], steps: Steps) -> Literal["threads", "collectives"]:
    """Threads where any was watched, and where agents watch: without them something is amiss there."""
    mine = [ranks[rank] for rank in steps.ranks]
    if any(thread.role == Role.DRIVING and len(thread.at_ns) > 1 for rank in mine for thread in rank.threads):
        return "threads"
    imported = [rank for rank in mine if rank.source != "agent" or rank.timed_by == TimedBy.DEVICE]
    if not imported:
        return "threads"
    if _most_end_at_enqueue(ranks, steps):
        raise NotComparableError(
            "collectives were timed by the host, and NCCL's end there when they are enqueued: they do not show who "
            "was late on the GPU (profile with CUDA activities, or use the NCCL Inspector)"
        )
    return "collectives"


def _most_end_at_enqueue(ranks: Mapping[int, RankEvidence], steps: Steps) -> bool:
    some = steps.ranks[:: max(1, len(steps.ranks) // _SAMPLED)]
    return sum(ends_at_enqueue(ranks[rank]) for rank in some) * 2 > len(some)


def _account(
    ranks: Mapping[int, RankEvidence], tables: Tables, steps: Steps, after_last_ms: Floats, by: str
) -> Account:
    if by == "threads":
        return account(ranks, steps, after_last_ms)
    transfers = transfers_of(tables.joined, tables.pairs)
    waits = {rank: exposed_of(ranks[rank], transfers, ranks[rank].last_ns) for rank in steps.ranks}
    return account_collectives(ranks, steps, waits)


def _unsplit(full: Account) -> Account:
    """Sleep is the GPU's time, working or waiting for peers; what the host does is the rank's own."""
    asleep = full.parts["blocked"] + full.parts["communication"] + full.parts["waiting"]
    zero = np.zeros_like(asleep)
    parts = full.parts | {"blocked": zero, "communication": zero, "waiting": zero, "device": asleep}
    return replace(full, parts=parts)


def _unaccounted(ranks: Mapping[int, RankEvidence], steps: Steps, full: Account) -> list[str]:
    words = []
    for row, rank in enumerate(steps.ranks):
        if not full.seen[row].any():
            watched = any(thread.role == Role.DRIVING for thread in ranks[rank].threads)
            why = (
                "its steps are not covered by its thread times"
                if watched
                else "its driving thread was not watched"
            )
            words.append(f"rank {rank}: {why}, so its own time is not known")
    return words


def _beside_steps(
    ranks: Mapping[int, RankEvidence], tables: Tables, steps: Steps, by: str, whole: float
) -> list[str]:
    """Pauses and stretches with another pattern, which are no steps, in words."""
    words = []
    if steps.others and steps.other_ms > max(0.02 * whole, 1000.0):
        words.append(
            f"{wording.ms(steps.other_ms)} in {steps.others} {'stretch' if steps.others == 1 else 'stretches'} "
            "between steps are no training steps: other collectives (an evaluation, a change of the pattern), or "
            "some that were lost"
        )
    if steps.pauses is not None:
        paused = steps.pauses
        longest = paused.series_ms
        full = _account(ranks, tables, paused, np.full(paused.count, np.inf), by)
        busy = [
            rank
            for row, rank in enumerate(paused.ranks)
            if full.seen[row].any()
            and full.own[row][full.seen[row]].sum() > _PAUSED * full.wall[row][full.seen[row]].sum()
        ]
        text = (
            f"a pause of {wording.ms(float(longest[0]))}"
            if paused.count == 1
            else f"{paused.count} pauses of {wording.ms(float(np.median(longest)))}"
        )
        begin = wording.to_the_second(wording.instant(_median_start(paused, 0)))
        text += f" ({'at' if paused.count == 1 else 'the first at'} {begin}): not counted as steps"
        if 0 < len(busy) < len(paused.ranks) / 2:
            text += (
                f"; {wording.ranks(busy)} was busy there (a checkpoint?) or stood still, the others waited"
            )
        words.append(text)
    return words


def _median_start(steps: Steps, column: int) -> int:
    """When a step of the job began: the lower median over ranks, so that one wrong clock does no harm."""
    starts = np.sort(steps.start_ns[steps.seen[:, column], column])
    return int(starts[(len(starts) - 1) // 2])


def _check_stall(evidence: Evidence, steps: Steps, series: Floats) -> None:
    silent = []
    seen = np.asarray(steps.seen.any(axis=1))
    for rank, any_seen, end_ns in zip(steps.ranks, seen, steps.spans[1], strict=True):
        if any_seen and not evidence.ranks[rank].ended and evidence.ranks[rank].source == "agent":
            silent.append((evidence.ranks[rank].last_ns - end_ns) / 1e6)
    if silent and min(silent) > max(STALL_MS, STALL_STEPS * float(np.median(series))):
        gone = sorted(rank for rank, life in evidence.ranks.items() if life.ended)
        tail = f"; {wording.ranks(gone)} ended" if gone else ""
        raise NotComparableError(
            f"no step has ended for {min(silent) / 1000:.0f} s: the job stands still, paused or hung, "
            f"and the steps before say nothing about that{tail}"
        )


def _common(full: Account, newest: Bools, least: int) -> tuple[list[int], Bools, list[str]]:
    """The most ranks that share enough steps: those with the fewest steps are left out first."""
    rows = [row for row in range(len(full.ranks)) if (full.seen[row] & newest).any()]
    seen_by = {row: int((full.seen[row] & newest).sum()) for row in rows}
    dropped: list[int] = []
    while len(rows) > 1:
        columns: Bools = full.seen[rows].all(axis=0) & newest
        if columns.sum() >= least:
            words = [
                f"rank {full.ranks[row]} was watched in {seen_by[row]} of {int(newest.sum())} steps: "
                f"not compared"
                for row in sorted(dropped)
            ]
            return rows, columns, words
        fewest = min(seen_by[row] for row in rows)
        dropped += [row for row in rows if seen_by[row] == fewest]
        rows = [row for row in rows if seen_by[row] > fewest]
    if not seen_by:
        raise NotComparableError(
            "thread times were seen of no rank: is the thread-time probe on (sysom doctor)?"
        )
    if len(seen_by) == 1:
        only = full.ranks[next(iter(seen_by))]
        raise NotComparableError(f"thread times were seen of rank {only} only: nothing to compare it with")
    counts = ", ".join(f"rank {full.ranks[row]}: {count}" for row, count in sorted(seen_by.items()))
    raise NotComparableError(f"no two ranks share {least} watched steps ({counts}): watch longer")
