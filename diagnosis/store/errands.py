"""The SQL of what is asked of agents: each command once, with who asked and what became of it."""

from __future__ import annotations

import msgspec
from sqlite_utils import Database

from diagnosis.store import Asked
from probes.records import Command

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Command).decode

WORDS_LIMIT = 2000
"""Longest answer of an agent that is kept, in characters."""


def add(db: Database, node: str, command: Command, issued_ns: int, expires_ns: int, by: str) -> None:
    """Raises ``sqlite3.IntegrityError`` for an id that is there already."""
    db.execute(
        "INSERT INTO command (id, node, command, asker, issued_ns, expires_ns) VALUES (?, ?, ?, ?, ?, ?)",
        (command.id, node, _encode(command), by, issued_ns, expires_ns),
    )


def pending(db: Database, now_ns: int) -> dict[str, list[Command]]:
    """Per node, the oldest first."""
    rows = db.execute(
        "SELECT node, command FROM command WHERE settled_ns IS NULL AND expires_ns > ?"
        " ORDER BY issued_ns, rowid",
        (now_ns,),
    ).fetchall()
    of_node: dict[str, list[Command]] = {}
    for node, blob in rows:
        of_node.setdefault(node, []).append(_decode(blob))
    return of_node


def settle(db: Database, id: str, outcome: str, words: str, at_ns: int) -> None:
    """The first word about a command stays."""
    db.execute(
        "UPDATE command SET outcome = ?, words = ?, settled_ns = ? WHERE id = ? AND settled_ns IS NULL",
        (outcome, words[:WORDS_LIMIT], at_ns, id),
    )


def newest(db: Database, limit: int) -> list[Asked]:
    """The commands asked last, the newest first."""
    rows = db.execute(
        "SELECT node, command, asker, issued_ns, expires_ns, outcome, words, settled_ns FROM command"
        " ORDER BY issued_ns DESC, rowid DESC LIMIT ?",
        (limit,),
    ).fetchall()
    return [Asked(node, _decode(blob), *rest) for node, blob, *rest in rows]


def forget(db: Database, before_ns: int) -> None:
    """Commands that could no longer be asked at an instant."""
    db.execute("DELETE FROM command WHERE expires_ns < ?", (before_ns,))
