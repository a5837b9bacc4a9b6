"""The workspace's page: what the browser loads, the stream of changes it follows, and what it may do.

Everybody on the machine can reach the address, and so can every web page that a browser here has open. So
each request must name this machine as its host (against DNS rebinding), and each action must come from the
page itself (its `Origin`) as JSON, which no foreign page can send without being asked first.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from urllib.parse import urlsplit

import jinja2
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from bot.slack.grammar import USAGE
from bot.workspace.delivery import Delivery
from bot.workspace.files import Files
from bot.workspace.forms import IncompleteError
from bot.workspace.people import NotThereError, Person
from bot.workspace.view import message_view, modal_view
from bot.workspace.views import View
from bot.workspace.world import Change, Channel, Json, Message, World

Handler = Callable[[Request], Awaitable[Response]]
_HERE = frozenset({"127.0.0.1", "localhost", "::1"})
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TEMPLATES = jinja2.Environment(loader=jinja2.PackageLoader("templates", "web"), autoescape=True)
MOST_TYPED = 12_000  # characters of one message; Slack's own composer stops there
# What the browser may load, and the file of each.
_FILES = {
    "workspace.css": "text/css",
    **dict.fromkeys(("workspace.js", "render.js", "blocks.js", "composer.js", "modal.js"), "text/javascript"),
}


class _Typed(msgspec.Struct):
    channel: str
    text: str
    thread_ts: str | None = None


class _Clicked(msgspec.Struct):
    action_id: str
    choice: str | list[str] | None = None
    channel: str = ""
    ts: str = ""
    view: str = ""


class _Submitted(msgspec.Struct):
    view: str
    values: dict[str, str | list[str] | None]


class _Closed(msgspec.Struct):
    view: str


class Page:
    """The page of one workspace, seen by one person."""

    def __init__(
        self,
        world: World,
        files: Files,
        person: Person,
        command: str,
        connected: Callable[[], bool],
        host: str,
    ) -> None:
        self._world = world
        self._files = files
        self._person = person
        self._command = command
        self._connected = connected
        self._hosts = _HERE | {host.lower()}
        self._streams: set[asyncio.Queue[Json | None]] = set()
        self._modal: Json | None = None
        person.direct  # noqa: B018 - opens the direct messages, so that the page lists them from the start
        world.listen(self._hear)

    def routes(self) -> list[Route]:
        """The page's addresses."""
        return [
            Route("/", self._guarded(self._html)),
            Route("/page/{file}", self._guarded(self._file)),
            Route("/changes", self._guarded(self._changes)),
            Route("/send", self._guarded(self._send), methods=["POST"]),
            Route("/click", self._guarded(self._click), methods=["POST"]),
            Route("/submit", self._guarded(self._submit), methods=["POST"]),
            Route("/close", self._guarded(self._close), methods=["POST"]),
        ]

    def stop(self) -> None:
        """End the streams, so that the server can stop."""
        for stream in self._streams:
            stream.put_nowait(None)

    # What the browser loads

    async def _html(self, request: Request) -> Response:
        text = _TEMPLATES.get_template("workspace.html.j2").render(
            bot=self._world.bot.name,
            me=self._person.name,
            command=self._command,
            usage=[f"{self._command} {part.strip()}" for part in USAGE.split("|")],
        )
        return Response(text, media_type="text/html")

    async def _file(self, request: Request) -> Response:
        name = request.path_params["file"]
        if name not in _FILES:
            return PlainTextResponse(f"there is no {name}", 404)
        source = name if name.startswith("workspace.") else f"workspace_{name}"
        text = resources.files("templates").joinpath("web", source).read_text(encoding="utf-8")
        return Response(text, media_type=_FILES[name])

    # What it follows

    async def _changes(self, request: Request) -> Response:
        stream: asyncio.Queue[Json | None] = asyncio.Queue()
        stream.put_nowait(self._state())
        self._streams.add(stream)
        return StreamingResponse(self._lines(stream), media_type="text/event-stream")

    async def _lines(self, stream: asyncio.Queue[Json | None]) -> AsyncIterator[bytes]:
        try:
            while (change := await stream.get()) is not None:
                yield b"data: " + msgspec.json.encode(change) + b"\n\n"
        finally:
            self._streams.discard(stream)

    def _state(self) -> Json:
        channels = [c for c in self._world.channels.values() if self._person.id in c.members]
        return {
            "kind": "state",
            "online": self._connected(),
            "channels": [self._channel_view(channel) for channel in channels],
            "messages": [
                self._message_view(message)
                for channel in channels
                for message in channel.messages
                if self._person.sees(message)
            ],
            "modal": modal_view(self._world, self._files, self._person.views),
        }

    def _message_view(self, message: Message) -> Json:
        return message_view(self._world, self._files, message, self._person.id)

    def _channel_view(self, channel: Channel) -> Json:
        name = self._world.bot.name if channel.direct else channel.name
        return {
            "id": channel.id,
            "name": name,
            "direct": channel.direct,
            "has_bot": self._world.bot.id in channel.members,
            "private": channel.private,
            "archived": channel.archived,
        }

    def _hear(self, change: Change) -> None:
        if change.channel is not None and self._person.id not in change.channel.members:
            return
        view: Json
        if change.channel is None:
            view = {"kind": "app", "online": self._connected()}
            self._show_modal()
        elif change.message is None:
            view = {"kind": "channel", "channel": self._channel_view(change.channel)}
        elif not self._person.sees(change.message):
            return
        elif change.kind == "deleted":
            view = {"kind": "deleted", "channel": change.channel.id, "ts": change.message.ts}
        else:
            view = {"kind": "message", "message": self._message_view(change.message)}
        self._tell(view)

    def _show_modal(self) -> None:
        """Tell the page what modal is open, where that changed."""
        modal = modal_view(self._world, self._files, self._person.views)
        if modal != self._modal:
            self._modal = modal
            self._tell({"kind": "modal", "modal": modal})

    def _tell(self, change: Json) -> None:
        for stream in self._streams:
            stream.put_nowait(change)

    # What it may do

    async def _send(self, request: Request) -> Response:
        typed = msgspec.json.decode(await request.body(), type=_Typed)
        if len(typed.text) > MOST_TYPED:
            return JSONResponse({"error": f"A message has at most {MOST_TYPED:,} characters."}, 400)
        channel = self._world.channels.get(typed.channel)
        if channel is None or self._person.id not in channel.members:
            raise NotThereError(f"there is no channel {typed.channel}")
        if typed.text.startswith("/"):
            if typed.thread_ts is not None:
                name = typed.text.partition(" ")[0]
                return JSONResponse({"error": f"{name} is not supported in threads. Sorry!"}, 400)
            await self._person.command(typed.text, channel)
        elif typed.text.strip():
            root = None if typed.thread_ts is None else channel.get(typed.thread_ts)
            if root is not None:
                await self._person.reply(root, typed.text)
            elif typed.thread_ts is not None:
                raise NotThereError("this thread is gone: its first message was deleted")
            else:
                await self._person.say(typed.text, channel)
        return JSONResponse({})

    async def _click(self, request: Request) -> Response:
        clicked = msgspec.json.decode(await request.body(), type=_Clicked)
        place: Message | View | None
        if clicked.view:
            place = self._view(clicked.view)
        else:
            channel = self._world.channels.get(clicked.channel)
            place = channel.get(clicked.ts) if channel is not None else None
        if place is None:
            raise NotThereError("this message is gone")
        delivery = await self._person.click(place, clicked.action_id, clicked.choice)
        return self._told(delivery)

    async def _submit(self, request: Request) -> Response:
        submitted = msgspec.json.decode(await request.body(), type=_Submitted)
        try:
            await self._person.submit(self._view(submitted.view), submitted.values)
        except IncompleteError as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({})  # what came of it the page sees in the modal

    async def _close(self, request: Request) -> Response:
        closed = msgspec.json.decode(await request.body(), type=_Closed)
        await self._person.close(self._view(closed.view))
        return JSONResponse({})

    def _view(self, id: str) -> View:
        found = next((view for view in self._person.views if view.id == id), None)
        if found is None:
            raise NotThereError("this window is gone")
        return found

    def _told(self, delivery: Delivery) -> Response:
        if not delivery.acknowledged:
            return JSONResponse({"error": f"{self._world.bot.name} did not respond. Try again."}, 504)
        return JSONResponse({})

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            refusal = self._refusal(request)
            if refusal is not None:
                return PlainTextResponse(refusal, 403)
            try:
                response = await handler(request)
            except msgspec.MsgspecError as error:
                return JSONResponse({"error": f"that is no request of this page: {error}"}, 400)
            except NotThereError as error:
                return JSONResponse({"error": str(error)}, 404)
            response.headers.update(_HEADERS)
            return response

        return guarded

    def _refusal(self, request: Request) -> str | None:
        host = request.headers.get("host", "")
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            name = None
        if name not in self._hosts:
            return f"this page answers only to the name of this machine, not to {host!r}"
        if request.method in ("GET", "HEAD"):
            return None
        if request.headers.get("origin") != f"http://{host}":
            return "only this page itself may do that"
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return "only JSON is taken here"
        return None
