"""The records that agents send: the ground floor that every other part stands on.

One :class:`Batch` per node and second carries, for every rank on that node, one columnar
:class:`RankBatch`. On the wire a batch is msgpack (msgspec) inside one zstd frame.

Units: times are nanoseconds. ``*_ns`` instants are CLOCK_MONOTONIC of the node that took them;
``Batch.utc_offset_ns`` turns them into UTC (``utc = monotonic + offset``). Durations are nanoseconds.
Columns of one struct all have the same length; :func:`decode` refuses a batch in which they differ.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import zstandard

SCHEMA = 1
"""Version of the wire format. A server takes its own version only, and says which one it speaks."""

MAX_WIRE_BYTES = 4 << 20
"""Largest compressed batch. A node with 16 ranks sends about 10 kB; 4 MiB is far above any honest one."""
MAX_PLAIN_BYTES = 64 << 20
"""Largest batch after decompression: a bomb stops here, before anything is decoded."""


class RecordError(ValueError):
    """A batch that cannot be used. The message says what is wrong and what to do; ``reason`` counts it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Op(enum.IntEnum):
    """What a collective does. Numbers are those of ``c10d::OpType`` (torch/csrc/distributed/c10d/Work.hpp)."""

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


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: immutable, fields by name."""


class Communicator(Struct):
    """One communicator as one rank sees it. ``uid`` is equal on all its members where the library gives
    one (c10d's group name); ``uid == ""`` means unknown, then ranks are matched by size and order."""

    uid: str
    desc: str
    rank: int
    """This rank's place in the communicator, 0 … size−1."""
    size: int


class Collectives(Struct):
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


class ThreadTime(Struct):
    """Where one watched thread's time went. Columns, one row per cut, cumulative from ``since_ns`` on, so a
    lost row costs resolution and never time: ``running + runnable + blocked == at_ns − since_ns``."""

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


class Occupant(Struct):
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


class RankBatch(Struct):
    """One second of one rank."""

    job: str
    rank: int
    world_size: int
    local_rank: int
    pid: int
    start_ns: int
    """When the process started; with ``pid`` it names one life of this rank."""
    name: str
    env: dict[str, str]
    """Allow-listed keys only (``probes.discovery.ENV_ALLOWED``)."""
    communicators: list[Communicator] = []
    """All that this rank has used so far; a communicator keeps its index."""
    collectives: Collectives = Collectives()
    threads: list[ThreadTime] = []
    occupants: list[Occupant] = []
    ended: bool = False
    """The process is gone; this is its last batch."""


class Metric(Struct):
    """One value of the node over the batch's interval."""

    name: str
    value: float
    unit: str
    labels: dict[str, str] = {}


class Event(Struct):
    """Something that happened once. ``kind`` is one of the words in docs/architecture.md."""

    kind: str
    at_ns: int
    detail: str
    job: str = ""
    rank: int = -1


class Probe(Struct):
    """Whether a probe watches, and if not, why not and what to do."""

    name: str
    state: str
    """``on``, ``off`` (nothing to watch now, or switched off), ``unavailable``."""
    why: str = ""
    hits: int = 0
    """Events since the agent started."""
    lost: int = 0
    """Events the kernel could not hand over."""


class Batch(Struct):
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


class Reply(Struct):
    """The server's answer to a batch. ``commands`` come from a fixed list and are signed."""

    stored: bool
    """False: this batch was there already."""
    commands: list[dict[str, Any]] = []


class _Version(msgspec.Struct):
    schema: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)
_version = msgspec.msgpack.Decoder(_Version)


def encode(batch: Batch) -> bytes:
    """The batch as it goes over the wire: msgpack in one zstd frame that states its size."""
    return zstandard.ZstdCompressor(level=3).compress(_encoder.encode(batch))


def decode(wire: bytes) -> Batch:
    """Read a batch from the wire.

    Raises :class:`RecordError` (``reason`` one of ``too_large``, ``not_zstd``, ``truncated``, ``bomb``,
    ``other_schema``, ``not_a_batch``, ``inconsistent``) with a message that says what to do. Never
    allocates more than ``MAX_PLAIN_BYTES``.
    """
    if len(wire) > MAX_WIRE_BYTES:
        raise RecordError("too_large", f"batch of {len(wire)} bytes; the limit is {MAX_WIRE_BYTES}: send less per batch")
    plain = _decompress(wire)
    try:
        version = _version.decode(plain).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError("not_a_batch", f"not a batch of sysom: {error}") from error
    if version != SCHEMA:
        raise RecordError(
            "other_schema",
            f"batch of schema {version}; this server speaks schema {SCHEMA}: "
            f"upgrade the {'server' if version > SCHEMA else 'agent'}",
        )
    try:
        batch = _decoder.decode(plain)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError("not_a_batch", f"not a batch of sysom: {error}") from error
    _check(batch)
    return batch


def _decompress(wire: bytes) -> bytes:
    try:
        size = zstandard.frame_content_size(wire)
    except zstandard.ZstdError as error:
        raise RecordError("not_zstd", f"not a zstd frame: {error}") from error
    if size < 0:
        raise RecordError("not_zstd", "the zstd frame does not state its size; agents of sysom always do")
    if size > MAX_PLAIN_BYTES:
        raise RecordError("bomb", f"batch would unpack to {size} bytes; the limit is {MAX_PLAIN_BYTES}")
    try:
        plain = zstandard.ZstdDecompressor().decompress(wire, max_output_size=MAX_PLAIN_BYTES)
    except zstandard.ZstdError as error:
        raise RecordError("truncated", f"the zstd frame is broken or cut short: {error}") from error
    if len(plain) != size:
        raise RecordError("truncated", f"the zstd frame holds {len(plain)} bytes, not the {size} that it states")
    return plain


_INT64 = 1 << 63


def _check(batch: Batch) -> None:
    if not batch.node or not batch.agent or not batch.boot_id:
        raise RecordError("inconsistent", "a batch must name its node, boot and agent")
    if batch.end_ns < batch.start_ns:
        raise RecordError("inconsistent", "a batch ends before it starts")
    if not all(0 <= value < _INT64 for value in (batch.seq, batch.start_ns, batch.end_ns)):
        raise RecordError("inconsistent", "seq, start_ns and end_ns must be whole numbers from 0 to 2^63 - 1")
    for rank in batch.ranks:
        where = f"job {rank.job!r} rank {rank.rank}"
        if not rank.job or not 0 <= rank.rank < rank.world_size:
            raise RecordError("inconsistent", f"{where}: not a rank of a world of {rank.world_size}")
        _check_columns(where, rank.collectives)
        for index in rank.collectives.communicator:
            if not 0 <= index < len(rank.communicators):
                raise RecordError("inconsistent", f"{where}: a collective names communicator {index}, which is not listed")
        for thread in rank.threads:
            _check_columns(f"{where} thread {thread.tid}", thread)


def _check_columns(where: str, columns: Collectives | ThreadTime) -> None:
    lists = {name: value for name in columns.__struct_fields__ if isinstance(value := getattr(columns, name), list)}
    if len({len(value) for value in lists.values()}) > 1:
        raise RecordError("inconsistent", f"{where}: columns of different length")
    for name, value in lists.items():
        if value and isinstance(value[0], int) and not (min(value) >= -_INT64 and max(value) < _INT64):
            raise RecordError("inconsistent", f"{where}: {name} holds a number beyond 64 bits")
