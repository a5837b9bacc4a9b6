"""Which collective of one rank is which of another, where traces do not number them.

Two ranks' recordings need not begin at the same collective, and kernels may have been sampled: then the n-th of
one rank is not the n-th of the other, and pairing them would blame somebody for nothing. Collectives are paired by
their order within a profiler step (PyTorch counts steps alike on all ranks), and only in groups in which all ranks
show the same operations of the same sizes in every step that they have in common. What cannot be paired goes to a
communicator of the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import sub
from statistics import median

from probes.importers.kineto_collectives import Collective
from probes.importers.kineto_columns import Group
from probes.records import Op

_UNEVEN = (Op.ALLTOALL, Op.ALLTOALL_BASE, Op.ALLGATHER, Op.REDUCE_SCATTER, Op.GATHER, Op.SCATTER, Op.UNKNOWN)
"""Operations whose sizes may differ between ranks."""
_POINT_TO_POINT = (Op.SEND, Op.RECV, Op.RECV_ANY_SOURCE)


@dataclass
class Recorded:
    """One rank in all its files, which share one list of groups."""

    rank: int
    utc: bool
    groups: list[Group]
    collectives: list[Collective]
    """In order of time."""


@dataclass
class _Share:
    """What one rank shows of one group."""

    of: Recorded
    group: int
    collectives: list[Collective]


def number(ranks: Sequence[Recorded]) -> list[str]:
    """Give every collective a sequence number in its group; move what cannot be paired to a group of its rank
    alone. Returns notes."""
    _tell_apart(ranks)
    groups: dict[tuple[str, int, bool], list[_Share]] = {}
    for one in ranks:
        mine: dict[tuple[int, bool], list[Collective]] = {}
        for row in one.collectives:
            mine.setdefault((row.group, row.op in _POINT_TO_POINT), []).append(row)
        for (index, between_two), collectives in mine.items():
            group = one.groups[index]
            key = (group.name, group.size, between_two)
            groups.setdefault(key, []).append(_Share(one, index, collectives))
    notes, unknown = [], 0
    for (name, size, between_two), shares in groups.items():
        lists = [share.collectives for share in shares]
        if not name and not size:
            unknown += sum(_alone(share, share.collectives) for share in shares)
            continue
        if all(row.seq >= 0 for rows in lists for row in rows):
            continue
        if len(shares) == 1:
            _in_order(lists[0])
            continue
        if between_two:
            why = "" if size == 2 and not _pair(lists, lambda row: (0, 0), utc=False) else "between two"
        else:
            why = _pair(lists, _shape, utc=all(one.utc for one in ranks))
        lost = sum(
            _alone(share, [row for row in share.collectives if why or row.seq < 0]) for share in shares
        )
        if why and not between_two:
            where = f"process group {name}" if name else "the process group that is not recorded"
            notes.append(
                f"the traces do not number their collectives, and in {where} {why}: its {lost} collectives are not"
                " compared across ranks (newer versions of PyTorch number them)"
            )
    if unknown and len(ranks) > 1:
        notes.append(
            f"{unknown} collectives name no process group: which of one rank is which of another is not known, so"
            " they are not compared across ranks"
        )
    return notes


def _pair(lists: list[list[Collective]], shape: Callable[[Collective], tuple[int, int]], *, utc: bool) -> str:
    """Number the rows alike on all ranks; or say why not, in words."""
    steps = [{row.step for row in collectives} - {-1} for collectives in lists]
    common = sorted(set.intersection(*steps))
    if not common:
        if any(steps):
            return "the ranks have no profiler step in common"
        if not utc or not _at_once(lists):
            return "nothing says where the recordings of the ranks begin (no profiler steps)"
        common = [-1]
    at = 0
    numbered: list[tuple[Collective, int]] = []
    before = common[0] - 1
    for step in common:
        at += step - before > 1  # a hole: nothing spans steps that not all ranks have
        before = step
        there = [[row for row in collectives if row.step == step] for collectives in lists]
        shapes = [list(map(shape, rows)) for rows in there]
        if any(one != shapes[0] for one in shapes[1:]):
            where = "" if step < 0 else f" in step {step}"
            return f"the ranks show different collectives{where} (sampled, or recorded at other times)"
        for rows in there:
            numbered += [(row, at + place) for place, row in enumerate(rows)]
        at += len(there[0])
    for row in chain.from_iterable(lists):
        row.seq = -1
    for row, seq in numbered:
        row.seq = seq
    return ""


def _at_once(lists: list[list[Collective]]) -> bool:
    """Whether the n-th ends of all ranks lie closer together than the ends of one rank do: recordings that begin at
    different collectives of a pattern that repeats look alike, but not at the same time."""
    ends = [[row.enter_ns + row.duration_ns for row in collectives] for collectives in lists]
    if len({len(one) for one in ends}) > 1 or len(ends[0]) < 2:
        return False
    apart = median(after - before for before, after in pairwise(ends[0]))
    return all(abs(median(map(sub, one, ends[0]))) < apart / 2 for one in ends[1:])


def _shape(row: Collective) -> tuple[int, int]:
    return row.op, -1 if row.op in _UNEVEN else row.bytes


def _in_order(collectives: list[Collective]) -> None:
    for seq, row in enumerate(collectives):
        row.seq = seq


def _alone(share: _Share, moved: list[Collective]) -> int:
    """Move collectives to a group of their rank alone; how many they are."""
    if not moved:
        return 0
    groups, rank = share.of.groups, share.of.rank
    group = groups[share.group]
    own = Group(f"{group.name or group.desc}, as rank {rank} alone recorded it", group.desc, 1, (rank,))
    if not group.name and not group.size:
        groups[share.group] = own
    elif own not in groups:
        groups.append(own)
    place = groups.index(own)
    for row in moved:
        row.group = place
    _in_order([row for row in share.of.collectives if row.group == place])
    return len(moved)


def _tell_apart(ranks: Sequence[Recorded]) -> None:
    """Groups of one name and other ranks are other groups (libraries that count names per rank): put their ranks
    into the name."""
    known: dict[str, set[tuple[int, ...]]] = {}
    for rows in ranks:
        for group in rows.groups:
            if group.name and group.ranks:
                known.setdefault(group.name, set()).add(group.ranks)
    for rows in ranks:
        for at, group in enumerate(rows.groups):
            if len(known.get(group.name, ())) > 1:
                ranks_of = ",".join(map(str, group.ranks[:8])) or "unknown"
                name = f"{group.name} of {ranks_of}" + ("…" if len(group.ranks) > 8 else "")
                rows.groups[at] = Group(name, group.desc, group.size, group.ranks)
