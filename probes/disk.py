"""Files of the spool: written whole or not at all, and what they take of the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

BLOCK = 4096
"""ext4 and xfs give out disk in blocks of this size."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DAMAGE = {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EISDIR}
"""What a file that cannot be read again answers (EUCLEAN: a file system's own "corrupted")."""


def is_full(error: OSError) -> bool:
    """Whether there is no room, or no quota."""
    return error.errno in _FULL


def is_damage(error: OSError) -> bool:
    """Whether this file is lost; other errors (too many open files) may pass."""
    return error.errno in _DAMAGE


def whole_blocks(size: int) -> int:
    """Bytes of disk that a file of ``size`` bytes takes."""
    return -(-size // BLOCK) * BLOCK


def use_of(path: Path) -> int:
    """Bytes of disk that a file or folder takes, its own blocks; at least what its size needs, as some file
    systems give out blocks later. Raises OSError."""
    return _use(path.stat())


def _use(found: os.stat_result) -> int:
    return max(found.st_blocks * 512, whole_blocks(found.st_size))


def write(path: Path, content: bytes, *, sync: bool = False) -> int:
    """Write beside ``path``, with ``sync`` wait until that is on the disk, and rename it into place; mode 0600.
    Gives the bytes of disk that it takes. Raises OSError, and leaves nothing beside."""
    beside = path.with_suffix(".tmp")
    try:
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(file, left) :]
            if sync:
                os.fsync(file)
            use = _use(os.fstat(file))
        finally:
            os.close(file)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            beside.unlink()
        raise
    return use


def read(path: Path, most: int = -1) -> bytes:
    """The file's first ``most`` bytes, or all. Raises OSError."""
    with path.open("rb") as file:
        return file.read(most)


def make_private(folder: Path) -> None:
    """Make a folder, and those above it, unless it is there; mode 0700. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def lock(path: Path) -> int:
    """A descriptor that holds the lock until it is closed, or its process ends. Raises ``BlockingIOError`` when
    somebody else holds it, and OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)  # no writer: a remount may come
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def delete(path: Path) -> None:
    """Delete a file that may be gone already. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def trim(folder: Path, keep: int) -> int:
    """Delete the oldest files of ``folder`` until the rest takes ``keep`` bytes of disk at most; gives what it
    takes, the folder's own blocks included. Raises OSError."""
    files = []
    for path in folder.iterdir():
        found = path.stat()
        files.append((found.st_mtime_ns, path.name, _use(found)))
    total = sum(use for *_, use in files)
    for _, name, use in sorted(files):
        if total <= keep:
            break
        delete(folder / name)
        total -= use
    return total + use_of(folder)
