"""Batches on the node's disk until the server has them.

One file per batch, named by its sequence number, written beside its place and renamed into it: a process
that dies leaves a whole file or none. Nothing is fsynced: a write per second that waits for the disk would
disturb the job, and what a power cut takes is the last seconds of a machine whose job it ended too; a file
that it left torn is set aside. Sequence numbers may then repeat, under another boot id, which is part of a
batch's name; within one boot they never do, because the state is saved before the batch.

    FOLDER/state.json          agent id, next sequence number, counts
    FOLDER/00000000000000000041.batch
    FOLDER/bad/                files that are damaged
    FOLDER/refused/            batches that the server will never take, each with its words (.why)
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
from pathlib import Path

import msgspec

from probes import records
from probes.records import Batch, RecordError

MAX_BYTES = 256 << 20
"""Pending batches kept at most: at 10 kB per second seven hours without a server."""
MAX_ASIDE_BYTES = 8 << 20
"""Kept at most in ``bad/`` and in ``refused/``, each: enough to see what is wrong."""


class SpoolError(RuntimeError):
    """The spool cannot be used, or a batch could not be kept; the message says why and what to do."""


class Counts(msgspec.Struct):
    """What was lost, since the spool was made."""

    dropped: int = 0
    """Batches given up because the spool or the disk was full."""
    bad: int = 0
    """Damaged files set aside."""
    refused: int = 0
    """Batches that the server refused for good."""


class _State(msgspec.Struct):
    agent: str
    next_seq: int
    counts: Counts


class Spool:
    """The spool in ``folder``, made (mode 0700) when it is not there. Safe from several threads.

    A folder that is lost, or whose state cannot be read, gives a new ``agent`` id, so that its sequence
    numbers are never taken for others. Raises :class:`SpoolError` when the folder cannot be used or another
    process uses it.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._mutex = threading.RLock()
        self._sizes: dict[int, int] = {}  # of the pending batches, oldest first
        self._total = 0
        try:
            for place in (folder, folder / "bad", folder / "refused"):
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                place.chmod(0o700)
            self._guard = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SpoolError(f"the spool {folder} cannot be used: {error}") from error
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._scan()
            self._state = self._read_state()
            self._save()
        except BlockingIOError as error:
            os.close(self._guard)
            raise SpoolError(
                f"another agent uses the spool {folder}: end it, or give this one another folder"
            ) from error
        except OSError as error:
            os.close(self._guard)
            raise SpoolError(f"the spool {folder} cannot be used: {error}") from error
        except BaseException:
            os.close(self._guard)
            raise

    @property
    def agent(self) -> str:
        """Random id of this spool, for ``Batch.agent``."""
        return self._state.agent

    @property
    def next_seq(self) -> int:
        """The sequence number that the next batch must carry."""
        return self._state.next_seq

    @property
    def counts(self) -> Counts:
        with self._mutex:
            return msgspec.structs.replace(self._state.counts)

    @property
    def size_bytes(self) -> int:
        """Bytes of all pending batches."""
        with self._mutex:
            return self._total

    def put(self, batch: Batch) -> None:
        """Keep a batch, whose ``agent`` and ``seq`` must be this spool's; over the limit the oldest go.

        Raises :class:`SpoolError` when it could not be written (a full disk): this batch is lost, counted as
        dropped, and its number is used up; the spool goes on. ``ValueError`` for another agent or number.
        """
        with self._mutex:
            if batch.agent != self.agent or batch.seq != self.next_seq:
                raise ValueError(
                    f"the spool expects batch {self.next_seq} of agent {self.agent}, "
                    f"not {batch.seq} of {batch.agent}"
                )
            wire = records.encode(batch)
            self._state.next_seq += 1
            try:
                while self._sizes and self._total + len(wire) > self._max_bytes:
                    self._forget(next(iter(self._sizes)))
                    self._state.counts.dropped += 1
                self._save()
                _write(self._path(batch.seq), wire)
            except OSError as error:
                self._state.counts.dropped += 1
                raise SpoolError(_words(self._folder, error)) from error
            self._know(batch.seq, len(wire))

    def pending(self) -> list[int]:
        """Sequence numbers of the batches kept, oldest first."""
        with self._mutex:
            return list(self._sizes)

    def read(self, seq: int) -> bytes | None:
        """A batch as it goes over the wire. None when it is gone or damaged; damaged, it is set aside."""
        with self._mutex:
            try:
                wire = self._path(seq).read_bytes()
                records.unpack(wire)
            except FileNotFoundError:
                self._total -= self._sizes.pop(seq, 0)
                return None
            except (RecordError, OSError) as error:
                self._state.counts.bad += 1
                self._set_aside(seq, "bad", str(error))
                return None
            return wire

    def remove(self, seq: int) -> None:
        """Forget a batch that the server has. Raises :class:`SpoolError` when its file cannot be deleted."""
        with self._mutex:
            try:
                self._forget(seq)
            except OSError as error:
                raise SpoolError(_words(self._folder, error)) from error

    def refuse(self, seq: int, words: str) -> None:
        """Set aside a batch that the server will never take, with what it said.

        Raises :class:`SpoolError` when its file can be neither moved nor deleted.
        """
        with self._mutex:
            self._state.counts.refused += 1
            self._set_aside(seq, "refused", words)

    def close(self) -> None:
        """Give the folder free for another process. Pending batches stay for it."""
        with self._mutex:
            if self._guard >= 0:
                try:
                    self._save()
                except OSError as error:
                    raise SpoolError(_words(self._folder, error)) from error
                finally:
                    os.close(self._guard)
                    self._guard = -1

    def _path(self, seq: int) -> Path:
        return self._folder / f"{seq:020}.batch"

    def _know(self, seq: int, size: int) -> None:
        self._sizes[seq] = size
        self._total += size

    def _forget(self, seq: int) -> None:
        # First here, then on the disk: a file that cannot be deleted is not sent again and again.
        self._total -= self._sizes.pop(seq, 0)
        self._path(seq).unlink(missing_ok=True)

    def _scan(self) -> None:
        for path in sorted(self._folder.iterdir()):
            if path.suffix == ".tmp":
                path.unlink()  # a write that its process did not live to finish
            elif path.suffix == ".batch" and path.stem.isdecimal():
                self._know(int(path.stem), path.stat().st_size)

    def _read_state(self) -> _State:
        path = self._folder / "state.json"
        # After a power cut the state may be older than the files.
        after_files = max(self._sizes, default=-1) + 1
        try:
            state = msgspec.json.decode(path.read_bytes(), type=_State)
            state.next_seq = max(state.next_seq, after_files)
        except FileNotFoundError:
            return _State(secrets.token_hex(8), after_files, Counts())
        except (msgspec.DecodeError, UnicodeDecodeError):
            path.replace(self._folder / "bad" / "state.json")
            return _State(secrets.token_hex(8), after_files, Counts(bad=1))
        return state

    def _save(self) -> None:
        _write(self._folder / "state.json", msgspec.json.encode(self._state))

    def _set_aside(self, seq: int, where: str, words: str) -> None:
        place = self._folder / where
        try:
            try:
                self._path(seq).replace(place / f"{seq:020}.batch")
                _write(place / f"{seq:020}.why", words[:2000].encode())
                _trim(place)
            finally:
                # What cannot be moved must not block the rest.
                self._forget(seq)
                self._save()
        except OSError as error:
            raise SpoolError(_words(self._folder, error)) from error


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    beside = path.with_suffix(".tmp")
    try:
        with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _trim(place: Path) -> None:
    files = sorted((path.stat().st_mtime_ns, path.name, path.stat().st_size) for path in place.iterdir())
    total = sum(size for *_, size in files)
    for _, name, size in files:
        if total <= MAX_ASIDE_BYTES:
            break
        total -= size
        (place / name).unlink(missing_ok=True)


def _words(folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk under the spool {folder} is full: free some space; a batch may be lost ({error})"
    return f"the spool {folder} cannot be written: {error}"
