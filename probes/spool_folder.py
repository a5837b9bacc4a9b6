"""The spool's folder: the names of its files, its state, and what a predecessor left in it.

    FOLDER/state.json          agent id, next sequence number, counts
    FOLDER/00000000000000000041.batch
    FOLDER/00000000000000000040.sent     the newest batch that the server has: keeps its number used
    FOLDER/bad/                files that are damaged, each with its words (.why)
    FOLDER/refused/            batches that the server will never take, each with its words

One file per batch, written beside its place and renamed into it: a process that dies leaves a whole file or
none, an acknowledged batch goes with one unlink, and damage costs one second. Several batches per file would
save the rest of a 4 KiB block each, and need a log, a cleaner and their recovery for it.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import NamedTuple

import msgspec

from probes import disk

ASIDE = ("bad", "refused")
"""Folders of what is set aside."""
STATE = "state.json"


class Counts(msgspec.Struct):
    """What was lost, since the spool was made."""

    dropped: int = 0
    """Batches given up because the spool or the disk was full, or could not be written, or they were too large."""
    bad: int = 0
    """Batches whose file was damaged (set aside) or gone."""
    refused: int = 0
    """Batches that the server refused for good."""


class State(msgspec.Struct):
    """What ``state.json`` holds."""

    agent: str
    next_seq: int
    counts: Counts
    told: Counts = msgspec.field(default_factory=Counts)
    """The part of ``counts`` that a kept batch tells."""


class Left(NamedTuple):
    """What a predecessor left."""

    batches: dict[int, int]
    """Sequence number → bytes of disk, oldest first."""
    sent: int
    """Number of the newest batch that the server has, where its file still stands; else -1."""
    sent_bytes: int
    highest: int
    """The highest number that a file has; -1 without any."""


def batch_file(folder: Path, seq: int) -> Path:
    """Where a batch waits."""
    return folder / f"{seq:020}.batch"


def sent_file(folder: Path, seq: int) -> Path:
    """Where a batch that the server has keeps its number used."""
    return batch_file(folder, seq).with_suffix(".sent")


def clear_up(folder: Path) -> Left:
    """End what a predecessor did not live to end, and know what it left. Raises OSError."""
    batches: dict[int, int] = {}
    sent, sent_bytes = -1, 0
    found = {path for path in folder.iterdir() if path.stem.isdecimal()}
    for path in sorted(found):
        seq = int(path.stem)
        if path.suffix == ".tmp":  # a write that its process did not live to finish, or a lost rename
            batch = path.with_suffix(".batch")
            if found.isdisjoint({batch, path.with_suffix(".sent")}):
                path.replace(batch)  # if it is torn, reading it will tell
                batches[seq] = disk.use_of(batch)
            else:
                disk.delete(path)
        elif path.suffix == ".batch":
            batches[seq] = disk.use_of(path)
        elif path.suffix == ".sent":
            disk.delete(sent_file(folder, sent))
            sent, sent_bytes = seq, disk.use_of(path)
    disk.delete(folder / "state.tmp")
    aside = [path for where in ASIDE for path in (folder / where).iterdir()]
    for path in aside:
        if path.suffix == ".tmp":  # words that a power cut left unwritten: they may be written again
            disk.delete(path)
    numbers = (int(path.stem) for path in [*found, *aside] if path.stem.isdecimal())
    return Left(batches, sent, sent_bytes, max(numbers, default=-1))


def read_state(folder: Path, after_files: int) -> State:
    """The state, whose next number is ``after_files`` at least: after a power cut it may be older than the files.
    Another agent's where there is none, or none that can be read, which is set aside. Raises OSError."""
    path = folder / STATE
    try:
        state = msgspec.json.decode(disk.read(path), type=State)
    except FileNotFoundError:
        return State(secrets.token_hex(8), after_files, Counts())
    except (msgspec.DecodeError, UnicodeDecodeError):
        path.replace(folder / "bad" / STATE)
        return State(secrets.token_hex(8), after_files, Counts(bad=1))
    state.next_seq = max(state.next_seq, after_files)
    return state
