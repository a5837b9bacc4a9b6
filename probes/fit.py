"""What a batch that is too large for the wire goes without, in the order in which it is missed least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from probes.records import Batch, RankBatch, Role, ThreadTime


class Smaller(NamedTuple):
    """A batch, and in words what was left out of it."""

    batch: Batch
    without: str


def smaller(batch: Batch) -> Iterator[Smaller]:
    """The batch without more and more of what explains: wakers; metrics; what threads waited for, but at each one's
    last cut; cuts of communication threads, but their last ones. Counters are cumulative: what stays holds."""
    without: list[str] = []
    for name, count, leave_out in _STEPS:
        if left_out := count(batch):
            batch = leave_out(batch)
            without.append(f"{left_out:,} {name}")
            yield Smaller(batch, ", ".join(without))


def _each_rank(change: Callable[[RankBatch], RankBatch]) -> Callable[[Batch], Batch]:
    return lambda batch: replace(batch, ranks=[change(rank) for rank in batch.ranks])


def _each_thread(change: Callable[[ThreadTime], ThreadTime]) -> Callable[[Batch], Batch]:
    return _each_rank(lambda rank: replace(rank, threads=[change(thread) for thread in rank.threads]))


def _wakers(batch: Batch) -> int:
    return sum(len(rank.wakers) for rank in batch.ranks)


def _metrics(batch: Batch) -> int:
    return len(batch.metrics) + sum(len(rank.metrics) for rank in batch.ranks)


def _without_metrics(batch: Batch) -> Batch:
    return replace(_each_rank(lambda rank: replace(rank, metrics=[]))(batch), metrics=[])


def _reasons(batch: Batch) -> int:
    threads = (thread for rank in batch.ranks for thread in rank.threads if thread.blocked_by)
    return sum(max(0, len(thread.at_ns) - 1) for thread in threads)


def _last_reasons(thread: ThreadTime) -> ThreadTime:
    """0 is read as not told: as what it was before."""
    told = {reason: [0] * (len(column) - 1) + column[-1:] for reason, column in thread.blocked_by.items()}
    return replace(thread, blocked_by=told)


def _cuts(batch: Batch) -> int:
    threads = (thread for rank in batch.ranks for thread in rank.threads if thread.role == Role.COMMUNICATION)
    return sum(max(0, len(thread.at_ns) - 1) for thread in threads)


def _last_cut(thread: ThreadTime) -> ThreadTime:
    if thread.role != Role.COMMUNICATION:
        return thread
    columns = {name: getattr(thread, name)[-1:] for name in _COLUMNS}
    told = {reason: column[-1:] for reason, column in thread.blocked_by.items()}
    return replace(thread, blocked_by=told, **columns)


_COLUMNS = tuple(
    name
    for name in ThreadTime.__struct_fields__
    if name.endswith("_ns") and name not in ("since_ns", "stolen_ns")
)
_STEPS: tuple[tuple[str, Callable[[Batch], int], Callable[[Batch], Batch]], ...] = (
    ("wakers", _wakers, _each_rank(lambda rank: replace(rank, wakers=[]))),
    ("metrics", _metrics, _without_metrics),
    ("cuts' reasons for blocking", _reasons, _each_thread(_last_reasons)),
    ("cuts of communication threads", _cuts, _each_thread(_last_cut)),
)
