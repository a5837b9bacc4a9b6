"""What names in a Kineto trace mean: kernels, collectives, types of numbers, and files named after their rank."""

from __future__ import annotations

import re
from pathlib import Path

from probes.records import Op

MAX_NAME = 120
"""Longest name of a kind of operation."""

COMMUNICATION = re.compile(
    r"nccl|rccl|msccl|nvshmem|deep_?ep|cross_device_reduce|(?:one|two)_?shot_all_?reduce|multimem_all|oneccl",
    re.IGNORECASE,
)
"""Kernels that move data between GPUs: NCCL's, RCCL's, and the ones libraries write themselves."""
NCCL_KERNEL = re.compile(r"(?:void )?nccl(?:Dev)?Kernel_?([A-Za-z]+)")
"""``ncclKernel_AllReduce_RING_LL_Sum_float(…)`` up to NCCL 2.18, ``ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)``
since 2.19 (nccl: src/device/generate.py)."""
ANNOTATION = re.compile(r"((?:nccl|rccl|gloo|mpi|ucc|xccl)\d*):(\w+)")
"""c10d's annotation around a collective (torch: ``profilingTitle`` of the process groups)."""
HOST_WAITS = re.compile(
    r"(?:cu|cuda|hip)(?:(?:Stream|Device|Event|Ctx)Synchronize|Memcpy(?!.*Async)\w*|Malloc\w*|Free\w*|MemAlloc\w*"
    r"|MemFree\w*|HostAlloc\w*|ModuleLoad\w*|LibraryLoad\w*)"
)
"""Calls of the runtime that hold up the host: waits for the GPU, copies that wait, memory, loading of code."""
STEP = re.compile(r"ProfilerStep#(\d{1,18})")

_OPS = {
    "allreduce": Op.ALLREDUCE,
    "allreducecoalesced": Op.ALLREDUCE_COALESCED,
    "allreducesparse": Op.ALLREDUCE_SPARSE,
    "sparseallreduce": Op.ALLREDUCE_SPARSE,
    "broadcast": Op.BROADCAST,
    "broadcastoop": Op.BROADCAST,
    "reduce": Op.REDUCE,
    "reduceoop": Op.REDUCE,
    "allgather": Op.ALLGATHER,
    "allgatherv": Op.ALLGATHER,
    "allgatherbase": Op.ALLGATHER_BASE,
    "allgatherinto": Op.ALLGATHER_BASE,
    "allgatherintotensor": Op.ALLGATHER_BASE,
    "allgathercoalesced": Op.ALLGATHER_COALESCED,
    "allgatherintotensorcoalesced": Op.ALLGATHER_COALESCED,
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
    "reducescatter": Op.REDUCE_SCATTER,
    "reducescatterv": Op.REDUCE_SCATTER,
    "reducescatterbase": Op.REDUCE_SCATTER_BASE,
    "reducescattertensor": Op.REDUCE_SCATTER_BASE,
    "reducescattertensorcoalesced": Op.REDUCE_SCATTER_COALESCED,
    "alltoall": Op.ALLTOALL,
    "alltoallv": Op.ALLTOALL_BASE,
    "alltoallbase": Op.ALLTOALL_BASE,
    "send": Op.SEND,
    "isend": Op.SEND,
    "recv": Op.RECV,
    "irecv": Op.RECV,
    "recvanysource": Op.RECV_ANY_SOURCE,
    "barrier": Op.BARRIER,
    "allbarrier": Op.BARRIER,
    "coalesced": Op.COALESCED,
}
NO_COLLECTIVES = frozenset({"wait", "init", "startcoalescing", "endcoalescing", "abort", "split"})
"""What ``record_param_comms`` also notes (torch: ProcessGroupNCCL.cpp)."""

_DTYPES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "half": ("float16", 2),
    "c10::half": ("float16", 2),
    "bfloat16": ("bfloat16", 2),
    "c10::bfloat16": ("bfloat16", 2),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    "int": ("int32", 4),
    "short": ("int16", 2),
    "short int": ("int16", 2),
    "char": ("int8", 1),
    "signed char": ("int8", 1),
    "byte": ("uint8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
    "complexfloat": ("complex64", 8),
    "complexdouble": ("complex128", 16),
    "c10::complex<float>": ("complex64", 8),
    "c10::complex<double>": ("complex128", 16),
    "float8_e4m3fn": ("float8_e4m3fn", 1),
    "float8_e5m2": ("float8_e5m2", 1),
    "float8_e4m3fnuz": ("float8_e4m3fnuz", 1),
    "float8_e5m2fnuz": ("float8_e5m2fnuz", 1),
    "uint16": ("uint16", 2),
    "uint32": ("uint32", 4),
    "uint64": ("uint64", 8),
}
"""ScalarType's names (c10/core/ScalarType.h) and those of the C++ types, in lower case → (name as in
``probes.nccl.layout.DTYPES``, bytes)."""
_RANK = re.compile(r"(?<![a-z0-9])rank[-_.= ]?(\d{1,6})(?![a-z0-9])", re.IGNORECASE)
_ANONYMOUS = re.compile(r"\((?:anonymous namespace|lambda[^()]*)\)(?:::)?|\{lambda[^{}]*\}(?:::)?")
_WRAPPERS = ("cutlass::Kernel", "cutlass::Kernel2", "cutlass::device_kernel", "cutlass3x::Kernel")
"""Kernels that are nothing but their first template argument."""


def op_of(name: str) -> Op | None:
    """What a collective's name says, however it is spelled (``all_reduce``, ``AllReduce``, ``_allgather_base``);
    UNKNOWN for one that is not known, None for what is no collective at all."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    if plain in NO_COLLECTIVES:
        return None
    return _OPS.get(plain, Op.UNKNOWN)


def op_of_kernel(name: str) -> Op | None:
    """What an NCCL kernel does; None for a kernel that is none of NCCL's. ``SendRecv`` kernels do sends, receives
    and all-to-alls: UNKNOWN."""
    found = NCCL_KERNEL.match(name)
    if found:
        return _OPS.get(found[1].lower(), Op.UNKNOWN)
    annotated = ANNOTATION.match(name)
    return op_of(annotated[2]) if annotated else None


def dtype_of(name: str) -> tuple[str, int]:
    """(name of the type, bytes of one number); the bytes are 0 where the type is not known."""
    return _DTYPES.get(name.lower().removeprefix("at::"), (name[:40], 0))


def shortened(name: str) -> str:
    """A name without C++'s templates, parameters and return types, at most ``MAX_NAME`` characters:
    ``void at::native::reduce_kernel<512, 1, …>(…)`` is ``at::native::reduce_kernel``."""
    plain = _ANONYMOUS.sub("", name)
    if plain.startswith("std::enable_if<"):
        plain = plain.partition(">::type ")[2] or plain
    cut = min((place for place in (plain.find("<"), plain.find("(")) if place > 0), default=len(plain))
    if cut < len(plain) and " " not in plain[:cut].removeprefix("void ").strip():
        short = plain[:cut].removeprefix("void ")
        if short in _WRAPPERS:
            short = re.split(r"[<>,(]", plain[cut + 1 :], maxsplit=1)[0].strip() or short
        plain = short
    return plain[:MAX_NAME] or "?"


def rank_in_name(path: Path) -> int | None:
    """The rank that a file's name plainly tells (``rank3.json``, ``trace_rank-3.json.gz``), or its folder's
    (``rank3/trace.json``); None where it does not, or tells two. Numbers of ``host_pid.time.pt.trace.json`` are
    no ranks."""
    ranks = {int(number) for number in _RANK.findall(path.name)}
    if not ranks:
        folder = _RANK.fullmatch(path.parent.name)
        ranks = {int(folder[1])} if folder else set()
    return ranks.pop() if len(ranks) == 1 else None
