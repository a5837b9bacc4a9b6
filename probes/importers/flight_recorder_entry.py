"""One entry of a Flight Recorder dump: its names, sizes and numbers, as records have them.

Names are those of torch/distributed/flight_recorder/components/types.py and of c10::ScalarType.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from probes.records import Op, State

OPS = {
    "broadcast": Op.BROADCAST,
    "_broadcast_oop": Op.BROADCAST,
    "all_reduce": Op.ALLREDUCE,
    "allreduce_coalesced": Op.ALLREDUCE_COALESCED,
    "all_reduce_barrier": Op.BARRIER,
    "barrier": Op.BARRIER,
    "reduce": Op.REDUCE,
    "_reduce_oop": Op.REDUCE,
    "all_gather": Op.ALLGATHER,
    "_all_gather_base": Op.ALLGATHER_BASE,
    "all_gather_single": Op.ALLGATHER_BASE,
    "all_gather_into_tensor_coalesced": Op.ALLGATHER_COALESCED,
    "ALLGATHER_coalesced": Op.ALLGATHER_COALESCED,
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
    "reduce_scatter": Op.REDUCE_SCATTER,
    "_reduce_scatter_base": Op.REDUCE_SCATTER_BASE,
    "reduce_scatter_single": Op.REDUCE_SCATTER_BASE,
    "reduce_scatter_tensor_coalesced": Op.REDUCE_SCATTER_COALESCED,
    "REDUCE_SCATTER_coalesced": Op.REDUCE_SCATTER_COALESCED,
    "all_to_all": Op.ALLTOALL,
    "all_to_all_single": Op.ALLTOALL_BASE,
    "all_to_all_v_single": Op.ALLTOALL_BASE,
    "coalesced": Op.COALESCED,
}
"""Names in ``profiling_name`` after the backend (torch/distributed/flight_recorder/components/types.py)."""
POINT_TO_POINT = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})")
STATES = {"scheduled": State.SCHEDULED, "started": State.STARTED, "completed": State.COMPLETED}
_DTYPES: dict[str, tuple[str, int]] = {
    "Byte": ("uint8", 1),
    "Char": ("int8", 1),
    "Bool": ("bool", 1),
    "Short": ("int16", 2),
    "Int": ("int32", 4),
    "Long": ("int64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
    "Float8_e5m2": ("float8_e5m2", 1),
    "Float8_e4m3fn": ("float8_e4m3fn", 1),
}
"""c10's names of scalar types → those that agents send, and bytes of one element."""
LIMIT = 1 << 62
"""Instants and numbers below this fit into 64 bits whatever is added to them."""


def group_of(entry: dict[Any, Any]) -> tuple[str, str]:
    group = entry.get("process_group")
    if isinstance(group, list | tuple) and group:
        return text(group[0], str(group[0])[:64]), text(group[1]) if len(group) > 1 else ""
    number = number_in(entry.get("pg_id"))
    return (str(number), "") if number is not None else ("", "")


def input_size(sizes: object, dtypes: object) -> tuple[int, str]:
    """Bytes of all input tensors, and their type; (−1, "") when it cannot be told."""
    if not isinstance(sizes, list | tuple) or not isinstance(dtypes, list | tuple):
        return -1, ""
    names = [_DTYPES.get(name, (name, 0)) if isinstance(name, str) else ("", 0) for name in dtypes]
    if not sizes or len(names) not in (1, len(sizes)):
        return (0 if not sizes else -1), names[0][0][:64] if names else ""
    total = 0
    for shape, (_, width) in zip(sizes, names * (len(sizes) if len(names) == 1 else 1), strict=True):
        count = width
        for length in shape if isinstance(shape, list | tuple) else (None,):
            if type(length) is not int or not 0 <= length < LIMIT or not width:
                return -1, names[0][0][:64]
            count = min(count * length, LIMIT)
        total += count
    return (total if total < LIMIT else -1), names[0][0][:64]


def ranks_in(value: object) -> list[int]:
    """``[0, 1]`` or ``"[0, 1]"`` (``ranks_str`` in TraceUtils.h); empty when it is neither."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return []
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 1 << 31 for one in value):
        return []
    return list(dict.fromkeys(value))


def text(value: object, otherwise: str = "") -> str:
    return value[:512] if isinstance(value, str) else otherwise[:512]


def number_in(value: object) -> int | None:
    """A whole number, also one in text (JSON dumps quote some); None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
        return int(value)
    return None


def counter(value: object) -> int:
    number = number_in(value)
    return number if number is not None and -1 <= number < LIMIT else -1
