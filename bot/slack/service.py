"""What the bot asks of the rest of sysom: one protocol, so that it knows neither store nor engine."""

from __future__ import annotations

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
