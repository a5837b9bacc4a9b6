"""What is known about one job in one window: the engine's only input.

Plain arrays, no clock; what a diagnosis looks at of few ranks may be read when it looks. Instants are UTC
nanoseconds (int64), converted per node with that node's newest offset; durations are nanoseconds. Nothing here
orders events of two nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt

from probes.records import Communicator, Event, Place, Probe, Progress, Role, TimedBy

Ints = npt.NDArray[np.int64]
Row = TypeVar("Row")


@dataclass(frozen=True)
class CollectiveTable:
    """One row per collective of one rank, in the order of arrival. All columns have one length."""

    communicator: Ints
    """Index into ``RankEvidence.communicators``."""
    seq: Ints
    op: Ints
    bytes: Ints
    enter_ns: Ints
    duration_ns: Ints
    """−1 while it has not ended."""
    failed: npt.NDArray[np.bool_]
    state: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """``probes.records.State``; empty where nothing tells."""
    dtype: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Index into ``RankEvidence.dtypes``; empty where nothing tells."""


@dataclass(frozen=True)
class OperationTable:
    """One row per operation that a trace timed, in order of start (``probes.records.Operations``)."""

    names: list[str]
    kind: Ints
    """Index into ``names``."""
    lane: Ints
    step: Ints
    """−1 where the trace does not tell."""
    start_ns: Ints
    duration_ns: Ints
    seq: Ints
    micro_batch: Ints
    chunk: Ints


@dataclass(frozen=True)
class ThreadSeries:
    """Cumulative times of one watched thread at its cuts (``probes.records.ThreadTime``), rows in time order.
    ``running + runnable + blocked`` grows exactly as ``at_ns`` does."""

    tid: int
    role: Role
    since_ns: int
    at_ns: Ints
    running_ns: Ints
    runnable_ns: Ints
    blocked_ns: Ints
    uninterruptible_ns: Ints
    interrupted_ns: Ints
    stolen_at_ns: Ints
    """End of each batch interval, for ``stolen_ns``."""
    stolen_ns: Ints
    """Time stolen by the hypervisor within each batch interval (not cumulative)."""
    blocked_by: Mapping[str, Ints] = field(default_factory=dict)
    """Parts of ``blocked_ns`` by what was waited for, likewise cumulative; what their sum lacks is not known."""


class OccupantRow(msgspec.Struct, frozen=True, gc=False):
    """Who had the CPU while a thread of this rank was runnable, in one batch's interval.

    A window of a large job has some hundred thousand of them: a struct without garbage collection.
    """

    start_ns: int
    end_ns: int
    role: Role
    pid: int
    name: str
    cgroup: str
    rank_job: str
    rank: int
    kernel: bool
    took_ns: int


class WakerRow(msgspec.Struct, frozen=True, gc=False):
    """Who ended sleeps of a thread of this rank, in one batch's interval (``probes.records.Waker``)."""

    start_ns: int
    end_ns: int
    tid: int
    reason: str
    pid: int
    waker_tid: int
    name: str
    slept_ns: int


class MetricRow(msgspec.Struct, frozen=True, gc=False):
    """One value of a rank or of a node, over one batch's interval."""

    start_ns: int
    end_ns: int
    name: str
    unit: str
    labels: tuple[tuple[str, str], ...]
    """In the order of their names."""
    value: float


class Listed(NamedTuple):
    """Rows as columns of one length. ``which`` indexes ``of``."""

    of: Sequence[tuple[object, ...]]
    start_ns: Ints
    end_ns: Ints
    which: Ints
    number: npt.NDArray[np.int64] | npt.NDArray[np.float64]


class Rows(Sequence[Row]):
    """The rows of one rank or node: a large job has some hundred thousand, of which a diagnosis looks at those of
    few ranks. Each look makes rows anew, and the first reads what they are made of."""

    __slots__ = ("_make", "_read")

    def __init__(self, make: Callable[..., Row], read: Callable[[], Listed]) -> None:
        """A row is ``make(start, end, *of[which], number)``."""
        self._make, self._read = make, read

    def listed(self) -> Listed:
        """As columns: no row is made."""
        return self._read()

    def __len__(self) -> int:
        return len(self._read().start_ns)

    def __iter__(self) -> Iterator[Row]:
        of, *columns = self._read()
        for start, end, which, number in zip(*(column.tolist() for column in columns), strict=True):
            yield self._make(start, end, *of[which], number)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        return list(self)[place]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(frozen=True)
class RankEvidence:
    """One life (process) of one rank."""

    rank: int
    node: str
    pid: int
    local_rank: int
    name: str
    communicators: list[Communicator]
    collectives: CollectiveTable
    threads: list[ThreadSeries]
    occupants: Sequence[OccupantRow]
    first_ns: int
    """Start of the first batch of this rank in the window."""
    last_ns: int
    """End of its last batch in the window."""
    ended: bool = False
    timed_by: TimedBy = TimedBy.HOST
    operations: OperationTable | None = None
    """None where no trace was imported."""
    place: Place = field(default_factory=Place)
    progress: list[Progress] = field(default_factory=list)
    """The newest that is known, per communicator."""
    source: str = "agent"
    dtypes: list[str] = field(default_factory=list)
    """Element types of its collectives, by name; "" is not known."""
    wakers: Sequence[WakerRow] = field(default_factory=list)
    metrics: Sequence[MetricRow] = field(default_factory=list)


@dataclass(frozen=True)
class Evidence:
    """All that a diagnosis may use."""

    job: str
    world_size: int
    start_ns: int
    end_ns: int
    watched_since_ns: int
    """When the first batch of this job was taken, in the window or before it."""
    ranks: dict[int, RankEvidence]
    probes: dict[str, list[Probe]] = field(default_factory=dict)
    """Per node, as its newest batch said."""
    events: list[Event] = field(default_factory=list)
    """``at_ns`` in UTC."""
    notes: list[str] = field(default_factory=list)
    """What the store found odd (a clock that jumped, batches that are missing), in words for ``not_seen``."""
    metrics: dict[str, Sequence[MetricRow]] = field(default_factory=dict)
    """Of nodes, by name."""
