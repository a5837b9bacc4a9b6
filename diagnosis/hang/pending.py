"""What is pending on whom: the collectives that have not ended, and which members of each came, are elsewhere, or
did not come. Facts only; :mod:`diagnosis.hang.find` concludes from them.

A snapshot (a Flight Recorder dump) has no clock of its own: whatever had not ended when it was written is pending.
Agents tell how long something has been pending, and only what is pending for long counts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from diagnosis.evidence import Evidence, RankEvidence
from diagnosis.joined import Key, communicator_keys
from probes.records import Op, State

PATIENCE_NS = 30_000_000_000
"""A collective that agents see pending for less than this may be slow: a retried read, a connection that is made
anew, garbage collection take seconds."""
PATIENCE_PAUSES = 3
"""… or for less than this many times the longest pause that the job made before: a checkpoint or an evaluation that
came once comes again, and may take longer."""
PATIENCE_STEPS = 20
"""… or for less than this many usual gaps between collectives (as ``limits.STALL_STEPS``)."""
PATIENCE_NEW_NS = 300_000_000_000
"""Of a job with fewer than ``HISTORY`` collectives nothing usual is known: compiling, reading a checkpoint and
setting up communicators take minutes. Half of NCCL's own patience (600 s)."""
HISTORY = 10
PATIENCE_ENDED_NS = 10_000_000_000
"""When the process that is waited for has ended, nothing can come any more; this is for news on their way."""

CROSSING = frozenset({Op.SEND, Op.RECV, Op.RECV_ANY_SOURCE})
SYNCHRONISING = frozenset(
    {
        Op.ALLREDUCE,
        Op.ALLREDUCE_COALESCED,
        Op.ALLREDUCE_SPARSE,
        Op.ALLGATHER,
        Op.ALLGATHER_BASE,
        Op.ALLGATHER_COALESCED,
        Op.REDUCE_SCATTER,
        Op.REDUCE_SCATTER_BASE,
        Op.REDUCE_SCATTER_COALESCED,
        Op.ALLTOALL,
        Op.ALLTOALL_BASE,
        Op.BARRIER,
    }
)
"""Ended on one member, these have been entered by all: each needs something of everybody."""


@dataclass(frozen=True)
class Wait:
    """One collective that has not ended on one rank, and what is known of its other members."""

    rank: int
    key: Key
    seq: int
    op: int
    bytes: int
    enter_ns: int
    started: bool
    """Its kernel runs; only where the recorder timed kernels."""
    dtype: str
    """Element type; "" where it is not known."""
    long: bool
    """Pending longer than patience (always, in a snapshot)."""
    absent: frozenset[int] = frozenset()
    """Members that did not enqueue it."""
    ended_on: frozenset[int] = frozenset()
    """Members on which it has ended; it is one of ``SYNCHRONISING``."""
    unknown: bool = False
    """Some member was not seen, or it is not known how far it is."""
    busy: bool = False
    """Some member that did not enqueue it does other things meanwhile: it is late, and may still come."""


@dataclass
class Standing:
    """How far one rank is."""

    evidence: RankEvidence
    keys: list[Key]
    """Of its communicators, by index."""
    snapshot: bool
    waits: list[Wait] = field(default_factory=list)
    """In the order in which it enqueued them; of an ended rank none."""
    enqueued: dict[Key, int] = field(default_factory=dict)
    """Highest number that it enqueued on each communicator, without sends and receives; absent: not known."""
    completed: dict[Key, int] = field(default_factory=dict)
    still: bool = True
    """It did nothing for longer than patience (always, in a snapshot)."""
    pending: set[tuple[Key, int]] = field(default_factory=set)
    """(communicator, number) of all that has not ended, however short."""
    ends: dict[tuple[Key, int], int] = field(default_factory=dict)
    """(communicator, number) → when it ended, UTC ns, where a snapshot tells."""
    timed: bool = False
    """The recorder told of some kernel that it started."""
    active_ns: int = 0
    """When it last entered a collective, or one ended on it."""

    @property
    def ended(self) -> bool:
        return self.evidence.ended


@dataclass(frozen=True)
class Queues:
    """All ranks side by side."""

    ranks: dict[int, Standing]
    members: dict[Key, tuple[int, ...]]
    """Ranks that list this communicator; where it holds the whole job, all that were seen."""
    descs: dict[Key, str]
    unseen: tuple[int, ...]
    """Ranks of the job of which there is nothing."""
    newest_ns: int
    """The newest instant that any rank tells of."""

    def name(self, key: Key) -> str:
        """The communicator in words."""
        desc = self.descs.get(key, "")
        return desc if desc not in ("", "undefined") else f"communicator {key[0] or f'of {key[1]} ranks'}"


def queues(evidence: Evidence) -> Queues:
    """What is pending on each rank, and who is missing there."""
    patience = _patience(evidence)
    newest_ns = max((rank.last_ns for rank in evidence.ranks.values()), default=0)
    ranks = {rank: _standing(seen, patience, newest_ns) for rank, seen in sorted(evidence.ranks.items())}
    members: dict[Key, list[int]] = defaultdict(list)
    descs: dict[Key, str] = {}
    for rank, standing in ranks.items():
        for key, communicator in zip(standing.keys, standing.evidence.communicators, strict=True):
            members[key].append(rank)
            descs[key] = descs.get(key) or communicator.desc
    for key, listed in members.items():
        if key[1] == evidence.world_size and len(listed) < key[1]:
            listed[:] = sorted(ranks)  # everybody is a member, also who has not used it yet
    unseen = tuple(rank for rank in range(evidence.world_size) if rank not in ranks)
    found = Queues(ranks, {key: tuple(listed) for key, listed in members.items()}, descs, unseen, newest_ns)
    crossings = {rank: _crossings(standing) for rank, standing in ranks.items()}
    known: dict[tuple[Key, int, bool, bool], _Members] = {}
    for standing in ranks.values():
        standing.waits[:] = [_with_members(wait, found, crossings, known) for wait in standing.waits]
    return found


def anything_old(evidence: Evidence) -> bool:
    """Whether :func:`queues` could find a wait that counts: for a healthy job, in some microseconds per rank."""
    return any(_has_old(rank) for rank in evidence.ranks.values())


def _has_old(rank: RankEvidence) -> bool:
    if rank.source == "flight-recorder":
        return bool(len(rank.collectives.seq))
    table = rank.collectives
    if rank.ended or not (table.duration_ns < 0).any():
        return False
    return rank.last_ns - _last_end(rank) >= PATIENCE_ENDED_NS


def _last_end(rank: RankEvidence) -> int:
    """When a collective last ended on a rank; when it was first seen, where none has."""
    table = rank.collectives
    ends = (table.enter_ns + table.duration_ns)[table.duration_ns >= 0]
    return int(ends.max()) if len(ends) else rank.first_ns


def _patience(evidence: Evidence) -> int:
    """How long something may be pending before agents' evidence calls it that, ns."""
    longest, gaps, ends = 0, [], 0
    for rank in evidence.ranks.values():
        table = rank.collectives
        done = table.duration_ns >= 0
        enter = np.sort(table.enter_ns)
        if len(enter) > 1:
            between = np.diff(enter)
            gaps.append(float(np.median(between)))
            longest = max(longest, int(between.max()))
        if done.any():
            longest = max(longest, int(table.duration_ns[done].max()))
        ends = max(ends, int(done.sum()))
    if ends < HISTORY:
        return PATIENCE_NEW_NS
    return max(PATIENCE_NS, PATIENCE_PAUSES * longest, int(PATIENCE_STEPS * np.median(gaps)) if gaps else 0)


def _standing(rank: RankEvidence, patience: int, newest_ns: int) -> Standing:
    keys = communicator_keys(rank.communicators)
    found = Standing(rank, keys, rank.source == "flight-recorder")
    table = rank.collectives
    state = table.state if len(table.state) else np.zeros(len(table.seq), np.int64)
    ended = np.where(state == State.UNKNOWN, table.duration_ns >= 0, state == State.COMPLETED)
    crossing = np.isin(table.op, list(CROSSING))
    found.timed = bool((state == State.STARTED).any()) or any(one.started >= 0 for one in rank.progress)
    last_end = _last_end(rank)
    found.active_ns = max(last_end, int(table.enter_ns.max()) if len(table.enter_ns) else 0)
    found.still = found.snapshot or rank.ended or newest_ns - found.active_ns >= patience
    for place, key in enumerate(keys):
        mine = (table.communicator == place) & ~crossing
        if mine.any():
            found.enqueued[key] = int(table.seq[mine].max())
        if (mine & ended).any():
            found.completed[key] = int(table.seq[mine & ended].max())
    for progress in rank.progress:
        key = keys[progress.communicator]
        for counter, told in ((found.enqueued, progress.enqueued), (found.completed, progress.completed)):
            if told >= 0:
                counter[key] = max(counter.get(key, -1), told)
    if found.snapshot:
        for row in np.flatnonzero(ended & (table.duration_ns >= 0)):
            name = keys[int(table.communicator[row])], int(table.seq[row])
            found.ends[name] = int(table.enter_ns[row] + table.duration_ns[row])
    if rank.ended:
        return found
    for row in np.flatnonzero(~ended & ~table.failed):
        key, seq = keys[int(table.communicator[row])], int(table.seq[row])
        # One that is open while others end is asynchronous (a checkpoint's), or its end was lost: it holds nobody.
        age = rank.last_ns - max(int(table.enter_ns[row]), last_end)
        found.pending.add((key, seq))
        if found.snapshot or age >= PATIENCE_ENDED_NS:
            found.waits.append(
                Wait(
                    rank=rank.rank,
                    key=key,
                    seq=seq,
                    op=int(table.op[row]),
                    bytes=int(table.bytes[row]),
                    enter_ns=int(table.enter_ns[row]),
                    started=bool(state[row] == State.STARTED),
                    dtype=rank.dtypes[table.dtype[row]] if len(table.dtype) else "",
                    long=found.snapshot or age >= patience,
                )
            )
    return found


_Members = tuple[frozenset[int], frozenset[int], bool, bool]
_Crossings = dict[tuple[Key, int], list[tuple[int, int]]]


def _crossings(standing: Standing) -> _Crossings:
    """Pending sends and receives by (communicator, op), as (number, when entered), in order."""
    found: _Crossings = defaultdict(list)
    for wait in standing.waits:
        if wait.op in CROSSING:
            found[wait.key, wait.op].append((wait.seq, wait.enter_ns))
    return found


def _with_members(
    wait: Wait,
    found: Queues,
    crossings: dict[int, _Crossings],
    known: dict[tuple[Key, int, bool, bool], _Members],
) -> Wait:
    listed, size = found.members[wait.key], wait.key[1]
    if size and len(listed) > size:  # several communicators look alike: nobody can be told to be missing
        return replace(wait, unknown=True)
    if wait.op in CROSSING:
        return _with_peer(wait, [rank for rank in listed if rank != wait.rank], found, crossings)
    name = (wait.key, wait.seq, wait.op in SYNCHRONISING, wait.long)
    if name not in known:
        known[name] = _members(wait, found)
    absent, ended_on, unknown, busy = known[name]
    return replace(wait, absent=absent, ended_on=ended_on - {wait.rank}, unknown=unknown, busy=busy)


def _members(wait: Wait, found: Queues) -> _Members:
    """``absent``, ``ended_on``, ``unknown`` and ``busy`` of a collective, the same for all that wait in it."""
    absent, ended_on = set(), set()
    unknown, busy = len(found.members[wait.key]) < wait.key[1], False
    for rank in found.members[wait.key]:
        other = found.ranks[rank]
        enqueued = other.enqueued.get(wait.key, None if other.snapshot else -1)
        if enqueued is None:  # a dump that does not tell; an agent that saw nothing saw that nothing came
            unknown = True
        elif enqueued < wait.seq and not other.still:
            busy = True
        elif enqueued < wait.seq and (wait.long or other.ended):
            absent.add(rank)
        ended = other.completed.get(wait.key, -1) >= wait.seq and (wait.key, wait.seq) not in other.pending
        if ended and wait.long and wait.op in SYNCHRONISING:
            ended_on.add(rank)
    return frozenset(absent), frozenset(ended_on), unknown, busy


def _with_peer(wait: Wait, others: list[int], found: Queues, crossings: dict[int, _Crossings]) -> Wait:
    """A send or receive. Its numbers differ between the two, but the n-th of one is the n-th of the other: when
    fewer are pending on the other side, the rest was not enqueued there."""
    if wait.key[1] != 2 or len(others) != 1 or wait.op == Op.RECV_ANY_SOURCE:
        return replace(wait, unknown=True)
    (peer,) = others
    opposite = Op.RECV if wait.op == Op.SEND else Op.SEND
    place = crossings[wait.rank][wait.key, wait.op].index((wait.seq, wait.enter_ns))
    other = found.ranks[peer]
    missing = place >= len(crossings[peer][wait.key, opposite]) and (wait.long or other.ended)
    absent = frozenset([peer] if missing and other.still else [])
    return replace(wait, absent=absent, busy=missing and not other.still)
