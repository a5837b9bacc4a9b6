"""Which collective of one rank is which of another, where traces do not number them.

Two ranks' recordings need not begin at the same collective, and kernels may have been sampled: then the n-th of
one rank is not the n-th of the other, and pairing them would blame somebody for nothing. Collectives are paired by
their order within a profiler step (PyTorch counts steps alike on all ranks), and only in groups in which all ranks
show the same operations of the same sizes in every step that they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import sub
from statistics import median

from probes.importers.kineto_collectives import Collective
from probes.importers.kineto_rows import Rows
from probes.records import Op

_UNEVEN = (Op.ALLTOALL, Op.ALLTOALL_BASE, Op.ALLGATHER, Op.REDUCE_SCATTER, Op.GATHER, Op.SCATTER, Op.UNKNOWN)
"""Operations whose sizes may differ between ranks."""
_POINT_TO_POINT = (Op.SEND, Op.RECV, Op.RECV_ANY_SOURCE)


def number(ranks: Sequence[Rows]) -> list[str]:
    """Give every collective a sequence number per group, or −1 where it cannot be paired. Returns notes."""
    _tell_apart(ranks)
    members: dict[tuple[str, int], list[list[Collective]]] = {}
    notes = []
    for rows in ranks:
        mine: dict[int, list[Collective]] = {}
        for row in rows.collectives:
            mine.setdefault(row.group, []).append(row)
        for index, collectives in mine.items():
            group = rows.groups[index]
            # A group without name and size is nobody else's: each rank has its own.
            key = (group.name, group.size or -1 - len(members))
            members.setdefault(key, []).append(collectives)
    several = len(ranks) > 1
    unnamed = 0
    for (name, size), lists in members.items():
        if not name and size < 0 and several:
            unnamed += sum(map(_unpaired, lists))
        elif all(row.seq >= 0 for collectives in lists for row in collectives):
            continue
        elif len(lists) == 1:
            _in_order(lists[0])
        elif why := _pair(
            [[row for row in one if row.op not in _POINT_TO_POINT] for one in lists],
            all(rows.utc for rows in ranks),
        ):
            lost = sum(map(_unpaired, lists))
            where = f"process group {name}" if name else "the process group that is not recorded"
            notes.append(
                f"the traces do not number their collectives, and in {where} {why}: its {lost} collectives are not"
                " compared across ranks (newer versions of PyTorch number them)"
            )
        else:
            for collectives in lists:
                _in_order([row for row in collectives if row.op in _POINT_TO_POINT])
    if unnamed:
        notes.append(
            f"{unnamed} collectives name no process group: which of one rank is which of another is not known, so"
            " they are not compared across ranks"
        )
    return notes


def _pair(lists: list[list[Collective]], utc: bool) -> str:
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
        shapes = [[_shape(row) for row in rows] for rows in there]
        if any(one != shapes[0] for one in shapes[1:]):
            where = "" if step < 0 else f" in step {step}"
            return f"the ranks show different collectives{where} (sampled, or recorded at other times)"
        for rows in there:
            numbered += [(row, at + place) for place, row in enumerate(rows)]
        at += len(there[0])
    for collectives in lists:
        _unpaired(collectives)
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


def _in_order(rows: list[Collective]) -> None:
    for seq, row in enumerate(rows):
        row.seq = seq


def _unpaired(rows: list[Collective]) -> int:
    for row in rows:
        row.seq = -1
    return len(rows)


def _tell_apart(ranks: Sequence[Rows]) -> None:
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
                rows.groups[at] = type(group)(name, group.desc, group.size, group.ranks)
