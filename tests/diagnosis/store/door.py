"""A server that can be killed and is back within a moment: one process has imported everything and listens; each
life is a fork of it that stores what comes over HTTP. Run as a program: door.py FILE TOKENS-AS-JSON.

    → line "port"      ← nothing to read
    line "live" in     → line "PID" of the next life, after the last one was reaped
"""

from __future__ import annotations

import http.server
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from diagnosis.ingest import Ingest, Refusal
from diagnosis.store import Keep
from diagnosis.store.sqlite import SqliteStore

TIDY_EVERY_S = 0.05


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ingest: Ingest
    one_at_a_time = threading.Lock()

    def do_POST(self) -> None:
        wire = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            with self.one_at_a_time:
                reply = self.ingest.accept(self.headers["X-Node"], wire)
        except Refusal as refusal:
            self.answer(refusal.status, {"error": str(refusal)})
        else:
            self.answer(200, {"stored": reply.stored})

    def answer(self, status: int, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Door(http.server.ThreadingHTTPServer):
    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener.getsockname(), Handler, bind_and_activate=False)
        self.socket = listener


def live(path: Path, listener: socket.socket) -> None:
    store = SqliteStore(path, keep=Keep(days=365 * 100, gb=20))
    Handler.ingest = Ingest(store, {})

    def tidy() -> None:
        while True:
            store.tidy(time.time_ns())
            time.sleep(TIDY_EVERY_S)

    threading.Thread(target=tidy, daemon=True).start()
    Door(listener).serve_forever()


def main(path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(listener.getsockname()[1], flush=True)
    life = 0
    for _ in sys.stdin:
        if life:
            os.waitpid(life, 0)
        life = os.fork()
        if life == 0:
            try:
                live(path, listener)
            finally:
                os._exit(1)
        print(life, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
