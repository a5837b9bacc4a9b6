"""HTTP mode: requests to the app's Request URL, signed as Slack signs them.

Sources: docs.slack.dev/authentication/verifying-requests-from-slack (`v0` signatures),
docs.slack.dev/apis/events-api (the challenge, retries and their headers, X-Slack-No-Retry), and
docs.slack.dev/interactivity/handling-user-interaction (the form's `payload` field).
"""

import asyncio
import hashlib
import hmac
import secrets
import ssl
import time
import uuid
from typing import Any
from urllib.parse import parse_qs, urlencode

import httpx
import msgspec

from bot.workspace.clock import Clock
from bot.workspace.delivery import ACKNOWLEDGE_WITHIN, Delivery, Kind, Settled
from bot.workspace.faults import Faults
from bot.workspace.world import Change, Json, World

_FORM = "application/x-www-form-urlencoded"
_STALE = 360  # seconds: over the five minutes that an app tolerates
Headers = list[tuple[bytes, bytes]]


class RequestUrlError(RuntimeError):
    """The app's Request URL did not answer the challenge as Slack wants it."""


class HttpMode:
    """The way to one Request URL. Timestamps are real time, whatever the workspace's clock says: the app that
    checks them lives in real time."""

    def __init__(self, world: World, clock: Clock, faults: Faults, url: str, secret: str) -> None:
        self._world = world
        self._clock = clock
        self._faults = faults
        self._url = url
        self._secret = secret
        # Not through a proxy, and no redirect is followed: what answers is the app itself.
        self._http = httpx.AsyncClient(trust_env=False, timeout=None)  # noqa: S113 - the clock keeps the time
        self._out: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, asyncio.Future[Delivery]] = {}

    @property
    def pending(self) -> int:
        """How many requests wait for their answer now."""
        return len(self._waiting)

    def deliver(
        self, kind: Kind, payload: Json, settled: Settled, *, attempt: int, reason: str, copies: int
    ) -> "asyncio.Future[Delivery]":
        """Send a request (see `delivery.Way`); of several copies, the first answer counts."""
        envelope_id = str(uuid.uuid4())
        result: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._waiting[envelope_id] = result
        tasks: list[asyncio.Task[None]] = []

        def settle(delivery: Delivery) -> None:
            if self._waiting.pop(envelope_id, None) is None:
                return
            forget()
            if not result.done():
                result.set_result(delivery)
            settled(delivery)
            self._world.tell(Change("delivery"))

        def expire() -> None:
            settle(_failed(envelope_id, "http_timeout"))
            for task in tasks:
                task.cancel()

        async def send() -> None:
            settle(await self._answer(envelope_id, kind, payload, attempt, reason))

        forget = self._clock.after(ACKNOWLEDGE_WITHIN, expire)
        for _ in range(copies):
            task = asyncio.create_task(send())
            self._out.add(task)
            task.add_done_callback(self._out.discard)
            tasks.append(task)
        return result

    async def verify(self) -> None:
        """Send the challenge that Slack sends when a Request URL is set.

        Raises: RequestUrlError, with what came back.
        """
        challenge = secrets.token_urlsafe(36)
        body = {"token": secrets.token_hex(12), "challenge": challenge, "type": "url_verification"}
        content = msgspec.json.encode(body)
        try:
            headers = self._headers("application/json", content)
            async with asyncio.timeout(ACKNOWLEDGE_WITHIN):
                answer = await self._http.post(self._url, content=content, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise RequestUrlError(
                f"{self._url} did not answer the challenge within {ACKNOWLEDGE_WITHIN:g} s "
                f"({type(error).__name__}: {error})"
            ) from error
        if answer.status_code != 200 or challenge != _challenge_in(answer):
            said = answer.text[:200]
            raise RequestUrlError(
                f"{self._url} did not give back the value of the challenge parameter: "
                f"HTTP {answer.status_code}, {said!r}"
            )

    async def stop(self) -> None:
        """Give up the requests that are still out."""
        for task in tuple(self._out):
            task.cancel()
        await asyncio.gather(*self._out, return_exceptions=True)
        for envelope_id, result in self._waiting.items():
            if not result.done():
                result.set_result(_failed(envelope_id, "http_timeout"))
        self._waiting.clear()
        await self._http.aclose()

    async def _answer(
        self, envelope_id: str, kind: Kind, payload: Json, attempt: int, reason: str
    ) -> Delivery:
        if kind == "events_api":
            media, content = "application/json", msgspec.json.encode(payload)
        else:
            json = msgspec.json.encode(payload).decode()
            fields = payload if kind == "slash_commands" else {"payload": json}
            media, content = _FORM, urlencode(fields).encode()
        headers = self._headers(media, content)
        if attempt:
            headers += [
                (b"X-Slack-Retry-Num", str(attempt).encode()),
                (b"X-Slack-Retry-Reason", reason.encode()),
            ]
        try:
            answer = await self._http.post(self._url, content=content, headers=headers)
        except httpx.ConnectError as error:
            tls = isinstance(error.__cause__, ssl.SSLError) or "SSL" in str(error)
            return _failed(envelope_id, "ssl_error" if tls else "connection_failed")
        except httpx.RequestError:
            return _failed(envelope_id, "connection_failed")
        # An event may be answered with any 2xx, a person's doing with 200 alone.
        if not (answer.is_success if kind == "events_api" else answer.status_code == 200):
            no_retry = answer.headers.get("X-Slack-No-Retry") == "1"
            return msgspec.structs.replace(_failed(envelope_id, "http_error"), no_retry=no_retry)
        return Delivery(envelope_id, acknowledged=True, payload=_payload(answer, kind))

    def _headers(self, media: str, content: bytes) -> Headers:
        bad = self._faults.take_signature()
        timestamp = str(int(time.time()) - (_STALE if bad == "stale" else 0))
        if bad == "no_number":
            timestamp = "yesterday"
        signature = sign(self._secret + ("x" if bad == "wrong" else ""), timestamp, content)
        headers = [
            (b"User-Agent", b"Slackbot 1.0 (+https://api.slack.com/robots)"),
            (b"Accept", b"application/json,*/*"),
            (b"Content-Type", media.encode()),
        ]
        if bad == "missing":
            return headers
        shown = "v0=ü".encode("latin-1") if bad == "not_ascii" else signature.encode()
        return [
            *headers,
            (b"X-Slack-Request-Timestamp", timestamp.encode()),
            (b"X-Slack-Signature", shown),
        ]


def sign(secret: str, timestamp: str, content: bytes) -> str:
    """Slack's signature of a request's body."""
    base = b"v0:" + timestamp.encode() + b":" + content
    return "v0=" + hmac.new(secret.encode(), base, hashlib.sha256).hexdigest()


def _failed(envelope_id: str, reason: str) -> Delivery:
    """A person is told of a deadline and of a failure; a redelivery says more exactly what happened."""
    late = reason == "http_timeout"
    return Delivery(
        envelope_id,
        acknowledged=False,
        error="operation_timeout" if late else "dispatch_failed",
        reason=reason,
    )


def _payload(answer: httpx.Response, kind: Kind) -> Json | None:
    """What an answer says: JSON, or for a command also plain text."""
    if kind == "events_api" or not answer.content.strip():
        return None
    if "json" in answer.headers.get("content-type", ""):
        try:
            payload: Any = answer.json()
        except ValueError:
            return None
        return payload if isinstance(payload, dict) and payload else None
    return {"text": answer.text} if kind == "slash_commands" else None


def _challenge_in(answer: httpx.Response) -> str:
    """The challenge in one of the three forms that Slack takes: plain text, a form, JSON."""
    media = answer.headers.get("content-type", "")
    if "json" in media:
        try:
            said = answer.json()
        except ValueError:
            return ""
        return str(said.get("challenge")) if isinstance(said, dict) else ""
    if _FORM in media:
        return parse_qs(answer.text).get("challenge", [""])[0]
    return answer.text.strip()
