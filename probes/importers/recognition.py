"""What kind of trace a file is, by its content: its name says nothing."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from probes.importers.files import GZIP

KINDS = "Kineto traces (JSON), Flight Recorder dumps, NCCL Inspector logs, operation tables (Parquet, CSV)"
HEAD_BYTES = 1 << 18
"""What is looked at: a Kineto trace has its device properties and process groups before the first event."""

_PICKLE = re.compile(rb"\x80[\x02-\x05]")
"""PROTO and the protocol; older ones are not written by PyTorch (pickletools)."""
_OPERATION_COLUMNS = {"rank", "optype", "duration"}


def recognise(path: Path) -> str | None:
    """The importer's name (``probes.importers.MODULES``), or None. Reads the first bytes. Raises ``OSError``."""
    head = _head(path)
    if head.startswith(b"PAR1"):
        return "operations"
    if _PICKLE.match(head):
        return "flight-recorder" if b"pg_config" in head or b"entries" in head else None
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"["):
        return _of_json(text)
    columns = {name.strip(' "\r').lower() for name in re.split(r"[,;\t]", _first_line(text))}
    return "operations" if columns >= _OPERATION_COLUMNS else None


def _of_json(text: bytes) -> str | None:
    if b'"traceEvents"' in text or (b'"schemaVersion"' in text and b'"deviceProperties"' in text):
        return "kineto"
    if text.startswith(b"[") and b'"ph"' in text and b'"ts"' in text:
        return "kineto"
    if b'"coll_perf"' in text or b'"inspector_output_format_version"' in text:
        return "inspector"
    if b'"pg_config"' in text or (b'"entries"' in text and b'"record_id"' in text):
        return "flight-recorder"
    return None


def unrecognised(path: Path) -> str:
    """What a file that is not recognised looks like, in a few words. Raises ``OSError``."""
    head = _head(path)
    if not head:
        return (
            "a gzip file with nothing in it, or damaged from the start"
            if path.stat().st_size
            else "an empty file"
        )
    if _PICKLE.match(head):
        return "a pickle without the keys of a Flight Recorder dump"
    if head.lstrip()[:1] in (b"{", b"["):
        return "JSON without the keys of a trace"
    if b"\0" in head:
        return "binary data of an unknown kind"
    return "text of an unknown kind"


def _first_line(text: bytes) -> str:
    return text.partition(b"\n")[0][:4096].decode("utf-8", "replace")


def _head(path: Path) -> bytes:
    """The first bytes, of what is in it when it is gzipped; of a damaged one what can be read."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head.startswith(GZIP):
        return head
    try:
        return zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
    except zlib.error:
        return b""
