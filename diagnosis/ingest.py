"""The way of a batch into the store: who sends it, is it sound, keep it, and what its node is to do next.

Knows nothing of HTTP but the status numbers, so that a file or a test can use it as the web server does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from diagnosis.commands import Pending
from diagnosis.orders import Signer
from diagnosis.store import Store, StoreError
from diagnosis.store.oddities import JUMP_NS
from diagnosis.tokens import Given, Tokens
from probes import codec
from probes.codec import RecordError
from probes.records import Batch, Reply

log = logging.getLogger(__name__)

_STATUS = {"too_large": 413, "bomb": 413, "other_schema": 409}
"""HTTP status by ``RecordError.reason``; 400 for all others."""
RETRY_AFTER_S = 10
"""What agents are told when the store fails: a full disk or a busy file does not change within a second."""


class Refusal(Exception):
    """A batch that was not taken. ``reason`` counts it, the message says what to do."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[Refusal], tuple[int, str, str, int | None]]:
        """Sent between processes with its parts."""
        return (Refusal, (self.status, self.reason, str(self), self.retry_after_s))


class Taken(NamedTuple):
    """A batch that is stored."""

    reply: Reply
    lag_s: float
    """From the batch's end, by its node's clock, to when it was stored; below 0 where that clock is ahead."""
    clock_jumped: bool
    """Its node's clock was set since the batch before."""


class Ingest:
    """Takes batches from nodes that have a token; with a ``signer`` replies carry commands.

    ``tokens``: see :class:`diagnosis.tokens.Tokens`; raises :class:`diagnosis.tokens.TokensError`.
    """

    def __init__(
        self,
        store: Store,
        tokens: Given | Tokens,
        *,
        signer: Signer | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokens = tokens if isinstance(tokens, Tokens) else Tokens(tokens)
        self._store = store
        self._signer = signer
        self._pending = Pending(store, clock) if signer is not None else None
        self._clock_ns = clock_ns
        self._offsets: dict[str, tuple[str, int]] = {}

    def authorise(self, header: str | None) -> str:
        """The node whose token an ``Authorization`` header holds. Raises :class:`Refusal` (401)."""
        return authorise(self.tokens, header)

    def accept(self, node: str, wire: bytes) -> Reply:
        """:meth:`take`, for callers that want the reply alone."""
        return self.take(node, wire).reply

    def take(self, node: str, wire: bytes) -> Taken:
        """Store the batch that ``node`` sent. Blocks; one thread's at a time.

        Raises :class:`Refusal`: 403 when the batch is another node's, 413 too large, 409 another schema, 400
        for anything else that is wrong with it, 503 when the store cannot keep it now.
        """
        try:
            batch = codec.decode(wire)
        except RecordError as error:
            raise Refusal(_STATUS.get(error.reason, 400), error.reason, str(error)) from error
        if batch.node != node:
            raise Refusal(
                403,
                "wrong_node",
                f"this token is node {node!r}'s, the batch says it is from {batch.node[:100]!r}: use that "
                "node's own token, or correct the agent's node name",
            )
        now_ns = self._clock_ns()
        try:
            stored = self._store.add(batch, now_ns)
            reply = self._reply(batch, stored, now_ns)
        except StoreError as error:
            raise Refusal(503, "store", str(error), retry_after_s=RETRY_AFTER_S) from error
        lag_s = (self._clock_ns() - batch.end_ns - batch.utc_offset_ns) / 1e9
        return Taken(reply, lag_s, stored and self._clock_jumped(batch))

    def _reply(self, batch: Batch, stored: bool, now_ns: int) -> Reply:
        if self._signer is None or self._pending is None:
            return Reply(stored=stored)
        # Of a batch that was there already, too: the server may have ended between the two. Where this fails,
        # the agent sends the batch again, so that no outcome is lost.
        self._pending.settle(batch, now_ns)
        return self._signer.reply(batch, stored=stored, commands=self._pending.of(batch.node, now_ns))

    def _clock_jumped(self, batch: Batch) -> bool:
        boot, offset = self._offsets.get(batch.node, (batch.boot_id, batch.utc_offset_ns))
        self._offsets[batch.node] = batch.boot_id, batch.utc_offset_ns
        return boot == batch.boot_id and abs(batch.utc_offset_ns - offset) > JUMP_NS


def authorise(tokens: Tokens, header: str | None) -> str:
    """The node whose token an ``Authorization`` header holds. Raises :class:`Refusal` (401)."""
    scheme, _, token = (header or "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise Refusal(
            401,
            "unauthorised",
            "no token: give the agent (SYSOM_NODE_TOKEN) the one that the server has for this node "
            "(SYSOM_NODE_TOKENS); it goes as 'Authorization: Bearer TOKEN'",
        )
    node = tokens.node_of(token)
    if node is None:
        raise Refusal(
            401,
            "unauthorised",
            "this token is not known: give the agent (SYSOM_NODE_TOKEN) the one that the server has for this "
            "node (SYSOM_NODE_TOKENS or the file SYSOM_NODE_TOKENS_FILE)",
        )
    return node
