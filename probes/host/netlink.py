"""Asking the kernel by netlink(7): include/uapi/linux/netlink.h."""

from __future__ import annotations

import socket
import struct

NLMSG_ERROR, NLMSG_DONE, NLM_F_REQUEST, NLM_F_DUMP = 2, 3, 1, 0x300
HEADER = struct.Struct("=IHHII")
"""``struct nlmsghdr``: size, type, flags, number, port."""
PATIENCE_S = 1.0
"""The kernel answers while it is asked: what is not there after this was lost."""


def to_kernel(protocol: int) -> socket.socket:
    """A socket of the calling thread's network namespace. Raises OSError; so do its methods, TimeoutError after
    ``PATIENCE_S``."""
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    try:
        link.settimeout(PATIENCE_S)
        # Else whoever administers a container's network could answer in the kernel's place, and without an end.
        link.connect((0, 0))
    except OSError:
        link.close()
        raise
    return link
