"""A running workspace, and a client of Slack's own SDK for it."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Page, async_playwright, expect
from slack_sdk.web.async_client import AsyncWebClient

from bot.workspace import Workspace
from tests.bot.browser import CHROMIUM, QUIET


@pytest.fixture
async def ws() -> AsyncIterator[Workspace]:
    async with Workspace() as workspace:
        yield workspace


@pytest.fixture
def slack(ws: Workspace) -> AsyncWebClient:
    return AsyncWebClient(ws.bot_token, base_url=ws.api_url)


@pytest.fixture
async def page(ws: Workspace) -> AsyncIterator[Page]:
    """The workspace's page in Chromium; at the end nothing failed in it, and it asked nobody else."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = await browser.new_page(viewport={"width": 1200, "height": 800})
        errors: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(ws.url)
        await expect(page.get_by_role("heading", name="# training")).to_be_visible()
        yield page
        await browser.close()
    assert [error for error in errors if "status of 4" not in error] == []
    assert [url for url in asked if not url.startswith((ws.url, "data:"))] == []
