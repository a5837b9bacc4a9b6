"""Recordings: batches of one node in a file, as its agent made them, to be looked at or played again elsewhere.

    "sysom recording 1\\n"
    one zstd frame of parts: length and CRC-32 (4 bytes each, big-endian), then msgpack: a header, then batches in
    order; the last length is 0

A recording that was cut short (its process was killed, the disk was full) is good up to the cut.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard

from probes import codec
from probes.codec import MAX_PLAIN_BYTES, RecordError
from probes.records import Batch

MAGIC = b"sysom recording 1\n"
LEVEL = 12
"""Of zstd: batches after one another pack better than each alone (1.8 against 2.4 kB per rank and second)."""
FLUSH_BATCHES = 10
"""A process that is killed loses so many batches at most."""
CHUNK = 512
"""Read at a time: at most 128 blocks of zstd, which unpack to 16 MiB (RFC 8878, 3.1.1.2)."""
_HEAD = struct.Struct(">II")


class RecordingError(ValueError):
    """A recording that cannot be made or read; the message says why and what to do."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording is of."""

    node: str
    made_ns: int
    """UTC, when it began."""
    kernel: str
    """Its version, as 6.18."""
    cpus: int
    note: str = ""
    """What the person who made it knows: the truth, where a fault was put in on purpose."""


@dataclass(frozen=True)
class Recording:
    """A recording's header and all its batches. ``cut_short`` says why it ends early; empty when it is whole."""

    header: Header
    batches: list[Batch]
    cut_short: str


class Writer:
    """Writes a recording into a new file. Raises :class:`RecordingError` when the file is there already or cannot
    be written."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self.batches = 0
        try:
            self._file: BinaryIO = open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115 - open as long as this object
        except FileExistsError as error:
            raise RecordingError(f"{path} is there already: give the recording another name") from error
        except OSError as error:
            raise RecordingError(f"the recording {path} cannot be made: {error.strerror or error}") from error
        try:
            self._file.write(MAGIC)
            compressor = zstandard.ZstdCompressor(level=LEVEL)
            self._frame = compressor.stream_writer(self._file, closefd=False)
            self._put(msgspec.msgpack.encode(header))
            self.flush()
        except OSError as error:
            self._file.close()
            raise self._failed(error) from error

    def add(self, batch: Batch) -> None:
        """Append a batch. Raises :class:`RecordingError`; what was flushed before stays readable."""
        try:
            self._put(codec.to_plain(batch))
            self.batches += 1
            if self.batches % FLUSH_BATCHES == 0:
                self.flush()
        except OSError as error:
            raise self._failed(error) from error

    def flush(self) -> None:
        """Hand everything so far to the kernel."""
        self._frame.flush(zstandard.FLUSH_BLOCK)
        self._file.flush()

    def close(self) -> None:
        """End the frame. Raises :class:`RecordingError`."""
        try:
            self._put(b"")
            self._frame.flush(zstandard.FLUSH_FRAME)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        finally:
            self._file.close()

    def size_bytes(self) -> int:
        """Size of the file so far."""
        return self._path.stat().st_size

    def _put(self, plain: bytes) -> None:
        self._frame.write(_HEAD.pack(len(plain), zlib.crc32(plain)) + plain)

    def _failed(self, error: OSError) -> RecordingError:
        return RecordingError(
            f"the recording {self._path} cannot be written on ({error.strerror or error}); its "
            f"{self.batches} batches so far can be played"
        )


def read(path: Path) -> Recording:
    """Read a recording. Raises :class:`RecordingError` for what is none, or has no whole header."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise RecordingError(f"{path} is not a recording of sysom (or one of another version)")
            parts = _parts(file)
            header = msgspec.msgpack.decode(next(parts), type=Header)
            batches: list[Batch] = []
            try:
                batches.extend(codec.from_plain(part) for part in parts)
            except _CutShort as cut:
                return Recording(
                    header, batches, f"{path} is cut short ({cut}): {len(batches)} batches are whole"
                )
            return Recording(header, batches, "")
    except OSError as error:
        raise RecordingError(f"the recording {path} cannot be read: {error.strerror or error}") from error
    except (_CutShort, StopIteration, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path} is damaged before its first batch: {error}") from error
    except RecordError as error:
        raise RecordingError(f"{path} holds a batch that cannot be used: {error}") from error


class _CutShort(Exception):
    pass


def _parts(file: BinaryIO) -> Iterator[bytes]:
    # Not the library's stream reader: of a frame that was cut short it keeps the last whole block to itself.
    frame = zstandard.ZstdDecompressor().decompressobj()
    plain = bytearray()

    def exactly(size: int) -> bytes:
        while len(plain) < size:
            packed = b"" if frame.eof else file.read(CHUNK)
            if not packed:
                raise _CutShort("the file has no end mark")
            plain.extend(frame.decompress(packed))
        content = bytes(plain[:size])
        del plain[:size]
        return content

    try:
        while True:
            length, check = _HEAD.unpack(exactly(_HEAD.size))
            if length > MAX_PLAIN_BYTES:
                raise _CutShort(f"a part of {length} bytes; {MAX_PLAIN_BYTES} are the most")
            part = exactly(length)
            if zlib.crc32(part) != check:
                raise _CutShort("a part is damaged")
            if not part:
                return
            yield part
    except zstandard.ZstdError as error:
        raise _CutShort(str(error)) from error
