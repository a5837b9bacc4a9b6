"""The thread that sends what is spooled, so that a slow or absent server never delays the watching."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import httpx

from probes.pace import Backoff
from probes.records import Reply
from probes.shipper import ShipResult, ship_pending
from probes.spool import Spool

log = logging.getLogger(__name__)

BUDGET_S = 5.0
"""How long one round of sending may take."""
DRAIN_S = 3.0
"""How long stopping waits for the server to take what is left; the rest stays in the spool."""
RETRY_S = 5.0
"""After a round that failed for a reason nobody thought of."""
SHORTEST_WAIT_S = 0.05
IDLE_S = 30.0
"""A node without ranks sends a sign of life this often."""


class Sender:
    """Sends while it runs, and says once what keeps it."""

    def __init__(self, client: httpx.Client, spool: Spool, on_reply: Callable[[bytes, Reply], None]) -> None:
        """``client`` is closed with :meth:`stop`. ``on_reply``: called in the sending thread with each batch that
        was taken and the server's reply."""
        self._client = client
        self._spool = spool
        self._on_reply = on_reply
        self._backoff = Backoff()
        self._wake = threading.Event()
        self._stop = False
        self._refusal = ""
        self._spooled_at = 0.0
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self.hindrance = ""
        """What keeps batches on this node, in words; empty when nothing does."""
        self.counts = {"stored": 0, "duplicate": 0}
        """Batches by the server's answer, since the start."""

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is something to send."""
        self._spooled_at = time.monotonic()
        self._wake.set()

    def due(self) -> bool:
        """Whether nothing was spooled for so long that the server should hear from this node."""
        return time.monotonic() - self._spooled_at > IDLE_S

    def stop(self) -> None:
        """Send what is left, for a while, and end."""
        self._stop = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._client.close()

    def _run(self) -> None:
        wait_s: float | None = None
        while not self._stop:
            self._wake.wait(wait_s)
            self._wake.clear()
            result = self._ship(BUDGET_S, self._backoff)
            # A node without ranks spools nothing for long, and what waits must not wait for that.
            wait_s = (
                RETRY_S if result is None else max(result.wait_s, SHORTEST_WAIT_S) if result.left else None
            )
        self._drain()

    def _drain(self) -> None:
        """What is left goes now or, when the server is away, not: whatever was agreed on waiting before."""
        end, backoff = time.monotonic() + DRAIN_S, Backoff()
        while (left_s := end - time.monotonic()) > 0:
            result = self._ship(left_s, backoff)
            if result is None or result.error or not result.left:
                return
            time.sleep(min(max(result.wait_s, SHORTEST_WAIT_S), left_s))

    def _ship(self, budget_s: float, backoff: Backoff) -> ShipResult | None:
        try:
            result = ship_pending(
                self._spool, self._client, backoff, budget_s=budget_s, on_reply=self._on_reply
            )
        except Exception:  # this thread must live as long as the agent: batches wait on the disk meanwhile
            log.exception("sending failed; it is tried again")
            return None
        self._say(result)
        return result

    def _say(self, result: ShipResult) -> None:
        """Each trouble once, and its end."""
        self.counts = {
            "stored": self.counts["stored"] + result.stored,
            "duplicate": self.counts["duplicate"] + result.duplicates,
        }
        if result.refused_words and result.refused_words != self._refusal:
            self._refusal = result.refused_words
            log.error(
                "the server refuses a batch for good (it is in the spool's refused/): %s", self._refusal
            )
        if result.error != self.hindrance:
            self.hindrance = result.error
            if result.error:
                log.warning("%d batches wait in the spool: %s", result.left, result.error)
            else:
                log.warning("the server takes batches again")
