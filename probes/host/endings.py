"""How a process ended: its wait status, from /proc while it is a zombie, or from a descriptor of it."""

from __future__ import annotations

import fcntl
import struct
from pathlib import Path

from probes import procfs
from probes.bpf import kernel_release

PIDFD_GET_INFO, PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3
INFO = struct.Struct("=QQ11Ii")
"""``struct pidfd_info`` as it was first published, 64 bytes: mask, cgroup, eleven ids, exit code
(include/uapi/linux/pidfd.h). Newer kernels take it, too."""
EXIT_CODE = 49
"""Place of field 52 of /proc/PID/stat after the name."""
TOLD_SINCE = (6, 15)
"""Linux from which on a descriptor tells how its process ended."""


def missing() -> list[str]:
    """What this kernel does not tell, in words."""
    if kernel_release() >= TOLD_SINCE:
        return []
    return [
        "PIDFD_GET_INFO (Linux 6.15): how a process ended is known only until its parent has waited for it"
    ]


def wait_status(proc: Path, pid: int, handle: int) -> int | None:
    """Wait status (wait(2)) of process ``pid``, which has ended; None where nothing tells it any more.

    ``handle``: its pidfd, from before."""
    asked = bytearray(INFO.pack(PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(handle, PIDFD_GET_INFO, asked)
    except OSError:  # a kernel that does not know the question
        return _of_zombie(proc, pid)
    told = INFO.unpack(asked)
    # A zombie is not told of that way, but is still in /proc.
    return int(told[-1]) if told[0] & PIDFD_INFO_EXIT else _of_zombie(proc, pid)


def _of_zombie(proc: Path, pid: int) -> int | None:
    stat = (procfs.read(f"{proc}/{pid}/stat") or b"").rpartition(b")")[2].split()
    return int(stat[EXIT_CODE]) if len(stat) > EXIT_CODE and stat[0] in (b"Z", b"X") else None
