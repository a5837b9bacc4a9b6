"""What agents are still to do, and what came of it: between the store and the replies to batches."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from diagnosis.store import Store
from probes.records import Batch, Command

log = logging.getLogger(__name__)

READ_EVERY_S = 1.0
"""The store is asked this often at most, however many batches come."""
REMEMBERED = 10_000
"""Commands of which it is known to whom they were given, so that no node settles another's."""
_OUTCOMES = {"command-done": "done", "command-refused": "refused"}


class Pending:
    """Commands by node, from a store. One thread's at a time."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds."""
        self._store = store
        self._clock = clock
        self._read_at = float("-inf")
        self._pending: dict[str, list[Command]] = {}
        self._given: OrderedDict[str, str] = OrderedDict()

    def of(self, node: str, now_ns: int) -> list[Command]:
        """What ``node`` is still to do. ``now_ns`` is UTC. Raises ``StoreError``."""
        if self._clock() - self._read_at >= READ_EVERY_S:
            self._pending = self._store.pending_commands(now_ns)
            self._read_at = self._clock()
            for owner, commands in self._pending.items():
                for command in commands:
                    self._given[command.id] = owner
                    self._given.move_to_end(command.id)
            while len(self._given) > REMEMBERED:
                self._given.popitem(last=False)
        return self._pending.get(node, [])

    def settle(self, batch: Batch, now_ns: int) -> None:
        """Note the outcomes that a batch tells of; a second time changes nothing. Raises ``StoreError``."""
        told = [(event, _OUTCOMES[event.kind]) for event in batch.events if event.kind in _OUTCOMES]
        if not told:
            return
        self.of(batch.node, now_ns)
        for event, outcome in told:
            id_, _, words = event.detail.partition(" ")
            if self._given.get(id_) != batch.node:
                log.info("node %r tells of a command that it was not given", batch.node)
                continue
            at_ns = event.at_ns + batch.utc_offset_ns
            self._store.settle_command(id_, outcome, words, at_ns)
            left = [command for command in self._pending.get(batch.node, []) if command.id != id_]
            self._pending[batch.node] = left
