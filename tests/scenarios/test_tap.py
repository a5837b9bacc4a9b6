"""The tap between agents and their server: nothing is changed on the way, and what was stored is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import msgspec
import pytest

from probes import codec
from probes.recording import read
from probes.records import Reply
from tests.probes.batches import a_batch, a_rank
from tests.scenarios.tap import Tap, tapped


class Server:
    """Answers with what it is told to, and keeps what came."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str | None, bytes]] = []
        self.status, self.headers = 200, {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.heard.append((self.path, self.headers["Authorization"], body))
                self.send_response(server.status)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if server.status == 200:
                    self.wfile.write(msgspec.json.encode(Reply(stored=True)))

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture
def tap(server: Server) -> Iterator[Tap]:
    with tapped(f"http://127.0.0.1:{server.http.server_address[1]}") as tap:
        yield tap


def send(tap: Tap, *batches: object) -> httpx.Response:
    with httpx.Client(base_url=tap.url, headers={"Authorization": "Bearer t"}) as client:
        for batch in batches:
            answer = client.post("/api/v1/batches", content=codec.encode(batch))
    return answer


def test_a_batch_passes_on_as_it_is_and_so_does_the_answer(server: Server, tap: Tap) -> None:
    wire = codec.encode(a_batch(1))
    answer = send(tap, a_batch(1))
    assert server.heard == [("/api/v1/batches", "Bearer t", wire)]
    assert msgspec.json.decode(answer.content, type=Reply) == Reply(stored=True)


def test_a_refusal_reaches_the_agent_with_when_to_come_again_and_is_not_recorded(
    server: Server, tap: Tap
) -> None:
    server.status, server.headers = 429, {"Retry-After": "7"}
    answer = send(tap, a_batch(1))
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    assert tap.batches("job-1") == []


def test_what_was_stored_is_recorded_once_in_order_and_of_the_job_alone(
    server: Server, tap: Tap, tmp_path: Path
) -> None:
    other = a_batch(3, ranks=[a_rank(3, job="other")])
    send(tap, a_batch(2), a_batch(1), a_batch(2), other)
    assert tap.record(tmp_path / "run.sysomrec", "job-1", "the truth", 2) == 2
    recording = read(tmp_path / "run.sysomrec")
    assert recording.batches == [a_batch(1), a_batch(2)]
    header = recording.header
    assert (header.node, header.note, header.cpus) == ("node-a", "the truth", 2)
    assert header.made_ns == a_batch(1).start_ns + a_batch(1).utc_offset_ns


def test_the_next_run_begins_with_nothing(server: Server, tap: Tap) -> None:
    send(tap, a_batch(1))
    assert tap.batches("job-1")
    tap.forget()
    assert tap.batches("job-1") == []
