"""What of ours is loaded in the kernel now: BPF programs of any process, and uprobes of the tracing file system.

The kernel names a program by its first 15 characters and BCC's other tools use the same names for theirs
(``sched_switch``), so a program is ours when its name and the names of all its maps are those of our sources.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from probes.bpf import BPF_SYSCALL, SOURCES, TRACEFS

PROG_GET_NEXT_ID, PROG_GET_FD_BY_ID, MAP_GET_FD_BY_ID, OBJ_GET_INFO_BY_FD = 11, 13, 14, 15
"""include/uapi/linux/bpf.h, ``enum bpf_cmd``."""
NAME = 15
"""BPF_OBJ_NAME_LEN less its zero."""
MAX_MAPS = 64
PROG_INFO = 232
"""Bytes of ``struct bpf_prog_info`` that are asked for; older kernels fill what they have."""
MAP_INFO = 88
PROG_MAPS_AT, PROG_NAME_AT, MAP_NAME_AT = 52, 64, 24
"""nr_map_ids (then map_ids at 56) and name in ``struct bpf_prog_info``, name in ``struct bpf_map_info``."""

_PROGRAM = re.compile(
    r"^(?:RAW_TRACEPOINT_PROBE\((\w+)\)|TRACEPOINT_PROBE\((\w+), *(\w+)\)|int (\w+)\()", re.MULTILINE
)
_MAP = re.compile(r'^BPF_(?:TABLE\w*\("[\w/]+",[^,]+,[^,]+, *(\w+)|\w+\((\w+))', re.MULTILINE)


class CannotLook(RuntimeError):
    """The kernel does not say what is loaded; the message says why."""


@dataclass(frozen=True)
class Program:
    """A loaded BPF program of ours."""

    id: int
    name: str
    """Its first 15 characters."""
    holders: tuple[int, ...]
    """Processes that hold it; empty when none does."""


def programs() -> list[Program]:
    """All BPF programs of ours that are loaded, by id. Raises :class:`CannotLook`."""
    names, maps = _names()
    ours = [
        (number, name)
        for number, name, its_maps in _all_programs()
        if name in names and its_maps and its_maps <= maps
    ]
    holders = _holders({number for number, _ in ours}) if ours else {}
    return [Program(number, name, tuple(sorted(holders.get(number, ())))) for number, name in ours]


def uprobes(tracefs: Path = TRACEFS) -> list[str]:
    """Lines of ``uprobe_events`` that BCC made for a collectives library. On kernels with a uprobe PMU (4.17) there
    are none: there a uprobe goes with its program."""
    try:
        lines = (tracefs / "uprobe_events").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if re.search(r"_bcc_\d+ ", line) and "libtorch" in line]


@cache
def _names() -> tuple[frozenset[str], frozenset[str]]:
    """Names of all programs and maps in our sources, as the kernel cuts them off."""
    functions: set[str] = set()
    maps: set[str] = set()
    for path in [*SOURCES.glob("*.bpf.c"), *SOURCES.glob("*.h")]:
        text = path.read_text()
        for raw, category, event, function in _PROGRAM.findall(text):
            if raw:  # BCC hands over either form: the long one while it fits its own limit
                functions |= {raw, f"raw_tracepoint__{raw}"}
            elif event:
                functions |= {f"{category}__{event}", f"tracepoint__{category}__{event}"}
            else:
                functions.add(function)
        for table, other in _MAP.findall(text):
            maps.add((table or other).removesuffix("_LOAD"))
    return frozenset(name[:NAME] for name in functions), frozenset(name[:NAME] for name in maps)


def _all_programs() -> Iterator[tuple[int, str, frozenset[str]]]:
    """(id, name, names of its maps) of every loaded program."""
    last = 0
    while True:
        request = ctypes.create_string_buffer(struct.pack("<3I", last, 0, 0))
        if _bpf(PROG_GET_NEXT_ID, request) < 0:
            if ctypes.get_errno() == errno.ENOENT:
                return
            raise CannotLook(
                f"the kernel does not tell which BPF programs are loaded: {os.strerror(ctypes.get_errno())}"
            )
        last = struct.unpack_from("<I", request.raw, 4)[0]
        if (found := _program(last)) is not None:
            yield last, *found


def _program(number: int) -> tuple[str, frozenset[str]] | None:
    """Name and maps of one program; None when it went meanwhile."""
    ids = (ctypes.c_uint32 * MAX_MAPS)()
    info = ctypes.create_string_buffer(PROG_INFO)
    struct.pack_into("<IQ", info, PROG_MAPS_AT, MAX_MAPS, ctypes.addressof(ids))
    if not _info(PROG_GET_FD_BY_ID, number, info):
        return None
    count = struct.unpack_from("<I", info.raw, PROG_MAPS_AT)[0]
    maps = set()
    for map_id in ids[: min(count, MAX_MAPS)]:
        map_info = ctypes.create_string_buffer(MAP_INFO)
        if not _info(MAP_GET_FD_BY_ID, map_id, map_info):
            return None
        # Shared maps have the number of their load at the end (probes.bpf.next_load).
        maps.add(re.sub(r"_\d+$", "", _text(map_info.raw, MAP_NAME_AT)))
    return _text(info.raw, PROG_NAME_AT), frozenset(maps)


def _info(open_by_id: int, number: int, info: ctypes.Array[ctypes.c_char]) -> bool:
    """Fill ``info`` of a program or map; False when it is gone."""
    handle = _bpf(open_by_id, ctypes.create_string_buffer(struct.pack("<3I", number, 0, 0)))
    if handle < 0:
        return False
    try:
        request = struct.pack("<2IQ", handle, len(info), ctypes.addressof(info))
        return _bpf(OBJ_GET_INFO_BY_FD, ctypes.create_string_buffer(request)) == 0
    finally:
        os.close(handle)


def _bpf(command: int, request: ctypes.Array[ctypes.c_char]) -> int:
    number = BPF_SYSCALL.get(platform.machine())
    if number is None:
        raise CannotLook(f"what is loaded in the kernel of a {platform.machine()} cannot be looked up")
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(number, command, request, len(request)))


def _text(raw: bytes, at: int) -> str:
    return raw[at : at + NAME + 1].partition(b"\0")[0].decode("ascii", "replace")


def _holders(numbers: set[int]) -> dict[int, set[int]]:
    """Program → processes with a descriptor of it, or of a link that runs it."""
    found: dict[int, set[int]] = {}
    for place in Path("/proc").glob("[0-9]*/fd"):
        try:
            for link in place.iterdir():
                if not link.readlink().name.startswith(("anon_inode:bpf", "anon_inode:[bpf")):
                    continue
                told = (place.parent / "fdinfo" / link.name).read_text()
                for number in re.findall(r"^prog_id:\s+(\d+)", told, re.MULTILINE):
                    if int(number) in numbers:
                        found.setdefault(int(number), set()).add(int(place.parent.name))
        except OSError:
            continue  # ended meanwhile
    return found
