"""The node agent: watches, spools, ships, once a second, until told to stop.

Two threads: one watches and writes each interval to the spool; the other sends what is spooled, so that a slow
or absent server never delays the watching. Ending by any signal leaves nothing attached: the kernel removes
what a process had attached when the process ends.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from probes.records import SCHEMA, Batch, Event
from probes.shipper import Backoff, ShipResult, open_client, ship_pending
from probes.spool import Spool, SpoolError
from probes.watch import Interval, NodeWatch

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
FAILURES_IN_A_ROW = 5
"""Intervals that may fail one after the other before the agent gives up."""
NICE = 10
"""A tenth of an ordinary process's weight: enough to be run within a second on a node that is full."""
BUDGET_S = 5.0
"""How long one round of sending may take."""
DRAIN_S = 3.0
"""How long stopping waits for the server to take what is left; the rest stays in the spool."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class AgentConfig:
    """How an agent runs."""

    server: str
    """For example http://server:8750"""
    token: str
    node: str
    state: Path
    """Folder for the spool and generated files."""
    spool_bytes: int


def run(config: AgentConfig, stop: threading.Event) -> None:
    """Watch until ``stop`` is set.

    Raises :class:`probes.bpf.BpfUnavailable` when this machine cannot be watched, :class:`SpoolError` when the
    spool cannot be used, ``ValueError`` for a server address that is none.
    """
    _step_aside()
    config.state.mkdir(parents=True, exist_ok=True)
    watch = NodeWatch(config.state / "cache")
    spool = Spool(config.state / "spool", max_bytes=config.spool_bytes)
    shipper = Shipper(config, spool)
    boot = BOOT_ID.read_text().strip()
    try:
        shipper.start()
        losses = _Losses(spool)
        failures = 0
        last = False
        while not last:
            last = stop.wait(INTERVAL_S)
            try:
                interval = watch.gather()
                failures = 0
            except Exception:
                failures += 1
                if failures >= FAILURES_IN_A_ROW:
                    raise
                # Beside a job, one odd process or map entry must not end the watching of all others.
                log.exception("one interval is lost; the probes are loaded anew")
                watch.recover()
                continue
            batch = to_batch(
                interval, config.node, boot, spool.agent, spool.next_seq, losses.events(interval.end_ns)
            )
            if batch.ranks or batch.events or shipper.due():
                try:
                    spool.put(batch)
                except SpoolError as error:
                    log.error("a batch is lost: %s", error)
                shipper.wake()
    finally:
        watch.close()
        shipper.stop()
        spool.close()


def _step_aside() -> None:
    """Let the job's threads go first: the agent wakes without pushing them off a CPU, and takes a small share of
    a CPU that is wanted by others. Compiling the programs takes some seconds, too."""
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(NICE)
    except OSError as error:
        log.warning("the agent keeps its ordinary priority: %s", error)


def to_batch(
    interval: Interval, node: str, boot_id: str, agent: str, seq: int, more: Sequence[Event] = ()
) -> Batch:
    """An interval as the batch that goes over the wire, with ``more`` events."""
    return Batch(
        schema=SCHEMA,
        node=node,
        boot_id=boot_id,
        agent=agent,
        seq=seq,
        start_ns=interval.start_ns,
        end_ns=interval.end_ns,
        utc_offset_ns=interval.utc_offset_ns,
        ranks=interval.ranks,
        metrics=interval.metrics,
        events=[*interval.events, *more],
        probes=interval.probes,
    )


class _Losses:
    """What the spool lost since it was last asked, as events."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._told = spool.counts

    def events(self, at_ns: int) -> list[Event]:
        now, before = self._spool.counts, self._told
        self._told = now
        lost = [
            ("batches-dropped", now.dropped - before.dropped, "found no room on the node's disk"),
            ("batches-damaged", now.bad - before.bad, "were damaged on the node's disk"),
            ("batches-refused", now.refused - before.refused, "were refused by the server for good"),
        ]
        return [
            Event(kind=kind, at_ns=at_ns, detail=f"{count} batches {what}")
            for kind, count, what in lost
            if count
        ]


class Shipper:
    """A thread that sends what is spooled, and says once what keeps it."""

    IDLE_S = 30.0
    """A node without ranks sends a sign of life this often."""

    def __init__(self, config: AgentConfig, spool: Spool) -> None:
        self._client = open_client(config.server, config.token)
        self._spool = spool
        self._backoff = Backoff()
        self._wake = threading.Event()
        self._stop = False
        self._said = ""
        self._refusal = ""
        self._spooled_at = 0.0
        self._thread = threading.Thread(target=self._run, name="shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is something to send."""
        self._spooled_at = time.monotonic()
        self._wake.set()

    def due(self) -> bool:
        """Whether nothing was spooled for so long that the server should hear from this node."""
        return time.monotonic() - self._spooled_at > self.IDLE_S

    def stop(self) -> None:
        """Send what is left, for a while, and end."""
        self._stop = True
        self._wake.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait()
            self._wake.clear()
            self._say(self._ship(BUDGET_S, self._backoff))
        self._say(self._ship(DRAIN_S, Backoff()))

    def _ship(self, budget_s: float, backoff: Backoff) -> ShipResult | None:
        try:
            return ship_pending(self._spool, self._client, backoff, budget_s=budget_s)
        except SpoolError as error:
            log.error("the spool: %s", error)
        except Exception:  # this thread must live as long as the agent: batches wait on the disk meanwhile
            log.exception("sending failed; it is tried again")
        return None

    def _say(self, result: ShipResult | None) -> None:
        """Each trouble once, and its end."""
        if result is None:
            return
        if result.refused_words and result.refused_words != self._refusal:
            self._refusal = result.refused_words
            log.error(
                "the server refuses a batch for good (it is in the spool's refused/): %s", self._refusal
            )
        if result.error != self._said:
            self._said = result.error
            if result.error:
                log.warning("%d batches wait in the spool: %s", result.left, result.error)
            else:
                log.warning("the server takes batches again")
