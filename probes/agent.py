"""The node agent: watches, spools, ships, once a second, until told to stop.

Two threads: one watches and writes each interval to the spool; the other sends what is spooled, so that a slow
or absent server never delays the watching. Ending by any signal leaves nothing attached: the kernel removes
what a process had attached when the process ends.
"""

from __future__ import annotations

import logging
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
    config.state.mkdir(parents=True, exist_ok=True)
    watch = NodeWatch(config.state / "cache")
    spool = Spool(config.state / "spool", max_bytes=config.spool_bytes)
    shipper = Shipper(config, spool)
    boot = BOOT_ID.read_text().strip()
    try:
        shipper.start()
        dropped = spool.counts.dropped
        last = False
        while not last:
            last = stop.wait(INTERVAL_S)
            interval = watch.gather()
            more = []
            if spool.counts.dropped > dropped:
                detail = f"{spool.counts.dropped - dropped} batches found no room on the node's disk"
                more.append(Event(kind="batches-dropped", at_ns=interval.end_ns, detail=detail))
                dropped = spool.counts.dropped
            batch = to_batch(interval, config.node, boot, spool.agent, spool.next_seq, more)
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
        self._sent_at = 0.0
        self._thread = threading.Thread(target=self._run, name="shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is something to send."""
        self._sent_at = time.monotonic()
        self._wake.set()

    def due(self) -> bool:
        """Whether nothing has been sent for so long that the server should hear from this node."""
        return time.monotonic() - self._sent_at > self.IDLE_S

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
            return None

    def _say(self, result: ShipResult | None) -> None:
        if result is None or result.error == self._said:
            return
        self._said = result.error
        if result.error:
            log.warning("%d batches wait in the spool: %s", result.left, result.error)
        else:
            log.info("the server takes batches again")
