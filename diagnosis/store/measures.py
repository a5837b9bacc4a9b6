"""What a batch measured of a rank or of its node, in the bytes that stand in the store until the minute is over."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from diagnosis.later import Once
from diagnosis.store.columns import (
    BATCHES,
    METRICS,
    Columns,
    Details,
    Measured,
    Table,
    in_order,
    listed_rows,
    no_details,
    of_node,
    undamaged,
)
from probes.records import Metric

FORMAT = -3
"""Stands first in what :func:`pack_node` makes; older blobs hold records, which are not numbers."""
_FORMAT_BYTE = msgspec.msgpack.encode(FORMAT)

Packed = tuple[list[bytes], bytes]
"""Each ``Measured`` in msgpack, as it is only compared until it is known which are the same, in the order in which
rows stand; the values as 64-bit floats."""
NONE: Packed = ([], b"")


class _OfNode(msgspec.Struct, frozen=True, array_like=True):
    format: int
    metrics: Packed


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_OfNode)
_decoder_1 = msgspec.msgpack.Decoder(list[Metric])
"""What stores of schema 5 and below hold: the records as they came."""
_measured = msgspec.msgpack.Decoder(Measured)


def packed(metrics: Sequence[Metric]) -> Packed:
    # In the order in which rows stand: sorting few here is less than sorting many when they are read.
    of = sorted((one.name, one.unit, sorted(one.labels.items()), one.value) for one in metrics)
    values = [value for *_, value in of]
    return [_encoder.encode(measured) for *measured, _ in of], struct.pack(f"<{len(values)}d", *values)


def unpacked(starts: list[int], ends: list[int], packed: list[Packed]) -> tuple[list[Measured], Table]:
    values = np.frombuffer(b"".join([values for _, values in packed]), "<i8")
    measured, table = listed_rows(
        METRICS, starts, ends, [named for named, _ in packed], values, _measured.decode
    )
    return measured, in_order(table)


def pack_node(metrics: Sequence[Metric]) -> bytes:
    """What one batch says of its node, to be read by :func:`unpack_node`."""
    return _encoder.encode(_OfNode(FORMAT, packed(metrics)))


def unpack_node(batches: Iterable[tuple[int, int, bytes]]) -> Columns:
    """What several batches (start, end, :func:`pack_node`, of this version or an older) say of a node."""
    seconds = sorted(batches)
    starts, ends = [start for start, _, _ in seconds], [end for _, end, _ in seconds]

    def details() -> Details:
        with undamaged():
            measured, metrics = unpacked(starts, ends, [_decoded(blob) for _, _, blob in seconds])
        return no_details()._replace(measured=measured, metrics=metrics)

    return of_node(in_order(Table(BATCHES, np.array([starts, ends], np.int64))), Once(details))


def _decoded(blob: bytes) -> Packed:
    if blob[1:2] == _FORMAT_BYTE:
        return _decoder.decode(blob).metrics
    return packed(_decoder_1.decode(blob))
