"""One call to Slack, and the three ways in which it can fail.

The SDK has one exception for all of them, and for what no Slack ever sent (a proxy's page, a reset).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

TIMEOUT_S = 20

Call = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""``(method, arguments) → answer``, as in ``("chat.postMessage", {...})``. Raises :class:`CallError`."""

TRANSIENT = frozenset(
    {"internal_error", "fatal_error", "service_unavailable", "request_timeout", "team_added_to_org"}
)
"""Slack's words for a trouble of its own, that passes."""


class CallError(RuntimeError):
    """Base of what a call raises."""


class RateLimitedError(CallError):
    """Too fast: nothing was done; again after ``seconds``."""

    def __init__(self, method: str, seconds: float) -> None:
        super().__init__(f"{method}: Slack asks for {seconds:g} s of silence")
        self.seconds = seconds


class UnavailableError(CallError):
    """Slack, or the way to it, fails just now. Whether the call did its work is not known."""


class RefusedError(CallError):
    """Slack understood and said no; saying it again is no use. ``error`` is Slack's code."""

    def __init__(self, method: str, error: str, more: str = "") -> None:
        super().__init__(f"{method}: {error}{f' ({more})' if more else ''}")
        self.error = error


def web_client(token: str | None, base_url: str | None) -> AsyncWebClient:
    """A client that never retries by itself: who calls decides when."""
    if base_url is None:
        return AsyncWebClient(token=token, timeout=TIMEOUT_S, retry_handlers=[])
    client = AsyncWebClient(token=token, base_url=base_url, timeout=TIMEOUT_S, retry_handlers=[])
    client.proxy = None  # the SDK takes it from the environment, and the way to this machine is none
    return client


def through(client: AsyncWebClient) -> Call:
    """Calls of this client as a :data:`Call`."""

    async def call(method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            response = await client.api_call(method, json=dict(arguments))
        except SlackApiError as error:
            raise _translated(method, error.response) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise UnavailableError(f"{method}: {type(error).__name__}: {error}") from error
        return response.data if isinstance(response.data, dict) else {}

    return call


def _translated(method: str, response: Any) -> CallError:
    status = int(getattr(response, "status_code", None) or getattr(response, "status", None) or 0)
    data = getattr(response, "data", None)
    data = data if isinstance(data, dict) else {}
    error = str(data.get("error", ""))
    if status == 429 or error in ("ratelimited", "rate_limited"):
        return RateLimitedError(method, _retry_after(getattr(response, "headers", {})))
    if status >= 500 or not error or error in TRANSIENT:
        return UnavailableError(f"{method}: HTTP {status} {error}".rstrip())
    messages = data.get("response_metadata", {}).get("messages", []) or data.get("errors", [])
    return RefusedError(method, error, "; ".join(map(str, messages)))


def _retry_after(headers: Mapping[str, Any]) -> float:
    for key, value in headers.items():
        if key.lower() == "retry-after":
            try:
                return max(float(value[0] if isinstance(value, list) else value), 0.0)
            except ValueError:
                break
    return 30.0
