"""The SQL of an import: packed and set aside first, then put into the store, or in the place of what was there, at
one moment.

What is set aside is a temporary table, a file that nobody else sees and that goes with the process: agents' batches
are stored meanwhile, and a file that breaks off in the middle leaves nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec
from sqlite_utils import Database

from diagnosis.store import JobExists, StoreError, packing, seconds, standing
from diagnosis.store.opening import transaction
from diagnosis.store.standing import NOWHERE, Standing
from probes.records import Batch, Communicator, Event, RankBatch

AGENT = "import"
"""In the place of an agent's random id."""

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class _Life:
    """What is known of one life of one rank so far: a row of ``watch`` to be."""

    node: str
    newest: RankBatch
    """Without its columns."""
    communicators: list[Communicator]
    standing: Standing
    first_ns: int
    last_ns: int
    ended: bool


_Key = tuple[str, int, int, int]
"""Node, rank, process id, start of the process."""


@dataclass
class Aside:
    """An import that is not in the store yet."""

    job: str
    imported: str
    lives: dict[_Key, _Life] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


def set_aside(db: Database, job: str, imported: str, batches: Iterable[Batch]) -> Aside:
    """Pack all batches into a temporary table of ``db``, one row each. Raises what ``batches`` raises, as it is,
    and :class:`StoreError` where the folder for temporary files has no room."""
    aside = Aside(job, imported)
    db.execute("DROP TABLE IF EXISTS temp.aside")
    db.execute("CREATE TEMP TABLE aside (life INTEGER, first_ns INTEGER, last_ns INTEGER, columns BLOB)")
    places: dict[_Key, int] = {}
    for batch in batches:
        aside.events += batch.events
        for rank in batch.ranks:
            key = (batch.node, rank.rank, rank.pid, rank.start_ns)
            _learn(aside, key, batch, rank)
            packed = seconds.of_rank(batch.start_ns, batch.end_ns, rank)
            row = (places.setdefault(key, len(places)), *packed.span(), packing.pack(packed))
            _insert(db, row)
    return aside


def _insert(db: Database, row: tuple[int, int, int, bytes]) -> None:
    try:
        db.execute("INSERT INTO temp.aside VALUES (?, ?, ?, ?)", row)
    except sqlite3.Error as error:
        raise StoreError(
            f"the folder for temporary files does not take this import ({error}): free some space there, or set "
            "TMPDIR to another folder"
        ) from error


def _learn(aside: Aside, key: _Key, batch: Batch, rank: RankBatch) -> None:
    told = standing.of_rank(batch.end_ns, rank)
    known = aside.lives.get(key)
    if known is None:
        known = _Life(batch.node, rank, [], NOWHERE, batch.start_ns, batch.end_ns, ended=False)
    newer = batch.end_ns >= known.last_ns
    aside.lives[key] = replace(
        known,
        newest=_without_columns(rank) if newer else known.newest,
        communicators=max(known.communicators, rank.communicators, key=len),
        standing=known.standing.joined(told),
        first_ns=min(known.first_ns, batch.start_ns),
        last_ns=max(known.last_ns, batch.end_ns),
        ended=known.ended or rank.ended,
    )


def _without_columns(rank: RankBatch) -> RankBatch:
    return RankBatch(
        job=rank.job,
        rank=rank.rank,
        world_size=rank.world_size,
        local_rank=rank.local_rank,
        pid=rank.pid,
        start_ns=rank.start_ns,
        name=rank.name,
        env=rank.env,
        timed_by=rank.timed_by,
        source=rank.source,
    )


def put_in(db: Database, aside: Aside, received_ns: int, *, replacing: bool) -> None:
    """Put what was set aside into the store; ``replacing``: in the place of an earlier import of the job. One
    transaction. Raises :class:`JobExists`."""
    with transaction(db):
        check_free(db, aside.job, replacing=replacing)
        _forget(db, aside.job)
        boots = {node: _boot(db, aside, node, received_ns) for node in sorted(_nodes(aside))}
        world_size = max(life.newest.world_size for life in aside.lives.values())
        db.execute("CREATE TEMP TABLE placed (life INTEGER PRIMARY KEY, watch INTEGER)")
        for place, life in enumerate(aside.lives.values()):
            watch = _watch(db, aside.job, world_size, boots[life.node][1], life)
            db.execute("INSERT INTO temp.placed VALUES (?, ?)", (place, watch))
        db.execute(
            "INSERT INTO main.chunk (watch, minute, first_ns, last_ns, columns)"
            " SELECT watch, -aside.rowid, first_ns, last_ns, columns"
            " FROM temp.aside JOIN temp.placed USING (life) ORDER BY watch, aside.rowid"
        )
        db.execute("DROP TABLE temp.placed")
        first_boot = min(boots.values())[0]
        for event in aside.events:
            db.execute(
                "INSERT INTO event (boot, at_ns, kind, detail, job, rank) VALUES (?, ?, ?, ?, ?, ?)",
                (first_boot, event.at_ns, event.kind, event.detail, aside.job, event.rank),
            )


def _nodes(aside: Aside) -> set[str]:
    return {life.node for life in aside.lives.values()}


def _boot(db: Database, aside: Aside, node: str, received_ns: int) -> tuple[int, int]:
    """Boot and sender of one node of an import, with the one batch that tells when it came and how far it
    reaches."""
    lives = [life for life in aside.lives.values() if life.node == node]
    first, last = min(life.first_ns for life in lives), max(life.last_ns for life in lives)
    # A job is imported once at a time, so its name tells this boot from those of all other imports.
    boot = db.execute(
        "INSERT INTO boot (node, boot_id, newest_end_ns, newest_offset_ns, probes, imported)"
        " VALUES (?, ?, ?, 0, ?, ?)",
        (node, f"{AGENT} {aside.job}", last, _encode([]), aside.imported),
    ).lastrowid
    sender = db.execute("INSERT INTO sender (boot, agent) VALUES (?, ?)", (boot, AGENT)).lastrowid
    db.execute(
        "INSERT INTO batch (sender, seq, start_ns, end_ns, utc_offset_ns, received_ns, metrics)"
        " VALUES (?, 0, ?, ?, 0, ?, NULL)",
        (sender, first, last, received_ns),
    )
    return int(boot or 0), int(sender or 0)


def _watch(db: Database, job: str, world_size: int, sender: int, life: _Life) -> int:
    about = life.newest
    added = db.execute(
        "INSERT INTO watch (job, rank, sender, pid, life_ns, run, world_size, local_rank, name, env, timed_by,"
        " source, communicators_ns, communicators, first_ns, last_ns, ended, standing)"
        " VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            job,
            about.rank,
            sender,
            about.pid,
            about.start_ns,
            world_size,
            about.local_rank,
            about.name,
            _encode(about.env),
            int(about.timed_by),
            about.source,
            life.first_ns,
            _encode(life.communicators),
            life.first_ns,
            life.last_ns,
            life.ended,
            standing.pack(life.standing),
        ),
    )
    return int(added.lastrowid or 0)


def check_free(db: Database, job: str, *, replacing: bool) -> None:
    """Raises :class:`JobExists` unless nothing is stored under this name, or an import that is to be replaced."""
    found = db.execute(
        "SELECT imported FROM watch JOIN sender ON sender.id = watch.sender JOIN boot ON boot.id = sender.boot"
        " WHERE job = ? ORDER BY imported LIMIT 1",
        (job,),
    ).fetchone()
    if found is not None and (not replacing or not found[0]):
        raise JobExists(job, found[0])


def _forget(db: Database, job: str) -> None:
    """Delete an earlier import of a job, and what retention has left of one."""
    found = db.execute(
        "SELECT boot.id, sender.id FROM boot LEFT JOIN sender ON sender.boot = boot.id"
        " WHERE boot_id = ? AND imported <> ''",
        (f"{AGENT} {job}",),
    ).fetchall()
    for boot, sender in found:
        db.execute(
            "DELETE FROM chunk WHERE watch IN (SELECT id FROM watch WHERE sender = ?)",
            (sender,),
        )
        db.execute("DELETE FROM watch WHERE sender = ?", (sender,))
        db.execute("DELETE FROM batch WHERE sender = ?", (sender,))
        db.execute("DELETE FROM sender WHERE id = ?", (sender,))
        db.execute("DELETE FROM event WHERE boot = ?", (boot,))
        db.execute("DELETE FROM boot WHERE id = ?", (boot,))
