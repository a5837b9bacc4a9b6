"""Batches on the node's disk until the server has them.

What lies in its folder, and why so: :mod:`probes.spool_folder`.

**Bounded.** All that the folder takes on the disk (blocks, not bytes; set aside, state and folders included)
stays within ``max_bytes``. What is there stays, because it holds the onset; when it is full the incoming batch is
given up, and counted.

**fsync.** :meth:`Spool.put` never waits for the disk, nor for a thread that does: it writes to the page cache. That
is enough against the death of the process, and for batches that are sent within seconds. Those that wait are
fsynced by the thread that sends (:meth:`Spool.settle`): every ``SYNC_EVERY_S`` at most ``SYNC_MOST`` of them, the
newest first, each file, then the folder. A power cut takes what was put since then, at most the last 30 s of a node
whose job it ended too, and the counts of that time. Files that it left empty or torn are recognised by the
checksum of their zstd frame, set aside and counted, never sent; a deleted batch that comes back is sent again and
stored once.

**Numbers** never repeat within a boot: each is on the disk, as a file's name or in the state, until a higher one
is. After a power cut they may, under another boot id, which is part of a batch's name.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from probes import codec, disk, spool_folder
from probes.codec import RecordError
from probes.records import Batch
from probes.spool_folder import ASIDE, STATE, Counts, batch_file, sent_file

__all__ = ["MAX_BYTES", "MIN_BYTES", "SYNC_EVERY_S", "Counts", "Spool", "SpoolError", "SpoolFull"]

MAX_BYTES = 256 << 20
"""Disk that the spool takes at most: at 12 kB per second six hours without a server."""
MIN_BYTES = 1 << 20
"""A spool below this would hold less than a minute or two of a node."""
MAX_ASIDE_BYTES = 8 << 20
"""Kept at most in ``bad/`` and in ``refused/``, each, and a sixteenth of the spool: enough to see what is wrong."""
SYNC_EVERY_S = 10.0
SYNC_MOST = 64
"""Files fsynced in one go: ten seconds' batches, and some that a predecessor left."""


class SpoolError(RuntimeError):
    """The spool cannot be used, or a batch could not be kept; the message says why and what to do."""


class SpoolFull(SpoolError):
    """There is no room for this batch within the spool's bound."""


class Spool:
    """The spool in ``folder``, made (mode 0700) when it is not there. One thread puts, another sends; more of
    either take turns.

    A folder that is lost, or whose state cannot be read, gives a new ``agent`` id, so that its sequence
    numbers are never taken for others. On a full disk it opens, and takes batches once there is room. Raises
    :class:`SpoolError` when ``max_bytes`` is below ``MIN_BYTES``, the folder cannot be used or another process
    uses it.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        if max_bytes < MIN_BYTES:
            raise SpoolError(
                f"a spool of {max_bytes} bytes is too small to be of use: give it {MIN_BYTES >> 20} MB or more "
                "(SYSOM_SPOOL_MB)"
            )
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_aside = min(MAX_ASIDE_BYTES, max_bytes // 16)
        self._putting = threading.Lock()
        self._sending = threading.RLock()  # held while the disk is waited for; put never takes it
        self._memory = threading.Lock()  # of the fields below; never held while a file is touched
        self._uses: dict[int, int] = {}  # disk of the pending batches, oldest first
        self._pending_bytes = 0
        self._aside_bytes = dict.fromkeys(ASIDE, 0)
        self._unsynced: set[int] = set()
        self._undeleted: set[Path] = set()
        self._sent = -1
        self._sent_bytes = 0
        self._folder_bytes = 0
        self._settled_s = float("-inf")
        self._dirty = True
        self._guard = self._take_folder()
        try:
            self._state = spool_folder.read_state(folder, self._scan() + 1)
            try:
                self._save(sync=True)
                disk.sync(folder)
                disk.sync(folder.parent)
            except OSError as error:
                if not disk.is_full(error):
                    raise
        except OSError as error:
            os.close(self._guard)
            raise SpoolError(f"the spool {folder} cannot be used: {error}") from error

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
        with self._memory:
            return msgspec.structs.replace(self._state.counts)

    @property
    def size_bytes(self) -> int:
        """Disk that all of the spool takes: whole blocks."""
        with self._memory:
            return self._use()

    def untold(self) -> Counts:
        """What was lost and no kept batch tells yet (see ``tells`` of :meth:`put`), also before a restart."""
        with self._memory:
            now, told = self._state.counts, self._state.told
            return Counts(now.dropped - told.dropped, now.bad - told.bad, now.refused - told.refused)

    def put(self, batch: Batch, *, tells: Counts | None = None) -> None:
        """Keep a batch, whose ``agent`` and ``seq`` must be this spool's. ``tells``: the part of :meth:`untold`
        that its events tell; told once this batch is kept.

        Raises :class:`SpoolFull` when the spool is full, :class:`SpoolError` when the batch could not be written
        (a full disk) or is too large to send: it is lost, counted as dropped, and its number is used up; the spool
        goes on. A folder that vanished is made anew. ``ValueError`` for another agent or number.
        """
        with self._putting:
            if batch.agent != self.agent or batch.seq != self.next_seq:
                raise ValueError(
                    f"the spool expects batch {self.next_seq} of agent {self.agent}, "
                    f"not {batch.seq} of {batch.agent}"
                )
            with self._memory:
                self._state.next_seq += 1
            try:
                use = self._write(batch.seq, codec.encode(batch))
            except (OSError, RecordError, SpoolError) as error:
                with self._memory:
                    self._state.counts.dropped += 1
                    self._dirty = True
                if isinstance(error, SpoolError):
                    raise
                raise self._error(error) if isinstance(error, OSError) else SpoolError(str(error)) from error
            with self._memory:
                self._know(batch.seq, use)
                if tells is not None:
                    self._tell(tells)

    def pending(self) -> list[int]:
        """Sequence numbers of the batches kept, oldest first."""
        with self._memory:
            return list(self._uses)

    def read(self, seq: int) -> bytes | None:
        """A batch as it goes over the wire. None when it is gone or damaged, which is counted; damaged, it is set
        aside. Raises :class:`SpoolError` when it cannot be read now, or not be set aside."""
        with self._sending:
            with self._memory:
                if seq not in self._uses:
                    return None
            try:
                wire = disk.read(self._path(seq), codec.MAX_WIRE_BYTES + 1)
                codec.unpack(wire)
            except FileNotFoundError:
                self._forget(seq, bad=1)
                return None
            except (RecordError, OSError) as error:
                if isinstance(error, OSError) and not disk.is_damage(error):
                    raise self._error(error) from error
                self._set_aside(seq, "bad", str(error))
                return None
            return wire

    def remove(self, seq: int) -> None:
        """Forget a batch that the server has. Raises :class:`SpoolError` when its file cannot be deleted: it is not
        sent again by this process, and deleted when that is possible."""
        with self._sending:
            with self._memory:
                newest = seq > self._sent and seq == max(self._uses, default=-1)
            path = self._path(seq)
            use = self._forget(seq)
            try:
                if newest:
                    path.replace(sent_file(self._folder, seq))
                    path, self._sent = sent_file(self._folder, self._sent), seq
                    with self._memory:
                        self._sent_bytes = use
                disk.delete(path)
            except FileNotFoundError:
                return
            except OSError as error:
                self._undeleted.add(path)
                raise self._error(error) from error

    def refuse(self, seq: int, words: str) -> None:
        """Set aside a batch that the server will never take, with what it said.

        Raises :class:`SpoolError` when its file cannot be moved, or its words not be written; it is not sent again
        by this process.
        """
        with self._sending:
            self._set_aside(seq, "refused", words)

    def settle(self, now_s: float) -> None:
        """Make what waits safe from a power cut, when the last time was ``SYNC_EVERY_S`` ago. ``now_s``: any clock
        that goes forward. Waits for the disk: for the thread that sends, after each round.

        Raises :class:`SpoolError` when something cannot be written; all that can be is.
        """
        with self._sending:
            if now_s - self._settled_s >= SYNC_EVERY_S and (self._unsynced or self._dirty or self._undeleted):
                self._settled_s = now_s
                self._settle()

    def close(self) -> None:
        """Give the folder free for another process. Pending batches stay for it. Raises :class:`SpoolError` when
        something could not be written."""
        with self._putting, self._sending:
            if self._guard >= 0:
                try:
                    self._dirty = True  # the number that is next
                    self._settle()
                finally:
                    os.close(self._guard)
                    self._guard = -1

    def _path(self, seq: int) -> Path:
        return batch_file(self._folder, seq)

    def _error(self, error: OSError) -> SpoolError:
        if disk.is_full(error):
            return SpoolError(
                f"the disk under the spool {self._folder} is full: free some space; until then batches may be "
                f"lost ({error})"
            )
        return SpoolError(f"the spool {self._folder} cannot be used now: {error}")

    def _use(self) -> int:
        fixed = self._folder_bytes + 2 * disk.BLOCK  # the state and its successor
        return self._pending_bytes + sum(self._aside_bytes.values()) + self._sent_bytes + fixed

    def _write(self, seq: int, wire: bytes) -> int:
        with self._memory:
            use = self._use() + disk.whole_blocks(len(wire))
        if use > self._max_bytes:
            raise SpoolFull(
                f"the spool {self._folder} is full ({self._max_bytes >> 20} MB): the newest batches are given up "
                "until the server takes the oldest; give it more disk (SYSOM_SPOOL_MB), or bring the server back"
            )
        try:
            use = disk.write(self._path(seq), wire)
        except FileNotFoundError:
            guard, self._guard = self._guard, self._take_folder()
            os.close(guard)
            self._dirty = True
            use = disk.write(self._path(seq), wire)
        self._folder_bytes = disk.use_of(self._folder)
        return use

    def _know(self, seq: int, use: int) -> None:
        self._uses[seq] = use
        self._pending_bytes += use
        self._unsynced.add(seq)

    def _forget(self, seq: int, *, bad: int = 0, refused: int = 0) -> int:
        """Forget it here, before the disk: what cannot be deleted is not sent again and again. Gives its use."""
        with self._memory:
            use = self._uses.pop(seq, 0)
            self._pending_bytes -= use
            self._unsynced.discard(seq)
            self._state.counts.bad += bad
            self._state.counts.refused += refused
            self._dirty = self._dirty or bool(bad or refused)
        return use

    def _tell(self, tells: Counts) -> None:
        told = self._state.told
        told.dropped += tells.dropped
        told.bad += tells.bad
        told.refused += tells.refused
        self._dirty = True

    def _take_folder(self) -> int:
        try:
            for aside in ASIDE:
                disk.make_private(self._folder / aside)
            disk.make_private(self._folder)
            return disk.lock(self._folder / "lock")
        except BlockingIOError as error:
            raise SpoolError(
                f"another agent uses the spool {self._folder}: end it, or give this one another folder"
            ) from error
        except OSError as error:
            raise SpoolError(f"the spool {self._folder} cannot be used: {error}") from error

    def _scan(self) -> int:
        """Know what a predecessor left. Gives the highest number that it used."""
        left = spool_folder.clear_up(self._folder)
        for seq, use in left.batches.items():
            self._know(seq, use)
        self._sent, self._sent_bytes = left.sent, left.sent_bytes
        self._folder_bytes = disk.use_of(self._folder)
        for where in ASIDE:
            self._trim(where)
        return left.highest

    def _save(self, *, sync: bool = False) -> None:
        with self._memory:
            content = msgspec.json.encode(self._state)
            self._dirty = False
        try:
            disk.write(self._folder / STATE, content, sync=sync)
        except OSError:
            self._dirty = True
            raise

    def _settle(self) -> None:
        with self._memory:
            batches = heapq.nlargest(SYNC_MOST, self._unsynced)
        acts: list[Callable[[], object]] = [partial(self._delete, path) for path in self._undeleted]
        acts += [partial(disk.sync, self._path(seq)) for seq in batches]
        if self._dirty:
            acts.append(partial(self._save, sync=True))
        acts.append(partial(disk.sync, self._folder))  # last: the names of files that are whole
        failed: OSError | None = None
        for act in acts:
            try:
                act()
            except FileNotFoundError:
                continue  # the folder vanished: put and read say so
            except OSError as error:
                failed = error
        with self._memory:
            # Also what failed: the kernel gives up what it could not write, and a second fsync says nothing.
            self._unsynced.difference_update(batches)
        if failed is not None:
            raise self._error(failed) from failed

    def _delete(self, path: Path) -> None:
        disk.delete(path)
        self._undeleted.discard(path)

    def _set_aside(self, seq: int, where: str, words: str) -> None:
        self._forget(seq, **{where: 1})
        path, aside = self._path(seq), self._folder / where / f"{seq:020}.batch"
        try:
            try:
                path.replace(aside)
                self._save()
                disk.write(aside.with_suffix(".why"), words[:2000].encode(errors="replace"))
            except OSError:
                # What cannot be moved must not block the rest, now or after a restart.
                self._undeleted.add(path)
                raise
            finally:
                self._trim(where)
        except OSError as error:
            raise self._error(error) from error

    def _trim(self, where: str) -> None:
        with self._memory:
            others = self._use() - self._aside_bytes[where]
        keep = max(0, min(self._max_aside, self._max_bytes - others))
        use = disk.trim(self._folder / where, keep)
        with self._memory:
            self._aside_bytes[where] = use
