"""A running workspace, and a client of Slack's own SDK for it."""

from collections.abc import AsyncIterator

import pytest
from slack_sdk.web.async_client import AsyncWebClient

from bot.workspace import Workspace


@pytest.fixture
async def ws() -> AsyncIterator[Workspace]:
    async with Workspace() as workspace:
        yield workspace


@pytest.fixture
def slack(ws: Workspace) -> AsyncWebClient:
    return AsyncWebClient(ws.bot_token, base_url=ws.api_url)
