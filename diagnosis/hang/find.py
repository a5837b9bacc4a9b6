"""Whether a job hangs, and who holds it: the ranks that others wait for and that nothing makes wait.

The wait-for graph of distributed deadlock detection (Chandy, Misra and Haas, "Distributed deadlock detection",
ACM TOCS 1983) over collectives: a rank waits for every member that did not enqueue what is pending on it, and,
where all came, for those whose own queue is held up earlier. Whoever ends such a chain is the culprit; all before
it are victims. Who is missing follows from membership and counters (as in PyTorch's ``fr_trace``), not from entries
alone: a rank without entries that others expect is a culprit, not healthy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from diagnosis import wording
from diagnosis.evidence import Evidence
from diagnosis.hang import words
from diagnosis.hang.chains import chain_ends
from diagnosis.hang.pending import CROSSING, SYNCHRONISING, Queues, Wait, anything_old, queues
from diagnosis.joined import Key
from probes.records import Op

Kind = Literal[
    "never-came", "stuck-inside", "not-begun", "died", "silent", "mismatch", "order", "together", "unseen"
]
"""``never-came``: did not enqueue what others wait in. ``stuck-inside``: enqueued, and does not end what others
ended. ``not-begun``: enqueued, and its GPU has not begun what runs on the others. ``died``: its process ended.
``silent``: its agent is gone too. ``mismatch``, ``order``: ranks do not call the same. ``together``: all are inside
and nothing moves. ``unseen``: only ranks that nobody saw are left."""

LAG_ALONE = 3
"""Collectives that a rank must be behind its peers' ends when nobody is missing anywhere: PyTorch's watchdog
notices ends up to 0.1 s late, so a dump of a running job shows a few."""
NOTICED_NS = 1_000_000_000
"""Ends are noticed within this: ten of the watchdog's periods."""
LATE_SHARE = 1 / 8
"""Share of the ranks that may be stuck while the others' newest ends are that fresh, if others wait. Of fewer than
eight, none: a dump of a running job shows one behind too often."""
UNSEEN_WAITS = 2
"""Ranks that wait for unseen ones must have this many collectives pending, and be this many: one is in flight in
any dump."""

_SAME_SIZE = frozenset(
    {Op.ALLREDUCE, Op.ALLREDUCE_COALESCED, Op.REDUCE, Op.BROADCAST, Op.ALLGATHER_BASE, Op.REDUCE_SCATTER_BASE}
)
"""All members must bring as much; the others may differ by rank (all-to-all of experts, scatter, gather)."""
_UNSEEN, _DISAGREED, _BUSY = -1, -2, -3
"""What a rank waits for that is nobody to name: a rank that nobody saw; members that do not call the same; one that
does other things meanwhile."""
_ANY = frozenset({Op.UNKNOWN, Op.COALESCED})


@dataclass(frozen=True)
class Holder:
    """A rank that holds the job, and why it is that."""

    rank: int
    kind: Kind
    reason: str
    """Ends without a full stop."""
    pending: int
    """Collectives that have not ended on it."""


@dataclass(frozen=True)
class Hang:
    """A job at a standstill. Without ``holders`` nobody can be named; ``reason`` says why."""

    kind: Kind
    holders: tuple[Holder, ...]
    """By rank."""
    reason: str
    op: str
    """What is pending where the culprits are waited for, in words: ``all-reduce``."""
    communicator: str
    seq: int
    since_ns: int
    """When the first of those who wait for the culprits entered, UTC."""
    victims: dict[int, str]
    """Rank → why it is cleared."""
    unseen: tuple[int, ...]
    """Ranks that nobody saw and that others wait for: may be it too."""
    snapshot: bool
    """From dumps, which do not tell how long."""
    pending: dict[int, int]
    """Rank → collectives that have not ended on it."""


def find_hang(evidence: Evidence) -> Hang | None:
    """Who holds the job; None when nothing shows that it hangs: nothing is pending, only for a short time, or the
    dumps contradict each other as those of a running job do."""
    if not anything_old(evidence) or all(rank.ended for rank in evidence.ranks.values()):
        return None
    seen = queues(evidence)
    pending = [wait for standing in seen.ranks.values() for wait in standing.waits]
    if not pending or _moves(seen) or _unsettled(seen, pending):
        return None
    odd, ties = _disagreements(seen, pending)
    stuck = _stuck(seen, pending)
    edges = _edges(seen, stuck, odd, ties)
    if not odd and not ties and _in_flight(seen, stuck, edges):
        return None
    holders = {holder.rank: holder for key in sorted(odd, key=str) for holder in odd[key].holders}
    for rank in sorted(stuck):
        wait = next(wait for wait in seen.ranks[rank].waits if wait.ended_on)
        holders.setdefault(rank, _held(seen, rank, "stuck-inside", words.stuck_inside(seen, rank, wait)))
    for end in chain_ends(edges):
        for holder in _holders(seen, end, edges):
            holders.setdefault(holder.rank, holder)
    if all(standing.snapshot for standing in seen.ranks.values()) and 2 * len(holders) > max(
        len(seen.ranks), 2
    ):
        return None  # more than half "hold" the rest: dumps of a running job, taken one after the other
    return _hang(seen, pending, holders, edges, next(iter(ties.values()), None))


def _moves(seen: Queues) -> bool:
    """Whether something ended on one rank that another one had not yet entered: impossible at one moment, so the
    job moved while dumps were written."""
    for rank, standing in seen.ranks.items():
        if not standing.snapshot:
            continue
        table, keys = standing.evidence.collectives, standing.keys
        for place, key in enumerate(keys):
            lowest = min(
                (
                    seen.ranks[other].enqueued.get(key, 1 << 62)
                    for other in seen.members[key]
                    if other != rank
                ),
                default=1 << 62,
            )
            if standing.completed.get(key, -1) <= lowest:
                continue
            rows = (table.communicator == place) & (table.seq > lowest)
            for row in rows.nonzero()[0]:
                ended = (key, int(table.seq[row])) not in standing.pending
                if ended and int(table.op[row]) in SYNCHRONISING:
                    return True
    return False


def _unsettled(seen: Queues, pending: list[Wait]) -> bool:
    """Whether many ranks have not noticed ends that others noticed just before the dumps: at a standstill
    everybody's watchdog has had the time, so the job moved. Where nobody else waits for anything, one such rank is
    enough: nothing shows a standstill, and its dump may only have been written before the others'."""
    late = set()
    for wait in pending:
        for peer in wait.ended_on:
            ended = seen.ranks[peer].ends.get((wait.key, wait.seq))
            if ended is not None and seen.newest_ns - ended < NOTICED_NS:
                late.add(wait.rank)
    waited_for = any(wait.rank not in late for wait in pending)
    return len(late) > (int(LATE_SHARE * len(seen.ranks)) if waited_for else 0)


def _in_flight(seen: Queues, stuck: set[int], edges: dict[int, dict[int, Wait]]) -> bool:
    """Whether a rank of a dump is inside a collective whose members have all come, nothing earlier being pending on
    any of them: it is under way, and at a standstill it would have ended. So the job moved."""
    for rank, standing in seen.ranks.items():
        head = standing.waits[0] if standing.waits else None
        if head is None or not standing.snapshot or rank in stuck or edges[rank]:
            continue
        members = [seen.ranks[other] for other in seen.members[head.key]]
        came = all((head.key, head.seq) in one.pending for one in members)
        begun = standing.timed and any(one.waits and one.waits[0].started for one in members)
        if came and head.op in SYNCHRONISING and (head.started or not begun):
            return True
    return False


def _stuck(seen: Queues, pending: list[Wait]) -> set[int]:
    """Ranks that do not end what their peers ended, and are behind nobody who is behind them."""
    behind: dict[int, set[int]] = {}
    lag: Counter[int] = Counter()
    for wait in pending:
        for peer in wait.ended_on:
            behind.setdefault(wait.rank, set()).add(peer)
            steps = seen.ranks[peer].completed[wait.key] - wait.seq + 1
            lag[wait.rank] = max(lag[wait.rank], steps)
    mutual = {rank for rank, peers in behind.items() if any(rank in behind.get(peer, ()) for peer in peers)}
    found = set(behind) - mutual
    missing = any(wait.absent for wait in pending)
    return {rank for rank in found if missing or lag[rank] >= LAG_ALONE or not seen.ranks[rank].snapshot}


@dataclass(frozen=True)
class _Odd:
    """The fewer who call something else than most members at one number of one communicator."""

    seq: int
    holders: list[Holder]


def _disagreements(seen: Queues, pending: list[Wait]) -> tuple[dict[Key, _Odd], dict[Key, tuple[Wait, str]]]:
    """Per communicator on which members call different things: the fewer, or, where no side has the majority, who
    calls what, in words."""
    odd: dict[Key, _Odd] = {}
    ties: dict[Key, tuple[Wait, str]] = {}
    for calls in _first_disagreements(pending):
        ordered = sorted(_sides(calls), key=len, reverse=True)
        model = ordered[0][0]
        if len(ordered[0]) > len(ordered[1]):
            others = wording.ranks([wait.rank for wait in ordered[0]])
            calling = f"where {others} {_calls(ordered[0])} {words.call(model)}"
            at = f"at number {model.seq:,} on {seen.name(model.key)}"
            odd[model.key] = _Odd(
                model.seq,
                [
                    _held(seen, wait.rank, "mismatch", f"calls {words.call(wait)} {at}, {calling}")
                    for side in ordered[1:]
                    for wait in side
                ],
            )
        else:
            told = [
                f"{wording.ranks([w.rank for w in side])} {_calls(side)} {words.call(side[0])}"
                for side in ordered
            ]
            at = f"at number {model.seq:,} on {seen.name(model.key)}"
            ties[model.key] = model, f"{at} {wording.listed(told)}"
    return odd, ties


def _calls(side: list[Wait]) -> str:
    return "calls" if len(side) == 1 else "call"


def _first_disagreements(pending: list[Wait]) -> Iterable[list[Wait]]:
    """Per communicator the pending calls of the lowest number at which members call different things."""
    by_number: dict[tuple[object, int], list[Wait]] = {}
    for wait in pending:
        if wait.op not in _ANY and wait.op not in CROSSING and wait.key[0] and wait.long:
            by_number.setdefault((wait.key, wait.seq), []).append(wait)
    done = set()
    for (key, _), calls in sorted(by_number.items(), key=lambda item: (str(item[0][0]), item[0][1])):
        if key not in done and len(_sides(calls)) > 1:
            done.add(key)
            yield calls


def _sides(calls: list[Wait]) -> list[list[Wait]]:
    """The calls of one number, apart by op, or else by size, or else by element type. Who does not tell size or
    type is on no side where sides differ in it."""
    tells: tuple[Callable[[Wait], object], ...] = (
        lambda wait: wait.op,
        lambda wait: wait.bytes if wait.op in _SAME_SIZE and wait.bytes >= 0 else None,
        lambda wait: wait.dtype or None if wait.op != Op.BARRIER else None,
    )
    for tell in tells:
        sides: dict[object, list[Wait]] = {}
        for wait in calls:
            if (told := tell(wait)) is not None:
                sides.setdefault(told, []).append(wait)
        if len(sides) > 1:
            return list(sides.values())
    return [calls]


def _edges(
    seen: Queues, stuck: set[int], odd: dict[Key, _Odd], ties: dict[Key, tuple[Wait, str]]
) -> dict[int, dict[int, Wait]]:
    """Rank → the ranks it waits for, each with the call. Culprits of their own wait for nobody."""
    heads = {rank: standing.waits[0] for rank, standing in seen.ranks.items() if standing.waits}
    culprits = stuck | {holder.rank for one in odd.values() for holder in one.holders}
    edges: dict[int, dict[int, Wait]] = {}
    for rank, standing in seen.ranks.items():
        mine = edges[rank] = {}
        if rank in culprits:
            continue
        for wait in standing.waits:
            # Where members disagree, numbers past that do not mean the same: all wait for those who are odd.
            if wait.key in odd and wait.seq >= odd[wait.key].seq:
                mine.update(
                    {holder.rank: wait for holder in odd[wait.key].holders if holder.rank not in mine}
                )
            elif wait.key in ties and wait.seq >= ties[wait.key][0].seq:
                mine.setdefault(_DISAGREED, wait)
            else:
                for other in wait.absent:
                    mine.setdefault(other, wait)
                if wait.unknown and wait.long:
                    mine.setdefault(_UNSEEN, wait)
                if wait.busy:
                    mine.setdefault(_BUSY, wait)
        if rank in heads and not heads[rank].absent and heads[rank].long:
            for other in _held_up(heads[rank], heads, seen):
                mine.setdefault(other, heads[rank])
    return edges


def _held_up(head: Wait, heads: dict[int, Wait], seen: Queues) -> list[int]:
    """Members that came to ``head`` and are not there yet: something earlier is pending on them, or their GPU has
    not begun it though it runs here."""
    found = []
    for other in seen.members[head.key]:
        first = heads.get(other)
        if other == head.rank or first is None:
            continue
        crossing = head.op in CROSSING
        same = first.key == head.key and (crossing or first.seq == head.seq)
        if not same or (head.started and not first.started and seen.ranks[other].timed):
            found.append(other)
    return found


def _holders(seen: Queues, end: tuple[int, ...], edges: dict[int, dict[int, Wait]]) -> list[Holder]:
    """The culprits at the end of a chain: none where all came and nothing is missing."""
    missed = {
        rank: [w for other in sorted(edges) if (w := edges[other].get(rank)) is not None and rank in w.absent]
        for rank in end
    }
    if len(end) > 1:
        inside = all(any(wait.rank in end for wait in missed[rank]) for rank in end)
        return (
            [_held(seen, rank, "order", _crossed(seen, missed[rank], end)) for rank in end] if inside else []
        )
    (rank,) = end
    standing = seen.ranks[rank]
    if missed[rank]:
        told = words.never_came(seen, rank, missed[rank])
        if standing.ended:
            return [_held(seen, rank, "died", f"its process ended; it {told}")]
        if not standing.snapshot and standing.evidence.last_ns < min(w.enter_ns for w in missed[rank]):
            return [_held(seen, rank, "silent", f"nothing was heard of its node since; it {told}")]
        return [_held(seen, rank, "never-came", told)]
    runs = [w for other in sorted(edges) if (w := edges[other].get(rank)) is not None and w.started]
    if runs and standing.waits and standing.waits[0].key == runs[0].key and not standing.waits[0].started:
        others = wording.ranks([wait.rank for wait in runs])
        told = f"its GPU has not begun {words.place(seen, runs[0])}, which runs on {others}"
        return [_held(seen, rank, "not-begun", told)]
    return []


def _held(seen: Queues, rank: int, kind: Kind, reason: str) -> Holder:
    return Holder(rank, kind, reason, len(seen.ranks[rank].waits))


def _crossed(seen: Queues, missed: list[Wait], end: tuple[int, ...]) -> str:
    wait = next(wait for wait in missed if wait.rank in end)
    return (
        f"rank {wait.rank} waits for it in {words.place(seen, wait)}, and it waits, in a circle, for that "
        "rank: they do not call their collectives in one order"
    )


def _hang(
    seen: Queues,
    pending: list[Wait],
    holders: dict[int, Holder],
    edges: dict[int, dict[int, Wait]],
    tie: tuple[Wait, str] | None,
) -> Hang | None:
    snapshot = all(standing.snapshot for standing in seen.ranks.values())
    count = {rank: len(standing.waits) for rank, standing in seen.ranks.items()}
    blocked = [wait for targets in edges.values() for other, wait in targets.items() if other in holders]
    lost = [targets[_UNSEEN] for targets in edges.values() if _UNSEEN in targets]
    kind: Kind
    if holders:
        first = holders[min(holders)]
        kind, reason = first.kind, f"rank {first.rank} {first.reason}"
        blocked = blocked or [wait for wait in pending if wait.rank in holders]
    elif tie is not None:
        kind, reason, blocked = "mismatch", tie[1], [tie[0]]
    elif lost and (not snapshot or sum(count[wait.rank] >= UNSEEN_WAITS for wait in lost) >= UNSEEN_WAITS):
        kind, blocked = "unseen", lost
        whom = "ranks that were not seen" if seen.unseen else "a rank that nothing tells (a send or receive)"
        reason = f"those who wait wait for {whom}"
    elif not snapshot and (blocked := [wait for wait in pending if wait.long and _all_inside(seen, wait)]):
        kind, reason = "together", "all members are inside, and nothing moves"
    else:
        return None
    at = min(blocked, key=lambda wait: (wait.enter_ns, wait.rank))
    return Hang(
        kind=kind,
        holders=tuple(holders[rank] for rank in sorted(holders)),
        reason=reason,
        op=words.op(at.op),
        communicator=seen.name(at.key),
        seq=at.seq,
        since_ns=at.enter_ns,
        victims=_victims(seen, set(holders), edges) if holders else {},
        unseen=seen.unseen if lost else (),
        snapshot=snapshot,
        pending=count,
    )


def _all_inside(seen: Queues, wait: Wait) -> bool:
    members = seen.members[wait.key]
    inside = sum((wait.key, wait.seq) in seen.ranks[rank].pending for rank in members)
    return inside == len(members) == wait.key[1]


def _victims(seen: Queues, holders: set[int], edges: dict[int, dict[int, Wait]]) -> dict[int, str]:
    """Who waits, and for whom: a culprit before one who waits itself, that before ranks nobody saw."""
    cleared = {}
    for rank, targets in edges.items():
        if rank in holders or not seen.ranks[rank].waits:
            continue
        if targets:
            other = min(targets, key=lambda one: (one not in holders, one < 0, one))
            cleared[rank] = words.victim(seen, targets[other], other, holders)
        else:
            wait = seen.ranks[rank].waits[0]
            cleared[rank] = f"is inside {words.place(seen, wait)} with all its members"
    return cleared
