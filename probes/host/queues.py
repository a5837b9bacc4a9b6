"""What limits an interface's sending on this node, by the kernel's queueing disciplines (tc(8)): how often it held
packets back, and what it dropped.

Asked by rtnetlink(7): include/uapi/linux/rtnetlink.h, pkt_sched.h, gen_stats.h.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from probes import procfs
from probes.host.netlink import (
    HEADER,
    NLM_F_DUMP,
    NLM_F_REQUEST,
    NLMSG_DONE,
    NLMSG_ERROR,
    PATIENCE_S,
    to_kernel,
)
from probes.host.network_namespace import within
from probes.records import Metric

RTM_GETQDISC, RTM_NEWQDISC = 38, 36
TCA_KIND, TCA_OPTIONS, TCA_STATS2, TCA_STATS_QUEUE = 1, 2, 7, 3
TCA_TBF_PARMS, TCA_TBF_RATE64 = 1, 4
BUFFER = 1 << 17
NO_ANSWER = (
    "rtnetlink: what interfaces hold back is not told: the kernel does not answer (does a driver hang?)"
)
LOOKED_THROUGH = 4096
"""Queueing disciplines of a namespace, the first: 10 µs each, and a container may make as many as it likes."""
LISTED = 8
"""Told per namespace and reading, of held back and of dropped: those with most."""
_QDISC = struct.Struct("=BxxxiIII")
"""``struct tcmsg``: the interface is the second."""
_STATS = struct.Struct("=IIIII")
"""``struct gnet_stats_queue``: qlen, backlog, drops, requeues, overlimits."""
_RATE = struct.Struct("=8xI")
"""``struct tc_ratespec``: bytes per second come last."""


class Queue(NamedTuple):
    """One queueing discipline of an interface."""

    interface: str
    kind: str
    """``tbf``, with its rate where that is known: ``tbf 45 Mbit/s``."""
    handle: int


class Queues:
    """What was held back and dropped since the last reading. Not safe for several threads."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before: dict[int, dict[Queue, tuple[int, int]]] = {}
        """By network namespace."""
        self._asking: threading.Thread | None = None
        self.missing = ""
        """Why nothing is told just now, in words."""

    def read(self, pids: Iterable[int]) -> tuple[list[Metric], dict[int, list[Metric]]]:
        """Of this process's namespace, and by pid of those in others."""
        own = procfs.network_namespace(self._proc, "self")
        members: dict[int, list[int]] = {own: []}
        for pid in pids:
            members.setdefault(procfs.network_namespace(self._proc, str(pid)), []).append(pid)
        members.pop(0, None)  # they have ended
        now = self._ask({namespace: those[0] if those else 0 for namespace, those in members.items()})
        self.missing = NO_ANSWER if now is None else ""
        if now is None:
            return [], {}
        before, self._before = self._before, now
        told = {one: list(_grown(before[one], now[one])) for one in now if one in before}
        ranks = {
            pid: told[one] for one, those in members.items() if one != own and told.get(one) for pid in those
        }
        return told.get(own, []), ranks

    def _ask(self, members: Mapping[int, int]) -> dict[int, dict[Queue, tuple[int, int]]] | None:
        """By namespace, of one process in each; None while the kernel does not answer."""
        if self._asking is not None and self._asking.is_alive():
            return None
        told: dict[int, dict[Queue, tuple[int, int]]] = {}
        failed: list[Exception] = []

        def ask() -> None:
            try:
                for namespace, pid in members.items():
                    with contextlib.suppress(
                        OSError
                    ):  # ended, or not allowed: what connections tell says that
                        told[namespace] = queues(pid, self._proc)
            except Exception as error:  # for whoever waits for this thread
                failed.append(error)

        # The kernel locks all interfaces to answer (RTNL). A driver that hangs holds that lock, and no socket's
        # timeout ends the wait for it: ranks must be watched meanwhile.
        self._asking = threading.Thread(target=ask, daemon=True)
        self._asking.start()
        self._asking.join(PATIENCE_S)
        if failed:
            raise failed[0]
        return None if self._asking.is_alive() else told


def _grown(before: Mapping[Queue, tuple[int, int]], now: Mapping[Queue, tuple[int, int]]) -> Iterator[Metric]:
    for which, name in enumerate(("egress_held_back", "egress_drops")):
        grown = {queue: totals[which] - before.get(queue, (0, 0))[which] for queue, totals in now.items()}
        for queue in heapq.nlargest(LISTED, grown, key=grown.__getitem__):
            if grown[queue] > 0:
                labels = {"interface": queue.interface, "qdisc": queue.kind}
                yield Metric(name=name, value=grown[queue], unit="1", labels=labels)


def queues(pid: int = 0, proc: Path = Path("/proc")) -> dict[Queue, tuple[int, int]]:
    """Times that packets were held back, and packets dropped, since it was set up: of all in the network namespace
    of a process (0: this one's). Raises OSError."""
    return within(pid, lambda: dict(itertools.islice(_asked(), LOOKED_THROUGH)), proc)


def _asked() -> Iterator[tuple[Queue, tuple[int, int]]]:
    with to_kernel(socket.NETLINK_ROUTE) as link:
        body = _QDISC.pack(0, 0, 0, 0, 0)
        link.send(HEADER.pack(HEADER.size + len(body), RTM_GETQDISC, NLM_F_REQUEST | NLM_F_DUMP, 1, 0) + body)
        while True:
            answer = link.recv(BUFFER)
            at = 0
            while at + HEADER.size <= len(answer):
                size, kind, _, _, _ = HEADER.unpack_from(answer, at)
                if kind == NLMSG_ERROR:
                    code = -struct.unpack_from("=i", answer, at + HEADER.size)[0]
                    raise OSError(code, os.strerror(code))
                if kind == NLMSG_DONE or size < HEADER.size:
                    return
                if kind == RTM_NEWQDISC:
                    yield from _told(answer[at + HEADER.size : at + size])
                at += (size + 3) & ~3


def _told(message: bytes) -> Iterator[tuple[Queue, tuple[int, int]]]:
    _, index, handle, _, _ = _QDISC.unpack_from(message)
    attributes = dict(_attributes(message[_QDISC.size :]))
    kind = attributes.get(TCA_KIND, b"").rstrip(b"\0").decode("ascii", "replace")[:16]
    stats = dict(_attributes(attributes.get(TCA_STATS2, b""))).get(TCA_STATS_QUEUE, b"")
    if len(stats) < _STATS.size:
        return
    _, _, drops, _, held_back = _STATS.unpack_from(stats)
    if kind == "tbf" and (rate := _tbf_rate(attributes.get(TCA_OPTIONS, b""))):
        kind = f"tbf {rate * 8 / 1e6:,.0f} Mbit/s"
    try:
        interface = socket.if_indextoname(index)
    except OSError:  # it is gone
        return
    yield Queue(_printable(interface), kind, handle), (held_back, drops)


def _printable(name: str) -> str:
    """An interface's name may be any bytes but slashes, colons and blanks (dev_valid_name), up to 15."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _tbf_rate(options: bytes) -> int:
    """Bytes per second."""
    inside = dict(_attributes(options))
    if len(whole := inside.get(TCA_TBF_RATE64, b"")) >= 8:
        return int.from_bytes(whole[:8], sys.byteorder)
    parameters = inside.get(TCA_TBF_PARMS, b"")
    return int(_RATE.unpack_from(parameters)[0]) if len(parameters) >= _RATE.size else 0


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if size < 4:
            return
        yield kind & 0x3FFF, data[at + 4 : at + size]
        at += (size + 3) & ~3
