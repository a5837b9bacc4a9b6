"""How long data of single connections is on its way: real connections, against what was sent over them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes.bpf import Kernel
from probes.discovery import Process, RankProcess
from probes.host import connections, tcp_info
from probes.host.connections import Connections
from probes.host.sockets import MAPPED, Flow, owners
from probes.host.tcp_info import NotToldError, Sent, ask
from tests.probes.processes import until

SIZE = 100_000
SYN = 1
"""It counts as a byte of whom it was sent by."""


class Line:
    """A connection of this process to itself."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=self.family) as listener:
            self.sender = socket.create_connection(listener.getsockname()[:2])
            self.receiver, _ = listener.accept()

    @property
    def flow(self) -> Flow:
        ends = []
        for host, port, *_ in (self.sender.getsockname(), self.sender.getpeername()):
            packed = socket.inet_pton(self.family, host)
            ends += [MAPPED + packed if len(packed) == 4 else packed, port]
        return Flow(*ends)

    def carry(self, size: int) -> None:
        self.sender.sendall(bytes(size))
        while size:
            size -= len(self.receiver.recv(size))

    def fill(self) -> None:
        """Send until the other end has no room for more."""
        self.sender.setblocking(False)
        while select.select([], [self.sender], [], 0.2)[1]:
            with contextlib.suppress(BlockingIOError):
                self.sender.send(bytes(1 << 16))

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


def sent(line: Line) -> Sent:
    return ask([line.flow])[line.flow]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_was_acknowledged_is_what_was_sent(host: str) -> None:
    line = Line(host)
    try:
        line.carry(SIZE)
        until(lambda: sent(line).acknowledged_bytes == SIZE + SYN, "all is acknowledged")
        told = sent(line)
        assert told.segments >= 2, "100,000 bytes are more than one segment of 64 KiB"
        assert 0 < told.round_trip_ns < 1_000_000_000
        assert ask([line.flow.turned])[line.flow.turned].acknowledged_bytes == 0, "the other end sent nothing"
    finally:
        line.close()


def test_of_many_connections_each_is_told_by_itself_and_a_closed_one_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_info, "AT_ONCE", 3)  # more than one message
    lines = [Line() for _ in range(7)]
    try:
        for number, line in enumerate(lines):
            line.carry(1000 * (number + 1))
        flows = [line.flow for line in lines]
        until(lambda: all(sent(line).acknowledged_bytes > SYN for line in lines), "all is acknowledged")
        lines[2].close()
        told = ask(flows)
        assert [told[flow].acknowledged_bytes - SYN if flow in told else None for flow in flows] == [
            1000,
            2000,
            None,
            4000,
            5000,
            6000,
            7000,
        ]
    finally:
        for line in lines:
            line.close()


def test_time_without_room_at_the_other_end_is_no_time_on_the_way(line: Line) -> None:
    line.fill()
    before = sent(line)
    assert before.held_up_ns > 0
    until(lambda: sent(line).held_up_ns >= before.held_up_ns + 200_000_000, "it has to wait")
    assert sent(line).sending_ns <= before.sending_ns + 20_000_000, (
        "but for the clock's ticks, nothing is sent"
    )


def test_a_kernel_without_answers_is_said_and_nothing_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> socket.socket:
        raise OSError(93, "Protocol not supported")

    monkeypatch.setattr(tcp_info, "_netlink", refused)
    with pytest.raises(NotToldError, match=r"sock_diag: .* Protocol not supported \(CONFIG_INET_TCP_DIAG\)"):
        tcp_info.check()
    followed = Connections()
    assert followed.missing.startswith("sock_diag: how long ranks' data is on its way is not told")
    followed.choose({Flow(bytes(16), 1, bytes(16), 2): {os.getpid()}}, ranks())
    assert followed.read(ranks()) == {}


def test_a_namespace_that_may_not_be_looked_into_is_said_with_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(pid: int, do: object, proc: Path) -> None:
        raise PermissionError(1, "cannot look into a rank's network namespace: Operation not permitted")

    monkeypatch.setattr(tcp_info, "within", refused)
    with pytest.raises(NotToldError, match=r"namespace: Operation not permitted \(CAP_SYS_ADMIN\)"):
        ask([Flow(bytes(16), 1, bytes(16), 2)], os.getpid())


# --- which are followed


def ranks() -> dict[int, RankProcess]:
    process = Process(os.getpid(), 1, 100, "python")
    return {os.getpid(): RankProcess("job-1", 0, 4, 0, process, Path("/lib/libtorch_cpu.so"), {})}


def test_each_reading_tells_what_came_since_the_last(line: Line) -> None:
    line.carry(SIZE)
    until(lambda: sent(line).acknowledged_bytes == SIZE + SYN, "all is acknowledged")
    followed = Connections()
    followed.choose(owners(ranks()), ranks())
    assert followed.read(ranks())[os.getpid()][line.flow].acknowledged_bytes == 0, "that was before"
    line.carry(700)
    until(lambda: sent(line).acknowledged_bytes == SIZE + 700 + SYN, "all is acknowledged")
    assert followed.read(ranks())[os.getpid()][line.flow].acknowledged_bytes == 700
    assert followed.read(ranks())[os.getpid()][line.flow].acknowledged_bytes == 0
    assert followed.read({}) == {}, "nobody's connections are asked for whose rank is no longer watched"


def told_of(monkeypatch: pytest.MonkeyPatch, *answers: Sent) -> list[Sent]:
    """What readings tell of a connection of which the kernel tells this, one after the other."""
    flow, told = Flow(bytes(16), 1, bytes(16), 2), iter(answers)
    monkeypatch.setattr(tcp_info, "ask", lambda flows, pid, proc: {flow: next(told)})
    followed = Connections()
    followed.choose({flow: {os.getpid()}}, ranks())
    return [followed.read(ranks())[os.getpid()][flow] for _ in answers[1:]]


def test_segments_begin_anew_after_four_billion(monkeypatch: pytest.MonkeyPatch) -> None:
    (told,) = told_of(monkeypatch, Sent(10, 0, 50, 2**32 - 2, 2**32 - 1, 7), Sent(30, 0, 90, 3, 1, 7))
    assert told == Sent(20, 0, 40, 5, 2, 7)


def test_a_new_connection_between_the_same_ends_is_told_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (told,) = told_of(monkeypatch, Sent(9_000, 800, 5_000, 70, 6, 7), Sent(300, 20, 40, 3, 1, 7))
    assert told == Sent(300, 20, 40, 3, 1, 7)


def test_what_is_not_told_of_one_namespace_is_said_though_others_tell(
    root_and_bpf: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Flow(bytes(16), 1, bytes(16), 2), Flow(bytes(16), 3, bytes(16), 4)
    with subprocess.Popen(
        ["unshare", "-n", "sh", "-c", "echo there; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as apart:
        assert apart.stdout is not None
        assert apart.stdout.readline() == b"there\n"

        def ask(flows: list[Flow], pid: int, proc: Path) -> dict[Flow, Sent]:
            if pid == apart.pid:
                raise NotToldError("sock_diag: not told: Operation not permitted")
            return {flow: Sent(0, 0, 0, 0, 0, 0) for flow in flows}

        monkeypatch.setattr(tcp_info, "ask", ask)
        both = {apart.pid: ranks()[os.getpid()]} | ranks()
        followed = Connections()
        followed.choose({here: {os.getpid()}, there: {apart.pid}}, both)
        assert followed.missing == "sock_diag: not told: Operation not permitted"
        followed.choose({there: {apart.pid}, here: {os.getpid()}}, {**ranks(), apart.pid: both[apart.pid]})
        assert followed.missing == "sock_diag: not told: Operation not permitted", "in whatever order"
        followed.choose({here: {os.getpid()}}, ranks())
        assert followed.missing == ""


def test_that_a_rank_ends_while_it_is_asked_for_is_nothing_that_a_machine_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(NotToldError, match="No such file"):
        tcp_info.ask([Flow(bytes(16), 1, bytes(16), 2)], ended.pid)
    numbers = iter([17])
    monkeypatch.setattr(
        "probes.procfs.network_namespace", lambda proc, pid: 4 if pid == "self" else next(numbers, 0)
    )
    followed = Connections()
    followed.choose({Flow(bytes(16), 1, bytes(16), 2): {ended.pid}}, {ended.pid: ranks()[os.getpid()]})
    assert followed.missing == ""


def test_how_many_are_not_looked_through_is_known(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOKED_THROUGH", 1)
    followed = Connections()
    followed.choose({line.flow: {os.getpid()}, line.flow.turned: {os.getpid()}}, ranks())
    assert followed.left_out == 1
    followed.choose({line.flow: {os.getpid()}}, ranks())
    assert followed.left_out == 0


def test_those_are_followed_that_carry_most_now(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FOLLOWED", 1)
    other = Line()
    try:
        line.carry(SIZE)
        until(lambda: sent(line).acknowledged_bytes == SIZE + SYN, "all is acknowledged")
        followed = Connections()
        followed.choose(owners(ranks()), ranks())
        assert list(followed.read(ranks())[os.getpid()]) == [line.flow]
        other.carry(SIZE // 2)
        until(lambda: sent(other).acknowledged_bytes == SIZE // 2 + SYN, "all is acknowledged")
        followed.choose(owners(ranks()), ranks())
        assert list(followed.read(ranks())[os.getpid()]) == [other.flow], (
            "it carried less in all, and more since"
        )
    finally:
        other.close()
