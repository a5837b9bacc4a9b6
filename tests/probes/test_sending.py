"""The sending thread: all goes out though nothing new comes, trouble is said once, and the end waits little."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from bench.stack import until
from probes import pace, sending
from probes.codec import decode
from probes.records import Reply
from probes.sending import Sender
from probes.spool import Spool
from tests.probes.batches import a_batch


class Server:
    """Answers in the test's own process; away while ``away`` is set."""

    def __init__(self) -> None:
        self.away = False
        self.got: list[int] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.away:
            raise httpx.ConnectError("connection refused")
        self.got.append(decode(request.content).seq)
        return httpx.Response(200, content=msgspec.json.encode(Reply(stored=True)))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "spool", max_bytes=1 << 20)
    yield made
    made.close()


def put(spool: Spool, count: int) -> None:
    for _ in range(count):
        spool.put(a_batch(0, agent=spool.agent, seq=spool.next_seq))


def sender(
    server: Server, spool: Spool, on_reply: Callable[[bytes, Reply], None] = lambda *_: None
) -> Sender:
    return Sender(
        httpx.Client(base_url="http://server", transport=httpx.MockTransport(server)), spool, on_reply
    )


def test_a_backlog_goes_out_though_nothing_new_is_spooled(server: Server, spool: Spool) -> None:
    put(spool, pace.BURST + 4)  # more than may go at once
    sends = sender(server, spool)
    sends.start()
    sends.wake()
    until(lambda: len(server.got) == pace.BURST + 4, "all batches", 20)
    assert server.got == sorted(server.got)
    until(lambda: sends.counts == {"stored": pace.BURST + 4, "duplicate": 0}, "the counts", 5)
    sends.stop()
    assert spool.pending() == []


def test_trouble_is_said_once_and_so_is_its_end(
    server: Server, spool: Spool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(pace, "LONGEST_WAIT_S", 0.02)
    server.away = True
    put(spool, 1)
    sends = sender(server, spool)
    with caplog.at_level(logging.WARNING, "probes.sending"):
        sends.start()
        sends.wake()
        until(lambda: "connection refused" in sends.hindrance, "the trouble", 10)
        until(lambda: sends._backoff.failures > 3, "more attempts", 10)
        server.away = False
        until(lambda: server.got and not sends.hindrance, "the end of the trouble", 10)
        sends.stop()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("1 batches wait in the spool: the server http://server")
    assert said[1] == "the server takes batches again"


def test_the_end_sends_what_is_left_whatever_was_agreed_on_waiting(server: Server, spool: Spool) -> None:
    server.away = True
    put(spool, 3)
    sends = sender(server, spool)
    sends.start()
    sends.wake()
    until(lambda: sends.hindrance, "the trouble", 10)
    server.away = False
    sends.stop()
    assert server.got == [0, 1, 2]


def test_the_end_does_not_wait_for_a_server_that_is_away(server: Server, spool: Spool) -> None:
    server.away = True
    put(spool, 3)
    sends = sender(server, spool)
    sends.start()
    begun = time.monotonic()
    sends.stop()
    assert time.monotonic() - begun < sending.DRAIN_S
    assert len(spool.pending()) == 3


def test_stopping_what_never_started_is_no_error(server: Server, spool: Spool) -> None:
    sender(server, spool).stop()


def test_replies_are_handed_over_in_the_sending_thread(server: Server, spool: Spool) -> None:
    heard: list[tuple[int, str]] = []
    put(spool, 1)
    sends = sender(
        server, spool, lambda wire, reply: heard.append((decode(wire).seq, threading.current_thread().name))
    )
    sends.start()
    sends.stop()
    assert heard == [(0, "sender")]


def test_an_error_that_nobody_thought_of_does_not_end_the_sending(
    server: Server, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, broken = sending.ship_pending, [True]

    def ship(*args: object, **named: object) -> object:
        if broken:
            broken.pop()
            raise RuntimeError("nobody thought of this")
        return original(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(sending, "ship_pending", ship)
    monkeypatch.setattr(sending, "RETRY_S", 0.01)
    put(spool, 1)
    sends = sender(server, spool)
    sends.start()
    sends.wake()
    until(lambda: server.got == [0], "the batch", 10)
    sends.stop()
