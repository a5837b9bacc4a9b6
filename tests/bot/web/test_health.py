"""What the server says of itself at /healthz and /metrics."""

import asyncio
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bot.web.app import create_app
from bot.web.metrics import MAX_NODES, Metrics
from diagnosis.store import StoreError, StoreHealth
from diagnosis.store.sqlite import SqliteStore
from diagnosis.tokens import Tokens
from probes import codec
from probes.records import SCHEMA
from tests.bot.web.door import BrokenStore, Door
from tests.probes.batches import a_batch

GOOD = codec.encode(a_batch(3))


@pytest.fixture
def door(tmp_path):
    store = SqliteStore(tmp_path / "sysom.db")
    yield Door(store)
    store.close()


async def test_health_shows_what_was_taken_and_refused_without_a_token(door):
    await door.post(GOOD)
    await door.post(b"noise")
    answer = await door.get("/healthz")
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "ok": True,
            "problems": [],
            "warnings": [],
            "schema": SCHEMA,
            "nodes": 2,
            "waiting": 0,
            "counts": {"refused_not_zstd": 1, "stored": 1},
        },
    )


def metric(text, name, **labels):
    """The value of a series; None where there is none."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None


async def test_metrics_count_batches_bytes_lag_and_nodes(door):
    for wire in (GOOD, GOOD, b"noise", b"more noise"):
        await door.post(wire)
    await door.post(GOOD, token="guess-of-a-token")
    answer = await door.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    text = answer.text
    assert metric(text, "sysom_batches_total", outcome="stored", reason="") == 1
    assert metric(text, "sysom_batches_total", outcome="duplicate", reason="") == 1
    assert metric(text, "sysom_batches_total", outcome="refused", reason="not_zstd") == 2
    assert metric(text, "sysom_batches_total", outcome="refused", reason="unauthorised") == 1
    assert metric(text, "sysom_batch_bytes_total") == 2 * len(GOOD)
    assert metric(text, "sysom_ingest_lag_seconds_count") == 1
    assert metric(text, "sysom_ingest_waiting") == 0
    assert metric(text, "sysom_node_last_seen_timestamp_seconds", node="node-a") == 1_700_000_000
    assert "token" not in text


def test_only_the_nodes_that_sent_last_have_series():
    metrics = Metrics()
    for number in range(3 * MAX_NODES):
        metrics.taken(f"node-{number}", 1, 0.0)
    lines = [line for line in metrics.text().decode().splitlines() if line.startswith("sysom_node_last")]
    assert len(lines) == MAX_NODES
    assert f'node="node-{3 * MAX_NODES - 1}"' in lines[-1]


def test_slack_tells_its_queue_and_acknowledgements():
    metrics = Metrics()
    metrics.slack_queue = lambda: 7
    metrics.acknowledged(0.03)
    text = metrics.text().decode()
    assert metric(text, "sysom_slack_queue") == 7
    assert metric(text, "sysom_slack_acknowledgement_seconds_bucket", le="0.025") == 0
    assert metric(text, "sysom_slack_acknowledgement_seconds_bucket", le="0.05") == 1


async def test_a_store_that_fails_is_a_problem_until_it_takes_a_batch():
    store = BrokenStore()
    door = Door(store)
    await door.post(GOOD)
    answer = await door.get("/healthz")
    assert (answer.status_code, answer.json()["ok"]) == (503, False)
    assert answer.json()["problems"] == ["the disk under the store is full: free some space"]
    store.add = lambda batch, received_ns: True
    await door.post(GOOD)
    assert (await door.get("/healthz")).status_code == 200


class Told:
    """An intake that says what a test wants it to."""

    tokens = Tokens({})

    def __init__(self, health=None, stuck_s=0.0):
        self._health, self._stuck_s = health, stuck_s

    async def health(self):
        if isinstance(self._health, Exception):
            raise self._health
        return self._health

    def stuck_s(self):
        return self._stuck_s

    async def close(self):
        pass


HEALTH = StoreHealth("/s.db", 100, 20, 3000, 1.5, None, None, "ok", ["the disk is full in 3 days"])


async def said_by(intake, path="/healthz", **options):
    app = create_app(intake, **options)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            while "sysom_event_loop_lag_seconds_count 0.0" in (await http.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # until everything was looked at once
            return await http.get(path)


async def test_health_and_size_of_the_store_are_told():
    answer = await said_by(Told(HEALTH))
    assert (answer.status_code, answer.json()["warnings"]) == (200, ["the disk is full in 3 days"])
    text = (await said_by(Told(HEALTH), "/metrics")).text
    assert metric(text, "sysom_store_size_bytes") == 100
    assert metric(text, "sysom_store_free_disk_bytes") == 3000
    assert metric(text, "sysom_store_warnings") == 1


@pytest.mark.parametrize(
    ("intake", "words"),
    [
        (Told(replace(HEALTH, integrity="page 3 is broken")), "the store /s.db is damaged: page 3 is broken"),
        (Told(stuck_s=61.0), "a batch has been written for 61 s: is the store's disk stuck?"),
        (Told(StoreError("the store does not open")), "the store does not open"),
    ],
)
async def test_what_keeps_the_server_from_its_work_is_a_problem(intake, words):
    answer = await said_by(intake)
    assert (answer.status_code, answer.json()["problems"]) == (503, [words])
    assert metric((await said_by(intake, "/metrics")).text, "sysom_problems") == 1


async def test_what_is_looked_after_besides_can_warn():
    answer = await said_by(Told(), refreshed=[lambda: "the certificate is old", lambda: ""])
    assert (answer.status_code, answer.json()["warnings"]) == (200, ["the certificate is old"])
    text = (await said_by(Told(HEALTH), "/metrics", refreshed=[lambda: "the certificate is old"])).text
    assert (metric(text, "sysom_problems"), metric(text, "sysom_warnings")) == (0, 2)
