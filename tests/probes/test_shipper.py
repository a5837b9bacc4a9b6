"""The way from a node's disk to a real server, and what comes between."""

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from bot.web.app import create_app
from diagnosis.ingest import Ingest
from diagnosis.store import StoreError
from diagnosis.store.sqlite import SqliteStore
from probes import records
from probes.pace import BURST, LONGEST_WAIT_S, Backoff
from probes.records import Reply
from probes.shipper import open_client, ship_pending
from probes.spool import Spool, SpoolError
from tests.bot.web.live import serving
from tests.probes.batches import a_batch, utc


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "sysom.db")
    yield store
    store.close()


@pytest.fixture
def ingest(store):
    return Ingest(store, {"node-a": "token-a", "node-b": "token-b"})


@pytest.fixture
def spool(tmp_path):
    spool = Spool(tmp_path / "spool")
    yield spool
    spool.close()


def put(spool, count=1, **changes):
    for _ in range(count):
        spool.put(a_batch(spool.next_seq, agent=spool.agent, **changes))


class Clock:
    """A clock that is moved by hand, and no jitter."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def ship(self, spool, client, backoff, **options):
        options = {"budget_s": 5.0, "uniform": lambda low, high: high} | options
        return ship_pending(spool, client, backoff, clock=self, **options)


@pytest.fixture
def clock():
    return Clock()


def stored_seqs(store):
    """Numbers of the batches in the store; batch n has the collectives 2n and 2n + 1."""
    return [
        seq // 2 for seq in store.evidence("job-1", utc(0), utc(1000)).ranks[0].collectives.seq[::2].tolist()
    ]


def test_what_is_spooled_arrives_and_is_deleted(spool, store, ingest, clock):
    put(spool, 3)
    with serving(create_app(ingest)) as address, open_client(address, "token-a") as client:
        result = clock.ship(spool, client, Backoff())
    assert (result.stored, result.left, result.error, result.wait_s) == (3, 0, "", 0.0)
    assert (spool.pending(), stored_seqs(store)) == ([], [0, 1, 2])


def test_while_the_server_is_away_nothing_is_lost_and_then_each_batch_is_stored_once(
    spool, store, ingest, clock
):
    backoff = Backoff()
    put(spool, 2)
    with serving(create_app(ingest)) as address:
        port = httpx.URL(address).port
        with open_client(address, "token-a") as client:
            clock.ship(spool, client, backoff)
    with open_client(address, "token-a") as client:
        put(spool, 2)
        away = clock.ship(spool, client, backoff)
        assert (away.stored, away.left) == (0, 2)
        assert "cannot be reached" in away.error
        put(spool, 2)
        with serving(create_app(ingest), port):
            assert clock.ship(spool, client, backoff).left == 4  # not yet: it waits
            clock.now += away.wait_s
            assert clock.ship(spool, client, backoff).stored == 1
            clock.now += 1.0
            back = clock.ship(spool, client, backoff)
    assert (back.stored, back.duplicates, back.left, back.error) == (3, 0, 0, "")
    assert stored_seqs(store) == [0, 1, 2, 3, 4, 5]


def test_a_batch_whose_answer_was_lost_is_sent_again_and_stored_once(spool, store, ingest, clock):
    put(spool, 2)
    first = spool.read(0)
    with serving(create_app(ingest)) as address, open_client(address, "token-a") as client:
        client.post("/api/v1/batches", content=first)
        result = clock.ship(spool, client, Backoff())
    assert (result.stored, result.duplicates, result.left) == (1, 1, 0)
    assert stored_seqs(store) == [0, 1]


def test_a_damaged_file_does_not_keep_back_the_others(spool, store, ingest, clock, tmp_path):
    put(spool, 3)
    (tmp_path / "spool" / "00000000000000000001.batch").write_bytes(b"torn")
    with serving(create_app(ingest)) as address, open_client(address, "token-a") as client:
        result = clock.ship(spool, client, Backoff())
    assert (result.stored, result.left, spool.counts.bad) == (2, 0, 1)
    assert stored_seqs(store) == [0, 2]


def test_a_batch_that_the_server_never_takes_is_set_aside_with_its_words(
    spool, store, ingest, clock, tmp_path
):
    put(spool, 1)
    put(spool, 1, schema=records.SCHEMA - 1)  # from before the agent was upgraded
    put(spool, 1, end_ns=0)
    put(spool, 1)
    with serving(create_app(ingest)) as address, open_client(address, "token-a") as client:
        result = clock.ship(spool, client, Backoff())
    assert (result.stored, result.refused, result.left, result.error) == (2, 2, 0, "")
    assert (stored_seqs(store), spool.counts.refused) == ([0, 3], 2)
    words = [path.read_text() for path in sorted((tmp_path / "spool" / "refused").glob("*.why"))]
    assert words[0].startswith(f"409 other_schema: batch of schema {records.SCHEMA - 1}")
    assert words[1].startswith("400 inconsistent: a batch ends before it starts")
    assert result.refused_words == words[1].strip()


def test_a_server_of_an_older_version_gets_nothing_until_it_is_upgraded_and_nothing_is_lost(
    spool, ingest, clock
):
    put(spool, 2, schema=records.SCHEMA + 1)  # what an agent ahead of its server writes
    with serving(create_app(ingest)) as address, open_client(address, "token-a") as client:
        result = clock.ship(spool, client, Backoff())
    assert (result.left, result.refused, spool.counts.refused) == (2, 0, 0)
    assert "upgrade the server" in result.error
    assert result.wait_s > 0


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("wrong", "does not accept this agent: this token is not known"),
        ("token-b", "use that node's own token"),
    ],
)
def test_a_token_that_is_not_accepted_keeps_everything_and_says_so(spool, ingest, clock, token, words):
    put(spool, 2)
    with serving(create_app(ingest)) as address, open_client(address, token) as client:
        result = clock.ship(spool, client, Backoff())
    assert (result.left, result.stored, result.refused) == (2, 0, 0)
    assert words in result.error


class BrokenStore:
    def add(self, batch, received_ns):
        raise StoreError("the disk under the store is full")


def test_a_server_that_cannot_store_is_given_the_time_it_asks_for(spool, clock):
    put(spool, 2)
    app = create_app(Ingest(BrokenStore(), {"node-a": "token-a"}))
    with serving(app) as address, open_client(address, "token-a") as client:
        result = clock.ship(spool, client, Backoff())
    assert (result.left, result.wait_s) == (2, 15.0)
    assert "cannot take batches now: the disk under the store is full" in result.error


def answering(status, body=b"<html>", headers=None):
    """A client of something that is not a server of sysom, and the requests that it got."""
    requests = []

    def handler(request):
        requests.append(request)
        return httpx.Response(status, content=body, headers=headers)

    return httpx.Client(transport=httpx.MockTransport(handler), base_url="http://server"), requests


@pytest.mark.parametrize("status", [200, 204, 302, 400, 404, 409, 500])
def test_an_answer_that_is_not_the_servers_deletes_nothing(spool, clock, status):
    put(spool)
    client, _ = answering(status)
    result = clock.ship(spool, client, Backoff())
    assert (result.left, result.stored, result.refused) == (1, 0, 0)
    assert str(status) in result.error


def test_a_proxy_that_finds_a_batch_too_large_does_not_block_the_rest(spool, clock):
    put(spool, 2)
    client, requests = answering(413)
    assert clock.ship(spool, client, Backoff()).refused == 2
    assert (len(requests), spool.pending()) == (2, [])


def test_waits_double_up_to_a_limit_and_a_success_ends_them(spool, clock):
    put(spool)
    backoff = Backoff()
    client, requests = answering(500)
    waits = []
    for _ in range(9):
        waits.append(clock.ship(spool, client, backoff).wait_s)
        clock.now += waits[-1] - 0.001
        assert clock.ship(spool, client, backoff).left == 1
        clock.now += 0.001
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert max(waits) == LONGEST_WAIT_S
    assert len(requests) == 9
    good, _ = answering(200, msgspec.json.encode({"stored": True}))
    clock.now += 60
    assert clock.ship(spool, good, backoff).left == 0
    assert (backoff.failures, backoff.next_try, backoff.error) == (0, 0.0, "")


def test_agents_of_one_cluster_do_not_come_back_together(spool, clock):
    put(spool)
    client, _ = answering(500)
    waits = {
        clock.ship(spool, client, Backoff(), uniform=lambda low, high, n=n: low + (high - low) * n / 4).wait_s
        for n in range(5)
    }
    assert waits == {0.5, 0.625, 0.75, 0.875, 1.0}


DATE = "Mon, 30 Nov 2026 11:00:00 GMT"


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        ("120", 180.0),
        ("999999", 900.0),
        ("Mon, 30 Nov 2026 11:02:00 GMT", 180.0),
        ("Tue, 01 Dec 2026 11:00:00 GMT", 900.0),
        ("Mon, 30 Nov 2026 10:59:00 GMT", 1.0),
        ("soon", 1.0),
        ("-5", 1.0),
        ("\N{SUPERSCRIPT TWO}".encode(), 1.0),
    ],
)
def test_a_wait_that_the_server_asks_for_is_kept_half_as_long_again_at_most_bounded_and_checked(
    spool, clock, status, header, wait_s
):
    put(spool)
    client, requests = answering(status, headers={"Retry-After": header, "Date": DATE})
    backoff = Backoff()
    assert clock.ship(spool, client, backoff).wait_s == wait_s
    clock.now += wait_s - 0.001
    assert clock.ship(spool, client, backoff).left == 1
    assert len(requests) == 1


def test_a_call_ends_when_its_budget_is_over(spool, clock):
    put(spool, 7)

    def slow(request):
        clock.now += 0.2
        return httpx.Response(200, json={"stored": True})

    client = httpx.Client(transport=httpx.MockTransport(slow), base_url="http://server")
    result = clock.ship(spool, client, Backoff(), budget_s=0.5)
    assert (result.stored, result.left, result.wait_s) == (3, 4, 0.0)


def test_a_server_slower_than_the_budget_is_waited_for_longer_each_time(spool, clock):
    put(spool)
    patience = []

    def timeout(request):
        patience.append(request.extensions["timeout"]["read"])
        raise httpx.ReadTimeout("timed out")

    client = httpx.Client(transport=httpx.MockTransport(timeout), base_url="http://server")
    backoff = Backoff()
    for _ in range(7):
        clock.now += clock.ship(spool, client, backoff, budget_s=0.5).wait_s
    assert patience == [0.5, 1, 2, 4, 8, 10, 10]


def test_the_token_goes_in_the_header_and_proxies_of_the_job_are_not_used(spool, clock, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    seen = []

    async def batches(request):
        seen.append(request.headers["authorization"])
        return Response('{"stored": true}')

    put(spool)
    app = Starlette(routes=[Route("/api/v1/batches", batches, methods=["POST"])])
    with serving(app) as address, open_client(address, "s3cret") as client:
        assert clock.ship(spool, client, Backoff()).stored == 1
    assert seen == ["Bearer s3cret"]


@pytest.mark.parametrize("address", ["", "server:8080", "ftp://server", "http://", "http://a:b"])
def test_an_address_that_is_none_is_said_at_once(address):
    with pytest.raises(ValueError, match="the server's address"):
        open_client(address, "t")


def test_an_answer_that_cannot_be_read_keeps_the_batch(spool, clock):
    put(spool, 1)
    client, _ = answering(200, body=b"not gzip", headers={"Content-Encoding": "gzip"})
    result = clock.ship(spool, client, Backoff())
    assert (result.left, result.stored) == (1, 0)
    assert result.error


def test_after_a_calm_time_some_batches_go_at_once_and_then_four_per_second(spool, clock):
    put(spool, 20)
    client, requests = answering(200, msgspec.json.encode({"stored": True}))
    backoff = Backoff()
    assert clock.ship(spool, client, backoff).wait_s == 0.25
    assert len(requests) == BURST
    for _ in range(4):
        clock.now += 0.25
        clock.ship(spool, client, backoff)
    assert len(requests) == BURST + 4


def test_after_an_outage_one_batch_goes_first(spool, clock):
    put(spool, 20)
    backoff = Backoff()
    clock.now += clock.ship(spool, answering(500)[0], backoff).wait_s
    client, requests = answering(200, msgspec.json.encode({"stored": True}))
    clock.ship(spool, client, backoff)
    assert len(requests) == 1
    clock.now += 1.0
    clock.ship(spool, client, backoff)
    assert len(requests) == 5


def test_each_accepted_batch_is_told_with_what_the_server_replied_once_it_is_off_the_spool(
    spool, store, ingest, clock
):
    put(spool, 2)
    put(spool, 1, end_ns=0)  # never accepted
    first, second = spool.read(0), spool.read(1)
    told = []

    def on_reply(wire, reply):
        told.append((wire, reply, spool.pending()))

    with serving(create_app(ingest)) as address, open_client(address, "token-a") as client:
        client.post("/api/v1/batches", content=first)
        clock.ship(spool, client, Backoff(), on_reply=on_reply)
    assert told == [
        (first, Reply(stored=False), [1, 2]),
        (second, Reply(stored=True), [2]),
    ]


def test_a_reply_that_cannot_be_followed_stops_nothing(spool, store, ingest, clock, caplog):
    put(spool, 3)

    def on_reply(wire, reply):
        raise KeyError("capture-start")

    with serving(create_app(ingest)) as address, open_client(address, "token-a") as client:
        result = clock.ship(spool, client, Backoff(), on_reply=on_reply)
    assert (result.stored, result.duplicates, result.left) == (3, 0, 0)
    assert caplog.text.count("what the server replied could not be followed") == 3


def test_a_spool_that_cannot_delete_is_said_and_the_others_are_sent(spool, store, ingest, clock, monkeypatch):
    put(spool, 3)

    def read_only(seq, remove=spool.remove):
        remove(seq)
        raise SpoolError("the spool cannot be used now: Read-only file system")

    monkeypatch.setattr(spool, "remove", read_only)
    with serving(create_app(ingest)) as address, open_client(address, "token-a") as client:
        result = clock.ship(spool, client, Backoff())
    assert (result.stored, result.left, result.error) == (
        3,
        0,
        "the spool cannot be used now: Read-only file system",
    )


def test_what_waits_is_made_safe_every_ten_seconds(spool, clock, monkeypatch):
    settled = []
    monkeypatch.setattr(spool, "_settle", lambda: settled.append(clock.now))
    client, _ = answering(500)
    backoff = Backoff()
    for _ in range(35):
        put(spool)
        clock.ship(spool, client, backoff)
        clock.now += 1.0
    assert settled == [1000.0, 1010.0, 1020.0, 1030.0]
    monkeypatch.undo()
