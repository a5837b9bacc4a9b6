"""What a failed call means: too fast, away, or no."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from bot.slack.calls import CallError, RateLimitedError, RefusedError, UnavailableError, through, web_client


class Script(http.server.BaseHTTPRequestHandler):
    """Answers every request with the server's ``answer``: status, content type, body, headers."""

    def do_POST(self) -> None:
        status, kind, body, headers = self.server.answer  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Script)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


JSON = "application/json"


@pytest.mark.parametrize(
    ("status", "kind", "body", "headers", "expected", "says"),
    [
        (
            429,
            JSON,
            b'{"ok": false, "error": "ratelimited"}',
            {"Retry-After": "17"},
            RateLimitedError,
            "17 s",
        ),
        (429, "text/html", b"slow down", {}, RateLimitedError, "30 s"),
        (500, "text/html", b"<h1>oops</h1>", {}, UnavailableError, "HTTP 500"),
        (502, "text/plain", b"bad gateway", {}, UnavailableError, "HTTP 502"),
        (200, JSON, b"no json", {}, UnavailableError, "HTTP 200"),
        (200, JSON, b'{"ok": false, "error": "internal_error"}', {}, UnavailableError, "internal_error"),
        (200, JSON, b'{"ok": false, "error": "not_in_channel"}', {}, RefusedError, "not_in_channel"),
        (
            200,
            JSON,
            b'{"ok": false, "error": "invalid_blocks", "errors": ["[ERROR] /blocks/1"]}',
            {},
            RefusedError,
            r"invalid_blocks \(\[ERROR\] /blocks/1\)",
        ),
    ],
)
async def test_each_failure_is_told_apart(
    server: http.server.ThreadingHTTPServer,
    status: int,
    kind: str,
    body: bytes,
    headers: dict[str, str],
    expected: type[CallError],
    says: str,
) -> None:
    server.answer = (status, kind, body, headers)  # type: ignore[attr-defined]
    call = through(web_client("xoxb-1", f"http://127.0.0.1:{server.server_port}/api/"))
    with pytest.raises(expected, match=says):
        await call("chat.postMessage", {"channel": "C1", "text": "hello"})


async def test_a_refused_connection_is_an_outage(server: http.server.ThreadingHTTPServer) -> None:
    port = server.server_port
    server.shutdown()
    server.server_close()
    with pytest.raises(UnavailableError):
        await through(web_client("xoxb-1", f"http://127.0.0.1:{port}/api/"))("auth.test", {})
