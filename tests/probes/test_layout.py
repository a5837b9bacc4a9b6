"""Offsets and numbers that the gloo probe assumes, against PyTorch's own headers, compiled; and its refusals."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from probes.nccl import layout
from probes.nccl.layout import input_bytes
from probes.records import Op
from tests.probes.pytorch import folder

OPS = {
    "BROADCAST": "BROADCAST",
    "ALLREDUCE": "ALLREDUCE",
    "ALLREDUCE_COALESCED": "ALLREDUCE_COALESCED",
    "REDUCE": "REDUCE",
    "ALLGATHER": "ALLGATHER",
    "_ALLGATHER_BASE": "ALLGATHER_BASE",
    "ALLGATHER_COALESCED": "ALLGATHER_COALESCED",
    "GATHER": "GATHER",
    "SCATTER": "SCATTER",
    "REDUCE_SCATTER": "REDUCE_SCATTER",
    "ALLTOALL_BASE": "ALLTOALL_BASE",
    "ALLTOALL": "ALLTOALL",
    "SEND": "SEND",
    "RECV": "RECV",
    "RECVANYSOURCE": "RECV_ANY_SOURCE",
    "BARRIER": "BARRIER",
    "_REDUCE_SCATTER_BASE": "REDUCE_SCATTER_BASE",
    "COALESCED": "COALESCED",
    "_ALLREDUCE_SPARSE": "ALLREDUCE_SPARSE",
    "REDUCE_SCATTER_TENSOR_COALESCED": "REDUCE_SCATTER_COALESCED",
    "UNKNOWN": "UNKNOWN",
}
"""PyTorch's name of a collective → ours."""

SCALARS = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "ComplexHalf": "complex32",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Bool": "bool",
    "BFloat16": "bfloat16",
}
"""PyTorch's name of a scalar type → NumPy's."""

PROGRAM = r"""
#include <any>
#include <sstream>
#include <iostream>
#define private public
#define protected public
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#undef private
#undef protected

#define FIELD(name, type, field) \
  std::cout << "\"" name "\": " << offsetof(type, field) << ",\n";

int main() {
  std::cout << "{";
  FIELD("BACKEND_RANK", c10d::Backend, rank_)
  FIELD("BACKEND_SIZE", c10d::Backend, size_)
  FIELD("BACKEND_UID", c10d::Backend, pg_uid_)
  FIELD("BACKEND_DESC", c10d::Backend, pg_desc_)
  FIELD("TENSOR_SIZES", c10::TensorImpl, sizes_and_strides_)
  FIELD("TENSOR_ELEMENTS", c10::TensorImpl, numel_)
  FIELD("TENSOR_DTYPE", c10::TensorImpl, data_type_)

  /* A SizesAndStrides as memory shows it: the number of dimensions, then the sizes in place. */
  c10::impl::SizesAndStrides sizes;
  sizes.set_sizes({7, 11, 13, 17, 19});
  const int64_t *words = reinterpret_cast<const int64_t *>(&sizes);
  std::cout << "\"sizes\": [" << words[0];
  for (int i = 1; i <= 5; i++)
    std::cout << ", " << words[i];
  std::cout << "],\n";

  /* A std::string: where its characters are, and how many. */
  std::string uid(40, 'u');
  const void *const *string = reinterpret_cast<const void *const *>(&uid);
  std::cout << "\"string_begins\": " << (string[0] == uid.data()) << ",\n";
  std::cout << "\"string_length\": " << reinterpret_cast<size_t>(string[1]) << ",\n";

  /* A std::optional<std::vector<at::Tensor>>: begin, end, capacity, engaged; one pointer per tensor. */
  std::optional<std::vector<c10::intrusive_ptr<c10::TensorImpl>>> inputs;
  inputs.emplace(3);
  const void *const *vector = reinterpret_cast<const void *const *>(&inputs);
  std::cout << "\"tensor_bytes\": "
            << (static_cast<const char *>(vector[1]) - static_cast<const char *>(vector[0])) / 3 << ",\n";
  std::cout << "\"engaged\": " << int(reinterpret_cast<const char *>(&inputs)[24]) << ",\n";

  std::cout << "\"dtype\": "
            << *reinterpret_cast<const uint16_t *>(&static_cast<const caffe2::TypeMeta &>(
                   caffe2::TypeMeta::fromScalarType(c10::ScalarType::BFloat16)))
            << ",\n";
  std::cout << "\"op_bytes\": " << sizeof(c10d::OpType) << ",\n";
  std::cout << "\"scalars\": {";
  SCALARS
  std::cout << "\"\": [0, 0]}, \"ops\": {";
  OPS
  std::cout << "\"\": 0}}" << std::endl;
}
"""


def _program() -> str:
    scalars = "".join(
        f'std::cout << "\\"{name}\\": [" << int(c10::ScalarType::{name}) << ", " '
        f'<< c10::elementSize(c10::ScalarType::{name}) << "],";'
        for name in SCALARS
    )
    ops = "".join(f'std::cout << "\\"{name}\\": " << int(c10d::OpType::{name}) << ",";' for name in OPS)
    return PROGRAM.replace("  SCALARS\n", scalars + "\n").replace("  OPS\n", ops + "\n")


@pytest.fixture(scope="module")
def pytorch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the installed PyTorch's headers say, and the program built from them shows."""
    torch = folder()
    build = tmp_path_factory.mktemp("layout")
    (build / "layout.cpp").write_text(_program())
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    link = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    command = ["g++", "-std=c++20", "-w", "-O0", *include, "-o", "layout", "layout.cpp", *link]
    built = subprocess.run(command, cwd=build, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    shown = subprocess.run([build / "layout"], check=True, capture_output=True, text=True)
    facts: dict[str, Any] = json.loads(shown.stdout)
    return facts


@pytest.mark.parametrize("field", sorted(layout.DEFINES))
def test_offsets_are_those_of_pytorch_s_headers(pytorch: dict[str, Any], field: str) -> None:
    assert layout.DEFINES[field] == pytorch[field]


def test_objects_lie_in_memory_as_the_probe_reads_them(pytorch: dict[str, Any]) -> None:
    assert pytorch["sizes"] == [layout.INLINE_DIMENSIONS, 7, 11, 13, 17, 19]
    assert (pytorch["string_begins"], pytorch["string_length"]) == (1, 40)
    assert (pytorch["tensor_bytes"], pytorch["engaged"]) == (8, 1)
    assert pytorch["op_bytes"] == 1
    assert layout.DTYPES[pytorch["dtype"]] == ("bfloat16", 2)


def test_data_types_have_pytorch_s_numbers_and_sizes(pytorch: dict[str, Any]) -> None:
    theirs = {number: (SCALARS[name], size) for name, (number, size) in pytorch["scalars"].items() if name}
    assert theirs == layout.DTYPES


def test_collectives_have_pytorch_s_numbers(pytorch: dict[str, Any]) -> None:
    theirs = {OPS[name]: number for name, number in pytorch["ops"].items() if name}
    assert theirs == {op.name: op.value for op in Op}


# --- what is read is believed only where it agrees with itself

FLOAT32 = 6


def test_a_collective_s_bytes_are_elements_times_width() -> None:
    assert input_bytes(24, 1, 3, (2, 3, 4, 0, 0), 24, FLOAT32) == (96, "float32")


def test_several_tensors_count_together() -> None:
    assert input_bytes(30, 2, 1, (10, 0, 0, 0, 0), 10, 15) == (60, "bfloat16")


def test_a_barrier_has_no_bytes() -> None:
    assert input_bytes(0, 0, 0, (0,) * 5, 0, 0) == (0, "")


def test_a_scalar_has_one_element_and_an_empty_tensor_none() -> None:
    assert input_bytes(1, 1, 0, (0,) * 5, 1, FLOAT32) == (4, "float32")
    assert input_bytes(0, 1, 2, (0, 5, 0, 0, 0), 0, FLOAT32) == (0, "float32")


def test_more_dimensions_than_are_kept_in_place_are_believed_unchecked() -> None:
    assert input_bytes(64, 1, 6, (1, 2, 3, 4, 5), 64, FLOAT32) == (256, "float32")


@pytest.mark.parametrize(
    ("why", "arguments"),
    [
        ("sizes say another number", (25, 1, 3, (2, 3, 4, 0, 0), 25, FLOAT32)),
        ("no such data type", (24, 1, 3, (2, 3, 4, 0, 0), 24, 99)),
        ("the elements could not be read", (-1, 1, 3, (2, 3, 4, 0, 0), 24, FLOAT32)),
        ("a negative first tensor", (24, 2, 1, (-5, 0, 0, 0, 0), -5, FLOAT32)),
        (
            "an address where the number of dimensions should be",
            (24, 1, 0x7F00DEADBEEF, (0,) * 5, 24, FLOAT32),
        ),
        ("a negative number of dimensions", (24, 1, -1, (0,) * 5, 24, FLOAT32)),
    ],
)
def test_what_does_not_fit_is_unknown(why: str, arguments: Any) -> None:
    assert input_bytes(*arguments) == (-1, ""), why
