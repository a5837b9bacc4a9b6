"""What a network namespace counts: per interface, and of TCP and UDP, from /proc/PID/net.

Formats: proc_pid_net(5); names of the counters: Documentation/networking/snmp_counter.rst of the kernel.
"""

from __future__ import annotations

from probes import procfs

INTERFACE = (
    ("interface_received_bytes", 0),
    ("interface_receive_errors", 2),
    ("interface_receive_drops", 3),
    ("interface_sent_bytes", 8),
    ("interface_send_errors", 10),
    ("interface_send_drops", 11),
)
"""Metric, and its column in /proc/net/dev."""
PROTOCOLS = {
    "Tcp.OutSegs": "tcp_sent_segments",
    "Tcp.RetransSegs": "tcp_retransmitted_segments",
    "Tcp.EstabResets": "tcp_reset_connections",
    "Tcp.OutRsts": "tcp_sent_resets",
    "Tcp.InErrs": "tcp_bad_segments",
    "Udp.NoPorts": "udp_without_receiver",
    "Udp.RcvbufErrors": "udp_receive_buffer_full",
    "TcpExt.TCPTimeouts": "tcp_timeouts",
    "TcpExt.TCPLostRetransmit": "tcp_lost_retransmits",
    "TcpExt.TCPAbortOnTimeout": "tcp_timed_out_connections",
    "TcpExt.TCPMemoryPressures": "tcp_memory_pressures",
    "TcpExt.ListenDrops": "tcp_listen_drops",
    "TcpExt.TCPBacklogDrop": "tcp_backlog_drops",
    "TcpExt.TCPRcvQDrop": "tcp_receive_queue_drops",
    "TcpExt.PruneCalled": "tcp_receive_buffer_pruned",
}
"""Counter in /proc/PID/net/snmp or netstat → metric."""
MAX_INTERFACES = 256
WHOLE = 1 << 20
"""Bytes: files of many rows come 4 kB at a time, so one read is not all of such a file."""


def interfaces(folder: str) -> dict[str, dict[str, int]]:
    """Interface → metric → total, without the loopback. ``folder``: a process's /proc/PID/net."""
    found: dict[str, dict[str, int]] = {}
    raw = (procfs.read(f"{folder}/dev", WHOLE) or b"").decode("utf-8", "replace")
    for line in raw.splitlines()[2 : 2 + MAX_INTERFACES]:
        name, _, rest = line.rpartition(":")  # a name may hold a colon, numbers do not
        values = rest.split()
        if name.strip() != "lo" and len(values) >= 12:
            found[name.strip()[:64]] = {metric: int(values[column]) for metric, column in INTERFACE}
    return found


def protocols(folder: str) -> dict[str, int]:
    """Metric → total, of those that this kernel counts. ``folder``: a process's /proc/PID/net."""
    found: dict[str, int] = {}
    for file in ("snmp", "netstat"):
        raw = (procfs.read(f"{folder}/{file}") or b"").decode("ascii", "replace")
        # Pairs of lines: "Tcp: RtoAlgorithm RtoMin …" and "Tcp: 1 200 …".
        lines = raw.splitlines()
        for names, values in zip(lines[::2], lines[1::2], strict=False):
            protocol, _, rest = names.partition(": ")
            for name, value in zip(rest.split(), values.partition(": ")[2].split(), strict=False):
                metric = PROTOCOLS.get(f"{protocol}.{name}")
                if metric and value.isdigit():
                    found[metric] = int(value)
    return found


def backlogs(folder: str) -> list[tuple[int, int, int]]:
    """(CPU, packets dropped because its queue was full, times that its receiving was cut short), both in all.

    ``folder``: a /proc/PID/net. The columns are softnet_stat's first three, hexadecimal, and the CPU is the 13th
    where the kernel tells it (net/core/net-procfs.c, Linux ≥ 5.10)."""
    found = []
    raw = (procfs.read(f"{folder}/softnet_stat", WHOLE) or b"").decode("ascii", "replace")
    for line, row in enumerate(raw.splitlines()):
        fields = [int(field, 16) for field in row.split()]
        if len(fields) >= 3:
            found.append((fields[12] if len(fields) > 12 else line, fields[1], fields[2]))
    return found
