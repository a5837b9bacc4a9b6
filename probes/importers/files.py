"""A trace file as plain bytes: gzip undone, and what is wrong with the file in words."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

GZIP = b"\x1f\x8b"
BUFFER_BYTES = 1 << 18


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, of what is in it when it is gzipped; a buffered stream that does not seek back.

    Raises :class:`probes.importers.Unusable`, also while it is read: not there, not to be read, a gzip file that is
    damaged or cut short.
    """
    with _explained(path), path.open("rb") as raw:
        gzipped = raw.read(2) == GZIP
        raw.seek(0)
        plain: io.RawIOBase = _Plain(path, gzip.GzipFile(fileobj=raw) if gzipped else raw)
        yield cast(BinaryIO, io.BufferedReader(plain, BUFFER_BYTES))


class _Plain(io.RawIOBase):
    """Reads, and says in words what went wrong where."""

    def __init__(self, path: Path, source: gzip.GzipFile | io.BufferedReader) -> None:
        self._path, self._source, self._read = path, source, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what io.BufferedReader gives
        with _explained(self._path, self._read):
            count = self._source.readinto(buffer)
        self._read += count
        return count


@contextmanager
def _explained(path: Path, at: int = 0) -> Iterator[None]:
    from probes.importers import Unusable

    try:
        yield
    except EOFError as error:
        raise Unusable(
            f"{path}: the gzip file is cut short after {at} bytes of what is in it: get the whole file", path
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise Unusable(
            f"{path}: the gzip file is damaged after {at} bytes of what is in it ({error}): get it again",
            path,
        ) from error
    except OSError as error:
        raise Unusable(f"{path} cannot be read: {error.strerror or error}", path) from error
