"""The agent's own numbers for Prometheus: its status (``probes.status``) as text over HTTP, when an address is set.

Counters begin with the agent. Nothing is measured when Prometheus asks: it gets the last interval's status.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from probes.status import AgentStatus

log = logging.getLogger(__name__)

PREFIX = "sysom_agent_"


class Metrics(Collector):
    """Serves the last status that it was shown at ``http://HOST:PORT/metrics``, in threads that never keep the
    agent from ending. An address that cannot be listened on is a warning: watching goes on without."""

    def __init__(self, host: str, port: int) -> None:
        self._status: AgentStatus | None = None
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            log.warning(
                "Prometheus is told nothing: %s:%d cannot be listened on (%s); set SYSOM_METRICS_LISTEN anew",
                host,
                port,
                error.strerror or error,
            )

    @property
    def port(self) -> int:
        """The port that is listened on; 0 when none is."""
        return self._server.server_port if self._server else 0

    def show(self, status: AgentStatus) -> None:
        """This is how the agent is now."""
        self._status = status

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand: labels come with the status."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The families of the last status; none before the first interval."""
        status = self._status
        if status is not None:
            yield from families(status)


def families(status: AgentStatus) -> Iterator[Metric]:
    """A status as metric families."""
    yield _gauge(
        "start_time_seconds", "When the agent started, seconds of CLOCK_MONOTONIC", status.started_ns / 1e9
    )
    age = (time.monotonic_ns() - status.at_ns) / 1e9
    yield _gauge("interval_age_seconds", "Time since the last interval ended; grows when watching hangs", age)
    yield _gauge("ranks", "Ranks watched", len(status.ranks))
    yield _gauge("detached", "1 while the kill switch keeps everything detached", bool(status.detached))
    yield _count("intervals_lost", "Intervals in which watching failed", status.intervals_lost)
    yield from _delivery(status)
    yield from _probes(status)
    yield from _budgets(status)
    commands = CounterMetricFamily(
        PREFIX + "commands",
        "What the server asked for, by outcome; unbelieved: orders not signed for us",
        labels=["outcome"],
    )
    for outcome, count in sorted(status.commands.items()):
        commands.add_metric([outcome], count)
    yield commands
    left = GaugeMetricFamily(PREFIX + "capture_left_seconds", "Time left of a capture", labels=["job"])
    for job, seconds in sorted(status.captures.items()):
        left.add_metric([job], seconds)
    yield left
    yield _gauge("captures", "Jobs watched at full detail", len(status.captures))


def _delivery(status: AgentStatus) -> Iterator[Metric]:
    taken = CounterMetricFamily(PREFIX + "batches", "Batches, by the server's answer", labels=["outcome"])
    lost = CounterMetricFamily(
        PREFIX + "batches_lost", "Batches that the server will never have, by reason", labels=["reason"]
    )
    for outcome, count in sorted(status.batches.items()):
        if outcome in ("stored", "duplicate", "refused"):
            taken.add_metric([outcome], count)
        if outcome not in ("stored", "duplicate"):
            lost.add_metric([outcome], count)
    yield taken
    yield lost
    yield _gauge("spool_batches", "Batches on this node that the server does not have", status.spool_batches)
    yield _gauge("spool_bytes", "Disk that they take", status.spool_bytes)
    yield _gauge("lag_seconds", "Age of the oldest of them; 0 when there is none", status.lag_s)
    yield _gauge("delivery_hindered", "1 while something keeps batches on this node", bool(status.shipping))


def _probes(status: AgentStatus) -> Iterator[Metric]:
    on = GaugeMetricFamily(PREFIX + "probe_on", "1 while the probe watches", labels=["probe"])
    cost = GaugeMetricFamily(
        PREFIX + "probe_cpu_seconds_per_second",
        "CPU time that the probe takes, traps included",
        labels=["probe"],
    )
    hits = CounterMetricFamily(PREFIX + "probe_hits", "Events seen by the probe", labels=["probe"])
    lost = CounterMetricFamily(
        PREFIX + "probe_events_lost", "Events that the kernel could not hand over", labels=["probe"]
    )
    for probe in status.probes:
        on.add_metric([probe.name], probe.state == "on")
        hits.add_metric([probe.name], probe.hits)
        lost.add_metric([probe.name], probe.lost)
        if probe.cost_ms_per_s >= 0:
            cost.add_metric([probe.name], probe.cost_ms_per_s / 1000)
    yield from (on, cost, hits, lost)


def _budgets(status: AgentStatus) -> Iterator[Metric]:
    yield _count("cpu_seconds", "CPU time of the agent's process", time.process_time())
    yield _gauge(
        "cpu_seconds_per_second", "CPU time of the agent's process, now", status.agent_ms_per_s / 1000
    )
    yield _gauge(
        "cpu_budget_seconds_per_second",
        "What agent and probes may take together",
        status.budget_ms_per_s / 1000,
    )
    yield _gauge("memory_bytes", "Resident memory of the agent", status.memory_bytes)
    yield _gauge("memory_budget_bytes", "Memory that it may hold", status.memory_budget_bytes)
    yield _gauge("events_per_second", "Events of all probes", status.events_per_s)
    yield _gauge("events_budget_per_second", "Events that may come", status.events_budget)
    yield _gauge("shed", "Things given up to stay within the budgets", len(status.shed))


def _gauge(name: str, words: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, words, value=value)


def _count(name: str, words: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, words, value=value)
