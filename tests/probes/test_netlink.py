"""Asking the kernel by netlink: nobody else answers."""

from __future__ import annotations

import socket

import pytest

from probes.bpf import Kernel
from probes.host.netlink import to_kernel


def test_whoever_administers_the_network_cannot_answer_in_the_kernel_s_place(root_and_bpf: Kernel) -> None:
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with (
        to_kernel(socket.NETLINK_ROUTE) as link,
        socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE) as somebody,
    ):
        somebody.bind((0, 0))
        port, _ = link.getsockname()
        with pytest.raises(ConnectionRefusedError):
            somebody.sendto(bytes(16), (port, 0))
