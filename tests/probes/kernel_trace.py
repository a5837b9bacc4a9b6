"""What the kernel's own tracing (Documentation/trace/ftrace.rst) says of a process's tracepoints."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from probes.bpf import TRACEFS

LINE = re.compile(r"^.*-(\d+) +\[\d+\] \S+ +(\d+\.\d+): (\w+): (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Seen:
    tid: int
    at_s: float
    event: str
    words: str


@dataclass(frozen=True)
class Trace:
    folder: Path

    def seen(self) -> list[Seen]:
        """All that came so far, by time."""
        text = (self.folder / "trace").read_text(errors="replace")
        found = [Seen(int(tid), float(at), event, words) for tid, at, event, words in LINE.findall(text)]
        return sorted(found, key=lambda seen: seen.at_s)

    def pairs_ns(self, begin: str, end: str) -> list[int]:
        """How long each passed from ``begin`` to the ``end`` of the same thread."""
        since: dict[int, float] = {}
        lasted = []
        for seen in self.seen():
            if seen.event == begin:
                since[seen.tid] = seen.at_s
            elif seen.event == end and seen.tid in since:
                lasted.append(round((seen.at_s - since.pop(seen.tid)) * 1e9))
        return lasted


@contextlib.contextmanager
def trace(events: Sequence[str], condition: str) -> Iterator[Trace]:
    """Trace ``category/event`` where ``condition`` holds, beside whatever else is traced. Skips where no instance
    of tracing can be made."""
    folder = TRACEFS / "instances" / f"sysom-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no instance of the kernel's tracing can be made: {error}")
    try:
        (folder / "trace_clock").write_text("mono")
        (folder / "buffer_size_kb").write_text("8192")
        for event in events:
            (folder / "events" / event / "filter").write_text(condition)
            (folder / "events" / event / "enable").write_text("1")
        yield Trace(folder)
    finally:
        (folder / "events/enable").write_text("0")
        folder.rmdir()
