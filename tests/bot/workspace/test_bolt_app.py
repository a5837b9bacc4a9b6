"""A real Bolt app over real Socket Mode in the workspace: what the bot relies on."""

import asyncio
from typing import Any

from slack_sdk.web.async_client import AsyncWebClient

from bot.workspace import Workspace
from tests.bot.workspace.bolt import app_in, running

BUTTON = {
    "type": "button",
    "text": {"type": "plain_text", "text": "Evidence"},
    "action_id": "evidence",
    "value": "v1",
}


async def test_a_command_is_acknowledged_posted_and_updated_in_place(ws: Workspace) -> None:
    app = app_in(ws)

    @app.command("/sysom")
    async def diagnose(ack: Any, command: dict[str, Any], client: AsyncWebClient) -> None:
        await ack()
        posted = await client.chat_postMessage(
            channel=command["channel_id"], text=f"looking: {command['text']}"
        )
        await client.chat_update(channel=posted["channel"], ts=posted["ts"], text="found it")

    async with running(ws, app):
        delivery = await ws.person("ada").command("/sysom diagnose job-123", channel="training")
        assert delivery.acknowledged
        message = await ws.wait_for(
            lambda: next((m for m in ws.channel("training").messages if m.edited), None)
        )
    assert (message.text, message.user) == ("found it", ws.world.bot.id)
    assert len(ws.channel("training").messages) == 1


async def test_a_click_carries_the_message_and_its_answer_replaces_it(ws: Workspace) -> None:
    app = app_in(ws)
    bodies: list[dict[str, Any]] = []

    @app.action("evidence")
    async def show(ack: Any, body: dict[str, Any], respond: Any) -> None:
        await ack()
        bodies.append(body)
        await respond("shown", replace_original=True)

    async with running(ws, app):
        sent = await app.client.chat_postMessage(
            channel="#training", text="verdict", blocks=[{"type": "actions", "elements": [BUTTON]}]
        )
        message = ws.channel("training").messages[0]
        assert (await ws.person("ada").click(message, "evidence")).acknowledged
        await ws.wait_for(lambda: ws.channel("training").messages[0].text == "shown")
    assert bodies[0]["actions"][0]["value"] == "v1"
    assert bodies[0]["message"]["ts"] == sent["ts"] == bodies[0]["container"]["message_ts"]
    assert bodies[0]["user"]["username"] == "ada"


async def test_a_reply_in_a_thread_reaches_the_app_as_an_event(ws: Workspace) -> None:
    app = app_in(ws)

    @app.event("message")
    async def answer(event: dict[str, Any], say: Any) -> None:
        await say(f"you said {event['text']}", thread_ts=event["thread_ts"])

    async with running(ws, app):
        await app.client.chat_postMessage(channel="#training", text="root")
        training = ws.channel("training")
        await ws.person("ada").reply(training.messages[0], "why rank 5?")
        await ws.wait_for(lambda: len(training.thread(training.roots[0])) == 2)
    assert [m.text for m in training.thread(training.roots[0])] == ["why rank 5?", "you said why rank 5?"]
    assert len(training.roots) == 1


async def test_an_app_that_does_not_acknowledge_is_reported_to_the_person_alone(ws: Workspace) -> None:
    app = app_in(ws)
    reached = asyncio.Event()

    @app.command("/sysom")
    async def stall(ack: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    async with running(ws, app):
        command = asyncio.create_task(ws.person("ada").command("/sysom jobs"))
        await reached.wait()
        ws.clock.advance(3.0)
        assert (await command).error == "operation_timeout"
    message = ws.channel("training").messages[0]
    assert "failed because the app did not respond" in message.text
    assert message.ephemeral_to == ws.person("ada").id
    assert not ws.person("grace").sees(message)
