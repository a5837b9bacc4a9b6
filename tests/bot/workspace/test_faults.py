"""Faults on demand and Slack's rates, as Slack's SDK meets them."""

import asyncio
import json
from typing import Any

import aiohttp
import httpx
import pytest
from slack_sdk.errors import SlackApiError
from slack_sdk.http_retry.builtin_async_handlers import (
    AsyncRateLimitErrorRetryHandler,
    AsyncServerErrorRetryHandler,
)
from slack_sdk.web.async_client import AsyncWebClient
from websockets.asyncio.client import connect

from bot.workspace import Workspace
from tests.bot.workspace.test_socket_mode import acknowledge, connection, receive


@pytest.fixture
def once(ws: Workspace) -> AsyncWebClient:
    """A client that gives up at the first failure."""
    return AsyncWebClient(ws.bot_token, base_url=ws.api_url, retry_handlers=[])


async def test_a_server_error_passes_and_the_sdk_tries_again(ws: Workspace, once: AsyncWebClient) -> None:
    ws.faults.server_error("chat.postMessage", status=503)
    with pytest.raises(SlackApiError) as caught:
        await once.chat_postMessage(channel="#training", text="x")
    assert caught.value.response.status_code == 503
    assert ws.channel("training").messages == ()
    patient = AsyncWebClient(
        ws.bot_token, base_url=ws.api_url, retry_handlers=[AsyncServerErrorRetryHandler()]
    )
    ws.faults.server_error("chat.postMessage")
    await patient.chat_postMessage(channel="#training", text="x")
    assert len(ws.channel("training").messages) == 1


@pytest.mark.parametrize(("after_effect", "there"), [(False, 0), (True, 1)])
async def test_a_dropped_connection_tells_the_caller_nothing(
    ws: Workspace, once: AsyncWebClient, after_effect: bool, there: int
) -> None:
    ws.faults.drop("chat.postMessage", after_effect=after_effect)
    with pytest.raises(aiohttp.ClientError):
        await once.chat_postMessage(channel="#training", text="x")
    assert len(ws.channel("training").messages) == there
    assert (await once.chat_postMessage(channel="#training", text="y"))["ok"]


async def test_a_slow_answer_comes_when_time_passed_and_its_effect_before(
    ws: Workspace, once: AsyncWebClient
) -> None:
    ws.faults.slow("chat.postMessage", seconds=30)
    call = asyncio.create_task(once.chat_postMessage(channel="#training", text="x"))
    await ws.wait_for(lambda: ws.channel("training").messages)
    ws.clock.advance(29)
    assert not call.done()
    ws.clock.advance(1)
    assert (await call)["ok"]


async def test_a_workspace_that_ends_lets_slow_answers_go() -> None:
    async with Workspace() as ws:
        client = AsyncWebClient(ws.bot_token, base_url=ws.api_url)
        ws.faults.slow("chat.postMessage", seconds=3600)
        call = asyncio.create_task(client.chat_postMessage(channel="#training", text="x"))
        await ws.wait_for(lambda: ws.channel("training").messages)
    assert (await call)["ok"]


async def test_faults_come_in_their_order(ws: Workspace, once: AsyncWebClient) -> None:
    ws.faults.rate_limit("auth.test", retry_after=3)
    ws.faults.server_error("auth.test")
    statuses = []
    for _ in range(2):
        with pytest.raises(SlackApiError) as caught:
            await once.auth_test()
        statuses.append(caught.value.response.status_code)
    assert statuses == [429, 500]
    assert (await once.auth_test())["ok"]


async def test_a_response_url_fails_too(ws: Workspace) -> None:
    async with await connection(ws) as socket, httpx.AsyncClient() as http:
        task = asyncio.create_task(ws.person("ada").command("/sysom jobs"))
        envelope = await receive(socket)
        await acknowledge(socket, envelope)
        await task
        url = envelope["payload"]["response_url"]
        ws.faults.server_error("response_url")
        ws.faults.drop("response_url", after_effect=True)
        assert (await http.post(url, json={"text": "a"})).status_code == 500
        with pytest.raises(httpx.TransportError):
            await http.post(url, json={"text": "b"})
    assert [message.text for message in ws.channel("training").messages] == ["b"]


async def test_one_message_per_second_and_channel() -> None:
    async with Workspace(paced=True) as ws:
        once = AsyncWebClient(ws.bot_token, base_url=ws.api_url, retry_handlers=[])

        refused: list[tuple[str, str]] = []

        async def post(channel: str) -> int:
            try:
                await once.chat_postMessage(channel=channel, text="x")
            except SlackApiError as error:
                refused.append((error.response["error"], error.response.headers["Retry-After"]))
                return int(error.response.status_code)
            return 200

        training = ws.channel("training").id
        assert [await post(c) for c in ("#training", "training", training, "#general")] == [
            200,
            429,
            429,
            200,
        ]
        assert refused == [("ratelimited", "1")] * 2
        ws.clock.advance(1)
        assert await post(training) == 200


async def test_fifty_updates_a_minute() -> None:
    async with Workspace(paced=True) as ws:
        once = AsyncWebClient(ws.bot_token, base_url=ws.api_url, retry_handlers=[])
        sent = await once.chat_postMessage(channel="#training", text="x")
        where = {"channel": sent["channel"], "ts": sent["ts"]}
        for n in range(50):
            await once.chat_update(text=str(n), **where)
        with pytest.raises(SlackApiError) as caught:
            await once.chat_update(text="50", **where)
        wait = int(caught.value.response.headers["Retry-After"])
        assert 50 <= wait <= 60
        ws.clock.advance(wait)
        await once.chat_update(text="50", **where)


async def test_the_sdk_waits_as_long_as_it_is_told(ws: Workspace) -> None:
    patient = AsyncWebClient(
        ws.bot_token, base_url=ws.api_url, retry_handlers=[AsyncRateLimitErrorRetryHandler()]
    )
    ws.rate_limit("auth.test", retry_after=0)
    assert (await patient.auth_test())["ok"]


async def test_an_envelope_comes_twice(ws: Workspace) -> None:
    async with await connection(ws) as one, await connection(ws) as two:
        ws.send_twice()
        task = asyncio.create_task(ws.person("ada").command("/sysom jobs"))
        first, second = await receive(one), await receive(two)
        assert first == second
        await acknowledge(one, first)
        assert (await task).acknowledged
        await acknowledge(two, second)


async def test_events_come_out_of_order(ws: Workspace) -> None:
    async with await connection(ws) as socket:
        ws.hold_events()
        for text in ("one", "two", "three"):
            await ws.person("ada").say(text)
        assert ws.pending == 0
        ws.release_events(newest_first=True)
        texts = [(await receive(socket))["payload"]["event"]["text"] for _ in range(3)]
        assert texts == ["three", "two", "one"]
        await ws.person("ada").say("four")
        assert (await receive(socket))["payload"]["event"]["text"] == "four"


async def test_an_app_holds_ten_connections_at_most(ws: Workspace) -> None:
    sockets: list[Any] = [await connection(ws) for _ in range(10)]
    url = (await AsyncWebClient(base_url=ws.api_url).apps_connections_open(app_token=ws.app_token))["url"]
    async with connect(url, proxy=None) as eleventh:
        assert json.loads(await eleventh.recv())["reason"] == "too_many_websockets"
    for socket in sockets:
        await socket.close()


async def test_a_warned_connection_ends_ten_seconds_later_and_answers_pings_until_then(ws: Workspace) -> None:
    async with await connection(ws) as socket:
        ws.disconnect("warning")
        assert (await receive(socket))["reason"] == "warning"
        await asyncio.wait_for(await socket.ping(b"Ping from the app"), 5)
        await socket.send(b"\x00binary is ignored")
        ws.clock.advance(10)
        await ws.wait_for(lambda: not ws.connections)
