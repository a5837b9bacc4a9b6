"""The Web API's front door: reads a call, checks its token, finds the method and shapes the answer.

What is the same for all methods stands in docs.slack.dev/apis/web-api: form and JSON bodies, the bearer
token, `{"ok": false, "error": …}` with status 200, and 429 with `Retry-After`.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bot.workspace.schema import Problem
from bot.workspace.socket_mode import SocketMode
from bot.workspace.world import Channel, Json, World

T = TypeVar("T")
SCOPES = (
    "app_mentions:read,channels:history,channels:join,channels:read,chat:write,commands,"
    "im:history,im:read,im:write,reactions:write,users:read"
)


class RefusedError(Exception):
    """A call that Slack answers with `ok: false`: its error code, and what stands beside it."""

    def __init__(self, error: str, **more: Any) -> None:
        super().__init__(error)
        self.answer: Json = {"ok": False, "error": error, **more}


def refuse_arguments(*messages: str) -> RefusedError:
    """Arguments that are missing or malformed."""
    return RefusedError(
        "invalid_arguments", response_metadata={"messages": [f"[ERROR] {m}" for m in messages]}
    )


def refuse_blocks(problems: Sequence[Problem]) -> RefusedError:
    """Blocks that break Slack's rules, in Slack's shape."""
    errors = [str(problem) for problem in problems]
    messages = [f"[ERROR] {error}" for error in errors]
    return RefusedError("invalid_blocks", errors=errors, response_metadata={"messages": messages})


class Call(msgspec.Struct, frozen=True):
    """One call that came with a valid token."""

    world: World
    sockets: SocketMode
    page_url: str
    arguments: Json

    def text(self, name: str) -> str:
        """An argument as a string, empty when it is not given."""
        value = self.arguments.get(name)
        return "" if value is None else value if isinstance(value, str) else str(value)

    def required(self, name: str) -> str:
        """An argument that has to be there."""
        value = self.text(name)
        if not value:
            raise refuse_arguments(f"missing required field: {name}")
        return value

    def channel(self, name: str = "channel", *, by_name: bool = False) -> Channel:
        """The channel that an argument names by its id, or also by its name where a method takes that."""
        value = self.required(name)
        found = self.world.channel(value) if by_name else self.world.channels.get(value)
        if found is None or (found.direct and self.world.bot.id not in found.members):
            raise RefusedError("channel_not_found")
        return found

    def flag(self, name: str, default: bool) -> bool:
        """An argument that is true or false."""
        value = self.text(name).lower()
        return value in ("true", "1") if value else default


Method = Callable[[Call], Json]


def page_of(call: Call, items: Sequence[T], *, default: int = 100, most: int = 1000) -> tuple[list[T], Json]:
    """One page of a list by `limit` and `cursor`, with the `response_metadata` that leads to the next."""
    limit = call.text("limit") or str(default)
    if not limit.isdecimal() or not 1 <= int(limit) <= most:
        raise RefusedError("invalid_limit")
    try:
        start = base64.b64decode(call.text("cursor"), validate=True) or b"0"
    except binascii.Error:
        raise RefusedError("invalid_cursor") from None
    if not start.isdigit():
        raise RefusedError("invalid_cursor")
    first, end = int(start), int(start) + int(limit)
    cursor = base64.b64encode(str(end).encode()).decode() if end < len(items) else ""
    return list(items[first:end]), {"next_cursor": cursor}


class RateLimits:
    """Faults on demand: the next calls of a method are answered with 429."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[int, int]] = {}

    def set(self, method: str, *, times: int, retry_after: int) -> None:
        """Answer the next `times` calls of `method` with 429 and `Retry-After: retry_after` (seconds)."""
        self._left[method] = (times, retry_after)

    def take(self, method: str) -> int | None:
        """Seconds to wait when this call is to be refused, or None."""
        times, retry_after = self._left.get(method, (0, 0))
        if times <= 0:
            return None
        self._left[method] = (times - 1, retry_after)
        return retry_after


async def answer(
    request: Request,
    call: Callable[[Json], Call],
    methods: dict[str, Method],
    tokens: dict[str, str],
    limits: RateLimits,
) -> Response:
    """Answer one HTTP request to `/api/METHOD`. `tokens` maps `xoxb` and `xapp` to the two valid tokens."""
    name = request.path_params["method"]
    retry_after = limits.take(name)
    if retry_after is not None:
        return JSONResponse({"ok": False, "error": "ratelimited"}, 429, {"Retry-After": str(retry_after)})
    try:
        arguments = await _arguments(request)
        method = methods.get(name)
        if method is None:
            raise RefusedError("unknown_method", req_method=name)
        if name != "api.test":
            _check_token(request, arguments, name, tokens)
        body = {"ok": True, **method(call(arguments))}
    except RefusedError as refused:
        body = refused.answer
    return JSONResponse(body, headers={"x-oauth-scopes": SCOPES, "x-accepted-oauth-scopes": ""})


async def _arguments(request: Request) -> Json:
    arguments: Json = dict(request.query_params)
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "GET" or not body:
        return arguments
    if kind == "application/json":
        try:
            decoded = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            raise RefusedError("invalid_json") from None
        if not isinstance(decoded, dict):
            raise RefusedError("json_not_object")
        decoded.pop("token", None)  # with a JSON body only the header counts
        return arguments | decoded
    if kind == "application/x-www-form-urlencoded":
        return arguments | dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
    if kind == "multipart/form-data":
        async with request.form() as form:
            return arguments | {key: value for key, value in form.items() if isinstance(value, str)}
    raise RefusedError("invalid_post_type")


def _check_token(request: Request, arguments: Json, name: str, tokens: dict[str, str]) -> None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = str(arguments.get("token", ""))
    if not token:
        raise RefusedError("not_authed")
    if token not in tokens.values():
        raise RefusedError("invalid_auth")
    if token != tokens["xapp" if name == "apps.connections.open" else "xoxb"]:
        raise RefusedError("not_allowed_token_type")
