"""Agents' batches over HTTP: taken once, refused in words, counted."""

import asyncio
import threading

import msgspec
import pytest
import zstandard

from bot.web.rates import Rate
from diagnosis.store.sqlite import SqliteStore
from probes import codec
from probes.records import SCHEMA
from tests.bot.web.door import BrokenStore, Door
from tests.probes.batches import a_batch, utc


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "sysom.db")
    yield store
    store.close()


@pytest.fixture
def door(store):
    return Door(store)


class Moved:
    """A clock in seconds that is moved by hand."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Moved()


async def test_a_batch_is_stored_and_its_repetition_answered_as_one(door, store):
    wire = codec.encode(a_batch(3))
    first, second = await door.post(wire), await door.post(wire)
    assert (first.status_code, first.json()) == (
        200,
        {"ok": True, "stored": True, "orders": "", "signature": ""},
    )
    assert (second.status_code, second.json()["stored"]) == (200, False)
    assert door.counts == {"duplicate": 1, "stored": 1}
    assert len(store.evidence("job-1", utc(0), utc(10)).ranks[0].collectives.seq) == 2


def zstd(plain, **options):
    return zstandard.ZstdCompressor(**options).compress(plain)


GOOD = codec.encode(a_batch(3))


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
        ("token-a", codec.encode(a_batch(3, agent="")), 400, "inconsistent", "agent"),
        ("token-a", bytes(codec.MAX_WIRE_BYTES + 1), 413, "too_large", "send less per batch"),
        ("token-a", zstd(bytes(codec.MAX_PLAIN_BYTES + 1)), 413, "bomb", "would unpack to"),
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
    door, store, token, wire, status, reason, words
):
    answer = await door.post(wire, token=token)
    assert (answer.status_code, answer.json()["ok"], answer.json()["reason"]) == (status, False, reason)
    assert words in answer.json()["error"]
    assert door.counts == {f"refused_{reason}": 1}
    assert store.jobs() == []


async def test_a_body_without_an_end_is_cut_at_the_limit(door):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1 << 16
            yield bytes(1 << 16)

    answer = await door.post(endless())
    assert answer.status_code == 413
    assert sent <= codec.MAX_WIRE_BYTES + (1 << 17)


async def test_a_body_that_never_comes_is_given_up(store):
    door = Door(store, body_timeout_s=0.05)

    async def stalled():
        yield b"\x28"
        await asyncio.Event().wait()

    answer = await door.post(stalled())
    assert (answer.status_code, answer.json()["reason"]) == (408, "slow")


async def test_a_sender_without_a_token_is_refused_before_its_body_is_read(door):
    read = False

    async def body():
        nonlocal read
        read = True
        yield b""

    answer = await door.post(body(), token="wrong")
    assert (answer.status_code, read) == (401, False)


async def test_a_store_that_fails_sends_agents_back_with_their_batch():
    door = Door(BrokenStore())
    answer = await door.post(GOOD)
    assert (answer.status_code, answer.json()["reason"]) == (503, "store")
    assert "free some space" in answer.json()["error"]
    assert int(answer.headers["Retry-After"]) > 0
    assert door.counts == {"refused_store": 1}


class SlowStore:
    def __init__(self):
        self.entered, self.go_on = threading.Event(), threading.Event()

    def add(self, batch, received_ns):
        self.entered.set()
        assert self.go_on.wait(10)
        return True


async def test_while_the_store_is_slow_the_loop_answers_and_the_queue_is_bounded():
    store = SlowStore()
    door = Door(store, max_waiting=1)
    async with door.client() as http:
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
    answer = await Door(FaultyStore()).post(GOOD)
    assert (answer.status_code, answer.json()["reason"]) == (500, "fault")
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/api/v1/batches", 405)]
)
async def test_other_addresses_answer_in_json_too(door, method, path, status):
    async with door.client() as http:
        answer = await http.request(method, path)
    assert (answer.status_code, answer.json()["ok"]) == (status, False)


# --- limits


async def test_of_a_size_that_is_too_large_not_a_byte_is_read(door):
    read = False

    async def body():
        nonlocal read
        read = True
        yield b""

    async with door.client() as http:
        for size in (str(codec.MAX_WIRE_BYTES + 1), "9" * 5000):
            answer = await http.post("/api/v1/batches", content=body(), headers={"Content-Length": size})
            assert (answer.status_code, answer.json()["reason"], read) == (413, "too_large", False)


async def test_a_node_that_sends_too_often_is_told_for_how_long_to_wait_and_others_are_heard(store, clock):
    door = Door(store, node_batches=Rate(0.5, 2, clock=clock))
    assert [(await door.post(b"")).status_code for _ in range(3)] == [400, 400, 429]
    answer = await door.post(GOOD)
    assert (answer.status_code, answer.json()["reason"], answer.headers["Retry-After"]) == (429, "rate", "2")
    assert "from node 'node-a'" in answer.json()["error"]
    assert (await door.post(b"", token="token-b")).status_code == 400
    clock.now += 2.0
    assert (await door.post(GOOD)).status_code == 200


async def test_a_node_that_sends_too_much_owes_time(store, clock):
    door = Door(store, node_bytes=Rate(1000, 2000, clock=clock))
    assert (await door.post(bytes(5000))).status_code == 400
    assert (await door.post(GOOD)).headers["Retry-After"] == "4"  # 3000 owed, and one to begin with
    clock.now += 3.1
    assert (await door.post(GOOD)).status_code == 200

    async def unstated():
        yield bytes(9000)

    clock.now += 10.0
    assert (await door.post(unstated())).status_code == 400
    assert (await door.post(GOOD)).status_code == 429


async def test_strangers_are_heard_a_few_times_and_do_not_disturb_who_has_a_token(store, clock):
    door = Door(store, strangers=Rate(1, 3, clock=clock))
    said = [(await door.post(GOOD, token="guess")).status_code for _ in range(4)]
    assert said == [401, 401, 401, 429]
    answer = await door.post(GOOD, token=None)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    assert "no token: give the agent" in answer.json()["error"]
    assert (await door.post(GOOD)).status_code == 200  # the same address
    assert (await door.post(GOOD, token="guess", address="192.0.2.2")).status_code == 401


async def test_one_node_does_not_take_every_place():
    store = SlowStore()
    door = Door(store)
    async with door.client() as http:
        posts = [asyncio.create_task(http.post("/api/v1/batches", content=GOOD)) for _ in range(5)]
        done, waiting = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
        assert [(task.result().status_code, task.result().json()["reason"]) for task in done] == [
            (503, "busy")
        ]
        other = asyncio.create_task(door.post(codec.encode(a_batch(3, node="node-b")), token="token-b"))
        store.go_on.set()
        assert {(await task).status_code for task in [*waiting, other]} == {200}
