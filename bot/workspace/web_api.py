"""The Web API's front door: reads a call, checks its token and scope, finds the method and shapes the answer.

What is the same for all methods stands in docs.slack.dev/apis/web-api: form and JSON bodies, the bearer
token, `{"ok": false, "error": …}` with status 200, and 429 with `Retry-After`.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bot.workspace import scopes
from bot.workspace.bodies import Body, read_body
from bot.workspace.faults import Faults, too_fast
from bot.workspace.files import Files
from bot.workspace.pace import Pace
from bot.workspace.refusals import RefusedError, refuse_arguments
from bot.workspace.socket_mode import SocketMode
from bot.workspace.views import Views
from bot.workspace.world import Channel, Json, World

T = TypeVar("T")
_FREE = frozenset({"api.test"})  # no token
_FOR_THE_APP = "apps.connections.open"


class Here(msgspec.Struct, frozen=True):
    """What the methods work on."""

    world: World
    files: Files
    views: Views
    sockets: SocketMode
    page_url: Callable[[], str]


class Call(msgspec.Struct, frozen=True):
    """One call that may be made: where, with which arguments, and whether they came as JSON."""

    here: Here
    arguments: Json
    json: bool = False

    @property
    def world(self) -> World:
        return self.here.world

    @property
    def files(self) -> Files:
        return self.here.files

    @property
    def views(self) -> Views:
        return self.here.views

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
        found = self.find(self.required(name), by_name=by_name)
        if found is None:
            raise RefusedError("channel_not_found")
        return found

    def find(self, value: str, *, by_name: bool = False) -> Channel | None:
        """A channel that the app may know of."""
        found = self.world.channel(value) if by_name else self.world.channels.get(value)
        if found is None or ((found.direct or found.private) and self.world.bot.id not in found.members):
            return None
        return found

    def flag(self, name: str, default: bool) -> bool:
        """An argument that is true or false."""
        value = self.text(name).lower()
        return value in ("true", "1") if value else default


Method = Callable[[Call], Json]


def page_of(call: Call, items: Sequence[T], *, default: int = 100, most: int = 1000) -> tuple[list[T], Json]:
    """One page of a list by `limit` and `cursor`, with the `response_metadata` that leads to the next."""
    limit = call.text("limit") or str(default)
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:9]) <= most:
        raise RefusedError("invalid_limit")
    try:
        start = base64.b64decode(call.text("cursor"), validate=True) or b"0"
    except (binascii.Error, ValueError):
        raise RefusedError("invalid_cursor") from None
    if not start.isdigit() or len(start) > 9:
        raise RefusedError("invalid_cursor")
    first, end = int(start), int(start) + int(limit)
    cursor = base64.b64encode(str(end).encode()).decode() if end < len(items) else ""
    return list(items[first:end]), {"next_cursor": cursor}


class FrontDoor:
    """Answers calls. `tokens` maps `xoxb` and `xapp` to the two valid tokens; `granted` are the scopes of the
    first; `pace` holds calls to Slack's rates, where it is given."""

    def __init__(
        self,
        here: Here,
        methods: dict[str, Method],
        tokens: dict[str, str],
        granted: frozenset[str],
        faults: Faults,
        pace: Pace | None,
    ) -> None:
        self._here = here
        self._methods = methods
        self._tokens = tokens
        self._granted = granted
        self._faults = faults
        self._pace = pace

    async def answer(self, request: Request) -> Response:
        """Answer one HTTP request to `/api/METHOD`."""
        return await self._faults.around(request.path_params["method"], request, self._answer)

    async def _answer(self, request: Request) -> Response:
        name = request.path_params["method"]
        body = Body({})
        needed: tuple[str, ...] = ()
        try:
            body = await read_body(request)
            method = self._methods.get(name)
            if method is None:
                raise RefusedError("unknown_method", req_method=name)
            self._check_token(request, body, name)
            needed = scopes.needed(name, body.arguments, self._kind(body.arguments))
            self._check_scopes(needed)
            wait = None if self._pace is None else self._pace.take(name, body.arguments)
            if wait is not None:
                return too_fast(wait)
            said = {"ok": True, **method(Call(self._here, body.arguments, body.json))}
        except RefusedError as refused:
            said = refused.answer
        headers = {
            "x-oauth-scopes": ",".join(sorted(self._granted)),
            "x-accepted-oauth-scopes": ",".join(needed),
        }
        return JSONResponse(_warned(said, body.warning), headers=headers)

    def _check_token(self, request: Request, body: Body, name: str) -> None:
        if name in _FREE:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            # The token that opens connections is taken from the header alone.
            token = "" if name == _FOR_THE_APP else str(body.arguments.get("token") or "")
        if not token:
            raise RefusedError("not_authed")
        if token not in self._tokens.values():
            raise RefusedError("invalid_auth")
        if token != self._tokens["xapp" if name == _FOR_THE_APP else "xoxb"]:
            raise RefusedError("not_allowed_token_type")

    def _check_scopes(self, needed: tuple[str, ...]) -> None:
        if self._granted.issuperset(needed):
            return
        provided = ",".join(sorted(self._granted))
        raise RefusedError("missing_scope", needed=",".join(needed), provided=provided)

    def _kind(self, arguments: Json) -> str:
        channel = self._here.world.channels.get(str(arguments.get("channel")))
        if channel is None:
            return "public_channel"
        return "im" if channel.direct else "private_channel" if channel.private else "public_channel"


def _warned(said: Json, warning: str) -> Json:
    """An answer with a warning beside what it says already."""
    if not warning:
        return said
    metadata = said.get("response_metadata", {})
    warnings = [*metadata.get("warnings", ()), warning]
    first = said.get("warning")
    return {
        **said,
        "warning": f"{first},{warning}" if first else warning,
        "response_metadata": {**metadata, "warnings": warnings},
    }
