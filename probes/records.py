"""The records that agents send: the ground floor that every other part stands on.

One :class:`Batch` per node and second carries, for every rank on that node, one columnar
:class:`RankBatch`. On the wire a batch is msgpack (msgspec) inside one zstd frame.

Units: times are nanoseconds. ``*_ns`` instants are CLOCK_MONOTONIC of the node that took them;
``Batch.utc_offset_ns`` turns them into UTC (``utc = monotonic + offset``). Durations are nanoseconds.
Columns of one struct all have the same length; :func:`decode` refuses a batch in which they differ.
"""

from __future__ import annotations

import enum
from typing import TypeVar

import msgspec
import zstandard

SCHEMA = 1
"""Version of the wire format. A server takes its own version only, and says which one it speaks."""

MAX_WIRE_BYTES = 4 << 20
"""Largest compressed batch. A node with 16 ranks sends about 10 kB; 4 MiB is far above any honest one."""
MAX_PLAIN_BYTES = 8 << 20
"""Largest batch after decompression: a bomb stops here, before anything is decoded. Decoded, one byte of
msgpack can become 58 bytes of Python (a list of one-letter strings): 8 MiB stay below 0.5 GiB."""
MAX_NAME = 512
"""Longest name (node, job, agent, boot id), in characters: they become keys of the store."""


class RecordError(ValueError):
    """A batch that cannot be used. The message says what is wrong and what to do; ``reason`` counts it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Op(enum.IntEnum):
    """What a collective does. Numbers are ``c10d::OpType``'s (torch/csrc/distributed/c10d/Work.hpp)."""

    BROADCAST = 0
    ALLREDUCE = 1
    ALLREDUCE_COALESCED = 2
    REDUCE = 3
    ALLGATHER = 4
    ALLGATHER_BASE = 5
    ALLGATHER_COALESCED = 6
    GATHER = 7
    SCATTER = 8
    REDUCE_SCATTER = 9
    ALLTOALL_BASE = 10
    ALLTOALL = 11
    SEND = 12
    RECV = 13
    RECV_ANY_SOURCE = 14
    BARRIER = 15
    REDUCE_SCATTER_BASE = 16
    COALESCED = 17
    ALLREDUCE_SPARSE = 18
    REDUCE_SCATTER_COALESCED = 19
    UNKNOWN = 100


class TimedBy(enum.IntEnum):
    """Which clock saw a collective end. Host-timed gloo calls end when the data is there; host-timed
    NCCL calls end at enqueue, and show late enqueues, not slow GPUs."""

    HOST = 0
    DEVICE = 1


class Role(enum.IntEnum):
    """What a watched thread does for its rank."""

    DRIVING = 0
    """Enqueues the step's work and waits for it."""
    COMMUNICATION = 1
    """Moves the data of collectives (a gloo run loop)."""
    HELPER = 2
    """The main thread of a process that works for the rank (a DataLoader worker)."""


class State(enum.IntEnum):
    """How far a collective came, where a flight recorder tells."""

    UNKNOWN = 0
    SCHEDULED = 1
    """Enqueued, not begun."""
    STARTED = 2
    COMPLETED = 3


class Lane(enum.IntEnum):
    """Where an operation runs; operations of one lane of one rank do not overlap, as a rule."""

    HOST = 0
    COMPUTE = 1
    COMMUNICATION = 2


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: immutable, fields by name."""


class Communicator(Struct, frozen=True, kw_only=True):
    """One communicator as one rank sees it. ``uid`` is equal on all its members where the library gives
    one (c10d's group name); ``uid == ""`` means unknown, then ranks are matched by size and order."""

    uid: str
    desc: str
    rank: int
    """This rank's place in the communicator, 0 … size−1."""
    size: int


class Collectives(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Columns, one row per collective, in the order in which the rank entered them."""

    communicator: list[int] = []
    """Index into ``RankBatch.communicators``."""
    seq: list[int] = []
    """The library's sequence number, counted per communicator."""
    op: list[int] = []
    """:class:`Op`; a number not listed there is kept as it came."""
    bytes: list[int] = []
    """Size of this rank's input; −1 when it could not be read."""
    dtype: list[str] = []
    enter_ns: list[int] = []
    """Arrival: the driving thread enters."""
    duration_ns: list[int] = []
    """From arrival to completion; −1 while it has not ended."""
    failed: list[bool] = []
    state: list[int] = []
    """:class:`State`; the column is empty where nothing tells (agents: an end is seen or it is not)."""


class Operations(Struct, frozen=True, kw_only=True):
    """Columns, one row per operation that a trace timed, in order of start: forward-compute, a kernel, a transfer.
    Agents send none; importers do."""

    names: list[str] = []
    """Kinds of operations; ``kind`` indexes them. Not a column."""
    kind: list[int] = []
    lane: list[int] = []
    """:class:`Lane`."""
    step: list[int] = []
    """Number of the training step; −1 when the trace does not tell."""
    start_ns: list[int] = []
    duration_ns: list[int] = []
    seq: list[int] = []
    """Place in the order that the trace gives, pairing operations of several ranks; −1 when it does not."""
    micro_batch: list[int] = []
    """−1 where there is none."""
    chunk: list[int] = []
    """Model chunk of an interleaved pipeline; −1 where there is none."""


class Place(Struct, frozen=True, kw_only=True):
    """Where a rank stands in the job's parallel layout and in the cluster; −1 and "" mean not known."""

    data: int = -1
    """Data-parallel rank."""
    stage: int = -1
    """Pipeline stage."""
    tensor: int = -1
    context: int = -1
    expert: int = -1
    switch: str = ""
    """The switch that its node hangs on."""


class Progress(Struct, frozen=True, kw_only=True):
    """How far a rank is on one communicator, by its library's own counters (sequence numbers; −1 not known)."""

    communicator: int
    """Index into ``RankBatch.communicators``."""
    enqueued: int
    started: int
    completed: int


_NO_OPERATIONS, _NO_PLACE = Operations(), Place()
"""The defaults, known again by identity."""


class ThreadTime(Struct, frozen=True, kw_only=True):
    """Where one watched thread's time went. Columns, one row per cut, cumulative from ``since_ns`` on, so a
    lost row costs resolution and never time: ``running + runnable + blocked == at_ns − since_ns``.

    A rank's communication threads come as one sum with ``tid`` 0, cut when the driving thread is; the sum of
    several threads does not add up to wall time, and ``since_ns`` is when the youngest began to be watched.
    """

    tid: int
    role: Role
    since_ns: int
    """When watching began; a changed value is a new thread under an old number."""
    at_ns: list[int] = []
    running_ns: list[int] = []
    """On a CPU, interrupts included (see ``interrupted_ns``)."""
    runnable_ns: list[int] = []
    """Wants a CPU and has none: preempted, or woken and not yet switched in."""
    blocked_ns: list[int] = []
    uninterruptible_ns: list[int] = []
    """The part of ``blocked_ns`` in state D, filled when the block ends; stays 0 where the kernel's
    sched_switch does not give the state (before 5.18)."""
    interrupted_ns: list[int] = []
    """The part of ``running_ns`` that hardware and software interrupts took."""
    stolen_ns: int = 0
    """The part of this batch's running time that the hypervisor took; estimated, never per cut."""
    blocked_by: dict[str, list[int]] = {}
    """Parts of ``blocked_ns`` by what was waited for (names of ``probes.host.reasons``), columns like the others,
    filled when a block ends; what is missing in their sum is not known. Empty where nothing tells."""


class Occupant(Struct, frozen=True, kw_only=True):
    """Who had the CPU while a rank's thread was runnable, summed over the batch's interval."""

    role: Role
    """Which of the rank's threads waited."""
    pid: int
    """Process id in the node's own numbering; 0 is the idle CPU (a throttled thread, or one just woken)."""
    name: str
    cgroup: str
    """Path in the cgroup hierarchy; empty when it could not be learned."""
    took_ns: int
    rank_job: str = ""
    """Job of which this process is a rank or a rank's helper, if it is one."""
    rank: int = -1
    kernel: bool = False
    """A kernel thread."""


class Metric(Struct, frozen=True, kw_only=True):
    """One value of the node, or of a rank, over the batch's interval."""

    name: str
    value: float
    unit: str
    labels: dict[str, str] = {}


class Waker(Struct, frozen=True, kw_only=True):
    """Who ended the sleeps of one of a rank's threads, summed over the batch's interval."""

    tid: int
    """The thread that slept."""
    reason: str
    """What it waited for, as in ``ThreadTime.blocked_by``; "" when that is not known."""
    pid: int
    """Process of the waker, in the node's own numbering; 0: an interrupt, or a timer."""
    waker_tid: int
    name: str
    slept_ns: int


class RankBatch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One second of one rank. What only importers tell takes no room in an agent's batch."""

    job: str
    rank: int
    world_size: int
    local_rank: int
    pid: int
    start_ns: int
    """When the process started; with ``pid`` it names one life of this rank."""
    name: str
    env: dict[str, str]
    """Allow-listed keys only (``probes.launchers.ENV_ALLOWED``)."""
    communicators: list[Communicator] = []
    """All that this rank has used so far; a communicator keeps its index."""
    collectives: Collectives = Collectives()
    threads: list[ThreadTime] = []
    occupants: list[Occupant] = []
    wakers: list[Waker] = []
    metrics: list[Metric] = []
    """Of this rank's processes and of what it runs on (its cgroup, its CPUs)."""
    timed_by: TimedBy = TimedBy.HOST
    """Which clock timed ``collectives``."""
    operations: Operations = _NO_OPERATIONS
    place: Place = _NO_PLACE
    progress: list[Progress] = []
    source: str = "agent"
    """What saw this: ``agent``, or the importer's name (``kineto``, ``flight-recorder``, ``inspector``,
    ``operations``)."""
    ended: bool = False
    """The process is gone; this is its last batch."""


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened once. ``kind`` is one of the words in docs/architecture.md."""

    kind: str
    at_ns: int
    detail: str
    job: str = ""
    rank: int = -1


class Probe(Struct, frozen=True, kw_only=True):
    """Whether a probe watches, and if not, why not and what to do."""

    name: str
    state: str
    """``on``, ``off`` (nothing to watch now, or switched off), ``unavailable``."""
    why: str = ""
    hits: int = 0
    """Events since the agent started."""
    lost: int = 0
    """Events the kernel could not hand over."""
    cost_ms_per_s: float = -1.0
    """What it takes of the node's CPUs now, traps included; −1 when it was not measured."""


class Batch(Struct, frozen=True, kw_only=True):
    """One second of one node. ``(node, boot_id, agent, seq)`` names it: the server stores it once."""

    schema: int
    node: str
    boot_id: str
    agent: str
    """Random id made with the agent's spool; tells two agents of one name, or a lost spool, apart."""
    seq: int
    start_ns: int
    end_ns: int
    utc_offset_ns: int
    ranks: list[RankBatch] = []
    metrics: list[Metric] = []
    events: list[Event] = []
    probes: list[Probe] = []


class CommandKind(enum.StrEnum):
    """All that a server can ask of an agent."""

    CAPTURE_START = "capture-start"
    """Watch the ranks of ``job`` at full detail for ``seconds``."""
    CAPTURE_END = "capture-end"
    """End the capture of ``job``."""
    PROBE_ON = "probe-on"
    PROBE_OFF = "probe-off"
    """Attach ``probe`` no more, until it is switched on again."""


MAX_CAPTURE_S = 600
"""Longest capture: at full detail a job pays more, so it must end by itself."""
MAX_COMMANDS = 16
"""Most commands in one reply."""


class Command(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing to do. Sent again with every reply until the agent has told the outcome (an event
    ``command-done`` or ``command-refused`` whose detail starts with the id), so agents do each id once."""

    id: str
    kind: CommandKind
    job: str = ""
    seconds: int = 0
    probe: str = ""


class Orders(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Commands, bound to the batch that they answer: orders for another node, or heard before, do not fit."""

    node: str
    boot_id: str
    agent: str
    seq: int
    commands: list[Command]


ORDERS_CONTEXT = b"sysom orders 1\0"
"""What is signed (Ed25519) is this and then ``Reply.orders`` as UTF-8: a signature made for anything else never
fits."""


class Reply(Struct, frozen=True, kw_only=True):
    """The server's answer to a batch, as JSON."""

    stored: bool
    """False: this batch was there already."""
    orders: str = ""
    """:class:`Orders` as JSON text; empty when there is nothing to do. Kept as text because that is signed."""
    signature: str = ""
    """Ed25519 over ``ORDERS_CONTEXT`` and ``orders``, in hexadecimal."""


class _Version(msgspec.Struct):
    schema: int


_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)
_version = msgspec.msgpack.Decoder(_Version)


def encode(batch: Batch) -> bytes:
    """The batch as it goes over the wire: msgpack in one zstd frame that states its size and checksum."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(_encoder.encode(batch))


def decode(wire: bytes) -> Batch:
    """Read a batch from the wire.

    Raises :class:`RecordError` (``reason`` one of ``too_large``, ``not_zstd``, ``truncated``, ``bomb``,
    ``other_schema``, ``not_a_batch``, ``inconsistent``) with a message that says what to do. Unpacks at
    most ``MAX_PLAIN_BYTES``. Every whole number of a batch that comes out fits into 64 bits, and so does
    the sum of an instant and ``utc_offset_ns``.
    """
    return from_plain(unpack(wire))


def to_plain(batch: Batch) -> bytes:
    """The batch as msgpack, not compressed."""
    return _encoder.encode(batch)


def from_plain(plain: bytes) -> Batch:
    """:func:`decode` for what is not compressed. Raises :class:`RecordError` likewise."""
    version = _decode(_version, plain).schema
    if version != SCHEMA:
        raise RecordError(
            "other_schema",
            f"batch of schema {version}; this server speaks schema {SCHEMA}: "
            f"upgrade the {'server' if version > SCHEMA else 'agent'}",
        )
    batch = _decode(_decoder, plain)
    _check(batch)
    return batch


def schema_of(wire: bytes) -> int:
    """Version of a batch, whichever it is. Raises :class:`RecordError` for what is no batch."""
    return _decode(_version, unpack(wire)).schema


def unpack(wire: bytes) -> bytes:
    """Undo the compression: a whole, undamaged frame within the limits, or :class:`RecordError`."""
    if len(wire) > MAX_WIRE_BYTES:
        raise RecordError(
            "too_large", f"batch of {len(wire)} bytes; the limit is {MAX_WIRE_BYTES}: send less per batch"
        )
    try:
        size = zstandard.frame_content_size(wire)
    except zstandard.ZstdError as error:
        raise RecordError("not_zstd", f"not a zstd frame: {error}") from error
    if size < 0:
        raise RecordError("not_zstd", "the zstd frame does not state its size; agents of sysom always do")
    if size > MAX_PLAIN_BYTES:
        raise RecordError("bomb", f"batch would unpack to {size} bytes; the limit is {MAX_PLAIN_BYTES}")
    try:
        plain = zstandard.ZstdDecompressor().decompress(wire, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RecordError("truncated", f"the zstd frame is broken or cut short: {error}") from error
    if len(plain) != size:
        raise RecordError("truncated", f"the zstd frame holds {len(plain)} bytes, not the stated {size}")
    return plain


def _decode(decoder: msgspec.msgpack.Decoder[_T], plain: bytes) -> _T:
    try:
        return decoder.decode(plain)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError("not_a_batch", f"not a batch of sysom: {error}") from error


_INT64 = 1 << 63
_INSTANT = 1 << 62
"""146 years of nanoseconds: instants and offsets stay below it, so that their sums fit into 64 bits."""


def _check(batch: Batch) -> None:
    for name in ("node", "boot_id", "agent"):
        _check_name(f"the batch's {name}", getattr(batch, name))
    if batch.end_ns < batch.start_ns:
        raise RecordError("inconsistent", "a batch ends before it starts")
    _check_range("the batch's seq", [batch.seq], 0, _INT64)
    _check_range("the batch's start_ns or end_ns", [batch.start_ns, batch.end_ns], 0, _INSTANT)
    _check_range("the batch's utc_offset_ns", [batch.utc_offset_ns], -_INSTANT, _INSTANT)
    for rank in batch.ranks:
        _check_rank(rank)
    for event in batch.events:
        _check_range(f"event {event.kind!r}: at_ns", [event.at_ns], -_INSTANT, _INSTANT)
        _check_range(f"event {event.kind!r}: rank", [event.rank], -_INT64, _INT64)
    for probe in batch.probes:
        _check_range(f"probe {probe.name!r}: hits or lost", [probe.hits, probe.lost], -_INT64, _INT64)


def _check_rank(rank: RankBatch) -> None:
    where = f"job {rank.job[:MAX_NAME]!r} rank {rank.rank}"
    _check_name("a rank's job", rank.job)
    if not 0 <= rank.rank < rank.world_size:
        raise RecordError("inconsistent", f"{where}: not a rank of a world of {rank.world_size}")
    _check_range(where, [rank.world_size, rank.local_rank, rank.pid], -_INT64, _INT64)
    _check_range(f"{where}: start_ns", [rank.start_ns], -_INSTANT, _INSTANT)
    for communicator in rank.communicators:
        _check_range(f"{where}: communicator", [communicator.rank, communicator.size], -_INT64, _INT64)
    _check_columns(where, rank.collectives)
    for index in rank.collectives.communicator:
        if not 0 <= index < len(rank.communicators):
            raise RecordError(
                "inconsistent", f"{where}: a collective names communicator {index}, which is not listed"
            )
    if rank.operations is not _NO_OPERATIONS:
        _check_columns(f"{where} operations", rank.operations)
        if rank.operations.kind:
            names = rank.operations.names
            _check_range(f"{where}: kind of an operation", rank.operations.kind, 0, len(names))
    if rank.place is not _NO_PLACE:
        place = rank.place
        numbers = [place.data, place.stage, place.tensor, place.context, place.expert]
        _check_range(f"{where}: place", numbers, -1, _INT64)
    for progress in rank.progress:
        _check_range(
            f"{where}: progress", [progress.enqueued, progress.started, progress.completed], -1, _INT64
        )
        _check_range(f"{where}: progress", [progress.communicator], 0, len(rank.communicators))
    for thread in rank.threads:
        _check_range(f"{where}: since_ns", [thread.since_ns], -_INSTANT, _INSTANT)
        _check_range(f"{where}: tid or stolen_ns", [thread.tid, thread.stolen_ns], -_INT64, _INT64)
        _check_columns(f"{where} thread {thread.tid}", thread)
    for occupant in rank.occupants:
        numbers = [occupant.pid, occupant.took_ns, occupant.rank]
        _check_range(f"{where}: occupant {occupant.pid}", numbers, -_INT64, _INT64)
    for waker in rank.wakers:
        numbers = [waker.tid, waker.pid, waker.waker_tid, waker.slept_ns]
        _check_range(f"{where}: waker {waker.pid}", numbers, -_INT64, _INT64)


def _check_columns(where: str, columns: Collectives | ThreadTime | Operations) -> None:
    lists: dict[str, list[int]] = {
        name: value
        for name in columns.__struct_fields__
        if isinstance(value := getattr(columns, name), list)
        and name != "names"
        and (value or name != "state")
    }
    if isinstance(columns, ThreadTime):
        lists |= {
            f"blocked_by {reason[:MAX_NAME]!r}": column for reason, column in columns.blocked_by.items()
        }
    if len({len(value) for value in lists.values()}) > 1:
        raise RecordError("inconsistent", f"{where}: columns of different length")
    for name, value in lists.items():
        if value and isinstance(value[0], int):
            limit = _INSTANT if name in ("enter_ns", "at_ns", "start_ns") else _INT64
            _check_range(f"{where}: {name}", value, -limit, limit)


def _check_range(what: str, values: list[int], low: int, high: int) -> None:
    if min(values) < low or max(values) >= high:
        raise RecordError("inconsistent", f"{what}: a number outside {low} ... {high - 1}")


def _check_name(what: str, name: str) -> None:
    if not name or len(name) > MAX_NAME:
        raise RecordError(
            "inconsistent", f"{what} must be a name of 1 to {MAX_NAME} characters, not {len(name)}"
        )
