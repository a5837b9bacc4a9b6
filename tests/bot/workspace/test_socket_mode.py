"""Socket Mode on the wire, and the answers that reach a person: deadlines, redelivery, response_url."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from slack_sdk.web.async_client import AsyncWebClient
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from bot.workspace import NotThereError, Workspace

BUTTON = {"type": "button", "text": {"type": "plain_text", "text": "Go"}, "action_id": "go", "value": "7"}


async def open_url(ws: Workspace) -> str:
    answer = await AsyncWebClient(base_url=ws.api_url).apps_connections_open(app_token=ws.app_token)
    return str(answer["url"])


async def connection(ws: Workspace) -> ClientConnection:
    socket = await connect(await open_url(ws), proxy=None)
    hello = await receive(socket)
    assert hello["type"] == "hello"
    assert hello["connection_info"]["app_id"] == ws.world.app_id
    return socket


async def receive(socket: ClientConnection) -> dict[str, Any]:
    message = json.loads(await asyncio.wait_for(socket.recv(), 5))
    assert isinstance(message, dict)
    return message


async def acknowledge(socket: ClientConnection, envelope: dict[str, Any], **payload: Any) -> None:
    answer = {"envelope_id": envelope["envelope_id"]} | ({"payload": payload} if payload else {})
    await socket.send(json.dumps(answer))


async def test_an_address_works_once(ws: Workspace) -> None:
    url = await open_url(ws)
    async with connect(url, proxy=None):
        with pytest.raises(InvalidStatus, match="403"):
            await connect(url, proxy=None)


async def test_an_address_that_is_not_used_soon_is_void(ws: Workspace) -> None:
    url = await open_url(ws)
    ws.clock.advance(31)
    with pytest.raises(InvalidStatus, match="403"):
        await connect(url, proxy=None)


async def test_each_envelope_goes_to_one_connection_in_turn(ws: Workspace) -> None:
    async with await connection(ws) as one, await connection(ws) as two:
        texts = []
        for n, socket in enumerate((one, two, one)):
            task = asyncio.create_task(ws.person("ada").command(f"/sysom {n}"))
            envelope = await receive(socket)
            texts.append(envelope["payload"]["text"])
            await acknowledge(socket, envelope)
            assert (await task).acknowledged
    assert texts == ["0", "1", "2"]


async def test_a_command_has_slacks_fields_and_its_text_is_escaped(ws: Workspace) -> None:
    async with await connection(ws) as socket:
        task = asyncio.create_task(ws.person("ada").command("/sysom diagnose a<b&c", channel="random"))
        envelope = await receive(socket)
        await acknowledge(socket, envelope)
        await task
    assert envelope["type"] == "slash_commands"
    assert envelope["accepts_response_payload"] is True
    payload = envelope["payload"]
    assert payload["command"] == "/sysom"
    assert payload["text"] == "diagnose a&lt;b&amp;c"
    assert (payload["channel_name"], payload["user_name"]) == ("random", "ada")
    assert "thread_ts" not in payload


async def test_the_answer_in_an_acknowledgement_is_for_the_person_alone(ws: Workspace) -> None:
    async with await connection(ws) as socket:
        task = asyncio.create_task(ws.person("ada").command("/sysom help"))
        await acknowledge(socket, await receive(socket), text="usage: …")
        await task
        task = asyncio.create_task(ws.person("ada").command("/sysom help"))
        await acknowledge(socket, await receive(socket), blocks=[{"type": "nope"}])
        await task
    first, second = ws.channel("training").messages
    assert (first.text, first.ephemeral_to) == ("usage: …", ws.person("ada").id)
    assert 'failed with the error "invalid_blocks"' in second.text


async def test_nobody_connected_is_a_failed_dispatch(ws: Workspace) -> None:
    delivery = await ws.person("ada").command("/sysom jobs")
    assert delivery.error == "dispatch_failed"
    assert "failed because the app did not respond" in ws.channel("training").messages[0].text


async def test_a_command_that_no_app_has_is_not_sent(ws: Workspace) -> None:
    async with await connection(ws):
        await ws.person("ada").command("/tmp is full")
    assert "`/tmp` is not a valid command" in ws.channel("training").messages[0].text


async def test_an_event_is_sent_again_three_times_with_the_same_id(ws: Workspace) -> None:
    async with await connection(ws) as socket:
        await ws.person("ada").say("hello")
        seen = []
        for wait in (0, 0, 60, 300):
            ws.clock.advance(wait)
            envelope = await receive(socket)
            seen.append(
                (envelope["retry_attempt"], envelope["retry_reason"], envelope["payload"]["event_id"])
            )
            ws.clock.advance(3)
        first = seen[0][2]
        assert seen == [(0, "", first), (1, "timeout", first), (2, "timeout", first), (3, "timeout", first)]
        ws.clock.advance(3600)
        await ws.person("ada").say("next")
        assert (await receive(socket))["payload"]["event"]["text"] == "next"


async def test_an_acknowledged_event_is_sent_once(ws: Workspace) -> None:
    async with await connection(ws) as socket:
        await ws.person("ada").say("one")
        await acknowledge(socket, await receive(socket))
        await ws.wait_for(lambda: not ws.pending)
        ws.clock.advance(600)
        await ws.person("ada").say("two")
        assert (await receive(socket))["payload"]["event"]["text"] == "two"


async def test_a_mention_is_told_twice_and_only_where_the_bot_is(ws: Workspace) -> None:
    async with await connection(ws) as socket:
        await ws.person("ada").say("@sysom look", channel="random")
        await ws.person("ada").say("@sysom look", channel="training")
        events = [(await receive(socket))["payload"]["event"] for _ in range(2)]
    assert [event["type"] for event in events] == ["message", "app_mention"]
    assert {event["channel"] for event in events} == {ws.channel("training").id}
    assert events[0]["text"] == f"<@{ws.world.bot.id}> look"


async def test_a_direct_message_is_an_event_of_kind_im(ws: Workspace) -> None:
    async with await connection(ws) as socket:
        await ws.person("ada").say("hello", channel="@sysom")
        event = (await receive(socket))["payload"]["event"]
    assert (event["channel_type"], event["channel"]) == ("im", ws.person("ada").direct.id)


async def test_a_refresh_announces_itself_and_closes(ws: Workspace) -> None:
    async with await connection(ws) as socket:
        ws.disconnect("warning")
        assert (await receive(socket))["reason"] == "warning"
        ws.disconnect("refresh_requested")
        assert (await receive(socket))["reason"] == "refresh_requested"
        with pytest.raises(ConnectionClosed):
            await receive(socket)
    assert ws.connections == 0


async def test_what_is_not_an_acknowledgement_is_ignored(ws: Workspace) -> None:
    async with await connection(ws) as socket:
        task = asyncio.create_task(ws.person("ada").command("/sysom jobs"))
        envelope = await receive(socket)
        for noise in ("", "no json", "[]", '{"envelope_id": 7}', '{"envelope_id": "unknown"}'):
            await socket.send(noise)
        await acknowledge(socket, envelope)
        assert (await task).acknowledged


async def click(ws: Workspace, socket: ClientConnection) -> dict[str, Any]:
    message = ws.channel("training").messages[0]
    task = asyncio.create_task(ws.person("ada").click(message, "go"))
    envelope = await receive(socket)
    await acknowledge(socket, envelope)
    assert (await task).acknowledged
    payload = envelope["payload"]
    assert isinstance(payload, dict)
    return payload


@pytest.fixture
async def posted(slack: AsyncWebClient) -> None:
    blocks = [{"type": "actions", "elements": [BUTTON]}]
    await slack.chat_postMessage(channel="#training", text="root", blocks=blocks)


@pytest.mark.usefixtures("posted")
async def test_a_response_url_works_five_times(ws: Workspace) -> None:
    async with await connection(ws) as socket, httpx.AsyncClient() as http:
        url = (await click(ws, socket))["response_url"]
        answers = [await http.post(url, json={"text": str(n)}) for n in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [404]
    assert answers[5].json()["error"] == "used_url"
    later = ws.channel("training").messages[1:]
    assert [m.text for m in later] == ["0", "1", "2", "3", "4"]
    assert {m.ephemeral_to for m in later} == {ws.person("ada").id}


@pytest.mark.usefixtures("posted")
async def test_a_response_url_ends_after_half_an_hour(ws: Workspace) -> None:
    async with await connection(ws) as socket, httpx.AsyncClient() as http:
        url = (await click(ws, socket))["response_url"]
        ws.clock.advance(1799)
        assert (await http.post(url, json={"text": "in time"})).status_code == 200
        ws.clock.advance(2)
        late = await http.post(url, json={"text": "late"})
    assert (late.status_code, late.json()["error"]) == (404, "expired_url")


@pytest.mark.usefixtures("posted")
async def test_a_response_replaces_deletes_or_shows_to_all(ws: Workspace) -> None:
    training = ws.channel("training")
    async with await connection(ws) as socket, httpx.AsyncClient() as http:
        url = (await click(ws, socket))["response_url"]
        await http.post(url, json={"text": "all", "response_type": "in_channel"})
        assert [(m.text, m.ephemeral_to) for m in training.messages] == [("root", None), ("all", None)]
        bad = await http.post(url, json={"text": "x", "replace_original": True, "blocks": [{"type": "no"}]})
        assert (bad.status_code, bad.json()["error"]) == (404, "invalid_blocks")
        await http.post(url, json={"text": "new", "replace_original": True})
        assert [m.text for m in training.messages] == ["new", "all"]
        await http.post(url, json={"delete_original": True})
        assert [m.text for m in training.messages] == ["all"]


@pytest.mark.usefixtures("posted")
async def test_only_what_is_there_can_be_clicked(ws: Workspace) -> None:
    message = ws.channel("training").messages[0]
    with pytest.raises(NotThereError, match="no element 'stop'; it has \\['go'\\]"):
        await ws.person("ada").click(message, "stop")
    ws.world.delete(ws.channel("training"), message)
    with pytest.raises(NotThereError, match="was it deleted"):
        await ws.person("ada").click(message, "go")


async def test_waiting_in_vain_says_what_was_there(ws: Workspace, slack: AsyncWebClient) -> None:
    await slack.chat_postMessage(channel="#training", text="something else")
    with pytest.raises(TimeoutError, match="something else"):
        await ws.wait_for(lambda: False, timeout=0.05)
