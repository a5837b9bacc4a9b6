"""Whose connections are slow, as the kernels of the ranks' nodes tell: pure numbers, no words.

In an all-reduce all wait for its slowest link alike, and nobody comes late. But data that a slow link holds up is
on its way for longer: for how long, the sender's kernel knows (``tcp_sending_ns``). What leaves a slow port waits
there, data and acknowledgements alike, so that all connections of that rank are slow, to it and from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from diagnosis.blame import matters
from diagnosis.egress import Limit, limit_of
from diagnosis.evidence import Evidence, Listed, MetricRow, RankEvidence, Rows
from diagnosis.limits import (
    ALPHA,
    EVIDENCE_PEERS,
    EXPLAINS_PART,
    FEWEST_PERMUTATIONS,
    MANY_RANKS,
    MAX_BLOCKS,
    MIN_BLOCKS,
    PERMUTATION_WORK,
    PERMUTATIONS,
    SLOW_LINK,
)
from diagnosis.scene import Scene
from diagnosis.steps import Bools, Floats

SENDING, BYTES, SEGMENTS = "tcp_sending_ns", "tcp_acknowledged_bytes", "tcp_data_segments"
AGAIN, TIMEOUTS, ROUND_TRIP = "tcp_segments_again", "tcp_losses", "tcp_round_trip_ns"
NAMES = frozenset({SENDING, BYTES, SEGMENTS, AGAIN, TIMEOUTS, ROUND_TRIP})
BLOCK_NS = 2_000_000_000
"""Two readings of the probe: neighbouring ones resemble each other."""
FEWEST_PEERS = 2
"""Others of the same kind to compare with: of two connections either may be the odd one."""
SLOWER = 2.0
"""Time per byte against the others'. The last segment's acknowledgement may be delayed, and is on loopbacks: there
data is on its way for a third of the time, and alike ranks differ by a half."""
FAR = 3.0
"""A round trip of so many times the others', or packets that are lost: there is no slow link without the one or the
other. Acknowledgements of the last segment alone, which a late receiver delays, do not make round trips so long."""
CARRIES = 0.1
"""Share of what its largest connection carries: notices of some bytes wait for delayed acknowledgements, and nobody
waits for them. A rank whose data goes to the next node has no other connections within its own."""
LATE_PART = 0.5
"""Share of the cost: a rank that takes so much longer on its own has something else the matter with it."""
MOSTLY = 0.5
"""Share of the blocks in which it must be slow: a receiver that stood still once looks the same for as long."""
LOST_SHARE = 0.001
"""Of segments, sent again: with a round trip of 0.1 ms that still lets through 550 MB/s (Mathis et al. 1997)."""
LOST_MORE = 5.0
"""… and so many times the peers' share."""
LOST_FEWEST = 10


@dataclass
class Connection:
    """What one rank sends to one peer, over the compared steps."""

    rank: int
    local: str
    peer: str
    """Addresses of both ends."""
    peer_rank: int | None
    """None where it runs on another node."""
    sending: Floats
    """Per block, share of the time that data was on its way."""
    bytes: float = 0.0
    segments: float = 0.0
    again: float = 0.0
    """Segments that were sent again."""
    timeouts: float = 0.0
    """Times that it waited in vain for an answer, and began anew."""
    round_trip_ms: float = 0.0
    """Mean over readings."""


@dataclass(frozen=True)
class SlowConnection:
    """A rank whose data is on its way longer than that of its peers."""

    row: int
    connection: Connection
    end: int | None
    """The rank at whose end it is slow, as its other connections tell; None: either."""
    sending_ms: float
    """Per step."""
    usual_ms: float
    """The peers'."""
    cost_ms: float
    q: float
    lost: bool
    """It loses packets, and that of its peers does not."""
    lost_share: float
    """Of the segments that it sends."""
    usual_lost_share: float
    bytes_per_s: float
    """While it sends, and with what its rank sends to others meanwhile."""
    usual_bytes_per_s: float
    round_trip_ms: float
    usual_round_trip_ms: float
    limit: Limit | None = None
    """What on the sender's own node holds it back."""


def slow_connection(evidence: Evidence, scene: Scene) -> SlowConnection | None:
    """The one whose data is on its way longest, if that is long beside those of its peers, step after step; None
    where none is, or nothing tells. Of many ranks it is looked for where steps changed only: to read what all their
    nodes tell takes seconds. Compares ranks of whose connections agents tell, and connections within a node
    with each other only, as well as those between nodes."""
    step_ms = float(scene.now.wall.mean())
    transfer, waits = _waits(scene)
    steady = len(scene.ranks) > MANY_RANKS and scene.history.since is None
    if steady or not matters(transfer, step_ms):
        return None
    start, end = _span(scene)
    of_ranks = _between_ranks([connections(evidence.ranks[rank], start, end) for rank in scene.ranks])
    found = [
        one
        for group in scene.groups
        for near in (True, False)
        if (one := _slowest(scene, of_ranks, group, near, step_ms, waits)) is not None
    ]
    if not found:
        return None
    worst = max(found, key=lambda one: (one.cost_ms, -one.row))
    sender = scene.ranks[worst.row]
    if worst.end not in (None, sender):
        return worst
    others = [rank for rank in scene.ranks if rank != sender]
    return replace(worst, limit=limit_of(evidence, sender, others[:EVIDENCE_PEERS], start, end))


def _slowest(
    scene: Scene,
    of_ranks: Sequence[Sequence[Connection]],
    group: Sequence[int],
    near: bool,
    step_ms: float,
    waits: float,
) -> SlowConnection | None:
    """Of the connection of each rank of a group that carries most, to its own node (``near``) or to others."""
    main: dict[int, Connection] = {}
    for row in group:
        least = CARRIES * max((one.bytes for one in of_ranks[row]), default=0.0)
        alike = [one for one in of_ranks[row] if (one.peer_rank is not None) == near and one.bytes >= least]
        if alike:
            main[row] = max(alike, key=lambda one: one.bytes)
    if len(main) <= FEWEST_PEERS:
        return None
    rows = list(main)
    sending = np.stack([main[row].sending for row in rows])
    told: Bools = ~np.asarray(np.isnan(sending).any(axis=0), np.bool_)
    if told.sum() < MIN_BLOCKS:
        return None
    sending = sending[:, told]
    mean = sending.mean(axis=1)
    worst = int(mean.argmax())
    # Of the others the lower median: a rank that sends to a slow port waits for its acknowledgements.
    usual = lower_median(np.delete(mean, worst))
    row = rows[worst]
    slow = main[row]
    over = _over([one for one in of_ranks[row] if (one.peer_rank is not None) == near], told, usual) * step_ms
    if not matters(float(mean[worst] - usual) * step_ms, step_ms) or not _mostly(sending, worst):
        return None
    others = [main[other] for other in rows if other != row]
    speeds = {of: _speed(main[of], of_ranks[of], told) for of in rows}
    speed, usual_speed = speeds.pop(row), float(np.median(list(speeds.values())))
    if speed * SLOWER > usual_speed:
        return None
    cost = min(over, waits)
    if _hindered(scene, group, [row, *_row_of(scene, slow.peer_rank)], cost):
        return None
    lost = lost_share(of_ranks[row])
    usual_lost = lower_median([lost_share(of_ranks[other]) for other in rows if other != row])
    again = sum(one.again for one in of_ranks[row])
    loses = again >= LOST_FEWEST and lost >= max(LOST_SHARE, LOST_MORE * usual_lost)
    usual_trip = lower_median([one.round_trip_ms for one in others])
    if not loses and slow.round_trip_ms < FAR * usual_trip:
        return None
    end, q = _end([one for other in rows for one in of_ranks[other]], slow, others, told)
    if q > ALPHA:
        end, q = None, min(1.0, 2 * _by_chance(sending, worst))
    if q > ALPHA:
        return None
    return SlowConnection(
        row,
        slow,
        end,
        float(mean[worst]) * step_ms,
        usual * step_ms,
        cost,
        q,
        loses,
        lost,
        usual_lost,
        speed,
        usual_speed,
        slow.round_trip_ms,
        usual_trip,
    )


def _end(
    everything: Sequence[Connection], slow: Connection, others: Sequence[Connection], told: Bools
) -> tuple[int | None, float]:
    """The rank at whose end a connection is slow: the end all of whose connections are, whichever way they carry;
    and how likely that is chance. Ends are ranks within a node, addresses between nodes. Each counts by the lower
    median of its connections: its neighbours share half of them at most."""
    near = slow.peer_rank is not None
    of_ends: dict[int | str, list[Floats]] = defaultdict(list)
    for one in everything:
        if (one.peer_rank is not None) == near:
            for end in _ends(one):
                of_ends[end].append(np.nan_to_num(one.sending[told]))
    seen = {one.rank for one in everything}
    ends = [end for end in of_ends if len(of_ends[end]) > 1 and (end in seen or not near)]
    if len(ends) <= FEWEST_PEERS or not set(_ends(slow)) <= set(ends):
        return None, 1.0
    score = np.stack([np.sort(of_ends[end], axis=0)[(len(of_ends[end]) - 1) // 2] for end in ends])
    worst = max(_ends(slow), key=lambda end: float(score[ends.index(end)].mean()))
    at = {slow.peer_rank} if near else {one.rank for one in others if one.local == worst}
    blamed = (
        slow.rank if worst == _ends(slow)[0] else min((one for one in at if one is not None), default=None)
    )
    return blamed, min(1.0, 2 * _by_chance(score, ends.index(worst))) if blamed is not None else 1.0


def _ends(one: Connection) -> tuple[int | str, int | str]:
    """The sender's, and the receiver's."""
    return (one.local, one.peer) if one.peer_rank is None else (one.rank, one.peer_rank)


def _over(mine: Sequence[Connection], told: Bools, usual: float) -> float:
    """Share of the time in which more is on its way than usual, on one connection or another of a rank, as if they
    were slow independently of each other."""
    quick = 1.0
    for one in mine:
        quick *= 1 - min(1.0, max(0.0, float(np.nan_to_num(one.sending[told]).mean()) - usual))
    return 1 - quick


def lower_median(values: Sequence[float] | Floats) -> float:
    """Of an even number the lower of the middle ones."""
    return float(np.sort(np.asarray(values, np.float64))[(len(values) - 1) // 2])


def lost_share(of_rank: Sequence[Connection]) -> float:
    """Segments that a rank sent again, of all with data that it sent."""
    segments = sum(one.segments for one in of_rank)
    return sum(one.again for one in of_rank) / segments if segments else 0.0


def _mostly(sending: Floats, worst: int) -> bool:
    """Whether it takes half as long again as the others in most blocks, and not in some incident."""
    others = np.sort(np.delete(sending, worst, axis=0), axis=0)
    middle = others[(len(others) - 1) // 2]
    return float((sending[worst] >= SLOW_LINK * middle).mean()) >= MOSTLY


def _by_chance(shares: Floats, worst: int) -> float:
    """How likely one of alike ranks or ends has so high a mean: each block's values are dealt out anew. ``shares``:
    ends × blocks."""
    while shares.shape[1] > MAX_BLOCKS:
        whole = shares.shape[1] // 2 * 2
        shares = shares[:, :whole].reshape(len(shares), -1, 2).mean(axis=2)
    least = float(shares[worst].mean())
    count = max(FEWEST_PERMUTATIONS, min(PERMUTATIONS, PERMUTATION_WORK // shares.size))
    deal = np.random.default_rng(0)
    # In an order that means nothing: what is said must not depend on how ranks are numbered.
    shares = shares[np.lexsort(shares.T)]
    hits = sum(float(deal.permuted(shares, axis=0).mean(axis=1).max()) >= least for _ in range(count))
    return (1 + hits) / (1 + count)


def _speed(main: Connection, of_rank: Sequence[Connection], told: Bools) -> float:
    """Bytes per second while it sends, with what its rank sends to others meanwhile: who sends as much to each of
    several has one port for all, and is not slow."""
    sent_s = float(main.sending[told].sum()) * BLOCK_NS / 1e9
    carried = sum(one.bytes for one in of_rank if (one.peer_rank is None) == (main.peer_rank is None))
    return carried / sent_s if sent_s > 0 else float("inf")


def _hindered(scene: Scene, group: Sequence[int], ends: Sequence[int], cost: float) -> bool:
    """Whether it may be an end itself: communication threads that wanted a CPU and had none, as acknowledgements
    wait for them; or a rank that takes longer on its own."""

    def over(values: Floats) -> float:
        mean = values.mean(axis=1)
        return max(float(mean[row]) for row in ends) - lower_median(mean[list(group)])

    inside = scene.now.parts.get("communication")
    starved = inside is not None and over(inside) >= EXPLAINS_PART * cost
    return starved or over(scene.now.own) >= LATE_PART * cost


def _row_of(scene: Scene, rank: int | None) -> list[int]:
    return [scene.ranks.index(rank)] if rank is not None and rank in scene.ranks else []


# --- what is told


def _between_ranks(of_ranks: Sequence[Sequence[Connection]]) -> list[list[Connection]]:
    """Without those to storage or trackers, for which collectives do not wait: nobody here sends from there."""
    ours = {one.local for told in of_ranks for one in told}
    return [[one for one in told if one.peer_rank is not None or one.peer in ours] for told in of_ranks]


def _waits(scene: Scene) -> tuple[float, float]:
    """What ranks wait in communication at least, ms per step: the least in each step, for which nobody comes late;
    and the least in the mean, as a slow transfer may hold up one rank in a step and another in the next."""
    parts = [
        scene.now.parts[part] for part in ("waiting", "receiving", "transfer") if part in scene.now.parts
    ]
    if not parts:
        return 0.0, 0.0
    waits = np.sum(parts, axis=0)
    return float(waits.min(axis=0).mean()), float(waits.mean(axis=1).min())


def _span(scene: Scene) -> tuple[int, int]:
    """First and last instant of the compared steps, by the ranks' clocks."""
    columns = np.flatnonzero(scene.columns)
    start = scene.steps.start_ns[scene.rows, columns[0]]
    end = scene.steps.end_ns[scene.rows, columns[-1]]
    return int(start.min()), int(end.max())


def connections(rank: RankEvidence, start_ns: int, end_ns: int) -> list[Connection]:
    """What a rank sent between two instants, by peer. Blocks in which nothing is told of the rank are NaN."""
    rows = rank.metrics.listed() if isinstance(rank.metrics, Rows) else _listed(rank.metrics)
    blocks = max(1, (end_ns - start_ns) // BLOCK_NS)
    block = ((rows.start_ns + rows.end_ns) // 2 - start_ns) // BLOCK_NS
    inside = (block >= 0) & (block < blocks) & (rows.end_ns > rows.start_ns)
    by_ends: dict[tuple[str, str, str], dict[str, Floats]] = defaultdict(
        lambda: defaultdict(lambda: np.zeros(blocks))
    )
    timeouts: dict[str, float] = {}
    starts, lengths = [], []
    for which, (name, _, tags) in enumerate(rows.of):
        if name not in NAMES:
            continue
        here = inside & (rows.which == which)
        labels = dict(cast("tuple[tuple[str, str], ...]", tags))
        local, peer, peer_rank = (labels.get(label, "") for label in ("local", "peer", "peer_rank"))
        if name == TIMEOUTS:
            timeouts[peer] = timeouts.get(peer, 0.0) + float(rows.number[here].sum())
            continue
        of = by_ends[local, peer, peer_rank]
        of[str(name)] += np.bincount(block[here], rows.number[here], blocks)
        if name == ROUND_TRIP:
            of["readings"] += np.bincount(block[here], minlength=blocks)
            starts.append(rows.start_ns[here])
            lengths.append(rows.end_ns[here] - rows.start_ns[here])
    if not starts:
        return []
    readings, first = np.unique(np.concatenate(starts), return_index=True)
    at = ((readings + np.concatenate(lengths)[first] // 2) - start_ns) // BLOCK_NS
    covered = np.bincount(at, np.concatenate(lengths)[first], blocks)
    return [
        Connection(
            rank.rank,
            local,
            peer,
            int(peer_rank) if peer_rank.isdecimal() else None,
            np.divide(of[SENDING], covered, out=np.full(blocks, np.nan), where=covered > 0),
            float(of[BYTES].sum()),
            float(of[SEGMENTS].sum()),
            float(of[AGAIN].sum()),
            timeouts.get(peer, 0.0),
            float(of[ROUND_TRIP].sum() / of["readings"].sum()) / 1e6,
        )
        for (local, peer, peer_rank), of in by_ends.items()
        if of["readings"].any()
    ]


def _listed(rows: Iterable[MetricRow]) -> Listed:
    """As the store has them: what is measured once, and columns."""
    wanted = [row for row in rows if row.name in NAMES]
    of = {key: which for which, key in enumerate(dict.fromkeys(_what(row) for row in wanted))}
    return Listed(
        list(of),
        np.array([row.start_ns for row in wanted], np.int64),
        np.array([row.end_ns for row in wanted], np.int64),
        np.array([of[_what(row)] for row in wanted], np.int64),
        np.array([row.value for row in wanted], np.float64),
    )


def _what(row: MetricRow) -> tuple[object, ...]:
    return row.name, row.unit, row.labels
