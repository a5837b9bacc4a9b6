"""Reading /proc, cheaply: the agent does it hundreds of times per second, and trusts nothing that it finds."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

SIZE = 1 << 16
MAPS_LIMIT = 16 << 20
"""Bytes of /proc/PID/maps that are looked at: 65,530 mappings (the kernel's limit) of usual length."""

IN_ANY_FOLDER = rb"/(?:[^\n]*/)?"
"""Regular expression for what stands before a file's name in its whole path."""

PID_NS_INIT_INO = 0xEFFFFFFC
"""Inode of the first pid namespace, the same on every machine: include/uapi/linux/nsfs.h (before Linux 6.17
include/linux/proc_ns.h)."""
HOST_PID_WORDS = (
    "the agent runs in a pid namespace of its own, where the node's processes are not seen: "
    "set hostPID: true in the pod's spec (with Docker: --pid=host)"
)


@dataclass(frozen=True)
class Mapping:
    """One mapping of a file into a process."""

    start: int
    end: int
    offset: int
    path: bytes
    """As the kernel prints it: a newline is ``\\012``, and ``" (deleted)"`` may follow the name."""

    @property
    def range(self) -> str:
        """Its name in /proc/PID/map_files."""
        return f"{self.start:x}-{self.end:x}"


def read(path: str, limit: int = SIZE) -> bytes | None:
    """The first ``limit`` bytes of a file; None when it cannot be read, as when its process has ended."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if limit <= SIZE:
            return os.read(handle, limit)
        parts, left = [], limit
        while left > 0 and (part := os.read(handle, min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(handle)


def mapping_of(maps: bytes, file: bytes, *, executable: bool = False) -> Mapping | None:
    """The first mapping, in /proc/PID/maps, of a file whose whole path matches the regular expression ``file``;
    with ``executable``, the first that holds code.

    Nearly all processes have no such mapping, and they may have 65,530 others: to take these line by line would
    be half a second of CPU time. That the name is not there is found within milliseconds; so that comes first."""
    name = b"/" + file.removeprefix(IN_ANY_FOLDER) if file.startswith(IN_ANY_FOLDER) else file
    somewhere = re.search(name, maps)
    if somewhere is None:
        return None
    flags = rb"..x." if executable else rb"...."
    line = re.compile(
        rb"^([0-9a-f]+)-([0-9a-f]+) " + flags + rb" ([0-9a-f]+) \S+ \S+ +(" + file + rb"(?: \(deleted\))?)$",
        re.MULTILINE,
    )
    found = line.search(maps, maps.rfind(b"\n", 0, somewhere.start()) + 1)
    if found is None:
        return None
    start, end, offset, path = found.groups()
    return Mapping(int(start, 16), int(end, 16), int(offset, 16), path)


def mapped_file(proc: Path, pid: int, mapping: Mapping) -> Path:
    """A path, on this node, to the very file that is mapped.

    That is its own path below the process's root when the same file still stands there. When it was deleted,
    replaced, or is mounted where that path does not lead, it is the kernel's own link to the mapped file, which
    only root may follow and which lasts as long as the mapping.
    """
    plain = proc / str(pid) / "root" / os.fsdecode(mapping.path).lstrip("/")
    link = proc / str(pid) / "map_files" / mapping.range
    try:
        mapped = link.stat()
    except OSError:  # not root, or ended
        return plain
    try:
        there = plain.stat()
    except OSError:
        return link
    return plain if os.path.samestat(there, mapped) else link


def network_namespace(proc: Path, pid: str) -> int:
    """Number of a process's network namespace, unique on its node while it lasts; 0 when it cannot be learned."""
    try:
        return (proc / pid / "ns/net").stat().st_ino
    except OSError:
        return 0


def in_initial_pid_namespace(proc: Path = Path("/proc")) -> bool:
    """Whether this process sees all processes of its node, under the numbers that the kernel's probes tell.
    ``HOST_PID_WORDS`` says what to do where it does not."""
    try:
        return (proc / "self/ns/pid").stat().st_ino == PID_NS_INIT_INO
    except FileNotFoundError:  # a kernel without pid namespaces
        return True
