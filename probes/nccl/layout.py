"""Where the fields that the gloo probe reads stand in PyTorch's objects, and how that is checked.

Offsets in bytes, from PyTorch's public headers (torch/include of the wheel): ``c10d::Backend`` in
torch/csrc/distributed/c10d/Backend.hpp, ``c10::TensorImpl`` in c10/core/TensorImpl.h, ``c10::ScalarType`` in
torch/headeronly/core/ScalarType.h. A test compiles these headers and compares. At run time each value
is checked against another that says the same (a tensor's element count against its sizes; a group's rank and
size against gloo's own context), so another layout gives "unknown", never a wrong number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BACKEND_RANK = 16
BACKEND_SIZE = 20
BACKEND_UID = 32
"""``pg_uid_``, a libstdc++ std::string: pointer, length, then 16 bytes."""
BACKEND_DESC = 64
"""``pg_desc_``, a std::string, too."""
TENSOR_SIZES = 56
"""``sizes_and_strides_``: number of dimensions, then up to five sizes in place."""
TENSOR_ELEMENTS = 152
TENSOR_DTYPE = 160

INLINE_DIMENSIONS = 5

DEFINES: dict[str, int | None] = {
    "BACKEND_RANK": BACKEND_RANK,
    "BACKEND_SIZE": BACKEND_SIZE,
    "BACKEND_UID": BACKEND_UID,
    "BACKEND_DESC": BACKEND_DESC,
    "TENSOR_SIZES": TENSOR_SIZES,
    "TENSOR_ELEMENTS": TENSOR_ELEMENTS,
    "TENSOR_DTYPE": TENSOR_DTYPE,
}

DTYPES: dict[int, tuple[str, int]] = {
    0: ("uint8", 1),
    1: ("int8", 1),
    2: ("int16", 2),
    3: ("int32", 4),
    4: ("int64", 8),
    5: ("float16", 2),
    6: ("float32", 4),
    7: ("float64", 8),
    8: ("complex32", 4),
    9: ("complex64", 8),
    10: ("complex128", 16),
    11: ("bool", 1),
    15: ("bfloat16", 2),
}
"""``c10::ScalarType`` → name and bytes per element."""


def input_bytes(
    elements: int, tensors: int, dimensions: int, sizes: Sequence[int], first: int, dtype: int
) -> tuple[int, str]:
    """(bytes of all input tensors, dtype name) of a collective; (−1, "") when the layout does not hold.

    ``elements`` of all ``tensors``, and of the ``first`` one, whose ``dimensions`` and ``sizes`` must give the
    same number. A collective without tensors (a barrier) has 0 bytes.
    """
    if tensors == 0:
        return 0, ""
    known = DTYPES.get(dtype)
    if known is None or elements < 0 or first < 0 or not 0 <= dimensions <= 64:
        return -1, ""
    if dimensions <= INLINE_DIMENSIONS and math.prod(sizes[:dimensions]) != first:
        return -1, ""
    name, width = known
    return elements * width, name
