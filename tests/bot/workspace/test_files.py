"""Files: the three steps through Slack's SDK, when a picture may show one, and who gets its content."""

from typing import Any

import httpx
import pytest
from slack_sdk.web.async_client import AsyncWebClient

from bot.workspace import Workspace
from tests.bot.workspace.test_web_api import refusal

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 40


def picture(id: str) -> list[dict[str, Any]]:
    return [{"type": "image", "slack_file": {"id": id}, "alt_text": "flame graph"}]


async def uploaded(slack: AsyncWebClient, content: bytes = PNG, name: str = "flames.png") -> str:
    answer = await slack.files_upload_v2(filename=name, content=content)
    return str(answer["files"][0]["id"])


async def test_a_picture_is_usable_once_slack_has_looked_at_it(ws: Workspace, slack: AsyncWebClient) -> None:
    id = await uploaded(slack)
    post = slack.chat_postMessage(channel="#training", text="x", blocks=picture(id))
    data = await refusal(post)
    assert data["error"] == "invalid_blocks"
    assert data["errors"] == ["invalid slack file [json-pointer:/blocks/0/slack_file]"]
    assert (await slack.files_info(file=id))["file"]["mimetype"] == ""
    ws.clock.advance(1)
    file = (await slack.files_info(file=id))["file"]
    assert (file["mimetype"], file["size"], file["name"]) == ("image/png", len(PNG), "flames.png")
    await slack.chat_postMessage(channel="#training", text="x", blocks=picture(id))
    blocks = [{"type": "image", "slack_file": {"url": file["url_private"]}, "alt_text": "a"}]
    await slack.chat_postMessage(channel="#training", text="x", blocks=blocks)
    assert len(ws.channel("training").messages) == 2


@pytest.mark.parametrize(
    ("content", "name"), [(b"<svg/>", "a.svg"), (b"no picture", "a.png"), (b"\0asm", "a.wasm")]
)
async def test_what_is_no_png_jpeg_or_gif_is_not_shown(
    ws: Workspace, slack: AsyncWebClient, content: bytes, name: str
) -> None:
    id = await uploaded(slack, content, name)
    ws.clock.advance(10)
    data = await refusal(slack.chat_postMessage(channel="#training", text="x", blocks=picture(id)))
    assert data["errors"] == ["invalid slack file [json-pointer:/blocks/0/slack_file]"]


async def test_a_file_is_shared_after_the_answer(ws: Workspace, slack: AsyncWebClient) -> None:
    root = await slack.chat_postMessage(channel="#training", text="root")
    channel, ts = root["channel"], root["ts"]
    await slack.files_upload_v2(
        filename="log.txt", content="step 7", channel=channel, thread_ts=ts, initial_comment="the log"
    )
    training = ws.channel("training")
    assert training.thread(ts) == ()
    ws.clock.advance(1)
    (reply,) = await ws.wait_for(lambda: training.thread(ts))
    assert (reply.text, len(reply.files)) == ("the log", 1)
    (shown,) = (await slack.conversations_replies(channel=channel, ts=ts))["messages"][1]["files"]
    assert shown["mimetype"] == "text/plain"


async def test_the_steps_are_taken_as_slack_takes_them(ws: Workspace, slack: AsyncWebClient) -> None:
    assert (await refusal(slack.files_getUploadURLExternal(filename="a", length=0)))[
        "error"
    ] == "missing_argument"
    big = await refusal(slack.files_getUploadURLExternal(filename="a", length=2**31))
    assert big["error"] == "file_upload_size_restricted"
    ticket = await slack.files_getUploadURLExternal(filename="a.png", length=len(PNG))
    files = [{"id": ticket["file_id"]}]
    assert (await refusal(slack.files_completeUploadExternal(files=files)))["error"] == "file_not_found"
    async with httpx.AsyncClient() as http:
        short = await http.post(ticket["upload_url"], content=PNG[:-1])
        assert (short.status_code, short.text) == (400, f"{len(PNG)} bytes were announced, and others came")
        form = await http.post(ticket["upload_url"], files={"filename": ("a.png", PNG)})
        assert (form.status_code, form.text) == (200, f"OK - {len(PNG)}")
        name = await refusal(slack.files_completeUploadExternal(files=files, channel_id="#training"))
        assert name["error"] == "invalid_channel"
        outside = await refusal(
            slack.files_completeUploadExternal(files=files, channel_id=ws.channel("random").id)
        )
        assert outside["error"] == "not_in_channel"
        await slack.files_completeUploadExternal(files=files)
        assert (await http.post(ticket["upload_url"], content=PNG)).status_code == 404
        headers = {"Authorization": f"Bearer {ws.bot_token}"}
        arguments = {"filename": "a", "length": 1}
        url = f"{ws.api_url}files.getUploadURLExternal"
        assert (await http.post(url, json=arguments, headers=headers)).json()["error"] == "invalid_arguments"


async def test_a_private_address_needs_the_token_and_the_pages_cannot_be_guessed(
    ws: Workspace, slack: AsyncWebClient
) -> None:
    id = await uploaded(slack)
    ws.clock.advance(1)
    file = (await slack.files_info(file=id))["file"]
    async with httpx.AsyncClient() as http:
        headers = {"Authorization": f"Bearer {ws.bot_token}"}
        got = await http.get(file["url_private"], headers=headers)
        assert (got.content, got.headers["content-type"]) == (PNG, "image/png")
        assert (await http.get(file["url_private"])).status_code == 403
        assert (await http.get(f"{ws.url}files/{id}")).status_code == 404


async def test_a_person_puts_a_file_into_a_channel(ws: Workspace, slack: AsyncWebClient) -> None:
    message = await ws.person("ada").upload("trace.json", b"{}", text="look at this")
    shown = (await slack.conversations_history(channel=message.channel))["messages"][0]
    assert (shown["text"], shown["files"][0]["name"]) == ("look at this", "trace.json")
    assert shown["files"][0]["mimetype"] == "application/json"
