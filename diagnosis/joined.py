"""Collectives of all ranks side by side, communicator by communicator."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from diagnosis.evidence import Ints, RankEvidence
from probes.records import Communicator, Op

Bools = npt.NDArray[np.bool_]
Key = tuple[str, int, int]
"""Identity of a communicator across ranks: (uid, size, 0), or ("", size, place in the order of first use)."""

_Rows = npt.NDArray[np.intp] | slice
"""Of a rank's table."""

AT_ONCE = 32
"""Ranks whose collectives are worked on at a time: some hundred KiB, which stay in a core's cache."""

POINT_TO_POINT = (int(Op.SEND), int(Op.RECV), int(Op.RECV_ANY_SOURCE))


def is_point_to_point(op: Ints) -> Bools:
    """Which ops are sends or receives; their numbers lie side by side."""
    return np.asarray((op >= POINT_TO_POINT[0]) & (op <= POINT_TO_POINT[-1]))


@dataclass(frozen=True)
class Durations:
    """Of all ranks together; per collective."""

    ended: Ints
    """How many ranks saw it end."""
    shortest: Ints
    """ns; the largest number there is where none did."""
    longest: Ints
    """ns; −1 where none did."""
    overlaps: Bools
    """Whether (all but the first) it begins before the one ahead of it has ended. One rank that did not wait is
    enough: all run the same code, and the late one sees short durations."""


@dataclass(frozen=True)
class Joined:
    """All collectives of one communicator: one column per sequence number, one row per rank."""

    key: Key
    ranks: tuple[int, ...]
    seq: Ints
    op: Ints
    bytes: Ints
    enter_ns: Ints
    duration_ns: Ints
    """−1 where it has not ended or was not seen."""
    seen: Bools

    def known(self, rows: slice = slice(None)) -> Bools:
        """Which collectives ranks saw end; ranks × collectives."""
        return np.asarray(self.seen[rows] & (self.duration_ns[rows] >= 0))

    @cached_property
    def durations(self) -> Durations:
        count = len(self.seq)
        ended, overlaps = np.zeros(count, np.int64), np.zeros(max(0, count - 1), np.bool_)
        most = np.iinfo(np.int64).max
        shortest, longest = np.full(count, most), np.full(count, -1)
        for first in range(0, len(self.ranks), AT_ONCE):
            rows = slice(first, first + AT_ONCE)
            known, duration, enter = self.known(rows), self.duration_ns[rows], self.enter_ns[rows]
            ended += known.sum(axis=0)
            within = enter[:, 1:] < enter[:, :-1] + duration[:, :-1]
            np.maximum(longest, duration.max(axis=0), out=longest)
            if not known.all():
                duration = np.where(known, duration, most)
                within &= known[:, :-1] & self.seen[rows, 1:]
            np.minimum(shortest, duration.min(axis=0), out=shortest)
            overlaps |= within.any(axis=0)
        return Durations(ended, shortest, longest, overlaps)


def communicator_keys(communicators: list[Communicator]) -> list[Key]:
    """Key of each communicator of one rank, by index."""
    unknown: dict[int, int] = {}
    keys: list[Key] = []
    for communicator in communicators:
        if communicator.uid:
            keys.append((communicator.uid, communicator.size, 0))
        else:
            keys.append(("", communicator.size, unknown.get(communicator.size, 0)))
            unknown[communicator.size] = unknown.get(communicator.size, 0) + 1
    return keys


def join(ranks: Mapping[int, RankEvidence]) -> dict[Key, Joined]:
    """The collectives of all ranks side by side, per communicator; without send and recv, whose numbers
    differ between ranks."""
    return join_all(ranks)[0]


def join_pairs(ranks: Mapping[int, RankEvidence]) -> dict[Key, Joined]:
    """Sends and receives within communicators of two, side by side: one's send is the other's receive, under
    one number. ``op`` is the larger of the two. In larger communicators numbers differ between ranks."""
    return join_all(ranks)[1]


def join_all(ranks: Mapping[int, RankEvidence]) -> tuple[dict[Key, Joined], dict[Key, Joined]]:
    """:func:`join` and :func:`join_pairs` in one pass."""
    collectives: dict[Key, dict[int, _Rows]] = {}
    pairs: dict[Key, dict[int, _Rows]] = {}
    for rank in sorted(ranks):
        table = ranks[rank].collectives
        if not len(table.op):
            continue
        keys = communicator_keys(ranks[rank].communicators)
        sends = is_point_to_point(table.op)
        if len(keys) == 1 and not sends.any():
            collectives.setdefault(keys[0], {})[rank] = slice(None)
            continue
        # Stable: within a communicator, and a kind, rows keep their order.
        place = table.communicator + len(keys) * sends
        order = np.argsort(place, kind="stable")
        bounds = np.searchsorted(place[order], np.arange(2 * len(keys) + 1)).tolist()
        for index, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first < last:
                found = collectives if index < len(keys) else pairs
                found.setdefault(keys[index % len(keys)], {})[rank] = order[first:last]
    return (
        {key: _join_one(key, ranks, members) for key, members in collectives.items()},
        {
            key: _join_one(key, ranks, members)
            for key, members in pairs.items()
            if key[1] == 2 and len(members) == 2
        },
    )


def _join_one(key: Key, ranks: Mapping[int, RankEvidence], members: dict[int, _Rows]) -> Joined:
    names = tuple(sorted(members))
    seqs = [ranks[rank].collectives.seq[members[rank]] for rank in names]
    seq = seqs[0] if bool((seqs[0][1:] > seqs[0][:-1]).all()) else np.unique(seqs[0])
    alike = all(len(one) == len(seq) and np.array_equal(one, seq) for one in seqs)
    if not alike:
        seq = np.unique(np.concatenate(seqs))
    shape = (len(names), len(seq))
    if alike:
        enter, duration, seen = np.empty(shape, np.int64), np.empty(shape, np.int64), np.ones(shape, np.bool_)
    else:
        enter, duration, seen = (
            np.zeros(shape, np.int64),
            np.full(shape, -1, np.int64),
            np.zeros(shape, np.bool_),
        )
    # Where ranks disagree (or one could not read the size) the largest is taken: the same whoever is rank 0.
    op, size = np.full(len(seq), -1, np.int64), np.full(len(seq), -1, np.int64)
    for row, rank in enumerate(names):
        table, found = ranks[rank].collectives, members[rank]
        if alike:
            enter[row], duration[row] = table.enter_ns[found], table.duration_ns[found]
            np.maximum(op, table.op[found], out=op)
            np.maximum(size, table.bytes[found], out=size)
        else:
            column = np.searchsorted(seq, seqs[row])
            enter[row, column], duration[row, column] = table.enter_ns[found], table.duration_ns[found]
            seen[row, column] = True
            op[column] = np.maximum(op[column], table.op[found])
            size[column] = np.maximum(size[column], table.bytes[found])
    return Joined(key, names, seq, op, size, enter, duration, seen)
