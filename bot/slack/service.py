"""What the bot asks of the rest of sysom: one protocol, so that it knows neither store nor engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from diagnosis.store import JobInfo
from diagnosis.verdict import Verdict


class Diagnoser(Protocol):
    """Answers questions about jobs. Both calls keep heavy work off the event loop."""

    async def diagnose(self, job: str) -> Verdict:
        """The verdict on a job, now.

        Raises ``diagnosis.store.UnknownJob`` and ``diagnosis.store.StoreError``.
        """

    async def jobs(self) -> list[JobInfo]:
        """All jobs, the one with the newest data first. Raises ``diagnosis.store.StoreError``."""


class Meter(Protocol):
    """Who wants to know how the bot does."""

    slack_queue: Callable[[], int]
    """Set by the bot: how many messages wait to be sent."""

    def acknowledged(self, seconds: float) -> None:
        """A request of Slack was acknowledged so long after it came."""
