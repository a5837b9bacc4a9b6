"""response_url: a way to answer one command or click without a token, five times within half an hour.

docs.slack.dev/interactivity/handling-user-interaction. The statuses are those that people report: 404 for an
address that is used up, and for blocks that are refused, without a word about why.
"""

import secrets
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from bot.workspace.chat import content
from bot.workspace.faults import Faults
from bot.workspace.files import Files
from bot.workspace.refusals import RefusedError
from bot.workspace.world import Channel, Json, User, World

USES = 5
LIFE = 1800.0  # seconds
ADDRESSES = 2000  # how many are remembered


class _Origin(msgspec.Struct):
    """What an address answers to: whose command or click, where, and on which message."""

    channel: Channel
    user: User
    message_ts: str | None
    expires: float
    uses: int = 0


class ResponseUrls:
    """The addresses that were given out."""

    def __init__(self, world: World, files: Files, faults: Faults, address: Callable[[], str]) -> None:
        self._world = world
        self._files = files
        self._faults = faults
        self._address = address
        self._origins: dict[str, _Origin] = {}

    def new(self, channel: Channel, user: User, message_ts: str | None = None) -> str:
        """A fresh address, for a command or (with the message's ts) for a click."""
        key = secrets.token_urlsafe(24)
        self._origins[key] = _Origin(channel, user, message_ts, self._world.clock.now() + LIFE)
        if len(self._origins) > ADDRESSES:
            del self._origins[next(iter(self._origins))]
        return f"http://{self._address()}/response/{key}"

    async def answer(self, request: Request) -> Response:
        """Answer one POST to such an address: `ok`, or the error with a status that is not 200."""
        return await self._faults.around("response_url", request, self._answer)

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        origin = self._origins.get(request.path_params["key"])
        try:
            if origin is None:
                raise RefusedError("invalid_url")
            if origin.expires <= self._world.clock.now():
                raise RefusedError("expired_url")
            if origin.uses >= USES:
                raise RefusedError("used_url")
            try:
                payload = msgspec.json.decode(body, type=dict[str, object])
            except (msgspec.DecodeError, RecursionError):
                raise RefusedError("invalid_payload") from None
            self._carry_out(origin, payload)
        except RefusedError as refused:
            gone = refused.error.endswith("_url") or refused.error == "invalid_blocks"
            return JSONResponse({"ok": False, "error": refused.error}, 404 if gone else 400)
        origin.uses += 1
        return PlainTextResponse("ok")

    def respond(self, channel: Channel, user: User, payload: Json) -> None:
        """Show what came with the acknowledgement of a command, under the same rules.

        Raises: RefusedError.
        """
        self._carry_out(_Origin(channel, user, None, 0.0), payload)

    def _carry_out(self, origin: _Origin, payload: Json) -> None:
        world, channel = self._world, origin.channel
        original = channel.get(origin.message_ts) if origin.message_ts is not None else None
        if payload.get("delete_original") and original is not None:
            world.delete(channel, original)
            return
        if channel.archived:
            raise RefusedError("is_archived")
        text, blocks = content(payload, self._files.shows, whole=False)
        if payload.get("replace_original") and original is not None:
            world.update(channel, original, text, blocks or [])
            return
        public = payload.get("response_type") == "in_channel"
        thread_ts = payload.get("thread_ts")
        world.post(
            channel,
            world.bot,
            text,
            blocks or (),
            thread_ts=thread_ts if isinstance(thread_ts, str) else None,
            ephemeral_to=None if public else origin.user.id,
        )
