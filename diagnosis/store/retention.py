"""The SQL of forgetting: the oldest minute of one agent's batches, in steps of some milliseconds.

A sender's mark (``forgotten_ns``) is set before anything of it is deleted. A batch that ends before its
sender's mark is acknowledged and not stored: it was stored and deleted, or it is older than what was deleted.
So a batch that comes once more is not stored again, though nothing is kept of it. The mark outlives the data
by a year (:data:`MARK_KEPT_NS`), in a row of some 80 bytes per agent and boot. An import has one batch, so all
of it goes together; it never comes again by itself, and leaves no mark.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from sqlite_utils import Database

from diagnosis.store import nodes
from diagnosis.store.nodes import MINUTE_NS
from diagnosis.store.rows import value

MARK_KEPT_NS = 365 * 86_400_000_000_000
"""A retry that comes later than this after all else of its agent and boot was deleted is taken for new."""
CHUNKS_PER_STEP = 16
"""One chunk is about 50 kB, a dozen pages to free."""
ROWS_PER_STEP = 256
"""Of tails and batches."""

_NO_PROBES = msgspec.msgpack.encode([])


class Oldest(NamedTuple):
    """A sender that has batches. In order of arrival, the next to go first."""

    received_ns: int
    """Arrival of the one of its batches that ended first (UTC)."""
    sender: int


def oldest(db: Database) -> list[Oldest]:
    """All senders that have batches."""
    found = []
    for (sender,) in db.execute("SELECT id FROM sender WHERE emptied_ns IS NULL").fetchall():
        received = first_arrival(db, sender)
        if received is not None:
            found.append(Oldest(received, sender))
    return found


def first_arrival(db: Database, sender: int) -> int | None:
    """When the batch of this sender that ended first arrived; 0 when it is before the mark, left over by a
    step, so that it goes first; None when the sender has no batch."""
    found = db.execute(
        "SELECT received_ns, end_ns < (SELECT forgotten_ns FROM sender WHERE id = batch.sender)"
        " FROM batch WHERE sender = ? ORDER BY end_ns, seq LIMIT 1",
        (sender,),
    ).fetchone()
    if found is None:
        return None
    received_ns, left_over = found
    return 0 if left_over else int(received_ns)


def forget_step(db: Database, sender: int) -> int:
    """Delete some of a sender's first minute, the one in which its first batch ends; how many batches went.

    Time series go first and batches last, so that whatever is there has the batches that tell its time.
    """
    end = value(db, "SELECT end_ns FROM batch WHERE sender = ? ORDER BY end_ns, seq LIMIT 1", (sender,))
    mark = int((end // MINUTE_NS + 1) * MINUTE_NS)
    db.execute("UPDATE sender SET forgotten_ns = max(forgotten_ns, ?) WHERE id = ?", (mark, sender))
    chunks = db.execute(
        "DELETE FROM chunk WHERE id IN (SELECT chunk.id FROM watch JOIN chunk ON chunk.watch = watch.id"
        " WHERE watch.sender = ? AND chunk.minute < ? LIMIT ?)",
        (sender, mark // MINUTE_NS, CHUNKS_PER_STEP),
    )
    tails = db.execute(
        "DELETE FROM tail WHERE id IN (SELECT id FROM tail WHERE sender = ? AND minute < ? LIMIT ?)",
        (sender, mark // MINUTE_NS, ROWS_PER_STEP),
    )
    of_node = nodes.forget(db, sender, mark // MINUTE_NS, CHUNKS_PER_STEP)
    if CHUNKS_PER_STEP in (chunks.rowcount, of_node) or tails.rowcount == ROWS_PER_STEP:
        return 0
    db.execute("DELETE FROM watch WHERE sender = ? AND last_ns < ?", (sender, mark))
    db.execute("UPDATE watch SET first_ns = ? WHERE sender = ? AND first_ns < ?", (mark, sender, mark))
    batches = db.execute(
        "DELETE FROM batch WHERE (sender, seq) IN"
        " (SELECT sender, seq FROM batch WHERE sender = ? AND end_ns < ? LIMIT ?)",
        (sender, mark, ROWS_PER_STEP),
    )
    _forget_events(db, sender)
    return batches.rowcount


def _forget_events(db: Database, sender: int) -> None:
    """Events of the sender's boot before the first batch that is left of it."""
    boot = value(db, "SELECT boot FROM sender WHERE id = ?", (sender,))
    firsts = [
        first
        for (one,) in db.execute("SELECT id FROM sender WHERE boot = ?", (boot,)).fetchall()
        for (first,) in db.execute(
            "SELECT start_ns FROM batch WHERE sender = ? ORDER BY end_ns, seq LIMIT 1", (one,)
        )
    ]
    if firsts:
        db.execute("DELETE FROM event WHERE boot = ? AND at_ns < ?", (boot, min(firsts)))
    else:
        db.execute("DELETE FROM event WHERE boot = ?", (boot,))


def forget_senders(db: Database, now_ns: int) -> None:
    """Keep of senders without batches their marks alone, and of those that have been so for a year nothing."""
    db.execute(
        "UPDATE sender SET emptied_ns = ? WHERE emptied_ns IS NULL"
        " AND NOT EXISTS (SELECT 1 FROM batch WHERE batch.sender = sender.id)",
        (now_ns,),
    )
    db.execute(
        "DELETE FROM sender WHERE emptied_ns < ?"
        " OR (emptied_ns IS NOT NULL AND boot IN (SELECT id FROM boot WHERE imported <> ''))",
        (now_ns - MARK_KEPT_NS,),
    )
    db.execute("DELETE FROM boot WHERE NOT EXISTS (SELECT 1 FROM sender WHERE sender.boot = boot.id)")
    db.execute(
        "UPDATE boot SET probes = ? WHERE length(probes) > ?"
        " AND NOT EXISTS (SELECT 1 FROM sender WHERE sender.boot = boot.id AND emptied_ns IS NULL)",
        (_NO_PROBES, len(_NO_PROBES)),
    )
