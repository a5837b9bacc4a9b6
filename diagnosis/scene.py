"""What can be compared in the evidence: steps, which ranks, since when. Or why nothing can be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis import wording
from diagnosis.accounting import Account, account
from diagnosis.changes import History, history
from diagnosis.evidence import Evidence
from diagnosis.layers.nccl import after_last_arrival, lateness_per_step
from diagnosis.limits import BLOCK_STEPS, MIN_BLOCKS, STALL_MS, STALL_STEPS
from diagnosis.peers import peer_groups
from diagnosis.steps import Bools, Floats, Steps, find_steps, join, median_where
from probes.records import Role

MIN_STEPS = MIN_BLOCKS * BLOCK_STEPS


class NotComparableError(ValueError):
    """The evidence does not allow a verdict; the message says precisely what is missing."""


@dataclass(frozen=True)
class Scene:
    """Arrays are ranks × steps in ms, and cover the steps of the newest level that all ``ranks`` share."""

    steps: Steps
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
    lateness: Floats | None
    """0 in the few steps where it is not known of all; None when that is more than a tenth of them."""
    groups: list[list[int]]
    """Peers, as rows of ``now``."""
    hidden_late: list[tuple[int, float]]
    """Ranks that take part in the steps and are not compared, with their mean lateness in ms."""
    left_out: list[str]
    """Ranks that were seen and are not compared, in words."""

    def growth_ms(self) -> float:
        """How much longer the job's mean step is than in the baseline; 0 without one."""
        level = self.history.baseline
        if level is None:
            return 0.0
        now = self.series_ms[self.history.current.first :]
        return float(now.mean() - self.series_ms[level.first : level.last].mean())


def observe(evidence: Evidence) -> Scene:
    """Raises :class:`NotComparableError`."""
    ranks = evidence.ranks
    if not ranks:
        raise NotComparableError("no rank of this job sent anything in this window")
    if len(ranks) == 1:
        raise NotComparableError(
            f"only rank {next(iter(ranks))} was watched; a late rank shows only against others"
        )
    if not any(len(rank.collectives.seq) for rank in ranks.values()):
        raise NotComparableError(
            f"no collective was seen on any of {len(ranks)} ranks: is the collectives probe on "
            f"(sysom doctor), and does the job communicate?"
        )
    joined = join(ranks)
    steps = find_steps(joined)
    if steps is None:
        seen = max(len(table.seq) for table in joined.values()) if joined else 0
        raise NotComparableError(
            f"no repeating pattern in the collectives ({seen} on the busiest communicator): "
            f"the window is too short, or the job does not train in steps"
        )
    left_out = [
        f"rank {rank} took part in no step on the common communicator: not compared"
        for rank in sorted(set(ranks) - set(steps.ranks))
    ]
    table = joined[steps.communicator]
    full = account(ranks, steps, after_last_arrival(table, steps))
    for row, rank in enumerate(steps.ranks):
        if not full.seen[row].any():
            watched = any(thread.role == Role.DRIVING for thread in ranks[rank].threads)
            why = (
                "its steps are not covered by its thread times"
                if watched
                else "its driving thread was not watched"
            )
            left_out.append(f"rank {rank}: {why}, so its own time is not known")
    series = _series(steps)
    if len(series) < MIN_STEPS:
        raise NotComparableError(f"{len(series)} steps seen, {MIN_STEPS} are needed: watch longer")
    _check_stall(evidence, steps, series)
    past = history(series)
    newest = np.arange(steps.count) >= past.current.first
    rows, columns, dropped = _common(full, newest)
    left_out += dropped
    now = full.select(rows, columns)
    before = None
    if past.baseline is not None:
        place = np.arange(steps.count)
        shared = (place >= past.baseline.first) & (place < past.baseline.last) & full.seen[rows].all(axis=0)
        if shared.sum() >= MIN_STEPS:
            before = full.select(rows, shared)
    late, known = lateness_per_step(table, steps)
    hidden_late = [
        (rank, float(late[row, known[row] & newest].mean()))
        for row, rank in enumerate(steps.ranks)
        if row not in rows and (known[row] & newest).any()
    ]
    late, known_by_all = late[rows][:, columns], known[rows][:, columns].all(axis=0)
    groups = [
        [now.ranks.index(rank) for rank in group if rank in now.ranks] for group in peer_groups(ranks, steps)
    ]
    return Scene(
        steps=steps,
        series_ms=series,
        history=past,
        ranks=now.ranks,
        rows=rows,
        columns=columns,
        now=now,
        before=before,
        lateness=np.where(known_by_all, late, 0.0) if known_by_all.mean() > 0.9 else None,
        groups=groups,
        hidden_late=hidden_late,
        left_out=left_out,
    )


def _series(steps: Steps) -> Floats:
    """The job's step times: the median over the ranks that saw the step, ms."""
    return median_where(steps.wall_ms(), steps.seen)


def _check_stall(evidence: Evidence, steps: Steps, series: Floats) -> None:
    silent = []
    for row, rank in enumerate(steps.ranks):
        ends = steps.end_ns[row, steps.seen[row]]
        if len(ends) and not evidence.ranks[rank].ended:
            silent.append((evidence.ranks[rank].last_ns - int(ends.max())) / 1e6)
    if silent and min(silent) > max(STALL_MS, STALL_STEPS * float(np.median(series))):
        gone = sorted(rank for rank, life in evidence.ranks.items() if life.ended)
        tail = f"; {wording.ranks(gone)} ended" if gone else ""
        raise NotComparableError(
            f"no step has ended for {min(silent) / 1000:.0f} s: the job stands still, paused or hung, "
            f"and the steps before say nothing about that{tail}"
        )


def _common(full: Account, newest: Bools) -> tuple[list[int], Bools, list[str]]:
    """The most ranks that share enough steps: those with the fewest steps are left out first."""
    rows = [row for row in range(len(full.ranks)) if (full.seen[row] & newest).any()]
    seen_by = {row: int((full.seen[row] & newest).sum()) for row in rows}
    dropped: list[int] = []
    while len(rows) > 1:
        columns: Bools = full.seen[rows].all(axis=0) & newest
        if columns.sum() >= MIN_STEPS:
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
    raise NotComparableError(f"no two ranks share {MIN_STEPS} watched steps ({counts}): watch longer")
