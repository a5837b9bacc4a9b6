"""What Slack sends to the app, whichever way: an acknowledgement within 3 s, events again when none comes.

The two ways are `socket_mode` and `http_mode`. What is said here holds for both
(docs.slack.dev/apis/events-api: an event comes at once, again right after, after one and after five minutes).
"""

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from bot.workspace.clock import Clock
from bot.workspace.world import Json

ACKNOWLEDGE_WITHIN = 3.0  # seconds, for everything that is sent
# Seconds before the second, third and fourth delivery of an event that nobody acknowledged.
RETRIES = (0.0, 60.0, 300.0)

Kind = Literal["events_api", "slash_commands", "interactive"]


class Delivery(msgspec.Struct, frozen=True):
    """How something that was sent fared: acknowledged, with the answer's payload if it had one; or not, and
    then `error` is what a person is told, and `reason` what a redelivery says about it.

    `no_retry`: the app asked not to get this event again.
    """

    envelope_id: str
    acknowledged: bool
    payload: Json | None = None
    error: Literal["", "operation_timeout", "dispatch_failed"] = ""
    reason: str = ""
    no_retry: bool = False


Settled = Callable[[Delivery], None]


class Way(Protocol):
    """A way to the app."""

    @property
    def pending(self) -> int:
        """How much waits for its acknowledgement now."""

    def deliver(
        self, kind: Kind, payload: Json, settled: Settled, *, attempt: int, reason: str, copies: int
    ) -> "asyncio.Future[Delivery]":
        """Send something once (or, as a fault, `copies` times at once); what came of it is there after at
        most 3 s of the workspace's clock.

        `settled` is called at the very moment that decides it, the future's waiters shortly after.
        """


class Dispatch:
    """Sends by the way that is set: `way` may be put in at any time."""

    def __init__(self, clock: Clock, way: Way) -> None:
        self.way = way
        self._clock = clock
        self._held: list[Json] | None = None
        self._doubled = 0
        self._stopped = False

    def send(self, kind: Kind, payload: Json) -> "asyncio.Future[Delivery]":
        """Send a command or an interaction: once, since a person stands before it and can try again."""
        return self.way.deliver(kind, payload, lambda _: None, attempt=0, reason="", copies=self._copies())

    def event(self, payload: Json) -> None:
        """Send an event, and again up to three times while nobody acknowledges it."""
        if self._held is not None:
            self._held.append(payload)
        else:
            self._attempt(payload, 0, "")

    def double(self, times: int) -> None:
        """Send each of the next `times` payloads twice."""
        self._doubled += times

    def hold(self) -> None:
        """Keep events back until `release`."""
        self._held = self._held or []

    def release(self, *, newest_first: bool) -> None:
        """Send what was kept back, in its order or in the opposite one."""
        held, self._held = self._held or [], None
        for payload in reversed(held) if newest_first else held:
            self._attempt(payload, 0, "")

    def stop(self) -> None:
        """Send nothing again."""
        self._stopped = True

    def _copies(self) -> int:
        if not self._doubled:
            return 1
        self._doubled -= 1
        return 2

    def _attempt(self, payload: Json, attempt: int, reason: str) -> None:
        def settled(delivery: Delivery) -> None:
            if self._stopped or delivery.acknowledged or delivery.no_retry or attempt == len(RETRIES):
                return
            again = attempt + 1, delivery.reason
            self._clock.after(RETRIES[attempt], lambda: self._attempt(payload, *again))

        self.way.deliver(
            "events_api", payload, settled, attempt=attempt, reason=reason, copies=self._copies()
        )
