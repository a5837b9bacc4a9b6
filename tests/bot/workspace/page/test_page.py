"""The page: who may use it, and what a person sees and does there in a real browser."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect
from slack_bolt.adapter.socket_mode.async_handler import AsyncSocketModeHandler
from slack_bolt.app.async_app import AsyncApp
from slack_sdk.web.async_client import AsyncWebClient

from bot.workspace import Workspace
from tests.bot.browser import in_browser


@pytest.mark.parametrize("path", ["", "changes", "page/workspace.js"])
async def test_another_host_name_gets_nothing(ws: Workspace, path: str) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{ws.url}{path}", headers={"Host": "evil.example"})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "HERE", "Content-Type": "text/plain"}, 403),
        ({"Origin": "HERE", "Host": "evil.example"}, 403),
        ({"Origin": "HERE"}, 200),
    ],
)
async def test_only_the_page_itself_may_send(ws: Workspace, headers: dict[str, str], status: int) -> None:
    here = ws.url.rstrip("/")
    headers = {"Content-Type": "application/json"} | {
        k: here if v == "HERE" else v for k, v in headers.items()
    }
    body = f'{{"channel": "{ws.channel("training").id}", "text": "hello"}}'
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{ws.url}send", content=body, headers=headers)
    assert answer.status_code == status
    assert len(ws.channel("training").messages) == (status == 200)


@pytest.mark.parametrize("body", ["", "[]", '{"channel": 1}', '{"channel": "C404", "text": "x"}'])
async def test_a_malformed_request_is_told_so(ws: Workspace, body: str) -> None:
    headers = {"Content-Type": "application/json", "Origin": ws.url.rstrip("/")}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{ws.url}send", content=body, headers=headers)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]


async def test_the_page_may_load_nothing_from_elsewhere(ws: Workspace) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.get(ws.url)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "http://" not in answer.text
    assert "https://" not in answer.text


@contextlib.asynccontextmanager
async def bot_in(ws: Workspace) -> AsyncIterator[AsyncApp]:
    app = AsyncApp(client=AsyncWebClient(ws.bot_token, base_url=ws.api_url))
    blocks = [
        {"type": "section", "text": {"type": "mrkdwn", "text": "*slow*: rank 2"}},
        {
            "type": "actions",
            "elements": [
                {
                    "type": "button",
                    "action_id": "evidence",
                    "text": {"type": "plain_text", "text": "Evidence"},
                    "value": "1",
                }
            ],
        },
    ]

    @app.command("/sysom")
    async def diagnose(ack: Any, command: dict[str, Any], client: AsyncWebClient) -> None:
        await ack()
        sent = await client.chat_postMessage(channel=command["channel_id"], text="looking …")
        await client.chat_update(channel=sent["channel"], ts=sent["ts"], text="slow", blocks=blocks)

    @app.action("evidence")
    async def show(ack: Any, body: dict[str, Any], client: AsyncWebClient) -> None:
        await ack()
        where = {"channel": body["channel"]["id"], "thread_ts": body["message"]["ts"]}
        await client.chat_postMessage(text="189 ms runnable", **where)

    @app.event("message")
    async def answer(event: dict[str, Any], say: Any) -> None:
        if "thread_ts" in event:
            await say(f"you asked: {event['text']}", thread_ts=event["thread_ts"])

    handler = AsyncSocketModeHandler(app, ws.app_token)
    await handler.connect_async()
    try:
        yield app
    finally:
        await handler.close_async()


@in_browser
async def test_a_newcomer_types_a_command_clicks_and_asks_in_the_thread(ws: Workspace, page: Page) -> None:
    async with bot_in(ws):
        await expect(page.get_by_text("sysom is connected")).to_be_visible()
        await page.get_by_role("button", name="/sysom help").click()
        field = page.get_by_role("textbox", name="Message training")
        await expect(field).to_have_value("/sysom help")
        await field.press("Enter")
        messages = page.locator("#messages .message")
        await expect(messages.get_by_text("slow", exact=True)).to_have_css("font-weight", "700")
        await expect(messages.get_by_text("APP")).to_be_visible()
        await page.get_by_role("button", name="Evidence").click()
        await page.get_by_role("button", name="1 reply").click()
        thread = page.get_by_role("complementary", name="Thread")
        await expect(thread.get_by_text("189 ms runnable")).to_be_visible()
        reply = thread.get_by_role("textbox", name="Reply in thread")
        await expect(reply).to_be_focused()
        await reply.fill("why rank 2?")
        await reply.press("Enter")
        await expect(thread.get_by_text("you asked: why rank 2?")).to_be_visible()
        await reply.fill("/sysom jobs")
        await reply.press("Enter")
        await expect(thread.get_by_role("alert")).to_have_text("/sysom is not supported in threads. Sorry!")
        await page.keyboard.press("Escape")
        await expect(thread).to_be_hidden()
        await field.focus()
        await field.press("ArrowUp")
        await expect(field).to_have_value("/sysom help")


@in_browser
async def test_what_messages_say_is_never_markup(ws: Workspace, page: Page) -> None:
    slack = AsyncWebClient(ws.bot_token, base_url=ws.api_url)
    evil = "<img src=x onerror=\"document.title='pwned'\">"
    escaped = evil.replace("<", "&lt;").replace(">", "&gt;")
    leaf = {"type": "text", "text": evil}
    link = {"type": "link", "url": "javascript:document.title='pwned'", "text": "bad link"}
    blocks = [
        {"type": "section", "text": {"type": "mrkdwn", "text": f"{escaped} `{escaped}` ```{escaped}```"}},
        {"type": "header", "text": {"type": "plain_text", "text": evil}},
        {"type": "rich_text", "elements": [{"type": "rich_text_section", "elements": [leaf, link]}]},
        {"type": "image", "image_url": "https://example.com/a.png", "alt_text": evil},
    ]
    await slack.chat_postMessage(channel="#training", text="x", blocks=blocks)
    await ws.person(evil).say(evil)
    message = page.locator("#messages .message")
    await expect(message).to_have_count(2)
    assert (await message.first.inner_text()).count(evil) == 6
    assert await page.locator("#messages img, #messages script, #messages a[href^='javascript']").count() == 0
    assert "workspace" in await page.title()


@in_browser
async def test_only_the_person_meant_sees_an_ephemeral_message(ws: Workspace, page: Page) -> None:
    slack = AsyncWebClient(ws.bot_token, base_url=ws.api_url)
    for name in ("grace", "ada"):
        user = ws.person(name).id
        await slack.chat_postEphemeral(channel=ws.channel("training").id, user=user, text=f"psst {name}")
    await expect(page.get_by_text("psst ada")).to_be_visible()
    await expect(page.get_by_text("Only visible to you")).to_have_count(1)
    await expect(page.get_by_text("psst grace")).to_have_count(0)


@in_browser
async def test_news_elsewhere_is_counted_and_deletions_are_seen(ws: Workspace, page: Page) -> None:
    slack = AsyncWebClient(ws.bot_token, base_url=ws.api_url)
    sent = await slack.chat_postMessage(channel="#general", text="news")
    await page.get_by_role("button", name="general 1").click()
    await expect(page.locator("#messages").get_by_text("news")).to_be_visible()
    await slack.chat_delete(channel=sent["channel"], ts=sent["ts"])
    await expect(page.locator("#messages").get_by_text("news")).to_have_count(0)


@in_browser
async def test_nothing_sticks_out_at_any_width(ws: Workspace, page: Page) -> None:
    slack = AsyncWebClient(ws.bot_token, base_url=ws.api_url)
    fields = [{"type": "mrkdwn", "text": "x" * 300}] * 4
    pre = {"type": "rich_text_preformatted", "elements": [{"type": "text", "text": "y" * 500}]}
    cells = [[{"type": "raw_text", "text": "z" * 20}] * 20] * 2
    blocks = [
        {"type": "section", "fields": fields},
        {"type": "rich_text", "elements": [pre]},
        {"type": "table", "rows": cells},
    ]
    await slack.chat_postMessage(channel="#training", text="x", blocks=blocks)
    await expect(page.locator("#messages .message")).to_have_count(1)
    boxes = "[document.documentElement, document.getElementById('stream')]"
    for width in (1200, 768, 360):
        await page.set_viewport_size({"width": width, "height": 700})
        assert await page.evaluate(f"{boxes}.map((e) => e.scrollWidth - e.clientWidth)") == [0, 0]
        assert await page.evaluate("document.documentElement.scrollHeight - innerHeight") == 0


@in_browser
async def test_on_a_phone_the_channels_are_behind_a_button(ws: Workspace, page: Page) -> None:
    await page.set_viewport_size({"width": 360, "height": 700})
    await expect(page.get_by_role("button", name="random")).to_be_hidden()
    await page.get_by_role("button", name="Show channels").click()
    await page.get_by_role("button", name="random").click()
    await expect(page.get_by_role("heading", name="# random")).to_be_visible()
    await expect(page.get_by_text("sysom is not in this channel")).to_be_visible()


CONTRAST = """(selector) => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const linear = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = channels(color).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const element = document.querySelector(selector);
  let behind = element;
  while (channels(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const pair = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(light);
  return [(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05), pair[1]];
}"""
"""WCAG 2.1's contrast between an element's text and what is behind it, and how light that is (0 to 1)."""


@in_browser
async def test_light_and_dark_can_be_read(ws: Workspace, page: Page) -> None:
    slack = AsyncWebClient(ws.bot_token, base_url=ws.api_url)
    await slack.chat_postMessage(channel="#training", text="`node-1` is slow, <https://a.example|see>")
    await expect(page.locator("#messages code")).to_be_visible()
    behind = {}
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        for selector in ("#messages .body", "#messages code", "#messages a", "#messages time", "textarea"):
            contrast, behind[scheme] = await page.evaluate(CONTRAST, selector)
            assert contrast >= 4.5, (scheme, selector)
    assert behind["dark"] < 0.1 < 0.8 < behind["light"]
