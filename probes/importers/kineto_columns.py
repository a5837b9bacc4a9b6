"""What is kept of a Kineto trace: 33 bytes per operation, 20 per launch, so that a file of gigabytes fits.

Instants are nanoseconds as the file counts them, until :mod:`probes.importers.kineto_rows` adds its base.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

import msgspec

from probes.records import Lane


class Call(msgspec.Struct, gc=False):
    """A collective as the host called it: ``record_param_comms``, or c10d's annotation around the call."""

    start_ns: int
    duration_ns: int
    tid: int
    op: int | None
    """None where the name does not say, and for what is no collective (``wait``)."""
    bytes: int
    dtype: str
    group: int
    """Index into ``Trace.groups``; −1 not known."""
    seq: int
    library: str
    """``nccl``, ``gloo``, …; "" for ``record_param_comms``."""


class Transfer(msgspec.Struct, gc=False):
    """A kernel of NCCL's."""

    start_ns: int
    duration_ns: int
    op: int
    bytes: int
    dtype: str
    group: int
    seq: int
    stream: int
    correlation: int
    external: int
    """Ties it to its ``record_param_comms``; −1 where the trace does not tie them."""


class Group(msgspec.Struct, frozen=True):
    """A process group. ``name`` "" and ``size`` 0: not known."""

    name: str
    desc: str
    size: int
    ranks: tuple[int, ...] = ()
    """Global ranks in order; empty where the trace does not list all."""


@dataclass
class Operations:
    """Columns of one length."""

    start: array[int] = field(default_factory=lambda: array("q"))
    duration: array[int] = field(default_factory=lambda: array("q"))
    kind: array[int] = field(default_factory=lambda: array("i"))
    lane: array[int] = field(default_factory=lambda: array("b"))
    correlation: array[int] = field(default_factory=lambda: array("q"))
    """Of the launch; −1 for what runs on the host."""
    tid: array[int] = field(default_factory=lambda: array("i"))

    def add(self, start: int, duration: int, kind: int, lane: Lane, correlation: int, tid: int) -> None:
        self.start.append(start)
        self.duration.append(duration)
        self.kind.append(kind)
        self.lane.append(lane)
        self.correlation.append(correlation)
        self.tid.append(tid)

    def __len__(self) -> int:
        return len(self.start)


@dataclass
class Launches:
    """Calls that put work on the GPU."""

    correlation: array[int] = field(default_factory=lambda: array("q"))
    at: array[int] = field(default_factory=lambda: array("q"))
    tid: array[int] = field(default_factory=lambda: array("i"))

    def sort(self) -> None:
        order = sorted(range(len(self.correlation)), key=self.correlation.__getitem__)
        for name in ("correlation", "at", "tid"):
            column = getattr(self, name)
            setattr(self, name, array(column.typecode, map(column.__getitem__, order)))

    def of(self, correlation: int) -> int:
        """Place of the launch; −1 where there is none. Sorted only."""
        place = bisect_right(self.correlation, correlation) - 1
        return place if place >= 0 and self.correlation[place] == correlation else -1
