"""The Bolt app: which requests of Slack there are, that each is acknowledged before anything else, and once."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from slack_bolt.async_app import AsyncAck, AsyncApp, AsyncBoltRequest
from slack_bolt.authorization import AuthorizeResult
from slack_bolt.error import BoltUnhandledRequestError
from slack_bolt.response import BoltResponse
from slack_sdk.web.async_client import AsyncWebClient

from bot.slack import grammar
from bot.slack.desk import Desk, Home
from bot.slack.once import Once
from bot.slack.service import Meter

log = logging.getLogger(__name__)

SCOPES = frozenset({"commands", "chat:write"})
"""What the bot token must allow: the slash command, and posting, editing and deleting own messages."""


class _Timed(AsyncApp):
    """Tells how long each request took to be acknowledged."""

    meter: Meter | None = None

    async def async_dispatch(self, req: AsyncBoltRequest) -> BoltResponse:
        begin = time.perf_counter()
        response = await super().async_dispatch(req)
        if self.meter is not None:
            self.meter.acknowledged(time.perf_counter() - begin)
        return response


def create_app(client: AsyncWebClient, home: Home, desk: Desk, meter: Meter | None = None) -> AsyncApp:
    """An app that hands commands to ``desk``. ``client`` is without a token; ``home`` stands for the lookup
    that Bolt would make before the first acknowledgement."""

    async def authorize(**_: Any) -> AuthorizeResult:
        return AuthorizeResult(
            enterprise_id=home.enterprise_id or None,
            team_id=home.team_id,
            bot_id=home.bot_id,
            bot_user_id=home.user_id,
            bot_token="",
        )

    bolt_log = logging.getLogger("bot.slack.bolt")
    level = bolt_log.level
    bolt_log.setLevel(logging.ERROR)  # it warns when SLACK_BOT_TOKEN is set besides: it is, and rightly so
    try:
        app = _Timed(
            name="sysom",
            logger=bolt_log,
            client=client,
            authorize=authorize,
            request_verification_enabled=False,  # bot.slack.inbound does it, and Socket Mode needs none
            raise_error_for_unhandled_request=True,  # else its warning prints suggestions for developers
        )
    finally:
        bolt_log.setLevel(level)

    app.meter = meter
    events = Once()

    @app.middleware
    async def once(body: dict[str, Any], next_: Callable[[], Awaitable[None]]) -> BoltResponse | None:
        """Slack sends an event up to four times, until it hears that one arrived."""
        if events.again(str(body.get("event_id") or "")):
            log.info("an event was delivered again, and handled once")
            return BoltResponse(status=200)
        await next_()
        return None

    @app.command(grammar.COMMAND)
    async def command(ack: AsyncAck, body: dict[str, Any]) -> None:
        await ack()
        desk.take(body)

    @app.error
    async def failed(error: Exception, body: dict[str, Any]) -> BoltResponse | None:
        if not isinstance(error, BoltUnhandledRequestError):
            log.error("a request of Slack failed", exc_info=error)
            return None
        if body.get("type") == "event_callback":
            return BoltResponse(status=200)  # unanswered, Slack would send it three times more
        log.warning("Slack sent a request that this bot knows nothing of; take deploy/slack-manifest.yaml")
        return None

    return app
