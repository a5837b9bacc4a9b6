"""Ranks' communicators, kept over reloads of the probes and restarts of the agent.

A rank's collectives name their communicator by its place in a list. Probes that are loaded anew learn the list
anew, in whatever order traffic comes: with what was known before, a communicator keeps its place for as long
as its process lives. In a file of the agent's cache, of this boot only; nothing is lost with it but places.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from probes.records import Communicator

log = logging.getLogger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Life(msgspec.Struct, frozen=True):
    pid: int
    start_ticks: int
    communicators: list[Communicator]


class _File(msgspec.Struct, frozen=True):
    boot: str
    lives: list[_Life]


class Remembered:
    """Process and its start → communicators."""

    def __init__(self, cache: Path) -> None:
        self._path = cache / "communicators.msgpack"
        self._boot = BOOT_ID.read_text().strip()
        self._lives = self._read()
        self._trouble = ""

    def of(self, pid: int, start_ticks: int) -> list[Communicator]:
        """What is known of a process; empty when it is new."""
        return self._lives.get((pid, start_ticks), [])

    def keep(self, lives: dict[tuple[int, int], list[Communicator]]) -> None:
        """All processes that are watched now and their communicators. Written when it has changed, before anything
        is told of a new one; a disk that takes nothing is said once."""
        # What the probes do not know yet again (they were loaded anew) is still true.
        lives = {
            key: known if len(known) >= len(self.of(*key)) else self.of(*key) for key, known in lives.items()
        }
        if lives == self._lives:
            return
        self._lives = lives
        content = _File(self._boot, [_Life(*key, known) for key, known in lives.items()])
        beside = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(msgspec.msgpack.encode(content))
            beside.replace(self._path)
        except OSError as error:
            if self._trouble != str(error):
                log.warning("communicators cannot be kept for the next start of the agent: %s", error)
            self._trouble = str(error)

    def _read(self) -> dict[tuple[int, int], list[Communicator]]:
        try:
            content = msgspec.msgpack.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s is not used: %s", self._path, error)
            return {}
        if content.boot != self._boot:
            return {}
        return {(life.pid, life.start_ticks): life.communicators for life in content.lives}
