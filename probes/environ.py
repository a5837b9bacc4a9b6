"""The environment of a process: the one it started with, and the one it has now.

/proc/PID/environ shows what a program was started with. What it sets later (``os.environ[...] = …`` in Python
calls setenv) is in its memory only: ``environ``, a variable of its C library, points to an array of pointers to
``KEY=value`` strings. It is read from there through /proc/PID/mem, which neither stops nor changes the process.

Covered: glibc and musl, on 64-bit little-endian machines, also where the program holds the variable itself (a
copy relocation, as in Debian's python3). Not covered: a program without dynamic symbols (linked statically), and
one that holds its environment elsewhere; of these only the start is known.

All of it is the process's own memory and may be anything: reads are bounded in number and size.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from probes import elf, procfs

VALUE_LIMIT = 128
"""Bytes of a value that are kept."""
START_LIMIT = 4 << 20
"""Bytes of /proc/PID/environ: a process can move its bounds (prctl PR_SET_MM_ENV_END)."""
MAX_VARIABLES = 8192
"""Entries of the array that are looked at: a pod gets some per service of its namespace."""
AT_A_TIME = 512
MAX_READS = 1024
"""Reads of strings; neighbours take one together."""
MAX_READ = 1 << 16
GAP = 256
"""Strings that lie closer than this are read together: those a process started with lie side by side."""
TRIES = 3
"""Times to look when the array was replaced meanwhile."""
USER_SPACE = 1 << 56
"""No address of user space is higher (x86-64 with five levels of page tables; arm64 has less)."""
POINTER = struct.Struct("<Q")

NAMES = ("environ", "__environ", "_environ")
C_LIBRARY = (
    procfs.IN_ANY_FOLDER
    + rb"(?:libc\.so\.6|libc-2\.\d+\.so|ld-musl-\w+\.so\.1|libc\.musl-\w+\.so\.1|libc\.so)"
)
MAX_FILES = 1024
"""Libraries and programs whose symbols are remembered."""


@dataclass
class Environments:
    """Reads the allowed keys of environments, and remembers where each C library keeps its own."""

    keys: tuple[str, ...]
    proc: Path = Path("/proc")
    _variables: dict[tuple[int, int, int, int], elf.Variable | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = "|".join(map(re.escape, self.keys)).encode()
        self._anywhere = re.compile(rb"(?:(?<=\0)|^)(" + keys + rb")=([^\0]*)")
        self._here = re.compile(rb"(" + keys + rb")=([^\0]*)")
        self._string = max(map(len, self.keys)) + 1 + VALUE_LIMIT

    def at_start(self, pid: int) -> dict[str, str]:
        """The allowed keys as the program was started with them; empty when it has ended."""
        raw = procfs.read(f"{self.proc}/{pid}/environ", START_LIMIT) or b""
        return _first(self._anywhere.findall(raw))

    def locate(self, pid: int, maps: bytes) -> int | None:
        """Address of the variable ``environ`` in a process, which stays for as long as its program runs; None when
        it is not found. ``maps``: its /proc/PID/maps."""
        try:
            program = (self.proc / str(pid) / "exe").readlink()
        except OSError:  # ended
            return None
        # The program first: the dynamic linker takes the first definition, and lets the C library use it too.
        for file in (re.escape(os.fsencode(program).removesuffix(b" (deleted)")), C_LIBRARY):
            mapping = procfs.mapping_of(maps, file)
            if mapping is None:
                continue
            variable = self._variable(procfs.mapped_file(self.proc, pid, mapping))
            address = variable.address_in(mapping.start, mapping.offset) if variable else None
            if address is not None:
                return address
        return None

    def live(self, pid: int, at: int) -> dict[str, str] | None:
        """The allowed keys as the process has them now; None when its memory cannot be read or holds no environment
        where ``at`` points."""
        try:
            memory = os.open(f"{self.proc}/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # ended, or not ours to read
            return None
        try:
            found = None
            for _ in range(TRIES):
                array = _pointers(_read(memory, at, POINTER.size))
                if not array:
                    return None
                entries = _entries(memory, array[0])
                found = None if entries is None else self._strings(memory, entries)
                if _pointers(_read(memory, at, POINTER.size)) == array:
                    break  # not replaced while it was read
            return found
        finally:
            os.close(memory)

    def _strings(self, memory: int, entries: list[int]) -> dict[str, str]:
        texts: dict[int, tuple[bytes, int]] = {}
        for block in _blocks(entries, self._string)[:MAX_READS]:
            raw = _read(memory, block[0], block[-1] - block[0] + self._string)
            texts.update((entry, (raw, entry - block[0])) for entry in block)
        pairs = []
        for entry in entries:
            raw, start = texts.get(entry, (b"", 0))
            if found := self._here.match(raw, start, start + self._string):
                pairs.append(found.groups())
        return _first(pairs)

    def _variable(self, file: Path) -> elf.Variable | None:
        try:
            status = file.stat()
        except OSError:  # ended
            return None
        key = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        if key not in self._variables:
            if len(self._variables) >= MAX_FILES:
                self._variables.clear()
            try:
                self._variables[key] = elf.variable(file, NAMES)
            except (elf.ElfUnreadable, OSError):  # then its environment is the one it started with
                self._variables[key] = None
        return self._variables[key]


def _entries(memory: int, array: int) -> list[int] | None:
    """Addresses of the strings, in order, up to the null pointer; None when there is no array."""
    if array == 0:
        return []  # clearenv(3)
    entries: list[int] = []
    while len(entries) < MAX_VARIABLES:
        pointers = _pointers(_read(memory, array + len(entries) * POINTER.size, AT_A_TIME * POINTER.size))
        if 0 in pointers:
            return entries + pointers[: pointers.index(0)]
        if not pointers:  # the end of what is mapped
            return entries or None
        entries += pointers
    return entries


def _blocks(entries: Iterable[int], length: int) -> list[list[int]]:
    """Addresses in groups that one read takes, ``length`` bytes from each."""
    blocks: list[list[int]] = []
    for entry in sorted(set(entries)):
        if blocks and entry - blocks[-1][-1] < length + GAP and entry + length - blocks[-1][0] <= MAX_READ:
            blocks[-1].append(entry)
        else:
            blocks.append([entry])
    return blocks


def _read(memory: int, at: int, length: int) -> bytes:
    """Bytes of a process's memory, as many as are there."""
    if not 0 < at < USER_SPACE:
        return b""
    try:
        return os.pread(memory, length, at)
    except OSError:
        return b""


def _pointers(raw: bytes) -> list[int]:
    whole = len(raw) - len(raw) % POINTER.size
    return [value for (value,) in POINTER.iter_unpack(raw[:whole])]


def _first(pairs: Iterable[tuple[bytes, ...]]) -> dict[str, str]:
    """Of a key that is there twice, the first: getenv(3) finds that one."""
    found: dict[str, str] = {}
    for key, value in pairs:
        found.setdefault(key.decode(), value[:VALUE_LIMIT].decode("utf-8", "replace"))
    return found
