"""The agent's numbers over real HTTP, read back by Prometheus's own parser."""

from __future__ import annotations

import logging
import socket
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from probes.metrics import Metrics
from probes.records import Probe
from tests.probes.test_status import me


def scraped(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def one(samples: dict[Any, float], name: str, **labels: str) -> float:
    return samples["sysom_agent_" + name, tuple(sorted(labels.items()))]


def test_the_last_status_is_what_prometheus_reads() -> None:
    metrics = Metrics("127.0.0.1", 0)
    try:
        assert scraped(metrics) == {}
        metrics.show(me(ranks=["old"]))
        metrics.show(
            me(
                ranks=["job-1 rank 0 (pid 7)", "job-1 rank 1 (pid 8)"],
                probes=[
                    Probe(name="gloo", state="on", hits=500, lost=3, cost_ms_per_s=1.5),
                    Probe(name="thread_time", state="off", why="asked for"),
                ],
                captures={'job "1"\n': 12.5},
                shed=["captures"],
                detached="",
                agent_ms_per_s=10.0,
                budget_ms_per_s=40.0,
                memory_bytes=100_000_000,
                memory_budget_bytes=512_000_000,
                events_per_s=51.0,
                events_budget=20_000,
                spool_batches=4,
                spool_bytes=16_384,
                lag_s=3.25,
                batches={"stored": 10, "duplicate": 2, "refused": 1, "dropped": 5, "damaged": 0},
                commands={"done": 2, "refused": 1, "unbelieved": 7},
                intervals_lost=1,
                shipping="the server is away",
            )
        )
        got = scraped(metrics)
    finally:
        metrics.close()
    assert one(got, "ranks") == 2
    assert one(got, "batches_total", outcome="stored") == 10
    assert one(got, "batches_total", outcome="duplicate") == 2
    assert one(got, "batches_lost_total", reason="dropped") == 5
    assert one(got, "batches_lost_total", reason="refused") == 1
    assert one(got, "spool_batches") == 4
    assert one(got, "spool_bytes") == 16_384
    assert one(got, "lag_seconds") == 3.25
    assert one(got, "delivery_hindered") == 1
    assert one(got, "probe_on", probe="gloo") == 1
    assert one(got, "probe_on", probe="thread_time") == 0
    assert one(got, "probe_cpu_seconds_per_second", probe="gloo") == 0.0015
    assert ("sysom_agent_probe_cpu_seconds_per_second", (("probe", "thread_time"),)) not in got, (
        "not measured"
    )
    assert one(got, "probe_hits_total", probe="gloo") == 500
    assert one(got, "probe_events_lost_total", probe="gloo") == 3
    assert one(got, "cpu_seconds_per_second") == 0.01
    assert one(got, "cpu_seconds_total") > 0
    assert one(got, "cpu_budget_seconds_per_second") == 0.04
    assert one(got, "memory_bytes") == 100_000_000
    assert one(got, "events_per_second") == 51
    assert one(got, "shed") == 1
    assert one(got, "captures") == 1
    assert one(got, "capture_left_seconds", job='job "1"\n') == 12.5
    assert one(got, "detached") == 0
    assert one(got, "intervals_lost_total") == 1
    assert one(got, "commands_total", outcome="unbelieved") == 7
    assert 0 <= one(got, "interval_age_seconds") < 60


def test_a_port_that_is_taken_is_a_warning_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        metrics = Metrics("127.0.0.1", taken.getsockname()[1])
        metrics.show(me())
        metrics.close()
    assert metrics.port == 0
    assert "SYSOM_METRICS_LISTEN" in caplog.text


def test_a_host_that_is_none_is_a_warning_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    Metrics("no-such-host.invalid", 9)
    assert "cannot be listened on" in caplog.text


def test_what_is_asked_beside_metrics_is_answered_and_the_agent_ends_with_a_connection_open() -> None:
    metrics = Metrics("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", metrics.port)):  # sends nothing
        metrics.show(me())
        assert scraped(metrics)
        metrics.close()
