"""The workspace's page in Chromium: one browser for all tests, in their one event loop, and a context for each."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from bot.workspace import Workspace
from tests.bot.browser import CHROMIUM, QUIET

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(loop_scope="session")
async def ws() -> AsyncIterator[Workspace]:
    async with Workspace() as workspace:
        yield workspace


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Starting it takes longer than most of what is done in it."""
    expect.set_options(timeout=60_000)  # five seconds pass quickly on a machine that has other work
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(ws: Workspace, browser: Browser) -> AsyncIterator[Page]:
    """The page, as a newcomer opens it; at the end nothing failed in it, and it asked nobody else."""
    context = await browser.new_context(viewport={"width": 1200, "height": 800})
    page = await context.new_page()
    await page.bring_to_front()  # the browser is shared: only the page in front has the focus
    errors: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(ws.url)
    await expect(page.get_by_role("heading", name="# training")).to_be_visible()
    yield page
    await context.close()
    assert [error for error in errors if "status of 4" not in error] == []
    assert [url for url in asked if not url.startswith((ws.url, "data:"))] == []
