"""The way of a batch into the store: who sends it, is it sound, keep it; and a count of everything refused.

Knows nothing of HTTP but the status numbers, so that a file or a test can use it as the web server does.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from diagnosis.store import Store, StoreError
from diagnosis.store.oddities import JUMP_NS
from probes import records
from probes.records import Batch, RecordError, Reply

_STATUS = {"too_large": 413, "bomb": 413, "other_schema": 409}
"""HTTP status by ``RecordError.reason``; 400 for all others."""
RETRY_AFTER_S = 10
"""What agents are told when the store fails: a full disk or a busy file does not change within a second."""


class TokensError(ValueError):
    """Tokens that do not tell nodes apart; the message names the nodes and no token."""


class Refusal(Exception):
    """A batch that was not taken. ``reason`` counts it, the message says what to do."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


class Counts:
    """How often what happened. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(sorted(self._counts.items()))


class Ingest:
    """Takes batches from nodes that have a token.

    ``tokens``: node name → token, one per node. Raises :class:`TokensError` for an empty token or one that two
    nodes share.
    """

    def __init__(
        self, store: Store, tokens: Mapping[str, str], *, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        owners: dict[str, str] = {}
        for node, token in tokens.items():
            if not token:
                raise TokensError(f"the token of node {node!r} is empty: give it one, or leave the node out")
            if token in owners:
                raise TokensError(f"nodes {owners[token]!r} and {node!r} share a token: give each its own")
            owners[token] = node
        self._store = store
        self._owners = [(token.encode(), node) for token, node in owners.items()]
        self._clock_ns = clock_ns
        self._offsets: dict[str, tuple[str, int]] = {}
        self.counts = Counts()

    def authorise(self, header: str | None) -> str:
        """The node whose token an ``Authorization`` header holds. Raises :class:`Refusal` (401)."""
        scheme, _, token = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise self.refused(
                401,
                "unauthorised",
                "no token: give the agent (SYSOM_NODE_TOKEN) the one that the server has for this node "
                "(SYSOM_NODE_TOKENS); it goes as 'Authorization: Bearer TOKEN'",
            )
        sent, owner = token.strip().encode(), None
        for known, node in self._owners:  # to the end, so that the time tells nothing
            if hmac.compare_digest(known, sent):
                owner = node
        if owner is None:
            raise self.refused(
                401,
                "unauthorised",
                "this token is not known: give the agent (SYSOM_NODE_TOKEN) the one that the server has for "
                "this node (SYSOM_NODE_TOKENS)",
            )
        return owner

    def accept(self, node: str, wire: bytes) -> Reply:
        """Store the batch that ``node`` sent. Blocks; safe from several threads.

        Raises :class:`Refusal`: 403 when the batch is another node's, 413 too large, 409 another schema, 400
        for anything else that is wrong with it, 503 when the store cannot keep it now.
        """
        try:
            batch = records.decode(wire)
        except RecordError as error:
            raise self.refused(_STATUS.get(error.reason, 400), error.reason, str(error)) from error
        if batch.node != node:
            raise self.refused(
                403,
                "wrong_node",
                f"this token is node {node!r}'s, the batch says it is from {batch.node[:100]!r}: use that "
                "node's own token, or correct the agent's node name",
            )
        try:
            stored = self._store.add(batch, self._clock_ns())
        except StoreError as error:
            raise self.refused(503, "store", str(error), retry_after_s=RETRY_AFTER_S) from error
        self.counts.add("stored" if stored else "duplicate")
        if stored:
            self._watch_clock(batch)
        return Reply(stored=stored)

    def refused(self, status: int, reason: str, message: str, retry_after_s: int | None = None) -> Refusal:
        """A counted refusal, to be raised."""
        self.counts.add(f"refused_{reason}")
        return Refusal(status, reason, message, retry_after_s)

    def _watch_clock(self, batch: Batch) -> None:
        boot, offset = self._offsets.get(batch.node, (batch.boot_id, batch.utc_offset_ns))
        if boot == batch.boot_id and abs(batch.utc_offset_ns - offset) > JUMP_NS:
            self.counts.add("clock_jumped")
        self._offsets[batch.node] = batch.boot_id, batch.utc_offset_ns
