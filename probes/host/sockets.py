"""Whose a TCP connection is: the sockets of processes, by the addresses of both ends.

/proc/PID/net/tcp and tcp6 list a network namespace's connections with their inode (Documentation/networking/
proc_net_tcp.rst), /proc/PID/fd the inodes of a process's sockets.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from probes import procfs

TABLE_LIMIT = 16 << 20
"""Bytes of a table, about 100,000 connections."""
ROW = re.compile(
    rb"^ *\d+: ([0-9A-F]+):([0-9A-F]{4}) ([0-9A-F]+):([0-9A-F]{4}) \S+ \S+ \S+ \S+ +\d+ +\d+ (\d+) ",
    re.MULTILINE,
)
"""Both ends and the inode: the 2nd, 3rd and 10th column of /proc/PID/net/tcp."""
MAPPED = bytes(10) + b"\xff\xff"
"""What stands before an IPv4 address that is written as one of IPv6."""


class Flow(NamedTuple):
    """A connection as one end has it: addresses of 16 bytes, IPv4 mapped; ports."""

    local: bytes
    local_port: int
    peer: bytes
    peer_port: int

    @property
    def turned(self) -> Flow:
        """As the other end has it."""
        return Flow(self.peer, self.peer_port, self.local, self.local_port)


def address(packed: bytes) -> str:
    """An address in words; IPv4 as such."""
    if packed.startswith(MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed)


def owners(pids: Iterable[int], proc: Path = Path("/proc")) -> dict[Flow, set[int]]:
    """Connection → those of ``pids`` that have it open. A process that is alone in its network namespace has all
    connections there, also those that it has closed and the kernel has not. One connection may be several
    processes': inherited, or of the same addresses in two namespaces."""
    by_namespace: dict[int, list[int]] = {}
    for pid in pids:
        by_namespace.setdefault(procfs.network_namespace(proc, str(pid)), []).append(pid)
    own = procfs.network_namespace(proc, "1") or procfs.network_namespace(proc, "self")
    found: dict[Flow, set[int]] = {}
    for namespace, members in by_namespace.items():
        alone = namespace not in (0, own) and len(members) == 1
        holders: dict[int, set[int]] = {}
        for pid in () if alone else members:
            for inode in _sockets(proc, pid):
                holders.setdefault(inode, set()).add(pid)
        for inode, ends in _connections(f"{proc}/{members[0]}/net"):
            whose = set(members) if alone else holders.get(inode)
            if whose:
                local, local_port, peer, peer_port = ends
                flow = Flow(_packed(local), int(local_port, 16), _packed(peer), int(peer_port, 16))
                found.setdefault(flow, set()).update(whose)
    return found


def _connections(folder: str) -> Iterable[tuple[int, Sequence[bytes]]]:
    """(inode, both ends as they are written) of all connections of a namespace: there may be a hundred thousand."""
    for file in ("tcp", "tcp6"):
        for *ends, inode in ROW.findall(procfs.read(f"{folder}/{file}", TABLE_LIMIT) or b""):
            yield int(inode), ends


@functools.lru_cache(maxsize=4096)
def _packed(words: bytes) -> bytes:
    """An address like ``0100007F``: words of four bytes, each as this machine has it in memory."""
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    return MAPPED + packed if len(packed) == 4 else packed


_SOCKET = re.compile(r"socket:\[(\d+)\]")
"""What a descriptor of a socket links to (proc(5))."""


def _sockets(proc: Path, pid: int) -> list[int]:
    """Inodes of a process's sockets."""
    found = []
    with contextlib.suppress(OSError), os.scandir(f"{proc}/{pid}/fd") as entries:  # it may end meanwhile
        for entry in entries:
            try:
                # Not stat(): that asks the file's own file system, and waits for one that does not answer.
                target = os.readlink(entry.path)  # noqa: PTH115 - thousands of them
            except OSError:  # closed since
                continue
            if (socket := _SOCKET.fullmatch(target)) is not None:
                found.append(int(socket[1]))
    return found
