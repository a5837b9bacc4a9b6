"""HTTP mode: Slack's requests come to ``/slack/events`` of our server, are checked there, and reach the bot.

Whoever reaches the server can send here, so nothing is read, kept or logged of a request before its headers are
plausible, and nothing is parsed before its signature holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
from slack_bolt.async_app import AsyncApp, AsyncBoltRequest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from bot.slack.signature import NotSlackError, check_body, check_headers
from bot.slack.tokens import SlackRefused

log = logging.getLogger(__name__)

PATH = "/slack/events"
"""Commands, buttons and events all come here."""
MAX_BYTES = 2 * 1024 * 1024
"""The largest body: a click carries its message, of 50 blocks at 3,000 characters, percent-encoded."""
BODY_S = 3.0
"""A body that takes longer is of no use: Slack waits no longer for the acknowledgement."""
MAX_READING = 64
"""Requests being read at a time: with 2 MiB each at most 128 MiB."""
SAY_EVERY_S = 60.0
"""Refusals for one reason are logged this often; how many there were is said then."""
_ORDINARY = frozenset({"no_bot", "disconnected"})
"""What happens at every start and stop: Slack sends it again, or a person does."""


class Inbound:
    """The door: it exists as long as the server, and is open while a bot runs. Else it says 503."""

    def __init__(self, signing_secret: str, now: Callable[[], float] = time.time) -> None:
        """``now`` is UTC in seconds. Raises :class:`SlackRefused` for a secret that can be none."""
        secret = signing_secret.strip()
        if not secret or not secret.isascii() or secret.startswith(("xoxb-", "xapp-")):
            what = "is empty" if not secret else "is not a signing secret"
            raise SlackRefused(
                f"SYSOM_SLACK_SIGNING_SECRET {what}, and HTTP mode needs one to tell Slack's requests from others: "
                "take the “Signing Secret” from “Basic Information” of the app’s page"
            )
        self.refused: Counter[str] = Counter()
        """Requests turned away, by reason, since the start."""
        self._secret = secret
        self._now = now
        self._app: AsyncApp | None = None
        self._reading = 0
        self._said: dict[str, tuple[float, int]] = {}

    def route(self) -> Route:
        """The address, for the server to mount."""
        return Route(PATH, self._take, methods=["POST"])

    @contextlib.contextmanager
    def open_for(self, app: AsyncApp) -> Iterator[None]:
        """Let requests through to this app."""
        if self._app is not None:
            raise RuntimeError("one bot already answers at this address")
        self._app = app
        try:
            yield
        finally:
            self._app = None

    async def _take(self, request: Request) -> Response:
        try:
            check_headers(request.headers, self._now())
        except NotSlackError as error:
            return self._refuse(401, error.reason, str(error))
        if self._reading >= MAX_READING:
            return self._refuse(503, "busy", "too many requests at a time", retry_after_s=1)
        self._reading += 1
        try:
            body = await _body(request)
        except TimeoutError:
            return self._refuse(408, "slow", f"its body did not arrive within {BODY_S:g} s")
        except ClientDisconnect:
            return self._refuse(400, "disconnected", "its sender went away while it sent")
        finally:
            self._reading -= 1
        if body is None:
            return self._refuse(413, "too_large", f"its body has more than {MAX_BYTES} bytes")
        try:
            check_body(self._secret, request.headers, body)
        except NotSlackError as error:
            return self._refuse(401, error.reason, str(error))
        return await self._hand_over(request, body)

    async def _hand_over(self, request: Request, body: bytes) -> Response:
        app = self._app
        if app is None:
            return self._refuse(503, "no_bot", "the bot is starting or stopping", retry_after_s=5)
        try:
            # No other header is signed, and Bolt would follow some.
            kind = request.headers.get("content-type", "")
            asked = AsyncBoltRequest(body=body.decode(), headers={"content-type": kind})
        except Exception as error:  # of which kind depends on how the JSON differs from Slack's
            words = f"its body is neither a form nor an object as Slack sends them ({type(error).__name__})"
            return self._refuse(400, "malformed", words)
        answer = await app.async_dispatch(asked)
        return Response(answer.body, answer.status, answer.first_headers())

    def _refuse(self, status: int, reason: str, words: str, *, retry_after_s: int | None = None) -> Response:
        """An answer in words, and a line in the log: of all that the request holds, neither shows anything."""
        self.refused[reason] += 1
        at, count = self._said.get(reason, (float("-inf"), 0))
        if time.monotonic() - at >= SAY_EVERY_S:
            before = f" ({self.refused[reason] - count - 1} more since this was last said)" if count else ""
            level = logging.INFO if reason in _ORDINARY else logging.WARNING
            log.log(level, "a request to %s was refused: %s%s", PATH, words, before)
            self._said[reason] = (time.monotonic(), self.refused[reason])
        headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        if status in (408, 413):
            headers["Connection"] = "close"  # the rest of the body is not read
        content = {"ok": False, "reason": reason, "error": f"this request was refused: {words}"}
        return Response(msgspec.json.encode(content), status, headers, "application/json")


async def _body(request: Request) -> bytes | None:
    """The body; None when it is too large, whatever Content-Length says. Raises TimeoutError."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BYTES:
        return None
    body = bytearray()
    async with asyncio.timeout(BODY_S):
        async for part in request.stream():
            body += part
            if len(body) > MAX_BYTES:
                return None
    return bytes(body)
