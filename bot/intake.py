"""Where the server's batches go: into the process that writes, or, for a store in this process, into a thread."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Protocol

from bot.worker import Worker, WorkerDied
from diagnosis import writer
from diagnosis.ingest import RETRY_AFTER_S, Ingest, Refusal, Taken
from diagnosis.store import StoreError, StoreHealth
from diagnosis.tokens import Tokens

NICE = 5
"""Before diagnoses, after the event loop."""
DEADLY_TIMES, DEADLY_KEPT = 3, 64
"""A batch that ended the process in so many requests (each is tried twice) is refused for good; so many are
remembered."""
CLOSE_S = 10.0
"""How long closing waits for what is written."""


class Intake(Protocol):
    """Takes batches, one after the other."""

    tokens: Tokens

    async def take(self, node: str, wire: bytes) -> Taken:
        """As :meth:`diagnosis.ingest.Ingest.take`."""

    async def health(self) -> StoreHealth | None:
        """How the store stands; None where that is not known. Raises ``StoreError``."""

    def stuck_s(self) -> float:
        """For how long the batch that is written now has been."""

    async def close(self) -> None:
        """Wait for the batches that were given, then end."""


class InThread:
    """An ingest of this process, in one thread of its own."""

    def __init__(self, ingest: Ingest) -> None:
        self.tokens = ingest.tokens
        self._ingest = ingest
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ingest")

    async def take(self, node: str, wire: bytes) -> Taken:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ingest.take, node, wire)

    async def health(self) -> StoreHealth | None:
        return None

    def stuck_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)


class InProcess:
    """A store in a process of its own; see :mod:`diagnosis.writer`."""

    def __init__(self, place: writer.Place, tokens: Tokens) -> None:
        self.tokens = tokens
        self._place = place
        self._worker = Worker("diagnosis.writer", what="storing batches", nice=NICE)
        self._deadly: OrderedDict[bytes, int] = OrderedDict()
        """How often a batch (its digest) ended the process, the newest last."""

    async def open(self) -> None:
        """Raises ``StoreError``, ``SigningError``."""
        await self._worker.call(writer.ready, self._place)

    async def take(self, node: str, wire: bytes) -> Taken:
        try:
            return await self._worker.call(writer.take, self._place, node, wire)
        except WorkerDied as error:
            digest = sha256(wire).digest()
            self._deadly[digest] = times = self._deadly.pop(digest, 0) + 1
            if len(self._deadly) > DEADLY_KEPT:
                self._deadly.popitem(last=False)
            if times >= DEADLY_TIMES:
                raise Refusal(
                    400,
                    "deadly",
                    f"this batch ended the process that stores batches {times} times ({error}): it is not taken, "
                    "so that the node's others are; its agent keeps it in the spool's refused/",
                ) from error
            raise Refusal(503, "store", str(error), retry_after_s=RETRY_AFTER_S) from error

    async def health(self) -> StoreHealth | None:
        try:
            return await self._worker.call(writer.health, self._place)
        except WorkerDied as error:
            raise StoreError(str(error)) from error

    def stuck_s(self) -> float:
        since = self._worker.busy_since
        return 0.0 if since is None else time.monotonic() - since

    async def close(self) -> None:
        await self._worker.close(CLOSE_S)
