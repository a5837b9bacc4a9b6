"""What the server counts and measures of itself, for Prometheus. No label holds a token, and series are bounded."""

from __future__ import annotations

import threading
import time
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from diagnosis.store import StoreHealth

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of :meth:`Metrics.text`."""
MAX_NODES = 1000
"""Nodes with a series of their own: those that sent last."""
_LAG_S = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200, 86_400)
_DIAGNOSIS_S = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 60, 120)
_QUICK_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 3)


class Counts:
    """How often what happened. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Tally[str] = Tally()

    def add(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(sorted(self._counts.items()))


class Metrics:
    """One server's numbers. Those of Slack come from whoever speaks with it: ``slack_queue``,
    :meth:`acknowledged`."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """``now``: UTC seconds."""
        self.counts = Counts()
        """Batches: ``stored``, ``duplicate``, ``refused_REASON``, ``clock_jumped``."""
        self.store: StoreHealth | None = None
        """The newest that is known."""
        self.slack_queue: Callable[[], int] = lambda: 0
        """How many messages wait to be sent to Slack."""
        self.problems: Callable[[], int] = lambda: 0
        self.warnings: Callable[[], int] = lambda: 0
        """How many there are at ``/healthz``."""
        self._now = now
        self._seen: OrderedDict[str, float] = OrderedDict()
        self.registry = CollectorRegistry()
        self.registry.register(_Read(self._read))
        self._bytes = Counter("sysom_batch_bytes", "Bytes of batches as they came", registry=self.registry)
        self.lag = Histogram(
            "sysom_ingest_lag_seconds",
            "From a batch's end, by its node's clock, to when it was stored",
            buckets=_LAG_S,
            registry=self.registry,
        )
        self.waiting = Gauge(
            "sysom_ingest_waiting", "Batches being read, waiting or written", registry=self.registry
        )
        self.diagnoses_waiting = Gauge(
            "sysom_diagnoses_waiting", "Diagnoses that wait for a process", registry=self.registry
        )
        self.diagnoses_running = Gauge(
            "sysom_diagnoses_running", "Diagnoses that run", registry=self.registry
        )
        self.diagnoses = Counter(
            "sysom_diagnoses", "Diagnoses that ended", ["result"], registry=self.registry
        )
        self.diagnosis_seconds = Histogram(
            "sysom_diagnosis_seconds",
            "Of a diagnosis, without waiting for a process",
            buckets=_DIAGNOSIS_S,
            registry=self.registry,
        )
        for result in ("finished", "failed", "unknown_job"):
            self.diagnoses.labels(result)
        self.loop_lag = Histogram(
            "sysom_event_loop_lag_seconds",
            "How late the event loop was, asked ten times a second",
            buckets=_QUICK_S,
            registry=self.registry,
        )
        self._acknowledged = Histogram(
            "sysom_slack_acknowledgement_seconds",
            "From a request of Slack to its acknowledgement",
            buckets=_QUICK_S,
            registry=self.registry,
        )

    def taken(self, node: str, size: int, lag_s: float | None) -> None:
        """A batch of ``node`` with ``size`` bytes was stored, or was there already. ``lag_s``: None for those."""
        self._bytes.inc(size)
        if lag_s is not None:
            self.lag.observe(max(lag_s, 0.0))
        self._seen[node] = self._now()
        self._seen.move_to_end(node)
        if len(self._seen) > MAX_NODES:
            self._seen.popitem(last=False)

    def acknowledged(self, seconds: float) -> None:
        """A request of Slack was acknowledged so long after it came in."""
        self._acknowledged.observe(seconds)

    def text(self) -> bytes:
        """All of it in Prometheus's text format, of type ``CONTENT_TYPE``."""
        return generate_latest(self.registry)

    def _read(self) -> Iterable[Metric]:
        counts = self.counts.read()
        batches = CounterMetricFamily("sysom_batches", "Batches that came", labels=["outcome", "reason"])
        for outcome in ("stored", "duplicate"):
            batches.add_metric([outcome, ""], counts.get(outcome, 0))
        for name, count in counts.items():
            if name.startswith("refused_"):
                batches.add_metric(["refused", name.removeprefix("refused_")], count)
        yield batches
        jumps = CounterMetricFamily("sysom_clock_jumps", "Node clocks that were set")
        jumps.add_metric([], counts.get("clock_jumped", 0))
        yield jumps
        seen = GaugeMetricFamily(
            "sysom_node_last_seen_timestamp_seconds", "When a node's newest batch came", labels=["node"]
        )
        for node, at in self._seen.items():
            seen.add_metric([node], at)
        yield seen
        yield GaugeMetricFamily(
            "sysom_slack_queue", "Messages that wait to be sent to Slack", value=self.slack_queue()
        )
        words = "What keeps the server from its work; /healthz has the words"
        yield GaugeMetricFamily("sysom_problems", words, value=self.problems())
        words = "What else needs a person; /healthz has the words"
        yield GaugeMetricFamily("sysom_warnings", words, value=self.warnings())
        if (store := self.store) is not None:
            for name, words, value in (
                ("size_bytes", "The store's file", store.size_bytes),
                ("wal_bytes", "Its write-ahead log", store.wal_bytes),
                ("free_disk_bytes", "What its disk has left", store.free_bytes),
                ("growth_bytes_per_second", "How fast it grows", store.bytes_per_s),
                ("warnings", "What needs a person about it; /healthz has the words", len(store.warnings)),
            ):
                yield GaugeMetricFamily(f"sysom_store_{name}", words, value=value)


class _Read(Collector):
    """Numbers that are kept elsewhere, read when they are asked for."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()
