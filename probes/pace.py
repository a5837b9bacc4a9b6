"""When an agent may send: waits after failures, what the server asks for, and the pace at which a spool is emptied.

A cluster's agents lose their server in one moment and must not come back in one. So every wait has a random part of
its own length's order, and an agent that comes back sends one batch, then ``CATCH_UP_PER_S`` at most: each of them
catches up with an outage in a third of its length, and all of them together never send more than four times what
they send every day.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
"""Waits double from the first to the longest while the server is away."""
LONGEST_ASKED_S = 600.0
"""A server that asks for a longer wait (a proxy's page of maintenance, a clock that is off) gets this one."""
CATCH_UP_PER_S = 4.0
BURST = 8
"""Batches that may go at once after a calm time: an interruption of some seconds is made up for immediately."""

Uniform = Callable[[float, float], float]


@dataclass
class Backoff:
    """When to try next, kept between calls. All instants are seconds of one clock that goes forward."""

    failures: int = 0
    next_try: float = 0.0
    error: str = ""
    """What keeps the batches here, in words."""
    _saved: float = BURST
    _saved_at: float = 0.0

    def allowance(self, now_s: float) -> int:
        """How many batches may be sent now."""
        if now_s < self.next_try:
            return 0
        self._saved = min(self._saved + max(0.0, now_s - self._saved_at) * CATCH_UP_PER_S, BURST)
        self._saved_at = now_s
        return int(self._saved)

    def wait_s(self, now_s: float) -> float:
        """Until the next batch may be sent; 0 when one may."""
        until_saved = self._saved_at + (1.0 - self._saved) / CATCH_UP_PER_S
        return max(0.0, self.next_try - now_s, until_saved - now_s)

    def accepted(self) -> None:
        """A batch was sent, and the server is there."""
        self.failures, self.next_try, self.error = 0, 0.0, ""
        self._saved -= 1.0

    def failed(self, words: str, now_s: float, uniform: Uniform, asked_s: float = 0.0) -> None:
        """A batch could not be sent, for this reason; the server asks to be left alone for ``asked_s``."""
        wait_s = min(FIRST_WAIT_S * 2.0**self.failures, LONGEST_WAIT_S)
        self.failures = min(self.failures + 1, 16)
        at_least = max(asked_s, wait_s / 2)
        self.next_try = now_s + at_least + uniform(0, max(asked_s, wait_s) / 2)
        self.error = words
        self._saved, self._saved_at = 1.0, self.next_try


def retry_after_s(value: str, date: str, now: datetime | None = None) -> float:
    """Seconds that a server asks to wait, from its Retry-After header (seconds or a date, RFC 9110 10.2.3), at most
    ``LONGEST_ASKED_S``; 0 when there is none or it is neither.

    A date is held against the server's own ``Date`` header, so that no clock needs to be right; without one,
    against ``now`` (UTC).
    """
    value = value.strip()
    if value.isascii() and value.isdecimal():
        return min(float(value[:10]), LONGEST_ASKED_S)
    until = _instant(value)
    since = _instant(date) or now or datetime.now(UTC)
    return min(max((until - since).total_seconds(), 0.0), LONGEST_ASKED_S) if until else 0.0


def _instant(value: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
