"""A tap on the wire between agents and their server: what is sent passes on, and is kept for a recording."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from probes import codec
from probes.bpf import kernel_release
from probes.record import of_job
from probes.recording import Header, Writer
from probes.records import Batch
from probes.shipper import receipt

PATIENCE_S = 30.0
KEPT_HEADERS = ("content-type", "retry-after", "date")
HOP = ("host", "connection", "content-length", "accept-encoding")


class Tap:
    """Stands before a server. ``url`` is for agents."""

    def __init__(self, server: str) -> None:
        self._client = httpx.Client(base_url=server, timeout=PATIENCE_S)
        self._lock = threading.Lock()
        self._batches: dict[tuple[str, int], Batch] = {}
        tap = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                wire = self.rfile.read(int(self.headers["Content-Length"]))
                answer = tap._pass_on(self.path, dict(self.headers), wire)
                self.send_response_only(answer.status_code)
                for name in KEPT_HEADERS:
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def _pass_on(self, path: str, headers: dict[str, str], wire: bytes) -> httpx.Response:
        kept = {name: value for name, value in headers.items() if name.lower() not in HOP}
        answer = self._client.post(path, content=wire, headers=kept)
        if receipt(answer) is not None:
            batch = codec.decode(wire)
            with self._lock:
                self._batches[batch.agent, batch.seq] = batch
        return answer

    def batches(self, job: str) -> list[Batch]:
        """What was stored so far and tells of a job, in order."""
        with self._lock:
            ordered = [self._batches[key] for key in sorted(self._batches)]
        return [kept for batch in ordered if (kept := of_job(batch, job)).ranks]

    def forget(self) -> None:
        """Of what was stored so far nothing is kept."""
        with self._lock:
            self._batches.clear()

    def record(self, path: Path, job: str, note: str, cpus: int) -> int:
        """Write what tells of a job as a recording; gives the number of batches."""
        batches = self.batches(job)
        first = batches[0]
        made_ns = first.start_ns + first.utc_offset_ns
        kernel = ".".join(map(str, kernel_release()))
        writer = Writer(path, Header(node=first.node, made_ns=made_ns, kernel=kernel, cpus=cpus, note=note))
        try:
            for batch in batches:
                writer.add(batch)
        finally:
            writer.close()
        return len(batches)

    def run(self) -> None:
        self._http.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._client.close()


@contextmanager
def tapped(server: str) -> Iterator[Tap]:
    tap = Tap(server)
    thread = threading.Thread(target=tap.run, daemon=True)
    thread.start()
    try:
        yield tap
    finally:
        tap.close()
        thread.join()
