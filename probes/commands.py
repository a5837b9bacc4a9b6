"""What the server asked of this agent: heard in the sending thread, done in the watching one, each id once.

A server sends a command with every reply until it has been told the outcome, so one command is heard often: with
each batch of a backlog, and again after a restart. :class:`Inbox` takes it across the threads; :class:`Ledger`
knows what was done, over restarts (``commands.json`` in the agent's state folder), and what still holds: probes
that were switched off stay off, and a capture goes on for the time that it has left.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from probes import codec, orders, status
from probes.orders import OrdersRefused
from probes.records import MAX_CAPTURE_S, Command, CommandKind, Event, Reply

log = logging.getLogger(__name__)

REMEMBERED = 1000
"""Ids whose outcome is kept: a server repeats a command for as long as batches wait, never for so many."""
MAX_WAITING = 256
"""Commands that may wait for the next interval."""
TELL_EVERY_S = 60.0
"""Orders that are not believed are told this often at most: a server that signs wrongly does so each second."""
ASKED = "asked for by the server"


class Watch(Protocol):
    """What of :class:`probes.watch.NodeWatch` commands act on. Refusals are ``ValueError`` with words."""

    def switch(self, probe: str, on: bool, why: str) -> None: ...
    def start_capture(self, job: str, seconds: int) -> None: ...
    def end_capture(self, job: str) -> None: ...


class Inbox:
    """Commands between the thread that hears them and the one that does them. Safe from several threads."""

    def __init__(self, key: Ed25519PublicKey | None, clock: Callable[[], float] = time.monotonic) -> None:
        """``key``: what orders are checked with; None: none is believed."""
        self._key = key
        self._clock = clock
        self._mutex = threading.Lock()
        self._waiting: dict[str, tuple[int, Command]] = {}
        self._logged: set[str] = set()
        self._untold = 0
        self._words = ""
        self._tell_at = -math.inf
        self.refused = 0
        """Replies whose orders were not believed."""

    def hear(self, wire: bytes, reply: Reply) -> None:
        """Take the orders of the reply to the batch ``wire``."""
        if not reply.orders:
            return
        try:
            batch = codec.decode(wire)
            commands = orders.commands(reply, batch, self._key)
        except OrdersRefused as error:
            self._refuse(str(error))
            return
        with self._mutex:
            for command in commands:
                if command.id in self._waiting or len(self._waiting) < MAX_WAITING:
                    self._waiting[command.id] = (batch.seq, command)

    def take(self) -> list[tuple[int, Command]]:
        """(number of the batch that was answered, command) of all that wait, in the order in which they came."""
        with self._mutex:
            waiting, self._waiting = self._waiting, {}
        return list(waiting.values())

    def events(self, at_ns: int) -> list[Event]:
        """That orders were not believed, at most once in ``TELL_EVERY_S``."""
        with self._mutex:
            if not self._untold or self._clock() < self._tell_at:
                return []
            count, self._untold = self._untold, 0
            self._tell_at = self._clock() + TELL_EVERY_S
            words = self._words
        return [Event(kind="orders-refused", at_ns=at_ns, detail=f"{count} times: {words}")]

    def _refuse(self, words: str) -> None:
        with self._mutex:
            self.refused += 1
            self._untold += 1
            self._words = words
            new = words not in self._logged
            if new and len(self._logged) < REMEMBERED:
                self._logged.add(words)
        if new:
            log.error("orders are not followed: %s", words)


class _Outcome(msgspec.Struct):
    kind: str
    words: str
    told_seq: int
    """Number of the batch that told it."""


class _Kept(msgspec.Struct):
    agent: str = ""
    """Spool whose batches ``told_seq`` counts."""
    boot_id: str = ""
    done: dict[str, _Outcome] = {}
    off: dict[str, str] = {}
    """Probe → why it was switched off."""
    captures: dict[str, int] = {}
    """Job → CLOCK_MONOTONIC nanoseconds at which its capture ends."""


class Ledger:
    """Which commands were done and what came of them. Not safe for several threads."""

    def __init__(self, path: Path, agent: str, boot_id: str) -> None:
        """``path``: where it is kept; a file that cannot be read is begun anew, and said so. ``agent``,
        ``boot_id``: as the batches carry them."""
        self._path = path
        self._kept = _read(path)
        if (
            self._kept.agent != agent
        ):  # another spool counts from 0: whatever was told may be lost with the old one
            for outcome in self._kept.done.values():
                outcome.told_seq = -1
        if self._kept.boot_id != boot_id:
            self._kept.captures = {}  # the jobs ended with the boot, and the clock began anew
        self._kept.agent, self._kept.boot_id = agent, boot_id
        self._resume = dict(self._kept.captures)
        self.counts = {"done": 0, "refused": 0}

    def restore(self, watch: Watch) -> None:
        """Switch off what was off before a restart."""
        for probe, why in self._kept.off.items():
            try:
                watch.switch(probe, False, why)
            except ValueError as error:
                log.warning("%s stays as it is: %s", probe, error)

    def resume(self, watch: Watch) -> None:
        """Go on with captures that a restart cut short, once their jobs are found; call it at each interval."""
        now = time.monotonic_ns()
        for job, ends_ns in list(self._resume.items()):
            seconds = math.ceil((ends_ns - now) / 1e9)
            try:
                if seconds > 0:
                    watch.start_capture(job, min(seconds, MAX_CAPTURE_S))
            except ValueError:
                continue  # its ranks are not found yet
            del self._resume[job]

    def follow(
        self, asked: list[tuple[int, Command]], watch: Watch, next_seq: int, at_ns: int
    ) -> list[Event]:
        """Do what was asked and was not done before; the events that tell the outcomes go into batch
        ``next_seq``. An outcome that the server asks for again after it was told is told again: its batch was
        lost."""
        events = []
        for seq, command in asked:
            outcome = self._kept.done.get(command.id)
            if outcome is None:
                outcome = self._do(command, watch)
                self.counts[outcome.kind.removeprefix("command-")] += 1
                log.warning("%s: %s %s", outcome.kind, command.id, outcome.words)
            elif seq <= outcome.told_seq:
                continue  # asked before the server could know
            outcome.told_seq = next_seq
            self._kept.done[command.id] = outcome
            while len(self._kept.done) > REMEMBERED:
                del self._kept.done[next(iter(self._kept.done))]
            events.append(Event(kind=outcome.kind, at_ns=at_ns, detail=f"{command.id} {outcome.words}"))
        if events:
            self._save()
        return events

    def _do(self, command: Command, watch: Watch) -> _Outcome:
        try:
            words = self._act(command, watch)
        except ValueError as error:
            return _Outcome("command-refused", str(error), -1)
        except (
            Exception
        ) as error:  # BCC raises bare Exception; beside a job one command must not end the agent
            log.exception("command %s failed", command.id)
            return _Outcome("command-refused", f"it failed: {error}", -1)
        return _Outcome("command-done", words, -1)

    def _act(self, command: Command, watch: Watch) -> str:
        """Raises ``ValueError``, in words, for what cannot be done."""
        if command.kind in (CommandKind.PROBE_ON, CommandKind.PROBE_OFF):
            on = command.kind == CommandKind.PROBE_ON
            watch.switch(command.probe, on, ASKED)
            self._kept.off.pop(command.probe, None)
            if not on:
                self._kept.off[command.probe] = ASKED
            return f"probe {command.probe} is switched {'on' if on else 'off'}"
        if not command.job:
            raise ValueError("a capture needs a job")
        if command.kind == CommandKind.CAPTURE_START:
            if not 0 < command.seconds <= MAX_CAPTURE_S:
                raise ValueError(f"a capture lasts 1 to {MAX_CAPTURE_S} s, not {command.seconds} s")
            watch.start_capture(command.job, command.seconds)
            self._kept.captures[command.job] = time.monotonic_ns() + command.seconds * 1_000_000_000
            self._resume.pop(command.job, None)
            return f"{command.job} is watched at full detail for {command.seconds} s"
        self._kept.captures.pop(command.job, None)
        if self._resume.pop(command.job, None) is None:
            watch.end_capture(command.job)
        return f"the capture of {command.job} has ended"

    def _save(self) -> None:
        now = time.monotonic_ns()
        self._kept.captures = {job: ends for job, ends in self._kept.captures.items() if ends > now}
        try:
            status.replace(self._path, msgspec.json.encode(self._kept), 0o600)
        except OSError as error:  # what was done is done; a restart may do it once more
            log.error("which commands were done cannot be kept in %s: %s", self._path, error)


def _read(path: Path) -> _Kept:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return _Kept()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("which commands were done is not known any more (%s: %s)", path, error)
        return _Kept()
