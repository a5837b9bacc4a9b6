"""The tcp probe: real losses, resets and drops between network namespaces, against the kernel's own counters."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from probes.bpf import Kernel
from probes.discovery import Process, RankProcess
from probes.host import connections
from probes.host.reading import Reading
from probes.host.sockets import Flow, address, owners
from probes.host.tcp import TcpProbe, drop_reasons
from tests.probes.processes import Child, start, until

TICK_NS = 20_000_000
"""The kernel counts in ticks of 10 ms at most, each begun one in full."""
A, B = "10.97.7.1", "10.97.7.2"
A6, B6 = "fd97:7::1", "fd97:7::2"

SERVER = """
import socket, struct, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], 0), family=family)
print(listener.getsockname()[1], flush=True)
peer, _ = listener.accept()
print("accepted", flush=True)
for word in sys.stdin:
    if word == "reset\\n":
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        print("reset", flush=True)
    else:
        print(len(peer.recv(1 << 16)), flush=True)
"""
CLIENT = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print(peer.getsockname()[1], flush=True)
for word in sys.stdin:
    if word == "end\\n":
        try:
            peer.recv(1)
        except ConnectionResetError:
            print("was reset", flush=True)
    else:
        peer.send(b"x" * 100)
        print("sent", flush=True)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Pair:
    """Two network namespaces joined by a cable."""

    def __init__(self, mark: str) -> None:
        self.names = (f"sysom-a-{mark}", f"sysom-b-{mark}")

    def run(self, where: int, code: str, *arguments: str) -> Child:
        command = ["ip", "netns", "exec", self.names[where], sys.executable, "-S", "-c", code, *arguments]
        return start(command)

    @contextlib.contextmanager
    def talk(self, host: str = B) -> Iterator[tuple[Child, Child]]:
        """A client in the one and a server in the other, connected."""
        server = self.run(1, SERVER, host)
        client = self.run(0, CLIENT, host, server.line())
        try:
            client.line()
            assert server.line() == "accepted"
            yield client, server
        finally:
            client.end()
            server.end()


@pytest.fixture
def pair(root_and_bpf: Kernel) -> Iterator[Pair]:
    pair = Pair(str(os.getpid()))
    try:
        for name in pair.names:
            ip("netns", "add", name)
        a, b = pair.names
        ip("-n", a, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b)
        for name, own, own6 in ((a, A, A6), (b, B, B6)):
            ip("-n", name, "addr", "add", f"{own}/24", "dev", "cable")
            ip("-n", name, "addr", "add", f"{own6}/64", "dev", "cable", "nodad")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield pair
    finally:
        for name in pair.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def probe(root_and_bpf: Kernel) -> Iterator[TcpProbe]:
    probe = TcpProbe(root_and_bpf)
    yield probe
    probe.close()


def a_rank(pid: int, number: int) -> RankProcess:
    process = Process(pid, 1, 100, "python")
    return RankProcess("job-1", number, 4, 0, process, Path("/lib/libtorch_cpu.so"), {})


def retransmitted(child: Child) -> int:
    """Tcp RetransSegs of a process's network namespace, by the kernel."""
    names, values = (
        line.split()
        for line in Path(f"/proc/{child.pid}/net/snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


class Told:
    """Sums of what a probe tells, by rank (−1: the node), metric and labels."""

    def __init__(self, probe: TcpProbe, *ranks: Child) -> None:
        self.probe = probe
        self.ranks = {child.pid: a_rank(child.pid, number) for number, child in enumerate(ranks)}
        self.sums: dict[tuple[int, str, str], float] = {}
        self.look()
        self.sums.clear()

    def look(self) -> None:
        reading: Reading = self.probe.read(self.ranks)
        told = [(-1, metric) for metric in reading.node]
        for pid, metrics in reading.ranks.items():
            told += [(self.ranks[pid].rank, metric) for metric in metrics]
        for rank, metric in told:
            key = (rank, metric.name, " ".join(v for name, v in metric.labels.items() if name != "local"))
            self.sums[key] = self.sums.get(key, 0) + metric.value

    def until(self, condition: Callable[[dict[tuple[int, str, str], float]], bool], what: str) -> None:
        def there() -> bool:
            self.look()
            return condition(self.sums)

        until(there, what)


def test_segments_sent_again_are_those_of_the_rank_that_sent_them(pair: Pair, probe: TcpProbe) -> None:
    with pair.talk() as (client, server):
        told = Told(probe, client, server)
        before = retransmitted(client)
        # The receiver takes packets of an address to which it has no way back for forged, and drops them.
        ip("-n", pair.names[1], "route", "add", "blackhole", f"{A}/32")
        client.tell("send")
        assert client.line() == "sent"
        key = (0, "tcp_retransmits", f"{B} 1")
        told.until(lambda sums: sums.get(key, 0) >= 2, "the client sends twice more")
        ip("-n", pair.names[1], "route", "del", "blackhole", f"{A}/32")
        server.tell("receive")
        assert server.line() == "100"
        told.look()
        assert told.sums[key] == retransmitted(client) - before
        told.until(lambda sums: sums.get((0, "tcp_segments_again", f"{B} 1"), 0) >= 2, "they are told twice")
        assert told.sums[0, "tcp_segments_again", f"{B} 1"] == told.sums[key]
        assert told.sums[0, "tcp_losses", f"{B} 1"] >= 1, (
            "a timeout puts the connection into the state of loss"
        )
        assert not [rank for rank, name, _ in told.sums if rank == 1 and name == "tcp_retransmits"]


@pytest.mark.parametrize(("a", "b"), [(A, B), (A6, B6)])
def test_a_reset_is_told_on_both_sides(pair: Pair, probe: TcpProbe, a: str, b: str) -> None:
    with pair.talk(b) as (client, server):
        told = Told(probe, client, server)
        server.tell("reset")
        assert server.line() == "reset"
        client.tell("end")
        assert client.line() == "was reset"
        told.look()
        assert told.sums[0, "tcp_resets_received", f"{b} 1"] == 1
        assert told.sums[1, "tcp_resets_sent", f"{a} 0"] == 1


def test_a_connection_of_no_rank_is_told_of_the_node(pair: Pair, probe: TcpProbe) -> None:
    with pair.talk() as (client, server):
        told = Told(probe)
        server.tell("reset")
        assert server.line() == "reset"
        client.tell("end")
        assert client.line() == "was reset"
        told.look()
        assert told.sums[-1, "tcp_resets_received", B] >= 1


def test_packets_for_nobody_are_drops_with_that_reason(probe: TcpProbe) -> None:
    told = Told(probe)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    for _ in range(57):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"x", ("127.0.0.1", port))
    told.look()
    assert told.sums[-1, "packet_drops", "NO_SOCKET"] >= 57


def test_what_a_rank_sends_is_told_by_peer_from_within_its_network_namespace(
    pair: Pair, probe: TcpProbe
) -> None:
    with pair.talk() as (client, server):
        told = Told(probe, client, server)
        for _ in range(3):
            client.tell("send")
            assert client.line() == "sent"
        key = (0, "tcp_acknowledged_bytes", f"{B} 1")
        told.until(lambda sums: sums.get(key, 0) >= 300, "three times 100 bytes have arrived")
        assert told.sums[key] == 300
        assert told.sums[0, "tcp_data_segments", f"{B} 1"] == 3
        assert not [name for rank, name, _ in told.sums if rank == 1 and name.startswith("tcp_ack")]


def test_data_that_nobody_acknowledges_is_on_its_way_all_the_time(pair: Pair, probe: TcpProbe) -> None:
    with pair.talk() as (client, server):
        told = Told(probe, client, server)
        ip("-n", pair.names[1], "route", "add", "blackhole", f"{A}/32")
        since = time.monotonic()
        client.tell("send")
        assert client.line() == "sent"
        key = (0, "tcp_sending_ns", f"{B} 1")
        told.until(lambda sums: sums.get(key, 0) >= 1e9, "it is on its way for a second")
        assert told.sums[key] <= (time.monotonic() - since) * 1e9 + TICK_NS
        assert (0, "tcp_acknowledged_bytes", f"{B} 1") not in told.sums


def test_that_connections_are_too_many_is_said(
    pair: Pair, probe: TcpProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LOOKED_THROUGH", 0)
    said = "1 of ranks' connections are too many to be looked through"
    with pair.talk() as (client, _):
        assert said not in probe.missing
        Told(probe, client)
        assert said in probe.missing


# --- whose a connection is


def test_both_ends_of_a_connection_are_found_by_their_processes(pair: Pair) -> None:
    server = pair.run(1, SERVER, B)
    port = server.line()
    client = pair.run(0, CLIENT, B, port)
    try:
        own = int(client.line())
        flow = Flow(b"\0" * 10 + b"\xff\xff" + bytes([10, 97, 7, 1]), own, MAPPED_B, int(port))
        found = owners([client.pid, server.pid])
        assert found[flow] == {client.pid}
        assert found[flow.turned] == {server.pid}
        assert address(flow.local) == A
    finally:
        client.end()
        server.end()


MAPPED_B = b"\0" * 10 + b"\xff\xff" + bytes([10, 97, 7, 2])


@pytest.mark.parametrize(
    ("family", "host", "packed"),
    [
        (socket.AF_INET, "127.0.0.1", b"\0" * 10 + b"\xff\xff\x7f\0\0\1"),
        (socket.AF_INET6, "::1", b"\0" * 15 + b"\1"),
    ],
)
def test_processes_of_one_namespace_are_told_apart_by_their_descriptors(
    family: socket.AddressFamily, host: str, packed: bytes
) -> None:
    # Another process that has a connection to this one.
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        other = start([sys.executable, "-S", "-c", CLIENT, host, str(port)])
        try:
            theirs = int(other.line())
            accepted, _ = listener.accept()
            with accepted:
                found = owners([os.getpid(), other.pid])
                assert found[Flow(packed, port, packed, theirs)] == {os.getpid()}
                assert found[Flow(packed, theirs, packed, port)] == {other.pid}
                assert address(packed) == host
        finally:
            other.end()


def test_a_connection_that_two_processes_hold_is_both_s(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        inode = os.fstat(listener.fileno()).st_ino
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", "import sys; sys.stdin.readline()"],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
        try:
            port = listener.getsockname()[1]
            local = b"\0" * 10 + b"\xff\xff\x7f\0\0\1"
            nobody = b"\0" * 10 + b"\xff\xff\0\0\0\0"
            assert inode
            assert owners([os.getpid(), child.pid])[Flow(local, port, nobody, 0)] == {os.getpid(), child.pid}
        finally:
            child.kill()
            child.communicate()


def test_processes_that_have_ended_own_nothing() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert owners([child.pid]) == {}


# --- other kernels

FORMAT_6_1 = """
	field:void * location;	offset:16;	size:8;	signed:0;
	field:unsigned short protocol;	offset:24;	size:2;	signed:0;
	field:enum skb_drop_reason reason;	offset:28;	size:4;	signed:0;

print fmt: "skbaddr=%p protocol=%u location=%p reason: %s", REC->skbaddr, REC->protocol, REC->location, \
__print_symbolic(REC->reason, { 1, "NOT_SPECIFIED" }, { 2, "NO_SOCKET" }, { 3, "PKT_TOO_SMALL" })
"""


def test_reasons_have_the_running_kernels_numbers() -> None:
    assert drop_reasons(FORMAT_6_1) == {1: "NOT_SPECIFIED", 2: "NO_SOCKET", 3: "PKT_TOO_SMALL"}
    assert drop_reasons("field:void * location;\n") == {}


def test_what_a_kernel_does_not_have_is_said_and_the_rest_is_loaded(
    root_and_bpf: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "probes.host.tcp.has_tracepoint", lambda category, event: event == "tcp_retransmit_skb"
    )
    monkeypatch.setattr("probes.host.tcp._format", lambda category, event: "")
    probe = TcpProbe(root_and_bpf)
    try:
        assert [words.partition(": ")[0] for words in probe.missing] == [
            "tcp:tcp_receive_reset",
            "tcp:tcp_send_reset",
            "tcp:tcp_cong_state_set",
            "skb:kfree_skb with a reason (Linux 5.17)",
        ]
        assert len(probe.programs()) == 1
        assert probe.read({}) == Reading(node=[], ranks={})
    finally:
        probe.close()
