"""How the bot starts, stays connected and stops, on a local workspace with real Socket Mode."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from slack_sdk.socket_mode.aiohttp import SocketModeClient

from bot.slack import SlackRefused, running_bot
from bot.slack.connection import STALE_S, keep_connected
from bot.slack.desk import Desk
from bot.workspace import Workspace
from diagnosis.verdict import Verdict
from tests.bot import verdicts
from tests.bot.slack.modes import Engine, found
from tests.bot.slack.moved_clock import MovedClock


@pytest.fixture
async def ws() -> AsyncIterator[Workspace]:
    async with Workspace() as workspace:
        yield workspace


async def test_hostile_names_ping_nobody(ws: Workspace) -> None:
    class Evil(Engine):
        async def diagnose(self, job: str) -> Verdict:
            return verdicts.hostile()

    async with running_bot(ws.bot_token, ws.app_token, Evil(), base_url=ws.api_url):
        await ws.person("ada").command("/sysom diagnose <!channel>`*")
        answer = await ws.wait_for(lambda: found(ws, "training", "is slow"))
    assert "@channel" not in answer
    assert "<!channel>" in answer


async def test_leaving_ends_the_connection_and_all_tasks(ws: Workspace) -> None:
    async with running_bot(ws.bot_token, ws.app_token, Engine(), base_url=ws.api_url) as home:
        assert (home.bot, home.team) == ("sysom", "workspace")
        await ws.wait_for(lambda: ws.connections == 1)
    await ws.wait_for(lambda: ws.connections == 0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("outbox")]


async def test_a_wrong_token_is_named_with_what_to_do(ws: Workspace) -> None:
    with pytest.raises(
        SlackRefused, match=r"SLACK_BOT_TOKEN: Slack says invalid_auth: take the “Bot User OAuth"
    ):
        async with running_bot("xoxb-wrong", ws.app_token, Engine(), base_url=ws.api_url):
            pass
    with pytest.raises(SlackRefused, match=r"SLACK_APP_TOKEN: .*connections:write"):
        async with running_bot(ws.bot_token, "xapp-wrong", Engine(), base_url=ws.api_url):
            pass


async def test_swapped_tokens_are_recognised_and_never_shown(ws: Workspace) -> None:
    with pytest.raises(SlackRefused, match="are the two swapped") as caught:
        async with running_bot(ws.app_token, ws.bot_token, Engine(), base_url=ws.api_url):
            pass
    assert ws.app_token not in str(caught.value)


async def test_an_unreachable_slack_is_said_to_be_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SlackRefused, match="is not reached"):
        async with running_bot("xoxb-1", "xapp-1", Engine(), base_url=f"http://127.0.0.1:{port}/api/"):
            pass


async def test_tokens_in_the_environment_do_not_disturb(
    ws: Workspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLACK_BOT_TOKEN", "xoxb-other")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING):
        async with running_bot(ws.bot_token, ws.app_token, Engine(), base_url=ws.api_url):
            await ws.person("ada").command("/sysom diagnose job-123")
            await ws.wait_for(lambda: found(ws, "training", "job-123 is slow"))
    assert not caplog.records


async def test_a_connection_that_stays_away_gets_a_new_address() -> None:
    clock = MovedClock()
    connected = [True, False, False]

    async def is_connected() -> bool:
        return connected.pop(0)

    client = SimpleNamespace(is_connected=is_connected, wss_uri="used")
    handler: Any = SimpleNamespace(client=client)
    keeper = asyncio.create_task(keep_connected(handler, clock))
    await clock.advance(2 * STALE_S)
    assert client.wss_uri == "used"
    await clock.advance(STALE_S)
    assert client.wss_uri is None
    keeper.cancel()


async def test_a_connection_that_fails_to_close_does_not_keep_those_who_wait_from_being_told(
    ws: Workspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[bool] = []
    close_desk, close_client = Desk.close, SocketModeClient.close

    async def told(desk: Desk) -> None:
        closed.append(True)
        await close_desk(desk)

    async def fails(client: SocketModeClient) -> None:
        await close_client(client)  # type: ignore[no-untyped-call]
        raise ConnectionResetError("gone")

    monkeypatch.setattr(Desk, "close", told)
    monkeypatch.setattr(SocketModeClient, "close", fails)
    async with running_bot(ws.bot_token, ws.app_token, Engine(), base_url=ws.api_url):
        pass
    assert closed == [True]
    assert "did not close as it should" in caplog.text
