"""A Chrome trace of any size, event by event: what stands around its events, and what is broken in it.

The decoder is msgspec's, which takes whole values only; so the text is cut into pieces that are whole. A piece that
begins at an element of the array and, put into brackets, is valid JSON ends at an element of the array: reading it
leaves the reader where a closing bracket is allowed. So a place that only looks like the end of an event (within a
string, say) does no harm: the decoder refuses the piece. What it refuses is split by hand (:func:`_elements`).

Memory: one piece of ``PIECE_BYTES``, its events, and one value around the events of at most ``VALUE_BYTES``.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from probes.importers import Unusable
from probes.importers.files import GZIP

PIECE_BYTES = 1 << 20
EVENT_BYTES = 4 << 20
"""Longest event; Kineto's are below 100 kB, whatever stacks and shapes they carry."""
VALUE_BYTES = 64 << 20
"""Longest value beside the events: process groups of 10,000 ranks in 300 groups are 20 MB."""
GUESSES = 4
"""How many likely ends are tried before a piece is split by hand."""

Scalar = int | float | str | bool | None


class Args(msgspec.Struct, gc=False):
    """What is used of an event's ``args``. Names: torch/csrc/profiler/util.h, kineto's output_json.cpp."""

    correlation: Scalar = None
    external: Scalar = msgspec.field(name="External id", default=None)
    collective: Scalar = msgspec.field(name="Collective name", default=None)
    elements: Scalar = msgspec.field(name="In msg nelems", default=None)
    dtype: Scalar = None
    group: Scalar = msgspec.field(name="Process Group Name", default=None)
    group_desc: Scalar = msgspec.field(name="Process Group Description", default=None)
    group_size: Scalar = msgspec.field(name="Group size", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    seq: Scalar = msgspec.field(name="Seq", default=None)
    rank: Scalar = msgspec.field(name="Rank", default=None)
    stream: Scalar = None
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b""))


class TraceEvent(msgspec.Struct, gc=False):
    """What is used of an event (Chrome's Trace Event Format). ``ts`` and ``dur`` are microseconds."""

    ph: Scalar = None
    cat: Scalar = None
    name: Scalar = None
    ts: Scalar = None
    dur: Scalar = None
    pid: Scalar = None
    tid: Scalar = None
    args: Args | None = None


_array = msgspec.json.Decoder(list[TraceEvent])
_one = msgspec.json.Decoder(TraceEvent)
_any = msgspec.json.Decoder()
_END = re.compile(rb"\}\s*,?\s*\]")
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
"""A string, a bracket, or the start of a string that the text cuts off."""
_GAP = re.compile(rb"[\s,]*")
_NOT_JSON = re.compile(rb"(?<=[:\[,\s])[-+]?(?:nan|inf(?:inity)?)(?=\s*[,}\]])", re.IGNORECASE)
"""What C++ and Python write where JSON has no word: the bandwidth of a copy that took no time is inf."""
_KEY = re.compile(rb'\s*"([^"\\]*+(?:\\.[^"\\]*+)*+)"\s*:\s*', re.DOTALL)


class Stream:
    """One trace, read once, front to back: :meth:`events`, and then what stood around them and what was wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.around: dict[str, Any] = {}
        """Values of the outermost object beside the events, by key."""
        self.cut = ""
        """Why the file ends early, in words; "" when it is whole."""
        self.broken = 0
        """Events that are no JSON, or not an event's."""
        self.at = 0
        """Bytes (of what is in the gzip) that were read."""
        self.found_events = False
        self._text = b""
        self._over = False
        self._bytes = self._plain()

    def events(self) -> Iterator[list[TraceEvent]]:
        """The events, some thousand at a time. Raises :class:`Unusable` for what is no trace."""
        head = self._peek(4)
        if head[:3] == b"\xef\xbb\xbf":
            self._text = self._text[3:]
        elif head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise Unusable(
                f"{self.path}: UTF-16 text; the profiler writes UTF-8: convert it first", self.path
            )
        first = self._skip_blank()
        if first == b"[":
            self._text = self._text[1:]
            self.found_events = True
            yield from self._events()
        elif first == b"{":
            self._text = self._text[1:]
            yield from self._object()
        elif first:
            raise Unusable(f"{self.path}: no JSON: it begins with {self._text[:20]!r}", self.path)
        elif self.cut:
            raise Unusable(f"{self.path}: {self.cut}, and there is nothing before that", self.path)
        else:
            raise Unusable(f"{self.path}: an empty file", self.path)
        if not self.found_events:
            why = f"{self.cut} before its events" if self.cut else "JSON without traceEvents"
            raise Unusable(
                f"{self.path}: {why}; sysom reads what torch.profiler exports (export_chrome_trace)",
                self.path,
            )

    def _object(self) -> Iterator[list[TraceEvent]]:
        while True:
            self._gap()
            if self._skip_blank() in (b"}", b""):
                if not self._text:
                    self._end("ends within its outermost object")
                return
            key = self._key()
            if key is None:
                self._end("is no JSON where a key should be")
                return
            if key == "traceEvents" and self._skip_blank() == b"[" and not self.found_events:
                self._text = self._text[1:]
                self.found_events = True
                yield from self._events()
            elif not self._value(key):
                return

    def _key(self) -> str | None:
        while (found := _KEY.match(self._text)) is None or found.end() == len(self._text):
            if len(self._text) > EVENT_BYTES or not self._more():
                break
        if found is None:
            return None
        self._text = self._text[found.end() :]
        return found[1].decode("utf-8", "replace")

    def _value(self, key: str) -> bool:
        """Take one value beside the events; whether the text goes on after it."""
        while (end := _value_end(self._text)) is None:
            if len(self._text) > VALUE_BYTES:
                self._end(
                    f"has a value of more than {VALUE_BYTES >> 20} MiB ({key[:60]!r}), which is not read"
                )
                return False
            if not self._more(len(self._text)):
                self._end(f"ends within the value of {key[:60]!r}")
                return False
        text, self._text = self._text[:end], self._text[end:]
        try:
            self.around[key] = _any.decode(_repaired(text))
        except (msgspec.DecodeError, RecursionError):
            self.broken += 1
        return True

    def _events(self) -> Iterator[list[TraceEvent]]:
        ended = False
        while not ended:
            self._gap()
            if self._text[:1] == b"]":
                self._text = self._text[1:]
                return
            while len(self._text) < PIECE_BYTES and self._more():
                pass
            if not self._text:
                self._end("ends within its events")
                return
            whole, used, ended = _whole(self._text)
            if whole is None:
                repaired = _repaired(self._text)
                if repaired != self._text:
                    self._text = repaired
                    whole, used, ended = _whole(self._text)
            if whole is None:
                whole, used, ended, bad = _elements(self._text)
                self.broken += bad
                if not used and not ended and not self._grow():
                    return
            self._text = self._text[used:]
            if whole:
                yield whole

    def _grow(self) -> bool:
        """Get more of an event that has not ended; False at the end of the file."""
        if len(self._text) > EVENT_BYTES:
            self._end(f"has an event of more than {EVENT_BYTES >> 20} MiB; what follows is not read")
            return False
        if not self._more(len(self._text)):
            self._end("ends within an event")
            return False
        return True

    def _end(self, how: str) -> None:
        if not self.cut:
            self.cut = f"the file {how} (byte {self.at - len(self._text)})"
        self._text = b""
        self._over = True

    def _gap(self) -> None:
        """Skip blanks and commas."""
        while True:
            found = _GAP.match(self._text)
            self._text = self._text[found.end() if found else 0 :]
            if self._text or not self._more():
                return

    def _skip_blank(self) -> bytes:
        """Skip blanks; the byte that follows."""
        while True:
            self._text = self._text.lstrip()
            if self._text or not self._more():
                return self._text[:1]

    def _peek(self, count: int) -> bytes:
        while len(self._text) < count and self._more():
            pass
        return self._text[:count]

    def _more(self, least: int = 0) -> bool:
        """Read on, at least ``least`` bytes where there are so many (what grows doubles); False at the end."""
        parts = [self._text]
        count = 0
        while not self._over and count <= least:
            piece = next(self._bytes, None)
            if piece is None:
                self._over = True
                break
            self.at += len(piece)
            count += len(piece)
            parts.append(piece)
        self._text = b"".join(parts)
        return count > 0

    def _plain(self) -> Iterator[bytes]:
        """The file's bytes, gzip undone; to the last byte that can be had of one that is cut short or damaged
        (``gzip.GzipFile`` loses up to a buffer of them)."""
        try:
            with self.path.open("rb") as file:
                head = file.read(PIECE_BYTES)
                if not head.startswith(GZIP):
                    while head:
                        yield head
                        head = file.read(PIECE_BYTES)
                    return
                unpack = zlib.decompressobj(wbits=31)
                while head:
                    plain = unpack.decompress(head, PIECE_BYTES)
                    head = unpack.unconsumed_tail
                    if plain:
                        yield plain
                    if unpack.eof:
                        head = (unpack.unused_data or file.read(PIECE_BYTES)).lstrip(b"\0")
                        if head and not head.startswith(GZIP[: len(head)]):
                            self.cut = (
                                f"something that is no gzip follows after {self.at} bytes of what is in it"
                            )
                            return
                        unpack = zlib.decompressobj(wbits=31) if head else unpack
                    elif not head:
                        head = file.read(PIECE_BYTES)
                if not unpack.eof:
                    yield from filter(None, [unpack.flush()])
                    self.cut = f"the gzip file is cut short after {self.at} bytes of what is in it"
        except zlib.error as error:
            self.cut = f"the gzip file is damaged after {self.at} bytes of what is in it ({error})"
        except OSError as error:
            raise Unusable(f"{self.path} cannot be read: {error.strerror or error}", self.path) from error


def _whole(text: bytes) -> tuple[list[TraceEvent] | None, int, bool]:
    """Events at the start of ``text``, their bytes, whether the array ends there. None: split by hand."""
    stop = len(text)
    for _ in range(GUESSES):
        stop = text.rfind(b"}", 0, stop)
        if stop < 0:
            break
        if _BETWEEN.match(text, stop):
            events = _decoded(text[: stop + 1])
            if events is not None:
                return events, stop + 1, False
    for end in islice(_END.finditer(text), GUESSES):
        events = _decoded(text[: end.start() + 1])
        if events is not None:
            return events, end.end(), True
    return None, 0, False


def _decoded(text: bytes) -> list[TraceEvent] | None:
    try:
        return _array.decode(b"[" + text + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _elements(text: bytes) -> tuple[list[TraceEvent], int, bool, int]:
    """What :func:`_whole` gives, and how many events are broken: element by element, each for itself."""
    events: list[TraceEvent] = []
    used = bad = depth = 0
    start = -1
    for token in _TOKEN.finditer(text):
        kind = token[0]
        if kind == b'"':
            break
        if kind in (b"{", b"["):
            if depth == 0:
                start = token.start()
            depth += 1
        elif kind in (b"}", b"]"):
            if depth == 0:
                return events, token.end(), True, bad
            depth -= 1
            if depth == 0:
                used = token.end()
                try:
                    events.append(_one.decode(text[start:used].decode("utf-8", "replace")))
                except (msgspec.DecodeError, RecursionError):
                    bad += 1
    return events, used, False, bad


def _repaired(text: bytes) -> bytes:
    """The text with null for numbers that are none, and with what is no UTF-8 replaced."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if error.end < len(text):  # a character that the piece's end cut in two is whole in the next one
            text = text.decode("utf-8", "replace").encode()
    return _NOT_JSON.sub(b"null", text)


def _value_end(text: bytes) -> int | None:
    """Where the JSON value at the start of ``text`` ends; None when it does not within it."""
    first = text[:1]
    if first not in (b"{", b"[", b'"'):
        plain = re.match(rb"[^,}\]\s]*", text)
        end = plain.end() if plain else 0
        return end if end < len(text) else None
    depth = 0
    for token in _TOKEN.finditer(text):
        kind = token[0]
        if kind == b'"':
            return None
        depth += (kind in (b"{", b"[")) - (kind in (b"}", b"]"))
        if depth == 0:
            return token.end()
    return None
