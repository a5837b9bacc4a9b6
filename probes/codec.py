"""Batches as bytes: onto the wire, and from bytes that may be anything.

Every number and every name of a batch that :func:`decode` gives is within what stores hold.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec
import zstandard

from probes.fit import smaller
from probes.records import (
    NO_OPERATIONS,
    NO_PLACE,
    SCHEMA,
    Batch,
    Collectives,
    Event,
    Metric,
    Operations,
    RankBatch,
    ThreadTime,
)

MAX_WIRE_BYTES = 4 << 20
"""Largest compressed batch. A node with 16 ranks sends about 10 kB; 4 MiB is far above any honest one."""
MAX_PLAIN_BYTES = 8 << 20
"""Largest batch after decompression: a bomb stops here, before anything is decoded. Decoded, one byte of
msgpack can become 58 bytes of Python (a list of one-letter strings): 8 MiB stay below 0.5 GiB."""
MAX_NAME = 512
"""Longest name (node, job, agent, boot id), in characters: they become keys of the store."""


MAX_REASONS = 64
"""Most reasons for which one thread blocks in a batch: each is a column for a minute. The kernel knows 15."""


class RecordError(ValueError):
    """A batch that cannot be used. The message says what is wrong and what to do; ``reason`` counts it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Version(msgspec.Struct):
    schema: int


_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)
_version = msgspec.msgpack.Decoder(_Version)


def encode(batch: Batch) -> bytes:
    """The batch as it goes over the wire: msgpack in one zstd frame that states its size and checksum.

    One that a server would refuse as too large goes without some of it (:func:`probes.fit.smaller`), which an event
    ``events-lost`` in it says. Raises :class:`RecordError` (``too_large``) when it is too large even so.
    """
    wire, plain_bytes = _packed(batch)
    if wire is not None:
        return wire
    limits = f"limits: {MAX_PLAIN_BYTES:,} bytes, and {MAX_WIRE_BYTES:,} compressed"
    for less, without in smaller(batch):
        words = f"a batch of {plain_bytes:,} bytes is too large ({limits}): sent without {without}"
        event = Event(kind="events-lost", at_ns=batch.end_ns, detail=words)
        wire, _ = _packed(msgspec.structs.replace(less, events=[*less.events, event]))
        if wire is not None:
            return wire
    raise RecordError(
        "too_large",
        f"a batch of {plain_bytes:,} bytes (ranks: {len(batch.ranks)}, events: {len(batch.events)}) is too large "
        f"to send, whatever is left out ({limits}): watch fewer ranks per agent",
    )


def _packed(batch: Batch) -> tuple[bytes | None, int]:
    """The batch on the wire, None when it is above a limit; its bytes before they are compressed."""
    plain = _encoder.encode(batch)
    if len(plain) > MAX_PLAIN_BYTES:
        return None, len(plain)
    wire = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(plain)
    return (wire if len(wire) <= MAX_WIRE_BYTES else None), len(plain)


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
    _check_metrics(f"node {batch.node!r}", batch.metrics)
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
    if rank.operations is not NO_OPERATIONS:
        _check_columns(f"{where} operations", rank.operations)
        if rank.operations.kind:
            names = rank.operations.names
            _check_range(f"{where}: kind of an operation", rank.operations.kind, 0, len(names))
    if rank.place is not NO_PLACE:
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
    _check_metrics(where, rank.metrics)


def _check_metrics(where: str, metrics: list[Metric]) -> None:
    for metric in metrics:
        _check_name(f"{where}: a metric's name", metric.name)
        if not math.isfinite(metric.value):
            raise RecordError(
                "inconsistent", f"{where}: metric {metric.name!r} is {metric.value}, which is no number"
            )


def _check_columns(where: str, columns: Collectives | ThreadTime | Operations) -> None:
    lists: dict[str, list[int]] = {
        name: value
        for name in columns.__struct_fields__
        if isinstance(value := getattr(columns, name), list)
        and name != "names"
        and (value or name != "state")
    }
    if isinstance(columns, ThreadTime):
        if len(columns.blocked_by) > MAX_REASONS:
            raise RecordError(
                "inconsistent",
                f"{where}: blocked for {len(columns.blocked_by)} reasons; there are at most {MAX_REASONS}",
            )
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
