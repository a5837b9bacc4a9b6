"""Whether a request was made by Slack: its signature, version v0.

The scheme is that of docs.slack.dev/authentication/verifying-requests-from-slack. Bolt's own check answers a
timestamp that is no number, and a signature beyond ASCII, with a traceback, and logs the body of what it refuses.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping

TIMESTAMP = "x-slack-request-timestamp"
SIGNATURE = "x-slack-signature"
APART_S = 300.0
"""How far a request's time may be from ours, in seconds: an old one may be a recording."""

_SECONDS = re.compile(r"[0-9]{1,12}")
_V0 = re.compile(r"v0=[0-9a-f]{64}")


class NotSlackError(ValueError):
    """A request that Slack did not make, as far as can be told. ``reason`` is one word, the message says more."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
        self.reason = reason


def check_headers(headers: Mapping[str, str], now: float) -> None:
    """Refuse what cannot be Slack's whatever its body says; ``headers`` has lower-case names, ``now`` is UTC.

    Raises :class:`NotSlackError`.
    """
    timestamp, signature = headers.get(TIMESTAMP, ""), headers.get(SIGNATURE, "")
    if not timestamp or not signature:
        raise NotSlackError("unsigned", "it has no signature: only Slack's requests are taken here")
    if not _SECONDS.fullmatch(timestamp):
        raise NotSlackError("timestamp", "its timestamp is not a number of seconds")
    apart = int(timestamp) - now
    if abs(apart) > APART_S:
        side = "ahead of" if apart > 0 else "behind"
        raise NotSlackError(
            "stale",
            f"its timestamp is {abs(apart):.0f} s {side} this machine's clock, and "
            f"at most {APART_S:g} s are taken: if that goes for all of Slack's requests, set the clock (NTP)",
        )
    if not _V0.fullmatch(signature):
        raise NotSlackError("signature", "its signature is not of the form v0=…")


def check_body(secret: str, headers: Mapping[str, str], body: bytes) -> None:
    """Refuse a body that ``secret`` did not sign; for headers that :func:`check_headers` let pass.

    Raises :class:`NotSlackError`.
    """
    if not hmac.compare_digest(sign(secret, headers[TIMESTAMP], body), headers[SIGNATURE]):
        raise NotSlackError(
            "signature",
            "its signature is not made with our signing secret: if Slack sent it, take the “Signing Secret” from "
            "“Basic Information” of the app’s page as SYSOM_SLACK_SIGNING_SECRET",
        )


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """The signature of a body that is sent at ``timestamp``, in seconds since 1970."""
    said = b"v0:" + timestamp.encode() + b":" + body
    return "v0=" + hmac.new(secret.encode(), said, hashlib.sha256).hexdigest()
