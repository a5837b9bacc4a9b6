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
from bot.workspace import chat, conversations, modals, uploads
from bot.workspace.clock import Clock
from bot.workspace.delivery import Dispatch
from bot.workspace.events import SUBSCRIPTIONS, callback, events_of
from bot.workspace.faults import Faults
from bot.workspace.files import PROCESSING, Files
from bot.workspace.http_mode import HttpMode
from bot.workspace.pace import Pace
from bot.workspace.page import Page
from bot.workspace.people import Desk, Person
from bot.workspace.plain import plain
from bot.workspace.response_urls import ResponseUrls
from bot.workspace.scopes import SCOPES
from bot.workspace.socket_mode import Disconnect, SocketMode
from bot.workspace.views import Views
from bot.workspace.web_api import FrontDoor, Here
from bot.workspace.world import Change, Channel, Message, World, new_id

T = TypeVar("T")
METHODS = {**conversations.METHODS, **chat.METHODS, **modals.METHODS, **uploads.METHODS}


class Workspace:
    """A local Slack workspace with one app in it; runs in this event loop for the length of an `async with`.

    ```python
    async with Workspace() as ws:
        client = AsyncWebClient(ws.bot_token, base_url=ws.api_url)
    ```

    Port 0 takes a free one. `me` is who the page acts as. `scopes` are what the bot token may do. With a
    `request_url` the app gets signed requests (HTTP mode), else envelopes (Socket Mode). `paced`: calls beyond
    Slack's rates are answered with 429. `file_processing`: how long (seconds) an upload is not usable yet.
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
        scopes: frozenset[str] = SCOPES,
        request_url: str | None = None,
        signing_secret: str | None = None,
        paced: bool = False,
        file_processing: float = PROCESSING,
    ) -> None:
        self.bot_token = f"xoxb-{secrets.token_urlsafe(24)}"
        self.app_token = f"xapp-1-{secrets.token_urlsafe(24)}"
        self.signing_secret = signing_secret or secrets.token_hex(16)
        self.clock = Clock()
        self.world = World(self.clock, bot_name=bot, team_name="workspace")
        self.faults = Faults(self.clock)
        self._host = host
        self._port = port
        self._events = events
        self._files = Files(self.world, self._address, file_processing)
        self._views = Views(self.world, self._files)
        self._sockets = SocketMode(self.world, self.clock, self._address)
        self._dispatch = Dispatch(self.clock, self._sockets)
        self._http: HttpMode | None = None
        self._request_url = request_url
        hooks = ResponseUrls(self.world, self._files, self.faults, self._address)
        self._hooks = hooks
        self._desk = Desk(self.world, self._dispatch, self._files, self._views, hooks, frozenset(commands))
        here = Here(self.world, self._files, self._views, self._sockets, lambda: self.url)
        tokens = {"xoxb": self.bot_token, "xapp": self.app_token}
        pace = Pace(self.world, self.clock) if paced else None
        self._door = FrontDoor(here, METHODS, tokens, scopes, self.faults, pace)
        self._serving = contextlib.AsyncExitStack()
        self._origin = ""
        for name in channels:
            self.world.add_channel(name, with_bot=True)
        for name in channels_without_bot:
            self.world.add_channel(name, with_bot=False)
        self._page = Page(self.world, self._files, self.person(me), commands[0], lambda: self.reachable, host)
        self.world.listen(self._send_events)

    # Life

    async def __aenter__(self) -> Self:
        """Bind and serve.

        Raises: OSError, when the address cannot be had.
        """
        if self._request_url is not None:
            self._use_http(self._request_url)
        served = listening(self._application(), self._host, self._port, ws="websockets-sansio")
        self._origin = await self._serving.enter_async_context(served)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End connections, streams and the server."""
        self._dispatch.stop()
        self._sockets.stop()
        self.faults.stop()
        if self._http is not None:
            await self._http.stop()
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
        """Somebody by name, who joins all public channels when they are new here."""
        user = self.world.user_named(name) or self.world.add_user(name)
        if user.is_bot:
            raise ValueError(f"{name} is a bot, not a person")
        return Person(self._desk, user)

    def stranger(self, name: str, channel: str | Channel) -> Person:
        """Somebody of another workspace, who is here through this shared channel.

        Raises: ValueError, when the channel is not shared.
        """
        where = channel if isinstance(channel, Channel) else self.channel(channel)
        if not where.shared:
            raise ValueError(f"#{where.name} is not shared: open it with add_channel(..., shared=True)")
        user = self.world.user_named(name) or self.world.add_user(name, team=new_id("T"))
        self.world.join(where, user)
        return Person(self._desk, user)

    def other_bot(self, name: str, channel: str | Channel) -> Person:
        """The bot of another app in a channel; it writes as people do."""
        user = self.world.user_named(name) or self.world.add_user(name, is_bot=True, bot_id=new_id("B"))
        self.world.join(channel if isinstance(channel, Channel) else self.channel(channel), user)
        return Person(self._desk, user)

    def trigger(self, name: str, *, in_view: bool = False) -> str:
        """A fresh trigger_id of a person, as of something done in a channel, or in the view they look at."""
        person = self.person(name)
        return self._views.trigger(person.user, person.view if in_view else None)

    def add_channel(
        self, name: str, *, with_bot: bool = True, private: bool = False, shared: bool = False
    ) -> Channel:
        """A new channel with everybody in it: perhaps `private`, or `shared` with another workspace."""
        return self.world.add_channel(name, with_bot=with_bot, private=private, shared=shared)

    def archive(self, channel: str, *, archived: bool = True) -> None:
        """Close a channel for writing, or open it again."""
        self.world.archive(self.channel(channel), archived=archived)

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
    def reachable(self) -> bool:
        """Whether the app can be told something: by a connection of its own, or at its request URL."""
        return self._http is not None or self.connections > 0

    @property
    def pending(self) -> int:
        """How much that was sent the app has not acknowledged yet."""
        return self._dispatch.way.pending

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

    # Ways to the app

    async def use_request_url(self, url: str) -> None:
        """Switch to HTTP mode: the app at `url` must answer Slack's challenge first.

        Raises: RequestUrlError, with what it said; ValueError, when that is no address.
        """
        way = HttpMode(self.world, self.clock, self.faults, url, self.signing_secret)
        try:
            await way.verify()
        finally:
            await way.stop()
        if self._http is not None:
            await self._http.stop()
        self._use_http(url)

    def disconnect(self, reason: Disconnect = "refresh_requested") -> None:
        """Do to the app's connections what Slack does from time to time."""
        self._sockets.disconnect(reason)

    # Faults; more of them are in `faults`

    def rate_limit(self, method: str, *, times: int = 1, retry_after: int = 1) -> None:
        """Answer the next `times` calls of a method with HTTP 429 and `Retry-After` (seconds)."""
        self.faults.rate_limit(method, times=times, retry_after=retry_after)

    def send_twice(self, times: int = 1) -> None:
        """Send each of the next `times` commands, interactions or events to the app twice."""
        self._dispatch.double(times)

    def hold_events(self) -> None:
        """Keep events from the app until `release_events`."""
        self._dispatch.hold()

    def release_events(self, *, newest_first: bool = False) -> None:
        """Send the events that were kept back, in the order in which they happened or in the opposite one."""
        self._dispatch.release(newest_first=newest_first)

    # Inside

    def _application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/api/{method}", self._door.answer, methods=["GET", "POST"]),
                Route("/response/{key}", self._hooks.answer, methods=["POST"]),
                Route("/upload/v1/{ticket}", self._upload, methods=["POST"]),
                Route("/files-pri/{id}/{name:path}", self._private_file),
                Route("/files/{key}", self._files.for_the_page),
                WebSocketRoute("/link/", self._sockets.serve),
                *self._page.routes(),
            ]
        )

    async def _upload(self, request: Request) -> Response:
        return await self.faults.around("upload", request, self._files.receive)

    async def _private_file(self, request: Request) -> Response:
        return await self._files.for_the_app(request, self.bot_token)

    def _use_http(self, url: str) -> None:
        self._http = HttpMode(self.world, self.clock, self.faults, url, self.signing_secret)
        self._dispatch.way = self._http
        self._sockets.enable(False)

    def _send_events(self, change: Change) -> None:
        for event in events_of(self.world, change, self._events, self._files):
            self._dispatch.event(callback(self.world, event))
