"""The node agent: watches, spools, ships, once a second, until told to stop.

Two threads: one watches, does what the server asked for, and writes each interval to the spool; the other
(``sending.py``) sends what is spooled. Ending by any signal leaves nothing attached: the kernel removes what a
process had attached when the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from probes import status
from probes.budget import Limits
from probes.commands import Inbox, Ledger
from probes.credentials import token_file
from probes.discovery import read_process
from probes.interval import Interval
from probes.metrics import Metrics
from probes.records import SCHEMA, Batch, Event
from probes.sending import Sender
from probes.shipper import open_client
from probes.spool import Counts, Spool, SpoolError
from probes.status import AgentStatus
from probes.watch import NodeWatch

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
FAILURES_IN_A_ROW = 5
"""Intervals that may fail one after the other before the agent gives up."""
NICE = 10
MAX_FILES = 65_536
"""A tenth of an ordinary process's weight: enough to be run within a second on a node that is full."""
MOST_EVENTS = 100
"""Events kept for a batch that finds room on the disk."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class AgentConfig:
    """How an agent runs."""

    server: str
    """For example http://server:8750"""
    token: str
    """Unless ``token_file`` is set."""
    node: str
    state: Path
    """Folder for the spool and generated files."""
    spool_bytes: int
    runtime: Path
    """Folder for the status and the kill switch."""
    limits: Limits = field(default_factory=Limits)
    token_file: Path | None = None
    """Holds the token instead; read again when the server refuses it."""
    ca: Path | None = None
    """Certificates that the server's is checked with; None: the system's."""
    command_key: Ed25519PublicKey | None = None
    """What the server's orders are checked with; None: none is followed."""
    metrics: tuple[str, int] | None = None
    """Address and port for Prometheus."""


def run(config: AgentConfig, stop: threading.Event) -> None:
    """Watch until ``stop`` is set.

    Raises :class:`probes.bpf.BpfUnavailable` when this machine cannot be watched, :class:`SpoolError` when the
    spool cannot be used (another agent uses it), :class:`probes.status.RuntimeFolderError`, ``ValueError`` for a
    server address, token file or certificate file that cannot be used.
    """
    _step_aside()
    _allow_many_files()
    config.state.mkdir(parents=True, exist_ok=True)
    watch = NodeWatch(config.state / "cache", limits=config.limits, host=config.node)
    status.prepare(config.runtime)
    status.sweep(config.runtime)
    with contextlib.ExitStack() as ending:  # the last that is named here ends first
        spool = Spool(config.state / "spool", max_bytes=config.spool_bytes)
        ending.callback(spool.close)
        agent = _Agent(config, watch, spool)
        ending.callback(agent.close)
        ending.callback(watch.close)
        agent.start()
        last = False
        while not last:
            last = stop.wait(INTERVAL_S)
            agent.interval()


def _allow_many_files() -> None:
    """Programs, maps, probes of processes and processes themselves are descriptors: a full node has thousands."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, MAX_FILES)), most))


def _step_aside() -> None:
    """Let the job's threads go first: the agent wakes without pushing them off a CPU, and takes a small share of
    a CPU that is wanted by others. Compiling the programs takes some seconds, too."""
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        # Not on top of what a unit or a shell has set already: at the lowest priority a full node starves it.
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    except OSError as error:
        log.warning("the agent keeps its ordinary priority: %s", error)


class _Agent:
    """What lasts from one interval to the next."""

    def __init__(self, config: AgentConfig, watch: NodeWatch, spool: Spool) -> None:
        self._config = config
        self._watch = watch
        self._spool = spool
        self._boot = BOOT_ID.read_text().strip()
        self._inbox = Inbox(config.command_key)
        self._ledger = Ledger(config.state / "commands.json", spool.agent, self._boot)
        self._lost_before = spool.counts
        self._events: list[Event] = []
        """Told with the next batch."""
        self._detached = ""
        self._failures = self._intervals_lost = 0
        self._said: dict[str, str] = {}
        itself = read_process(status.PROC, os.getpid())
        self._status = AgentStatus(
            pid=os.getpid(),
            start_ticks=itself.start_ticks if itself else 0,
            node=config.node,
            state=str(config.state),
            server=config.server,
            started_ns=time.monotonic_ns(),
            at_ns=time.monotonic_ns(),
        )
        token = config.token if config.token_file is None else token_file(config.token_file)
        self._sender = Sender(open_client(config.server, token, config.ca), spool, self._inbox.hear)
        self._metrics = Metrics(*config.metrics) if config.metrics else None

    def start(self) -> None:
        """Tell that this agent is there, before it takes the seconds to load its probes; then begin to send."""
        self._ledger.restore(self._watch)
        self._show(None)
        self._mind_the_switch()
        self._sender.start()

    def interval(self) -> None:
        """Watch, do what was asked, keep and tell. Raises when nothing has worked for ``FAILURES_IN_A_ROW``."""
        self._mind_the_switch()
        now = time.monotonic_ns()
        self._events += self._ledger.follow(self._inbox.take(), self._watch, self._spool.next_seq, now)
        self._events += self._inbox.events(now)
        if not self._detached:
            self._ledger.resume(self._watch)
        interval = self._gather()
        if interval is not None:
            self._keep(interval)
        self._show(interval)

    def close(self) -> None:
        """Send what is left, and take the status away."""
        self._sender.stop()
        if self._metrics is not None:
            self._metrics.close()
        with contextlib.suppress(OSError):
            status.remove(self._config.runtime, os.getpid())

    def _mind_the_switch(self) -> None:
        """Follow the kill switch. When detaching fails the error ends the agent, and the kernel detaches."""
        why = status.detached(self._config.runtime)
        if why == self._detached:
            return
        was, self._detached = self._detached, why
        now = time.monotonic_ns()
        if why:
            log.warning("the kill switch is on, everything is detached: %s", why)
            self._watch.detach_all(why)
            self._events.append(Event(kind="detached", at_ns=now, detail=why))
        elif was:
            log.warning("the kill switch is off: probes are attached again")
            self._watch.allow_all()
            self._events.append(Event(kind="attached", at_ns=now, detail="the kill switch is off"))
        self._show(None)  # now: the next interval may take the seconds of loading the probes

    def _gather(self) -> Interval | None:
        try:
            interval = self._watch.gather()
        except Exception:
            self._failures += 1
            self._intervals_lost += 1
            if self._failures >= FAILURES_IN_A_ROW:
                raise
            # Beside a job, one odd process or map entry must not end the watching of all others.
            log.exception("one interval is lost; the probes are loaded anew")
            self._watch.recover()
            return None
        self._failures = 0
        return interval

    def _keep(self, interval: Interval) -> None:
        lost = self._spool.untold()
        more = [*self._events, *losses(lost, interval.end_ns)]
        batch = to_batch(
            interval, self._config.node, self._boot, self._spool.agent, self._spool.next_seq, more
        )
        if not (batch.ranks or batch.events or self._sender.due()):
            return
        trouble = ""
        try:
            self._spool.put(batch, tells=lost)
            self._events = []
        except SpoolError as error:
            trouble = f"batches are lost: {error}"
            self._events = self._events[-MOST_EVENTS:]  # told with a batch that finds room
        self._say_once("spool", trouble, "batches are kept again")
        self._sender.wake()

    def _show(self, interval: Interval | None) -> None:
        """Tell on this node how it goes; an agent that cannot goes on."""
        self._status = self._now(interval)
        if self._metrics is not None:
            self._metrics.show(self._status)
        trouble = ""
        try:
            status.write(self._config.runtime, self._status)
        except OSError as error:
            trouble = f"`sysom doctor` is not told of this agent: {error}"
        self._say_once("status", trouble, "`sysom doctor` is told of this agent again")

    def _say_once(self, what: str, trouble: str, over: str) -> None:
        """Each trouble once, and its end."""
        if trouble != self._said.get(what, ""):
            self._said[what] = trouble
            log.warning("%s", trouble or over)

    def _now(self, interval: Interval | None) -> AgentStatus:
        """The status at this moment; without an ``interval`` what was seen last still stands."""
        cost = self._watch.cost()
        before = self._status
        lost = self._spool.counts
        pending = self._spool.pending()
        return msgspec.structs.replace(
            before,
            at_ns=time.monotonic_ns(),
            ranks=before.ranks if interval is None else _ranks(interval),
            probes=self._watch.probes(),
            captures=self._watch.captures(),
            shed=self._watch.shed(),
            detached=self._detached,
            agent_ms_per_s=cost.agent_ms_per_s,
            budget_ms_per_s=cost.budget_ms_per_s,
            memory_bytes=cost.memory_bytes,
            memory_budget_bytes=cost.memory_budget_bytes,
            events_per_s=cost.events_per_s,
            events_budget=round(cost.events_budget_per_s),
            spool_batches=len(pending),
            spool_bytes=self._spool.size_bytes,
            lag_s=_lag_s(self._config.state / "spool", pending),
            batches={
                **self._sender.counts,
                "dropped": lost.dropped - self._lost_before.dropped,
                "damaged": lost.bad - self._lost_before.bad,
                "refused": lost.refused - self._lost_before.refused,
            },
            commands={**self._ledger.counts, "unbelieved": self._inbox.refused},
            intervals_lost=self._intervals_lost,
            shipping=self._sender.hindrance,
        )


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


def _ranks(interval: Interval) -> list[str]:
    running = [rank for rank in interval.ranks if not rank.ended]
    return [f"{rank.job} rank {rank.rank} (pid {rank.pid})" for rank in running]


def losses(lost: Counts, at_ns: int) -> list[Event]:
    """What the spool lost, as events."""
    kinds = [
        ("batches-dropped", lost.dropped, "found no room on the node's disk, or were too large to send"),
        ("batches-damaged", lost.bad, "were damaged on the node's disk"),
        ("batches-refused", lost.refused, "were refused by the server for good"),
    ]
    return [
        Event(kind=kind, at_ns=at_ns, detail=f"{count} batches {what}")
        for kind, count, what in kinds
        if count
    ]


def _lag_s(spool: Path, pending: Sequence[int]) -> float:
    """Age of the oldest batch that waits: of its file, which a restart does not change."""
    if not pending:
        return 0.0
    try:
        return max(0.0, time.time() - (spool / f"{pending[0]:020}.batch").stat().st_mtime)
    except OSError:  # just sent
        return 0.0
