"""Agents' batches over HTTP: taken once, refused in words, counted."""

import asyncio
import threading

import httpx
import msgspec
import pytest
import zstandard

from bot.web.app import create_app
from diagnosis.ingest import Ingest
from diagnosis.store import StoreError
from diagnosis.store.sqlite import SqliteStore
from probes import records
from probes.records import SCHEMA
from tests.bot.web.live import serving
from tests.probes.batches import a_batch, utc

TOKENS = {"node-a": "token-a", "node-b": "token-b"}


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "sysom.db")
    yield store
    store.close()


@pytest.fixture
def ingest(store):
    return Ingest(store, TOKENS)


def client(ingest, token="token-a", **options):
    transport = httpx.ASGITransport(create_app(ingest, **options), raise_app_exceptions=False)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers)


async def post(ingest, wire, **options):
    async with client(ingest, **options) as http:
        return await http.post("/api/v1/batches", content=wire)


def counts(ingest):
    return ingest.counts.read()


async def test_a_batch_is_stored_and_its_repetition_answered_as_one(ingest, store):
    wire = records.encode(a_batch(3))
    first, second = await post(ingest, wire), await post(ingest, wire)
    assert (first.status_code, first.json()) == (
        200,
        {"ok": True, "stored": True, "orders": "", "signature": ""},
    )
    assert (second.status_code, second.json()["stored"]) == (200, False)
    assert counts(ingest) == {"duplicate": 1, "stored": 1}
    assert len(store.evidence("job-1", utc(0), utc(10)).ranks[0].collectives.seq) == 2


def zstd(plain, **options):
    return zstandard.ZstdCompressor(**options).compress(plain)


GOOD = records.encode(a_batch(3))


@pytest.mark.parametrize(
    ("token", "wire", "status", "reason", "words"),
    [
        (None, GOOD, 401, "unauthorised", "SYSOM_NODE_TOKENS"),
        ("", GOOD, 401, "unauthorised", "SYSOM_NODE_TOKENS"),
        ("token-", GOOD, 401, "unauthorised", "SYSOM_NODE_TOKENS"),
        ("token-b", GOOD, 403, "wrong_node", "node 'node-b'"),
        ("token-a", b"", 400, "not_zstd", "zstd"),
        ("token-a", b"noise", 400, "not_zstd", "zstd"),
        ("token-a", GOOD[:-5], 400, "truncated", "cut short"),
        ("token-a", zstd(b"\x01"), 400, "not_a_batch", "not a batch of sysom"),
        ("token-a", records.encode(a_batch(3, agent="")), 400, "inconsistent", "agent"),
        ("token-a", bytes(records.MAX_WIRE_BYTES + 1), 413, "too_large", "send less per batch"),
        ("token-a", zstd(bytes(records.MAX_PLAIN_BYTES + 1)), 413, "bomb", "would unpack to"),
        ("token-a", zstd(bytes(1 << 25), write_content_size=False), 400, "not_zstd", "state its size"),
        (
            "token-a",
            zstd(msgspec.msgpack.encode({"schema": SCHEMA + 1})),
            409,
            "other_schema",
            "upgrade the server",
        ),
    ],
)
async def test_what_cannot_be_taken_is_refused_in_words_counted_and_not_stored(
    ingest, store, token, wire, status, reason, words
):
    answer = await post(ingest, wire, token=token)
    assert (answer.status_code, answer.json()["ok"], answer.json()["reason"]) == (status, False, reason)
    assert words in answer.json()["error"]
    assert counts(ingest) == {f"refused_{reason}": 1}
    assert store.jobs() == []


async def test_a_body_without_an_end_is_cut_at_the_limit(ingest):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1 << 16
            yield bytes(1 << 16)

    answer = await post(ingest, endless())
    assert answer.status_code == 413
    assert sent <= records.MAX_WIRE_BYTES + (1 << 17)


async def test_a_body_that_never_comes_is_given_up(ingest):
    async def stalled():
        yield b"\x28"
        await asyncio.Event().wait()

    answer = await post(ingest, stalled(), body_timeout_s=0.05)
    assert (answer.status_code, answer.json()["reason"]) == (408, "slow")


async def test_a_sender_without_a_token_is_refused_before_its_body_is_read(ingest):
    read = False

    async def body():
        nonlocal read
        read = True
        yield b""

    answer = await post(ingest, body(), token="wrong")
    assert (answer.status_code, read) == (401, False)


class BrokenStore:
    def add(self, batch, received_ns):
        raise StoreError("the disk under the store is full: free some space")


async def test_a_store_that_fails_sends_agents_back_with_their_batch():
    ingest = Ingest(BrokenStore(), TOKENS)
    answer = await post(ingest, GOOD)
    assert (answer.status_code, answer.json()["reason"]) == (503, "store")
    assert "free some space" in answer.json()["error"]
    assert int(answer.headers["Retry-After"]) > 0
    assert counts(ingest) == {"refused_store": 1}


class SlowStore:
    def __init__(self):
        self.entered, self.go_on = threading.Event(), threading.Event()

    def add(self, batch, received_ns):
        self.entered.set()
        assert self.go_on.wait(10)
        return True


async def test_while_the_store_is_slow_the_loop_answers_and_the_queue_is_bounded():
    store = SlowStore()
    ingest = Ingest(store, TOKENS)
    async with client(ingest, max_waiting=1) as http:
        first = asyncio.create_task(http.post("/api/v1/batches", content=GOOD))
        await asyncio.to_thread(store.entered.wait, 10)
        assert (await http.get("/healthz")).json()["waiting"] == 1
        second = await http.post("/api/v1/batches", content=GOOD)
        assert (second.status_code, second.json()["reason"]) == (503, "busy")
        assert second.headers["Retry-After"] == "1"
        store.go_on.set()
        assert (await first).status_code == 200
        assert (await http.post("/api/v1/batches", content=GOOD)).status_code == 200


class FaultyStore:
    def add(self, batch, received_ns):
        raise ZeroDivisionError("secret")


async def test_a_fault_of_the_server_is_an_answer_without_its_inside():
    answer = await post(Ingest(FaultyStore(), TOKENS), GOOD)
    assert (answer.status_code, answer.json()["reason"]) == (500, "fault")
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/api/v1/batches", 405)]
)
async def test_other_addresses_answer_in_json_too(ingest, method, path, status):
    async with client(ingest) as http:
        answer = await http.request(method, path)
    assert (answer.status_code, answer.json()["ok"]) == (status, False)


async def test_health_shows_what_was_taken_and_refused_without_a_token(ingest):
    await post(ingest, GOOD)
    await post(ingest, b"noise")
    async with client(ingest, token=None) as http:
        health = (await http.get("/healthz")).json()
    assert health == {
        "ok": True,
        "schema": SCHEMA,
        "waiting": 0,
        "counts": {"refused_not_zstd": 1, "stored": 1},
    }


def test_over_the_network_a_body_larger_than_allowed_is_refused(ingest):
    with serving(create_app(ingest)) as address, httpx.Client(base_url=address, trust_env=False) as http:
        answer = http.post(
            "/api/v1/batches",
            content=bytes(records.MAX_WIRE_BYTES + 1),
            headers={"Authorization": "Bearer token-a"},
        )
        assert (answer.status_code, answer.json()["reason"]) == (413, "too_large")
