"""The SQL of the SQLite store: what a batch writes, and what an evidence reads. No locks, no transactions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from sqlite_utils import Database

from diagnosis.store import JobInfo, columns, nodes, numbering, oddities, packing, seconds, standing
from diagnosis.store.assemble import Watch, cut
from diagnosis.store.columns import Columns
from diagnosis.store.nodes import MINUTE_NS
from diagnosis.store.numbering import Seen
from diagnosis.store.oddities import BatchTime, Clock
from probes.records import Batch, Communicator, Event, Probe, RankBatch

ALWAYS_NS = 1 << 62
"""Beyond any instant (``probes.records``)."""

_encode = msgspec.msgpack.Encoder().encode
_communicators = msgspec.msgpack.Decoder(list[Communicator])
_probes = msgspec.msgpack.Decoder(list[Probe])


def value(db: Database, sql: str, values: tuple[Any, ...] = ()) -> Any:
    """The first column of the first row; None when there is no row."""
    row = db.execute(sql, values).fetchone()
    return None if row is None else row[0]


def add_batch(db: Database, batch: Batch, received_ns: int) -> int | None:
    """Write a batch with its columns; the sender's id, or None when the batch was there already."""
    boot = _boot(db, batch)
    known = db.execute(
        "SELECT id, forgotten_ns, emptied_ns FROM sender WHERE boot = ? AND agent = ?", (boot, batch.agent)
    ).fetchone()
    if known is None:
        added = db.execute("INSERT INTO sender (boot, agent) VALUES (?, ?)", (boot, batch.agent))
        known = (added.lastrowid, 0, None)
    sender, forgotten_ns, emptied_ns = known
    if batch.end_ns < forgotten_ns:  # stored and deleted, or older than what was deleted
        return None
    if emptied_ns is not None:
        db.execute("UPDATE sender SET emptied_ns = NULL WHERE id = ?", (sender,))
    added = db.execute(
        "INSERT OR IGNORE INTO batch (sender, seq, start_ns, end_ns, utc_offset_ns, received_ns, metrics)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            sender,
            batch.seq,
            batch.start_ns,
            batch.end_ns,
            batch.utc_offset_ns,
            received_ns,
            nodes.as_it_came(batch),
        ),
    )
    if added.rowcount == 0:
        return None
    for rank in batch.ranks:
        _add_rank(db, sender, batch, rank)
    for event in batch.events:
        db.execute(
            "INSERT INTO event (boot, at_ns, kind, detail, job, rank) VALUES (?, ?, ?, ?, ?, ?)",
            (boot, event.at_ns, event.kind, event.detail, event.job, event.rank),
        )
    return int(sender)


def _boot(db: Database, batch: Batch) -> int:
    newest = (batch.end_ns, batch.utc_offset_ns, _encode(batch.probes))
    db.execute(
        "INSERT INTO boot (node, boot_id, newest_end_ns, newest_offset_ns, probes)"
        " VALUES (?, ?, ?, ?, ?) ON CONFLICT (node, boot_id) DO NOTHING",
        (batch.node, batch.boot_id, *newest),
    )
    boot = value(db, "SELECT id FROM boot WHERE node = ? AND boot_id = ?", (batch.node, batch.boot_id))
    db.execute(
        "UPDATE boot SET newest_end_ns = ?, newest_offset_ns = ?, probes = ?"
        " WHERE id = ? AND (newest_end_ns, newest_offset_ns, probes) < (?, ?, ?)",
        (*newest, boot, *newest),
    )
    return int(boot)


def _add_rank(db: Database, sender: int, batch: Batch, rank: RankBatch) -> None:
    watch = _watch(db, sender, batch, rank)
    second = seconds.pack(batch.start_ns, batch.end_ns, rank)
    db.execute(
        "INSERT INTO tail (watch, sender, minute, first_ns, last_ns, columns) VALUES (?, ?, ?, ?, ?, ?)",
        (
            watch,
            sender,
            batch.start_ns // MINUTE_NS,
            second.first_ns,
            second.last_ns,
            second.columns,
        ),
    )


def _watch(db: Database, sender: int, batch: Batch, rank: RankBatch) -> int:
    """The watch that a batch's rank belongs to, made or brought up to date."""
    key = (rank.job, rank.rank, sender, rank.pid, rank.start_ns)
    seen = Seen(batch.end_ns, rank.communicators)
    about = (
        rank.world_size,
        rank.local_rank,
        rank.name,
        _encode(rank.env),
        int(rank.timed_by),
        rank.source,
    )
    stands = standing.of_rank(batch.end_ns, rank)
    runs = db.execute(
        "SELECT id, communicators_ns, communicators, standing FROM watch"
        " WHERE job = ? AND rank = ? AND sender = ? AND pid = ? AND life_ns = ? ORDER BY run",
        key,
    ).fetchall()
    known = [Seen(at_ns, _communicators.decode(blob)) for _, at_ns, blob, _ in runs]
    place = numbering.run_of(known, seen)
    if place is None:
        added = db.execute(
            "INSERT INTO watch (job, rank, sender, pid, life_ns, run, world_size, local_rank, name, env,"
            " timed_by, source, communicators_ns, communicators, first_ns, last_ns, ended, standing)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *key,
                len(runs),
                *about,
                seen.at_ns,
                _encode(seen.communicators),
                batch.start_ns,
                batch.end_ns,
                rank.ended,
                standing.pack(stands),
            ),
        )
        return int(added.lastrowid or 0)
    watch = int(runs[place][0])
    # Batches come in any order: the newest describes the rank.
    db.execute(
        "UPDATE watch SET world_size = ?, local_rank = ?, name = ?, env = ?, timed_by = ?, source = ?"
        " WHERE id = ? AND last_ns <= ?",
        (*about, watch, batch.end_ns),
    )
    if stands is not standing.NOWHERE:
        before = standing.unpack(runs[place][3])
        db.execute(
            "UPDATE watch SET standing = ? WHERE id = ?", (standing.pack(before.joined(stands)), watch)
        )
    joined = numbering.joined(known[place], seen)
    if joined != known[place]:
        db.execute(
            "UPDATE watch SET communicators_ns = ?, communicators = ? WHERE id = ?",
            (joined.at_ns, _encode(joined.communicators), watch),
        )
    db.execute(
        "UPDATE watch SET first_ns = min(first_ns, ?), last_ns = max(last_ns, ?), ended = max(ended, ?)"
        " WHERE id = ?",
        (batch.start_ns, batch.end_ns, rank.ended, watch),
    )
    return watch


def minutes_over(db: Database, sender: int, minute: int, limit: int) -> list[tuple[int, int]]:
    """Up to ``limit`` pairs (watch, minute) of a sender that have tails of a minute before ``minute``."""
    return db.execute(
        "SELECT DISTINCT watch, minute FROM tail WHERE sender = ? AND minute < ?"
        " ORDER BY minute, watch LIMIT ?",
        (sender, minute, limit),
    ).fetchall()


def pack_minute(db: Database, watch: int, minute: int) -> None:
    """Merge the tails of one watch and minute, and the chunk if there is one already, into one chunk."""
    tails = db.execute("SELECT columns FROM tail WHERE watch = ? AND minute = ?", (watch, minute)).fetchall()
    chunk = value(db, "SELECT columns FROM chunk WHERE watch = ? AND minute = ?", (watch, minute))
    merged = seconds.unpack(blob for (blob,) in tails)
    if chunk is not None:
        merged = columns.merge([packing.unpack(chunk), merged])
    db.execute(
        "INSERT OR REPLACE INTO chunk (watch, minute, first_ns, last_ns, columns) VALUES (?, ?, ?, ?, ?)",
        (watch, minute, *merged.span(), packing.pack(merged)),
    )
    db.execute("DELETE FROM tail WHERE watch = ? AND minute = ?", (watch, minute))


def clocks(db: Database, boots: Iterable[int]) -> dict[int, Clock]:
    """How the clock of each of these boots stands to the server's."""
    return {boot: _clock(db, boot) for boot in boots}


def _clock(db: Database, boot: int) -> Clock:
    own, imported = db.execute("SELECT newest_offset_ns, imported FROM boot WHERE id = ?", (boot,)).fetchone()
    if imported:  # when it was imported says nothing about its clock
        return Clock(own, 0, live=False)
    senders = db.execute("SELECT id FROM sender WHERE boot = ?", (boot,)).fetchall()
    arrivals = [
        arrival
        for sender in senders  # one by one: each is read from the end of the index
        for arrival in db.execute(
            "SELECT end_ns, received_ns FROM batch WHERE sender = ? ORDER BY end_ns DESC, seq DESC LIMIT ?",
            (*sender, oddities.CLOCK_BATCHES),
        )
    ]
    return oddities.clock(own, sorted(arrivals)[-oddities.CLOCK_BATCHES :])


_WATCH_FIELDS = (
    "id",
    "node",
    "boot",
    "rank",
    "pid",
    "life_ns",
    "world_size",
    "local_rank",
    "name",
    "first_ns",
    "last_ns",
    "timed_by",
    "source",
    "imported",
)
_WATCHES = " FROM watch JOIN sender ON sender.id = watch.sender JOIN boot ON boot.id = sender.boot"


def watches(db: Database, job: str) -> list[Watch]:
    """All watches of a job, at any time; empty when the job is not known. What agents saw hides an import."""
    rows = db.execute(
        "SELECT watch.id, node, boot.id, rank, pid, life_ns, world_size, local_rank, name, watch.first_ns,"
        f" watch.last_ns, timed_by, source, imported, communicators, ended, standing{_WATCHES} WHERE job = ?",
        (job,),
    ).fetchall()
    of_boot = clocks(db, {row[2] for row in rows})
    watches = [
        Watch(
            **dict(zip(_WATCH_FIELDS, row[:-3], strict=True)),
            communicators=_communicators.decode(row[-3]),
            ended=bool(row[-2]),
            standing=standing.unpack(row[-1]),
            clock=of_boot[row[2]],
        )
        for row in rows
    ]
    return [watch for watch in watches if not watch.imported] or watches


def columns_of(db: Database, watch: Watch, start_ns: int, end_ns: int) -> Columns:
    """The time series of one watch between two UTC instants (still in the node's monotonic time)."""
    start, end = start_ns - watch.utc_offset_ns, end_ns - watch.utc_offset_ns
    chunks, tails = (
        [
            blob
            for (blob,) in db.execute(
                f"SELECT columns FROM {table} WHERE watch = ? AND last_ns >= ? AND first_ns < ?",  # noqa: S608
                (watch.id, start, end),
            )
        ]
        for table in ("chunk", "tail")
    )
    parts = [packing.unpack(blob) for blob in chunks]
    if tails:
        parts.append(seconds.unpack(tails))
    return cut(columns.merge(parts), start, end)


def probes_of(db: Database, boots: list[int]) -> dict[str, list[Probe]]:
    """Per node of these boots, the probes as its newest batch said."""
    rows = [
        row
        for boot in boots
        for row in db.execute(
            "SELECT newest_end_ns + newest_offset_ns, boot_id, node, probes FROM boot"
            " WHERE id = ? AND imported = ''",
            (boot,),
        )
    ]
    return {node: _probes.decode(blob) for _, _, node, blob in sorted(rows)}


def probes_of_nodes(db: Database) -> dict[str, list[Probe]]:
    """Per node that ever sent anything, the probes as the newest batch of its newest boot said."""
    rows = db.execute(
        "SELECT node, probes FROM boot WHERE imported = '' ORDER BY newest_end_ns + newest_offset_ns, boot_id"
    )
    return {node: _probes.decode(blob) for node, blob in rows}


def events_of(db: Database, watch: Watch, job: str, start_ns: int, end_ns: int) -> list[Event]:
    """Events of the watch's node and boot between two UTC instants: the job's, and the node's own. What is to be
    known of an import is so at any instant."""
    if watch.imported:
        start_ns, end_ns = -ALWAYS_NS, ALWAYS_NS
    offset = watch.utc_offset_ns
    rows = db.execute(
        "SELECT kind, at_ns, detail, job, rank FROM event"
        " WHERE boot = ? AND at_ns >= ? AND at_ns < ? AND job IN (?, '')",
        (watch.boot, start_ns - offset, end_ns - offset, job),
    )
    return [
        Event(kind=kind, at_ns=at + offset, detail=detail, job=of_job, rank=rank)
        for kind, at, detail, of_job, rank in rows
    ]


def node_notes(db: Database, watch: Watch, start_ns: int, end_ns: int) -> list[str]:
    """What is odd about the batches of the watch's node and boot between two UTC instants."""
    if watch.imported:
        return []
    start, end = start_ns - watch.utc_offset_ns, end_ns - watch.utc_offset_ns
    senders = db.execute("SELECT id FROM sender WHERE boot = ?", (watch.boot,)).fetchall()
    of_sender = [_batch_times(db, sender, start, end) for (sender,) in senders]
    notes = []
    lost = sum(oddities.missing(batches, start, end) for batches in of_sender)
    if lost:
        notes.append(oddities.missing_note(watch.node, lost))
    inside = [b for batches in of_sender for b in batches if b.end_ns > start and b.start_ns < end]
    jumps = oddities.jumps(inside, watch.clock.own_offset_ns)
    if jumps:
        notes.append(oddities.jump_note(watch.node, jumps))
    off = oddities.clock_note(watch.node, watch.clock)
    return [*notes, off] if off else notes


def _batch_times(db: Database, sender: int, start: int, end: int) -> list[BatchTime]:
    """One agent's batches that end between two monotonic instants, with a neighbour on either side."""
    select = "SELECT seq, start_ns, end_ns, utc_offset_ns FROM batch WHERE sender = ? AND "
    rows = [
        *db.execute(f"{select} end_ns < ? ORDER BY end_ns DESC, seq DESC LIMIT 1", (sender, start)),
        *db.execute(f"{select} end_ns >= ? AND end_ns < ? ORDER BY end_ns, seq", (sender, start, end)),
        *db.execute(f"{select} end_ns >= ? ORDER BY end_ns, seq LIMIT 1", (sender, end)),
    ]
    return [BatchTime(*row) for row in rows]


def job_infos(db: Database) -> list[JobInfo]:
    """One line per job, the one with the newest data first."""
    rows = db.execute(
        "SELECT job, rank, node, world_size, watch.first_ns, watch.last_ns, boot.id, source, imported"
        f"{_WATCHES}"
    ).fetchall()
    by_agents = {row[0] for row in rows if not row[-1]}
    rows = [row for row in rows if not row[-1] or row[0] not in by_agents]
    of_boot = clocks(db, {row[6] for row in rows})
    of_job: dict[str, list[tuple[int, str, int, int, int, str, str]]] = {}
    for job, rank, node, world_size, first, last, boot, source, imported in rows:
        offset = of_boot[boot].offset_ns
        line = (rank, node, world_size, first + offset, last + offset, source, imported)
        of_job.setdefault(job, []).append(line)
    infos = [
        JobInfo(
            job=job,
            world_size=max((line[4], line[2]) for line in lines)[1],
            ranks_seen=len({line[0] for line in lines}),
            nodes=len({line[1] for line in lines} - {""}),
            first_ns=min(line[3] for line in lines),
            last_ns=max(line[4] for line in lines),
            source=lines[0][5],
            imported=lines[0][6],
        )
        for job, lines in of_job.items()
    ]
    return sorted(infos, key=lambda info: (-info.last_ns, info.job))


def arrivals(db: Database) -> tuple[int | None, int | None]:
    """Arrival of the oldest and the newest batch, as each sender's first and last say; None without batches."""
    of_senders = [
        arrived
        for (sender,) in db.execute("SELECT id FROM sender WHERE emptied_ns IS NULL").fetchall()
        for order in ("ORDER BY end_ns, seq", "ORDER BY end_ns DESC, seq DESC")
        for (arrived,) in db.execute(
            f"SELECT received_ns FROM batch WHERE sender = ? {order} LIMIT 1",  # noqa: S608
            (sender,),
        )
    ]
    return min(of_senders, default=None), max(of_senders, default=None)
