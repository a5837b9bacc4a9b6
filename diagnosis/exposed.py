"""What ranks waited for inside collectives and receives, from durations alone.

All members leave a blocking collective together, so its shortest duration is the transfer, and what a member
spent beyond it was waiting for the last to come. A send and its receive are a collective of two. Where nothing can
be compared (a broadcast, a receive whose sender was not seen), what the rank's own quickest ones took is the
transfer. Clocks of two ranks are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from diagnosis.evidence import CollectiveTable, Ints, RankEvidence
from diagnosis.joined import Bools, Joined, Key, communicator_keys, is_point_to_point
from diagnosis.layers.nccl import leave_together
from probes.records import Lane, Op

RECEIVES = (int(Op.RECV), int(Op.RECV_ANY_SOURCE))
QUICKEST = 0.1
"""This quantile of a rank's own durations of one kind of transfer stands for the transfer without waiting."""


@dataclass(frozen=True)
class Exposed:
    """The exposed time of one rank in communication: disjoint pieces in order, on its own clock. Each piece first
    waits, from ``begin_ns`` to ``all_here_ns``, then transfers, to ``end_ns``. Columns of one length."""

    begin_ns: Ints
    all_here_ns: Ints
    end_ns: Ints
    place: Ints
    """Index into ``keys``."""
    op: Ints
    keys: list[Key]

    @property
    def receives(self) -> Bools:
        """Which pieces are sends or receives."""
        return is_point_to_point(self.op)


def shortest(table: Joined) -> Ints:
    """Per collective, ns: how long it took once the last member had come: the shortest duration of any member.
    −1 where fewer than two are known, or members leave at different times."""
    told = (table.durations.ended >= 2) & (leave_together(table.op) | is_point_to_point(table.op))
    return np.where(told, table.durations.shortest, -1)


def exposed_of(
    rank: RankEvidence, transfers: Mapping[tuple[Key, bool], tuple[Ints, Ints]], last_ns: int
) -> Exposed:
    """``transfers``: per communicator, and whether these are sends and receives, sequence numbers with their
    :func:`shortest`. A collective whose end is not known lasts until the rank enters the next, at most."""
    table = rank.collectives
    keys = communicator_keys(rank.communicators)
    order = np.argsort(table.enter_ns, kind="stable")
    transfer = _transfer(table, keys, transfers)[order]
    enter, duration = table.enter_ns[order], table.duration_ns[order]
    following = np.append(enter[1:], max(last_ns, int(enter[-1]) if len(enter) else 0))
    end = np.where(duration >= 0, enter + duration, following)
    # Overlapping ones (buckets): only what the ones before have not covered is this one's.
    before = np.concatenate([enter[:1], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    begin = np.maximum(enter, before)
    exposed = end > begin
    here = np.clip(end - transfer, begin, np.maximum(end, begin))
    return Exposed(
        begin[exposed],
        here[exposed],
        end[exposed],
        table.communicator[order][exposed],
        table.op[order][exposed],
        keys,
    )


def _transfer(
    table: CollectiveTable, keys: list[Key], transfers: Mapping[tuple[Key, bool], tuple[Ints, Ints]]
) -> Ints:
    """Per row, ns: the part of its duration that was no waiting."""
    pairwise = is_point_to_point(table.op)
    found = np.full(len(table.seq), -1, np.int64)
    for index, key in enumerate(keys):
        of_this = table.communicator == index
        for sends in (False, True):
            if (key, sends) in transfers:
                rows = np.flatnonzero(of_this & (pairwise == sends))
                seq, least = transfers[key, sends]
                place = np.minimum(np.searchsorted(seq, table.seq[rows]), len(seq) - 1)
                found[rows] = np.where(seq[place] == table.seq[rows], least[place], -1)
    alone = np.flatnonzero((found < 0) & (table.duration_ns >= 0))
    if len(alone):
        kinds = np.stack([table.communicator[alone], table.op[alone], table.bytes[alone]])
        kind = np.unique(kinds, axis=1, return_inverse=True)[1].reshape(-1)
        for number in range(int(kind.max()) + 1):
            rows = alone[kind == number]
            found[rows] = int(np.quantile(table.duration_ns[rows], QUICKEST))
    return np.clip(found, 0, np.maximum(table.duration_ns, 0))


def transfers_of(
    tables: Mapping[Key, Joined], pairs: Mapping[Key, Joined]
) -> dict[tuple[Key, bool], tuple[Ints, Ints]]:
    """What :func:`exposed_of` needs of all ranks together."""
    found = {(key, False): (table.seq, shortest(table)) for key, table in tables.items()}
    return found | {(key, True): (table.seq, shortest(table)) for key, table in pairs.items()}


def computing(rank: RankEvidence) -> tuple[Ints, Ints]:
    """Disjoint intervals, in order, in which a trace shows the rank computing; empty where none was imported."""
    table = rank.operations
    if table is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows = np.flatnonzero((table.lane == Lane.COMPUTE) & (table.duration_ns > 0))
    rows = rows[np.argsort(table.start_ns[rows], kind="stable")]
    start, end = table.start_ns[rows], np.maximum.accumulate(table.start_ns[rows] + table.duration_ns[rows])
    if not len(rows):
        return start, end
    fresh = np.flatnonzero(np.concatenate([[True], start[1:] > end[:-1]]))
    return start[fresh], end[np.append(fresh[1:] - 1, len(end) - 1)]
