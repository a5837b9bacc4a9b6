"""The bot's life: checks what it was given, is reached by Socket Mode or by HTTP, leaves cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import aiohttp
from slack_bolt.adapter.socket_mode.async_handler import AsyncSocketModeHandler
from slack_bolt.async_app import AsyncApp

from bot.slack.app import create_app
from bot.slack.calls import through, web_client
from bot.slack.clock import Clock, SystemClock
from bot.slack.desk import Desk, Home
from bot.slack.ephemeral import over_http
from bot.slack.inbound import PATH, Inbound
from bot.slack.outbox import Outbox
from bot.slack.service import Diagnoser, Meter
from bot.slack.tokens import SlackAway, home_of, socket_address

log = logging.getLogger(__name__)

CONNECT_S = 30.0
STALE_S = 45.0
"""A one-use address of Socket Mode is worthless by then, yet the SDK would try it for ever."""


@contextlib.asynccontextmanager
async def running_bot(
    bot_token: str,
    app_token: str,
    diagnoser: Diagnoser,
    *,
    base_url: str | None = None,
    clock: Clock | None = None,
    meter: Meter | None = None,
) -> AsyncIterator[Home]:
    """The bot, connected by Socket Mode and answering for the length of an ``async with``.

    ``base_url``: another address of Slack's Web API. Raises :class:`SlackRefused` before anything runs.
    """
    clock = clock or SystemClock()
    client = web_client(bot_token, base_url)
    home = await home_of(client)
    address = await socket_address(client, app_token)
    async with _answering(bot_token, home, diagnoser, base_url, clock, meter) as app:
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


@contextlib.asynccontextmanager
async def running_http_bot(
    bot_token: str,
    inbound: Inbound,
    diagnoser: Diagnoser,
    *,
    base_url: str | None = None,
    clock: Clock | None = None,
    meter: Meter | None = None,
) -> AsyncIterator[Home]:
    """The bot, reached through ``inbound`` (whose route a server has) for the length of an ``async with``.

    ``base_url``: another address of Slack's Web API. Raises :class:`SlackRefused` before anything runs.
    """
    home = await home_of(web_client(bot_token, base_url))
    async with _answering(bot_token, home, diagnoser, base_url, clock or SystemClock(), meter) as app:
        with inbound.open_for(app):  # closed first: nothing new comes in
            log.info("answering at %s as %s in %s", PATH, home.bot, home.team)
            yield home


@contextlib.asynccontextmanager
async def _answering(
    bot_token: str,
    home: Home,
    diagnoser: Diagnoser,
    base_url: str | None,
    clock: Clock,
    meter: Meter | None,
) -> AsyncIterator[AsyncApp]:
    """An app with all that answers its requests; at the end those who wait are told."""
    async with aiohttp.ClientSession(trust_env=base_url is None) as session:
        outbox = Outbox(through(web_client(bot_token, base_url)), clock)
        desk = Desk(diagnoser, outbox, over_http(session), home, clock)
        if meter is not None:
            meter.slack_queue = lambda: outbox.waiting
        try:
            yield create_app(web_client(None, base_url), home, desk, meter)
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
        raise SlackAway(
            f"Slack accepts both tokens, and no Socket Mode connection came about within {CONNECT_S:g} s: "
            "check that a WebSocket to wss-primary.slack.com:443 gets out (a proxy goes into HTTPS_PROXY)"
        ) from None
