"""The workspace as a whole: starting and stopping it, its addresses and tokens, its people, waiting."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from bot.web.listening import listening
from bot.workspace import chat, conversations
from bot.workspace.clock import Clock
from bot.workspace.events import SUBSCRIPTIONS, callback, events_of
from bot.workspace.page import Page
from bot.workspace.people import Person
from bot.workspace.plain import plain
from bot.workspace.response_urls import ResponseUrls
from bot.workspace.socket_mode import Disconnect, SocketMode
from bot.workspace.web_api import Call, RateLimits, answer
from bot.workspace.world import Change, Channel, Json, Message, World

T = TypeVar("T")
METHODS = {**conversations.METHODS, **chat.METHODS}


class Workspace:
    """A local Slack workspace with one app in it; runs in this event loop for the length of an `async with`.

    ```python
    async with Workspace() as ws:
        client = AsyncWebClient(ws.bot_token, base_url=ws.api_url)
    ```

    Port 0 takes a free one. `me` is who the page acts as.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        bot: str = "sysom",
        me: str = "ada",
        channels: Sequence[str] = ("training", "general"),
        channels_without_bot: Sequence[str] = ("random",),
        commands: Sequence[str] = ("/sysom",),
        events: frozenset[str] = SUBSCRIPTIONS,
    ) -> None:
        self.bot_token = f"xoxb-{secrets.token_urlsafe(24)}"
        self.app_token = f"xapp-1-{secrets.token_urlsafe(24)}"
        self.clock = Clock()
        self.world = World(self.clock, bot_name=bot, team_name="workspace")
        self._host = host
        self._port = port
        self._commands = frozenset(commands)
        self._events = events
        self._limits = RateLimits()
        self._sockets = SocketMode(self.world, self.clock, self._address)
        self._hooks = ResponseUrls(self.world, self._address)
        self._serving = contextlib.AsyncExitStack()
        self._origin = ""
        for name in channels:
            self.world.add_channel(name, with_bot=True)
        for name in channels_without_bot:
            self.world.add_channel(name, with_bot=False)
        self._page = Page(self.world, self.person(me), commands[0], lambda: self.connections > 0, host)
        self.world.listen(self._send_events)

    # Life

    async def __aenter__(self) -> Self:
        """Bind and serve.

        Raises: OSError, when the address cannot be had.
        """
        served = listening(self._application(), self._host, self._port, ws="websockets-sansio")
        self._origin = await self._serving.enter_async_context(served)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End connections, streams and the server."""
        self._sockets.stop()
        self.clock.stop()
        self._page.stop()
        await self._serving.aclose()

    # Addresses

    @property
    def url(self) -> str:
        """The page, for a browser."""
        return f"http://{self._address()}/"

    @property
    def api_url(self) -> str:
        """The `base_url` for Slack's SDK."""
        return f"http://{self._address()}/api/"

    def _address(self) -> str:
        return self._origin.removeprefix("http://")

    # People and places

    def person(self, name: str) -> Person:
        """Somebody by name, who joins all channels when they are new here."""
        user = self.world.user_named(name) or self.world.add_user(name)
        if user.is_bot:
            raise ValueError(f"{name} is a bot, not a person")
        return Person(self.world, self._sockets, self._hooks, user, self._commands)

    def channel(self, name: str) -> Channel:
        """A channel by name or id.

        Raises: KeyError.
        """
        channel = self.world.channel(name)
        if channel is None:
            raise KeyError(f"no channel {name!r}")
        return channel

    def plain(self, message: Message) -> str:
        """What a person reads in a message, as text for a terminal."""
        return plain(message, self.world.name_of)

    @property
    def connections(self) -> int:
        """How many Socket Mode connections the app holds."""
        return self._sockets.connections

    @property
    def pending(self) -> int:
        """How many envelopes the app has not acknowledged yet."""
        return self._sockets.pending

    async def wait_for(self, condition: Callable[[], T | None], timeout: float = 10.0) -> T:  # noqa: ASYNC109 - the wait belongs to it
        """Wait until `condition()` is true, and give its value; it is asked again at each change here.

        Changes are: messages posted, updated and deleted; envelopes acknowledged or expired;
        connections opened and closed.

        Raises: TimeoutError after `timeout` seconds of real time, with what the channels hold.
        """
        changed = asyncio.Event()
        forget = self.world.listen(lambda change: changed.set())
        try:
            async with asyncio.timeout(timeout):
                while not (value := condition()):
                    await changed.wait()
                    changed.clear()
                return value
        except TimeoutError:
            raise TimeoutError(
                f"the condition did not come true within {timeout} s.\n{self.transcript()}"
            ) from None
        finally:
            forget()

    def transcript(self) -> str:
        """Everything that was said, as text."""
        lines: list[str] = []
        for channel in self.world.channels.values():
            for message in channel.messages:
                who = self.world.name_of(message.user)
                mark = " (only for one)" if message.ephemeral_to else ""
                lines.append(f"#{channel.name} {message.ts} {who}{mark}: {self.plain(message)}")
        return "\n".join(lines) or "nothing was said"

    # Faults

    def rate_limit(self, method: str, *, times: int = 1, retry_after: int = 1) -> None:
        """Answer the next `times` calls of a method with HTTP 429 and `Retry-After` (seconds)."""
        self._limits.set(method, times=times, retry_after=retry_after)

    def disconnect(self, reason: Disconnect = "refresh_requested") -> None:
        """Do to the app's connections what Slack does from time to time."""
        self._sockets.disconnect(reason)

    # Inside

    def _application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/api/{method}", self._api, methods=["GET", "POST"]),
                Route("/response/{key}", self._hooks.answer, methods=["POST"]),
                WebSocketRoute("/link/", self._sockets.serve),
                *self._page.routes(),
            ]
        )

    async def _api(self, request: Request) -> Response:
        def call(arguments: Json) -> Call:
            return Call(self.world, self._sockets, self.url, arguments)

        tokens = {"xoxb": self.bot_token, "xapp": self.app_token}
        return await answer(request, call, METHODS, tokens, self._limits)

    def _send_events(self, change: Change) -> None:
        for event in events_of(self.world, change, self._events):
            self._sockets.deliver_event(callback(self.world, event))
