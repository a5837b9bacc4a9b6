"""The bot's life: checks both tokens, connects by Socket Mode, stays connected, leaves cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import aiohttp
from slack_bolt.adapter.socket_mode.async_handler import AsyncSocketModeHandler
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot.slack.app import SCOPES, create_app
from bot.slack.calls import through, web_client
from bot.slack.clock import Clock, SystemClock
from bot.slack.desk import Desk, Home
from bot.slack.ephemeral import over_http
from bot.slack.outbox import Outbox
from bot.slack.service import Diagnoser

log = logging.getLogger(__name__)

CONNECT_S = 30.0
STALE_S = 45.0
"""A one-use address of Socket Mode is worthless by then, yet the SDK would try it for ever."""


class SlackRefused(RuntimeError):
    """Slack cannot be used. The message says which setting is wrong, or what is away, and what to do."""


@contextlib.asynccontextmanager
async def running_bot(
    bot_token: str,
    app_token: str,
    diagnoser: Diagnoser,
    *,
    base_url: str | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[Home]:
    """The bot, connected and answering for the length of an ``async with``.

    ``base_url``: another address of Slack's Web API. Raises :class:`SlackRefused` before anything runs.
    """
    clock = clock or SystemClock()
    client = web_client(bot_token, base_url)
    home = await _home(client)
    address = await _socket_address(client, app_token)
    async with aiohttp.ClientSession(trust_env=base_url is None) as session:
        outbox = Outbox(through(client), clock)
        desk = Desk(diagnoser, outbox, over_http(session), home, clock)
        app = create_app(web_client(None, base_url), home, desk)
        handler = AsyncSocketModeHandler(app, app_token)
        if base_url is not None:
            handler.client.proxy = None
        handler.client.wss_uri = address
        keeper: asyncio.Task[None] | None = None
        try:
            await _connect(handler)
            keeper = asyncio.create_task(keep_connected(handler, clock))
            log.info("connected to Slack as %s in %s", home.bot, home.team)
            yield home
        finally:
            if keeper is not None:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
            try:
                await handler.client.close()  # type: ignore[no-untyped-call]  # nothing new comes in
            except Exception:
                log.warning("the connection to Slack did not close as it should", exc_info=True)
            finally:
                await desk.close()


async def keep_connected(handler: AsyncSocketModeHandler, clock: Clock) -> None:
    """Have the SDK take a new address when it has been off for long: it goes on with a used one by itself."""
    was_off = False
    while True:
        await clock.sleep(STALE_S)
        off = not await handler.client.is_connected()
        if off and was_off:
            log.warning("no connection to Slack for over %g s; trying a new address", STALE_S)
            handler.client.wss_uri = None
        was_off = off


async def _connect(handler: AsyncSocketModeHandler) -> None:
    try:
        async with asyncio.timeout(CONNECT_S):
            await handler.client.connect()  # type: ignore[no-untyped-call]
    except TimeoutError:
        raise SlackRefused(
            f"Slack accepts both tokens, and no Socket Mode connection came about within {CONNECT_S:g} s: "
            "check that a WebSocket to wss-primary.slack.com:443 gets out (a proxy goes into HTTPS_PROXY)"
        ) from None


async def _home(client: AsyncWebClient) -> Home:
    try:
        said = await client.auth_test()
    except SlackApiError as error:
        code = _code(error)
        raise SlackRefused(f"SLACK_BOT_TOKEN: Slack says {code}: {_advice(code, client.token)}") from error
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise _unreachable(client, error) from error
    missing = SCOPES - _scopes(said.headers)
    if missing:
        raise SlackRefused(
            f"SLACK_BOT_TOKEN lacks the scope {' and '.join(sorted(missing))}: add it under “OAuth & "
            "Permissions” (or take deploy/slack-manifest.yaml), then install the app again"
        )
    return Home(
        team=str(said.get("team", "")),
        team_id=str(said.get("team_id", "")),
        enterprise_id=str(said.get("enterprise_id") or ""),
        bot=str(said.get("user", "sysom")),
        bot_id=str(said.get("bot_id", "")),
        user_id=str(said.get("user_id", "")),
    )


async def _socket_address(client: AsyncWebClient, app_token: str) -> str:
    try:
        return str((await client.apps_connections_open(app_token=app_token))["url"])
    except SlackApiError as error:
        code = _code(error)
        raise SlackRefused(f"SLACK_APP_TOKEN: Slack says {code}: {_app_advice(code, app_token)}") from error
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise _unreachable(client, error) from error


def _scopes(headers: object) -> frozenset[str]:
    """Scopes that the answer's headers name; all, where they name none."""
    named = headers.get("x-oauth-scopes") if hasattr(headers, "get") else None
    return frozenset(part.strip() for part in str(named).split(",")) if named else SCOPES


def _code(error: SlackApiError) -> str:
    data = getattr(error.response, "data", None)
    return (
        str(data.get("error", "an error"))
        if isinstance(data, dict)
        else "something that is not Slack’s answer"
    )


def _advice(code: str, token: str | None) -> str:
    if (token or "").startswith("xapp-"):
        return "that is an app-level token (xapp-…), and a bot token is needed (xoxb-…): are the two swapped?"
    if code in ("account_inactive", "token_revoked", "token_expired"):
        return "the app was removed, or its token withdrawn: install it again and take the new token"
    return "take the “Bot User OAuth Token” (xoxb-…) from “OAuth & Permissions” of the app’s page"


def _app_advice(code: str, token: str) -> str:
    if token.startswith("xoxb-"):
        return (
            "that is a bot token (xoxb-…); the app-level token starts with xapp-: perhaps the two are swapped"
        )
    if code == "missing_scope":
        return "it lacks the scope connections:write: make a new app-level token with it"
    return (
        "take an app-level token (xapp-…) with the scope connections:write from “Basic Information” of the "
        "app’s page, and switch Socket Mode on"
    )


def _unreachable(client: AsyncWebClient, error: Exception) -> SlackRefused:
    return SlackRefused(
        f"{client.base_url} is not reached ({type(error).__name__}: {error}): check the network, "
        "and HTTPS_PROXY if a proxy is needed"
    )
