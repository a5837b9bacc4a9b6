"""What people use on the page: menus, the field with its history and completion, modals, pictures."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any

from playwright.async_api import Page, expect
from slack_bolt.adapter.socket_mode.async_handler import AsyncSocketModeHandler
from slack_bolt.app.async_app import AsyncApp
from slack_sdk.web.async_client import AsyncWebClient

from bot.workspace import Workspace
from tests.bot.browser import in_browser

EVIL = "<img src=x onerror=\"document.title='pwned'\">"


def plain(text: str) -> dict[str, Any]:
    return {"type": "plain_text", "text": text}


def options(*names: str) -> list[dict[str, Any]]:
    return [{"text": plain(name), "value": name.lower()} for name in names]


@contextlib.asynccontextmanager
async def connected(ws: Workspace) -> AsyncIterator[AsyncApp]:
    app = AsyncApp(client=AsyncWebClient(ws.bot_token, base_url=ws.api_url))
    handler = AsyncSocketModeHandler(app, ws.app_token)
    await handler.connect_async()
    try:
        yield app
    finally:
        await handler.close_async()


@in_browser
async def test_a_menu_acts_on_what_is_chosen_and_not_on_the_way_there(ws: Workspace, page: Page) -> None:
    chosen: list[str] = []
    async with connected(ws) as app:

        @app.action("more")
        @app.action("rank")
        async def act(ack: Any, action: dict[str, Any]) -> None:
            await ack()
            chosen.append(action["selected_option"]["value"])

        more = {"type": "overflow", "action_id": "more", "options": options("Rerun", "Snooze", EVIL)}
        rank = {
            "type": "static_select",
            "action_id": "rank",
            "placeholder": plain("Rank"),
            "options": options("R2", "R7"),
        }
        blocks = [{"type": "actions", "elements": [more, rank]}]
        await AsyncWebClient(ws.bot_token, base_url=ws.api_url).chat_postMessage(
            channel="#training", text="x", blocks=blocks
        )
        button = page.get_by_role("button", name="More actions")
        await button.focus()
        await page.keyboard.press("ArrowDown")
        await expect(button).to_have_attribute("aria-expanded", "true")
        await expect(page.get_by_role("menuitem", name="Rerun")).to_be_focused()
        await page.keyboard.press("ArrowDown")
        await expect(page.get_by_role("menuitem", name="Snooze")).to_be_focused()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("menu")).to_be_hidden()
        await expect(button).to_be_focused()
        assert chosen == []
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("menuitem", name="Rerun")).to_be_focused()  # it is open
        await page.keyboard.press("End")
        await expect(page.get_by_role("menuitem", name=EVIL)).to_be_focused()
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Rank").click()
        await page.get_by_role("menuitemradio", name="R7").click()
        await ws.wait_for(lambda: len(chosen) == 2)
    assert chosen == [EVIL.lower(), "r7"]
    assert "workspace" in await page.title()


@in_browser
async def test_each_channel_has_its_own_history_and_draft(ws: Workspace, page: Page) -> None:
    field = page.locator("#composer-text")
    for line in ("one", "two"):
        await field.fill(line)
        await field.press("Enter")
    await expect(page.locator("#messages .message")).to_have_count(2)
    await field.fill("half a th")
    await page.get_by_role("button", name="general").click()
    await expect(field).to_have_value("")
    await field.press("ArrowUp")
    await expect(field).to_have_value("")
    await page.get_by_role("button", name="training").click()
    await expect(field).to_have_value("half a th")
    await page.reload()
    await expect(page.locator("#messages .message")).to_have_count(2)
    for key, expected in (("ArrowUp", "two"), ("ArrowUp", "one"), ("ArrowDown", "two"), ("ArrowDown", "")):
        await field.press(key)
        await expect(field).to_have_value(expected)


@in_browser
async def test_commands_are_completed(ws: Workspace, page: Page) -> None:
    field = page.locator("#composer-text")
    hints = page.get_by_role("group", name="Commands")
    await field.press_sequentially("/s")
    await expect(hints.get_by_role("button")).to_have_text(
        ["/sysom diagnose JOB", "/sysom jobs", "/sysom help"]
    )
    await expect(page.get_by_role("status").filter(has_text="Tab completes")).to_have_count(1)
    await field.press("Tab")
    await expect(field).to_have_value("/sysom diagnose ")
    await expect(hints.get_by_role("button")).to_have_text(["/sysom diagnose JOB"])
    await field.press_sequentially("j")
    await expect(hints).to_be_hidden()
    await field.fill("/sysom j")
    await hints.get_by_role("button").click()
    await expect(field).to_have_value("/sysom jobs")
    await expect(field).to_be_focused()
    await field.fill("/")
    await field.press("Escape")
    await expect(hints).to_be_hidden()
    await field.fill("hello")
    await field.press("Tab")
    await expect(page.get_by_role("button", name="Send", exact=True)).to_be_focused()


@in_browser
async def test_pictures_are_shown_and_other_files_are_handed_over(ws: Workspace, page: Page) -> None:
    ada = ws.person("grace")
    await ada.upload("flame.png", png(40, 20), text="here")
    await ada.upload("page.html", b"<script>document.title='pwned'</script>")
    picture = page.locator("#messages img")
    await expect(picture).to_have_count(1)
    await expect(picture).to_have_attribute("alt", "flame.png")
    await page.wait_for_function("document.querySelector('#messages img').naturalWidth === 40")
    link = page.get_by_role("link", name="page.html")
    async with page.expect_download() as download:
        await link.click()
    assert (await download.value).suggested_filename == "page.html"


FORM = {
    "type": "modal",
    "callback_id": "form",
    "notify_on_close": True,
    "title": plain("Snooze"),
    "submit": plain("Snooze it"),
    "blocks": [
        {"type": "section", "text": plain(EVIL)},
        {
            "type": "input",
            "block_id": "why",
            "label": plain("Why"),
            "hint": plain("One line"),
            "element": {"type": "plain_text_input", "action_id": "a", "min_length": 3},
        },
        {
            "type": "input",
            "block_id": "who",
            "label": plain("Who"),
            "optional": True,
            "element": {"type": "checkboxes", "action_id": "a", "options": options("Ada", "Grace")},
        },
        {
            "type": "input",
            "block_id": "long",
            "label": plain("How long"),
            "element": {"type": "static_select", "action_id": "a", "options": options("1h", "8h")},
        },
    ],
}


@in_browser
async def test_a_modal_is_filled_in_corrected_and_submitted(ws: Workspace, page: Page) -> None:
    submitted: list[dict[str, Any]] = []
    async with connected(ws) as app:

        @app.command("/sysom")
        async def opens(ack: Any, body: dict[str, Any], client: AsyncWebClient) -> None:
            await ack()
            await client.views_open(trigger_id=body["trigger_id"], view=FORM)

        @app.view("form")
        async def takes(ack: Any, view: dict[str, Any]) -> None:
            submitted.append(view["state"]["values"])
            wrong = (
                {"response_action": "errors", "errors": {"why": "Say more"}} if len(submitted) == 1 else {}
            )
            await ack(**wrong)

        await page.locator("#composer-text").fill("/sysom snooze")
        await page.keyboard.press("Enter")
        modal = page.get_by_role("dialog", name="Snooze")
        why = modal.get_by_role("textbox", name="Why")
        await expect(why).to_be_focused()
        assert EVIL in await modal.inner_text()
        await why.fill("maintenance")
        await modal.get_by_role("checkbox", name="Grace").check()
        await why.press("Enter")
        await expect(modal.get_by_role("alert").filter(has_text="How long")).to_be_visible()
        assert submitted == []
        await modal.get_by_role("combobox", name="How long").select_option("8h")
        await modal.get_by_role("button", name="Snooze it").click()
        await expect(modal.get_by_text("Say more")).to_be_visible()
        await expect(why).to_have_value("maintenance")
        await expect(why).to_have_attribute("aria-invalid", "true")
        await expect(modal.get_by_role("checkbox", name="Grace")).to_be_checked()
        await why.fill("maintenance of node-7")
        await page.set_viewport_size({"width": 390, "height": 500})
        assert await modal.evaluate(
            "(e) => [e.scrollWidth - e.clientWidth, e.getBoundingClientRect().bottom <= innerHeight]"
        ) == [0, True]
        await modal.get_by_role("button", name="Snooze it").click()
        await expect(modal).to_be_hidden()
    assert submitted[1]["why"]["a"]["value"] == "maintenance of node-7"
    assert [option["value"] for option in submitted[1]["who"]["a"]["selected_options"]] == ["grace"]
    assert submitted[1]["long"]["a"]["selected_option"]["value"] == "8h"
    assert "workspace" in await page.title()


@in_browser
async def test_escape_leaves_a_modal_and_the_app_hears_of_it(ws: Workspace, page: Page) -> None:
    closed: list[str] = []
    async with connected(ws) as app:

        @app.command("/sysom")
        async def opens(ack: Any, body: dict[str, Any], client: AsyncWebClient) -> None:
            await ack()
            await client.views_open(trigger_id=body["trigger_id"], view=FORM)

        @app.view_closed("form")
        async def hears(ack: Any, view: dict[str, Any]) -> None:
            await ack()
            closed.append(view["callback_id"])

        await ws.person("ada").command("/sysom snooze")
        await expect(page.get_by_role("dialog", name="Snooze")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog", name="Snooze")).to_be_hidden()
        await ws.wait_for(lambda: closed)
    assert closed == ["form"]


def png(width: int, height: int) -> bytes:
    """A picture in one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\xc0\x40\x20" * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
