"""Collectives of all ranks side by side, communicator by communicator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosis.evidence import Ints, RankEvidence
from probes.records import Communicator, Op

Bools = npt.NDArray[np.bool_]
Key = tuple[str, int, int]
"""Identity of a communicator across ranks: (uid, size, 0), or ("", size, place in the order of first use)."""

POINT_TO_POINT = (int(Op.SEND), int(Op.RECV), int(Op.RECV_ANY_SOURCE))


def is_point_to_point(op: Ints) -> Bools:
    """Which ops are sends or receives; their numbers lie side by side."""
    return np.asarray((op >= POINT_TO_POINT[0]) & (op <= POINT_TO_POINT[-1]))


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
    return _join(ranks, point_to_point=False)


def join_pairs(ranks: Mapping[int, RankEvidence]) -> dict[Key, Joined]:
    """Sends and receives within communicators of two, side by side: one's send is the other's receive, under
    one number. ``op`` is the larger of the two. In larger communicators numbers differ between ranks."""
    return {
        key: table
        for key, table in _join(ranks, point_to_point=True).items()
        if key[1] == 2 and len(table.ranks) == 2
    }


def _join(ranks: Mapping[int, RankEvidence], *, point_to_point: bool) -> dict[Key, Joined]:
    rows: dict[Key, dict[int, npt.NDArray[np.intp]]] = {}
    for rank in sorted(ranks):
        table = ranks[rank].collectives
        wanted = is_point_to_point(table.op) == point_to_point
        if not wanted.any():
            continue
        keys = communicator_keys(ranks[rank].communicators)
        if len(keys) == 1:
            rows.setdefault(keys[0], {})[rank] = np.flatnonzero(wanted)
            continue
        place = np.where(wanted, table.communicator, len(keys))
        order = np.argsort(place, kind="stable")
        bounds = np.searchsorted(place[order], np.arange(len(keys) + 1))
        for index, key in enumerate(keys):
            if bounds[index] < bounds[index + 1]:
                rows.setdefault(key, {})[rank] = order[bounds[index] : bounds[index + 1]]
    return {key: _join_one(key, ranks, members) for key, members in rows.items()}


def _join_one(
    key: Key, ranks: Mapping[int, RankEvidence], members: dict[int, npt.NDArray[np.intp]]
) -> Joined:
    names = tuple(sorted(members))
    seqs = [ranks[rank].collectives.seq[members[rank]] for rank in names]
    seq = seqs[0] if bool((np.diff(seqs[0]) > 0).all()) else np.unique(seqs[0])
    if not all(len(one) == len(seq) and np.array_equal(one, seq) for one in seqs):
        seq = np.unique(np.concatenate(seqs))
    shape = (len(names), len(seq))
    enter, duration = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    seen = np.zeros(shape, np.bool_)
    # Where ranks disagree (or one could not read the size) the largest is taken: the same whoever is rank 0.
    op, size = np.full(len(seq), -1, np.int64), np.full(len(seq), -1, np.int64)
    for row, rank in enumerate(names):
        table, found = ranks[rank].collectives, members[rank]
        column = np.searchsorted(seq, seqs[row])
        enter[row, column], duration[row, column], seen[row, column] = (
            table.enter_ns[found],
            table.duration_ns[found],
            True,
        )
        op[column] = np.maximum(op[column], table.op[found])
        size[column] = np.maximum(size[column], table.bytes[found])
    return Joined(key, names, seq, op, size, enter, duration, seen)
