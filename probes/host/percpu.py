"""Entries of per-CPU maps as raw bytes: BCC would make Python objects of all their fields, on every CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any


class PerCpuMap:
    """A per-CPU map with keys of four bytes and values of ``size`` bytes, a multiple of eight."""

    def __init__(self, libbcc: Any, table: Any, size: int, cpus: int) -> None:
        """``cpus``: how many :func:`possible_cpu_list` gives."""
        self._libbcc, self._fd, self._size, self._cpus = libbcc, table.map_fd, size, cpus

    def read(self, key: int) -> list[bytes]:
        """An entry's value on each possible CPU; empty when there is no such entry."""
        room = ctypes.create_string_buffer(self._size * self._cpus)
        if self._libbcc.bpf_lookup_elem(self._fd, ctypes.byref(ctypes.c_uint32(key)), room) != 0:
            return []
        raw = room.raw
        return [raw[at : at + self._size] for at in range(0, len(raw), self._size)]

    def write(self, key: int, values: list[bytes]) -> bool:
        """Set an entry on each possible CPU; False when the map has no room for it."""
        key_ = ctypes.byref(ctypes.c_uint32(key))
        return bool(self._libbcc.bpf_update_elem(self._fd, key_, b"".join(values), 0) == 0)

    def zero(self, key: int) -> bool:
        """Set an entry to zero on each possible CPU; False when the map has no room for it."""
        return self.write(key, [bytes(self._size)] * self._cpus)

    def remove(self, key: int) -> None:
        """Take an entry out, if it is there."""
        self._libbcc.bpf_delete_elem(self._fd, ctypes.byref(ctypes.c_uint32(key)))


def possible_cpu_list(sysfs: Path = Path("/sys")) -> list[int]:
    """The CPUs that the kernel may ever bring up, in the order in which it copies an entry's values."""
    cpus: list[int] = []
    for part in (sysfs / "devices/system/cpu/possible").read_text().strip().split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus
