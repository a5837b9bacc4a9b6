"""What the kernel knows of single TCP connections (``struct tcp_info``): how long data was on its way, how much.

Asked by netlink, connection by connection (sock_diag(7)): what a node with a hundred thousand others has costs
nothing. A request is put to the network namespace of the socket that puts it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from probes.host.netlink import HEADER, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, to_kernel
from probes.host.network_namespace import within
from probes.host.sockets import MAPPED, Flow

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
"""include/uapi/linux/netlink.h, sock_diag.h"""
INET_DIAG_INFO = 2
"""The attribute that is a ``struct tcp_info``: include/uapi/linux/inet_diag.h."""
ESTABLISHED, CLOSE_WAIT = 1, 8
"""States in which data can be sent: include/net/tcp_states.h."""
AT_ONCE = 64
"""Requests in one message: their answers must fit into the socket's buffer."""
_REQUEST = struct.Struct("=BBBxI2s2s16s16sIII")
"""``struct inet_diag_req_v2``."""
_ANSWER = struct.Struct("=BB")
_ANSWERED = HEADER.size + 72
"""Attributes come behind ``struct inet_diag_msg``."""
_ATTRIBUTE = struct.Struct("=HH")
_SENT = struct.Struct("=68xI28xI16xQ28xI8xQQ")
"""rtt, total_retrans, bytes_acked, data_segs_out, busy_time, rwnd_limited of ``struct tcp_info``: fields stay."""


class Sent(NamedTuple):
    """What one end of a connection has sent since it was made, and how that went."""

    sending_ns: int
    """Data had left, or was to leave, and the other end had not acknowledged it, though it had room for it."""
    held_up_ns: int
    """… and the other end had no room for it."""
    acknowledged_bytes: int
    """Who opened the connection has one more."""
    segments: int
    """With data, what was sent again included."""
    again: int
    """… of which were sent again."""
    round_trip_ns: int
    """Smoothed, as of now: no count."""


class NotToldError(OSError):
    """This kernel, or this process, cannot ask; the message says why."""


def ask(flows: Sequence[Flow], pid: int = 0, proc: Path = Path("/proc")) -> dict[Flow, Sent]:
    """Of those of ``flows`` that are open in the network namespace of a process (0: in this one's). Raises
    :class:`NotToldError`."""
    if not flows:
        return {}
    found: dict[Flow, Sent] = {}
    try:
        # Kept no longer than the question takes: it would keep the namespace.
        with within(pid, _netlink, proc) as link:
            for begin in range(0, len(flows), AT_ONCE):
                found |= _answers(link, flows[begin : begin + AT_ONCE])
    except OSError as error:
        raise _not_told(error) from error
    return found


def check() -> None:
    """Raises :class:`NotToldError` where the kernel has no answers: asked for a connection, it would say that there
    is none."""
    nothing = _request(Flow(MAPPED + bytes(4), 0, MAPPED + bytes(4), 0), 0, states=0, flags=NLM_F_DUMP)
    try:
        with _netlink() as link:
            link.send(nothing)
            _raise_if_error(link.recv(4096))
    except OSError as error:
        raise _not_told(error) from error


def _not_told(error: OSError) -> NotToldError:
    needs = "CAP_SYS_ADMIN" if isinstance(error, PermissionError) else "CONFIG_INET_TCP_DIAG"
    return NotToldError(
        f"sock_diag: how long ranks' data is on its way is not told: {error.strerror or error} ({needs})"
    )


def _answers(link: socket.socket, flows: Sequence[Flow]) -> dict[Flow, Sent]:
    link.send(b"".join(_request(flow, number) for number, flow in enumerate(flows)))
    found = {}
    for _ in flows:
        answer = link.recv(4096)
        _, kind, _, number, _ = HEADER.unpack_from(answer)
        if kind == NLMSG_ERROR and _error(answer) == errno.ENOENT:  # it was closed
            continue
        _raise_if_error(answer)
        state = _ANSWER.unpack_from(answer, HEADER.size)[1]
        if state in (ESTABLISHED, CLOSE_WAIT) and (sent := _sent(answer)) is not None:
            found[flows[number]] = sent
    return found


def _error(answer: bytes) -> int:
    return -int(struct.unpack_from("=i", answer, HEADER.size)[0])


def _raise_if_error(answer: bytes) -> None:
    _, kind, _, _, _ = HEADER.unpack_from(answer)
    if kind in (NLMSG_ERROR, NLMSG_DONE) and (code := _error(answer)) > 0:
        raise OSError(code, os.strerror(code))


def _request(flow: Flow, number: int, states: int = 0xFFFFFFFF, flags: int = 0) -> bytes:
    mapped = flow.local.startswith(MAPPED) and flow.peer.startswith(MAPPED)
    ends = (flow.local[12:], flow.peer[12:]) if mapped else (flow.local, flow.peer)
    body = _REQUEST.pack(
        socket.AF_INET if mapped else socket.AF_INET6,
        socket.IPPROTO_TCP,
        1 << (INET_DIAG_INFO - 1),
        states,
        flow.local_port.to_bytes(2, "big"),
        flow.peer_port.to_bytes(2, "big"),
        *ends,
        0,
        0xFFFFFFFF,
        0xFFFFFFFF,
    )  # any interface, and no cookie
    return HEADER.pack(HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | flags, number, 0) + body


def _sent(answer: bytes) -> Sent | None:
    """None before Linux 4.10, whose ``struct tcp_info`` ends earlier."""
    at = _ANSWERED
    while at + _ATTRIBUTE.size <= len(answer):
        size, kind = _ATTRIBUTE.unpack_from(answer, at)
        if kind == INET_DIAG_INFO and size >= _ATTRIBUTE.size + _SENT.size:
            rtt_us, again, acked, segments, busy_us, full_us = _SENT.unpack_from(answer, at + _ATTRIBUTE.size)
            return Sent(
                max(0, busy_us - full_us) * 1000, full_us * 1000, acked, segments, again, rtt_us * 1000
            )
        at += max(_ATTRIBUTE.size, (size + 3) & ~3)
    return None


def _netlink() -> socket.socket:
    return to_kernel(NETLINK_SOCK_DIAG)
