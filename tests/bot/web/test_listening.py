"""The server on a real socket: what is refused, and when, of what a stranger or a broken network can do."""

import asyncio
import contextlib
import json
import socket
import ssl
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from bot.web import listening as room
from bot.web.app import create_app
from bot.web.certificate import Certificate, CertificateError
from bot.web.listening import HEAD_BYTES, listening
from bot.web.rates import Rate
from diagnosis.ingest import Ingest
from probes import codec
from tests.bot.web.certificates import issue
from tests.probes.batches import a_batch

TOKENS = {"node-a": "token-a"}
GOOD = codec.encode(a_batch(3))


class Taking:
    def add(self, batch, received_ns):
        return True


def door(**options):
    return create_app(Ingest(Taking(), TOKENS), **options)


@contextlib.asynccontextmanager
async def connection(url):
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def head(size, *, token="token-a", more=""):
    return (
        f"POST /api/v1/batches HTTP/1.1\r\nHost: s\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Length: {size}\r\n{more}\r\n"
    ).encode()


async def answered(reader):
    """(status, headers, body) of the next response."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(lines[0].split()[1]), headers, body


# --- before a body is read


@pytest.mark.parametrize(
    ("request_head", "status", "reason"),
    [
        (head(codec.MAX_WIRE_BYTES + 1), 413, "too_large"),
        (head(10**15), 413, "too_large"),
        (head(1000, token="guess"), 401, "unauthorised"),
    ],
)
async def test_what_the_headers_say_is_answered_though_no_body_comes(request_head, status, reason):
    async with listening(door(), "127.0.0.1", 0) as url, connection(url) as (reader, writer):
        writer.write(request_head)
        said = await answered(reader)
        assert (said[0], json.loads(said[2])["reason"]) == (status, reason)


async def test_a_sender_that_asks_first_sends_nothing_in_vain():
    async with listening(door(), "127.0.0.1", 0) as url, connection(url) as (reader, writer):
        writer.write(head(codec.MAX_WIRE_BYTES + 1, more="Expect: 100-continue\r\n"))
        assert (await answered(reader))[0] == 413
    async with listening(door(), "127.0.0.1", 0) as url, connection(url) as (reader, writer):
        writer.write(head(len(GOOD), more="Expect: 100-continue\r\n"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(GOOD)
        assert (await answered(reader))[0] == 200


async def test_after_a_refusal_the_rest_of_the_body_is_passed_over_and_the_next_batch_taken():
    async with listening(door(), "127.0.0.1", 0) as url, httpx.AsyncClient(base_url=url) as http:
        http.headers["Authorization"] = "Bearer token-a"
        answer = await http.post("/api/v1/batches", content=bytes(codec.MAX_WIRE_BYTES + 1))
        assert (answer.status_code, answer.json()["reason"]) == (413, "too_large")
        assert (await http.post("/api/v1/batches", content=GOOD)).status_code == 200


async def test_a_node_above_its_rate_is_told_so_over_the_network():
    app = door(node_batches=Rate(0.01, 1))
    async with listening(app, "127.0.0.1", 0) as url, connection(url) as (reader, writer):
        writer.write(head(len(GOOD)) + GOOD)
        assert (await answered(reader))[0] == 200
        writer.write(head(len(GOOD)))  # no body
        status, headers, body = await answered(reader)
        assert (status, json.loads(body)["reason"]) == (429, "rate")
        assert 90 <= int(headers["retry-after"]) <= 100


async def test_an_answers_body_does_not_wait_until_its_head_is_acknowledged(monkeypatch):
    """Nagle's algorithm would have it wait: 40 ms, the time by which acknowledgements may be delayed."""
    sends_at_once, made = [], room._Connection.connection_made

    def noted(self, transport):
        made(self, transport)
        connected = transport.get_extra_info("socket")
        sends_at_once.append(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(room._Connection, "connection_made", noted)
    async with listening(door(), "127.0.0.1", 0) as url, connection(url) as (reader, writer):
        writer.write(head(len(GOOD)) + GOOD)
        assert (await answered(reader))[0] == 200
    assert sends_at_once == [1]


@pytest.mark.parametrize("request_head", [f"GET /{'a' * HEAD_BYTES} HTTP/1.1\r\n", "nonsense\r\n\r\n"])
async def test_heads_that_are_too_large_or_none_are_refused(request_head):
    async with listening(door(), "127.0.0.1", 0) as url, connection(url) as (reader, writer):
        writer.write(request_head.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")


# --- who takes time


async def test_a_body_that_stops_is_given_up_and_its_connection_ended():
    async with (
        listening(door(body_timeout_s=0.1), "127.0.0.1", 0) as url,
        connection(url) as (reader, writer),
    ):
        writer.write(head(1000) + b"x")
        status, _, body = await answered(reader)
        assert (status, json.loads(body)["reason"]) == (408, "slow")
        assert await reader.read() == b""


@pytest.mark.parametrize("sent", [b"", b"POST /api/v1/batches HTTP/1.1\r\nHost:"])
async def test_a_connection_on_which_no_request_comes_is_ended(monkeypatch, sent):
    monkeypatch.setattr(room, "IDLE_S", 0.1)
    async with listening(door(), "127.0.0.1", 0) as url, connection(url) as (reader, writer):
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_who_sends_on_after_a_refusal_is_ended_too(monkeypatch):
    monkeypatch.setattr(room, "IDLE_S", 0.1)
    async with listening(door(), "127.0.0.1", 0) as url, connection(url) as (reader, writer):
        writer.write(head(1 << 20, token="guess"))
        assert (await answered(reader))[0] == 401
        ended = asyncio.create_task(reader.read())
        async with asyncio.timeout(10):
            while not ended.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)  # the pace of one who has time
        with contextlib.suppress(ConnectionResetError):
            assert await ended == b""


async def test_a_request_that_is_answered_late_is_not_ended(monkeypatch):
    monkeypatch.setattr(room, "IDLE_S", 0.1)
    async with (
        listening(door(body_timeout_s=2.0), "127.0.0.1", 0) as url,
        connection(url) as (reader, writer),
    ):
        writer.write(head(len(GOOD)))
        await asyncio.sleep(1.3)  # longer than a connection may be idle, and than the sweep's second
        writer.write(GOOD)
        assert (await answered(reader))[0] == 200


async def test_more_connections_than_there_is_room_for_are_turned_away(monkeypatch):
    monkeypatch.setattr(room, "_max_connections", lambda: 2)
    async with listening(door(), "127.0.0.1", 0) as url, contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(connection(url))
        first[1].write(head(len(GOOD)) + GOOD)
        assert (await answered(first[0]))[0] == 200
        second = await stack.enter_async_context(connection(url))
        second[1].write(head(len(GOOD)) + GOOD)
        assert (await answered(second[0]))[0] == 200
        third = await stack.enter_async_context(connection(url))
        with contextlib.suppress(ConnectionResetError):
            assert await third[0].read() == b""
        first[1].write(head(len(GOOD)) + GOOD)
        assert (await answered(first[0]))[0] == 200


# --- TLS


def trusting(chain):
    return ssl.create_default_context(cafile=chain)


def name_of(url, context):
    """The name in the certificate that the server shows to a new connection."""
    host, port = url.removeprefix("https://").split(":")
    plain = socket.create_connection((host, int(port)), 10)
    with context.wrap_socket(plain, server_hostname=host) as secure:
        return dict(pair[0] for pair in secure.getpeercert()["subject"])["commonName"]


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1:DeprecationWarning")
async def test_with_a_certificate_it_speaks_https_and_nothing_else(tmp_path):
    chain, key = issue(tmp_path, "first")
    async with listening(door(), "127.0.0.1", 0, certificate=Certificate(chain, key)) as url:
        async with httpx.AsyncClient(base_url=url, verify=trusting(chain)) as http:
            answer = await http.post(
                "/api/v1/batches", content=GOOD, headers={"Authorization": "Bearer token-a"}
            )
            assert answer.status_code == 200
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient() as http:
                await http.get(url.replace("https", "http"))
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(chain)
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol|version"):
            await asyncio.to_thread(name_of, url, old)


async def test_a_renewed_certificate_is_shown_without_a_restart_and_open_connections_live_on(tmp_path):
    certificate = Certificate(*issue(tmp_path, "first"))
    async with listening(door(), "127.0.0.1", 0, certificate=certificate) as url:
        before = trusting(tmp_path / "cert.pem")
        async with httpx.AsyncClient(base_url=url, verify=before) as http:
            assert (await http.get("/healthz")).status_code == 200
            assert not certificate.stale()
            issue(tmp_path, "second")
            assert certificate.stale()
            certificate.refresh()
            assert not certificate.stale()
            assert (await http.get("/healthz")).status_code == 200  # the old connection
        after = trusting(tmp_path / "cert.pem")
        assert await asyncio.to_thread(name_of, url, after) == "second"


async def test_a_renewal_that_does_not_fit_leaves_the_old_one_in_use(tmp_path, caplog):
    certificate = Certificate(*issue(tmp_path, "first"))
    trusted = trusting(tmp_path / "cert.pem")
    first_key = (tmp_path / "key.pem").read_bytes()
    issue(tmp_path, "second")
    (tmp_path / "key.pem").write_bytes(first_key)
    certificate.refresh()
    assert "is not the key of the certificate" in certificate.problem
    assert certificate.problem in caplog.text
    async with listening(door(), "127.0.0.1", 0, certificate=certificate) as url:
        assert await asyncio.to_thread(name_of, url, trusted) == "first"
    issue(tmp_path, "third")
    certificate.refresh()
    assert certificate.problem == ""


def test_a_certificate_that_expires_is_said_ten_days_before(tmp_path):
    certificate = Certificate(*issue(tmp_path, "one"))  # of today and tomorrow
    now = datetime.now(UTC)
    assert certificate.warning(now - timedelta(days=10)) == ""
    assert "cert.pem expires at " in certificate.warning(now)
    assert "cert.pem has expired at " in certificate.warning(now + timedelta(days=1))


def test_certificates_that_cannot_be_used_are_said(tmp_path):
    chain, key = issue(tmp_path, "one")
    none = tmp_path / "none.pem"
    for files, words in (
        ((none, key), r"SYSOM_TLS_CERT: .*none.pem cannot be read: No such file"),
        ((chain, none), r"SYSOM_TLS_KEY: .*none.pem cannot be read: No such file"),
        ((key, chain), "are not a certificate and its key as PEM files"),
    ):
        with pytest.raises(CertificateError, match=words):
            Certificate(*files)
    (tmp_path / "other").mkdir()
    other = issue(tmp_path / "other", "other")
    with pytest.raises(CertificateError, match="is not the key of the certificate in SYSOM_TLS_CERT"):
        Certificate(chain, other[1])
    locked = issue(tmp_path, "locked", password=b"hush")
    with pytest.raises(CertificateError, match="is encrypted: give a key without a password"):
        Certificate(*locked)
