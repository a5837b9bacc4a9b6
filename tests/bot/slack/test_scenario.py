"""The whole bot on a local workspace, as people use it, by Socket Mode and by HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from bot.workspace import Workspace
from tests.bot.slack.modes import MODES, Engine, found


@pytest.fixture(params=MODES)
async def ws(request: Any) -> AsyncIterator[Workspace]:
    async with request.param(Engine()) as workspace:
        yield workspace


async def test_a_person_asks_and_one_message_becomes_the_answer(ws: Workspace) -> None:
    delivery = await ws.person("ada").command("/sysom diagnose job-123", channel="training")
    assert delivery.acknowledged
    answer = await ws.wait_for(lambda: found(ws, "training", "job-123 is slow: rank 2 on node-7"))
    assert "CPU contention on rank 2, node-7 (operating system)" in answer
    assert "Asked by @ada" in answer
    await ws.wait_for(lambda: found(ws, "training", "Cleared"))
    (root,) = ws.channel("training").roots
    assert [ws.plain(m).split("\n")[0] for m in ws.channel("training").thread(root)][-1] == "Evidence"


async def test_jobs_help_and_mistakes_are_seen_by_the_asker_alone(ws: Workspace) -> None:
    ada = ws.person("ada")
    for line in ("/sysom jobs", "/sysom help", "/sysom diagnos <!channel>"):
        assert (await ada.command(line)).acknowledged
    for words in ("4 of 4 ranks on 1 node", "What sysom answers", "is not a command"):
        await ws.wait_for(lambda words=words: found(ws, "training", words))  # type: ignore[misc]
    assert {m.ephemeral_to for m in ws.channel("training").messages} == {ada.id}


async def test_direct_messages_work(ws: Workspace) -> None:
    ada = ws.person("ada")
    await ada.command("/sysom diagnose jab-123", channel=ada.direct)
    await ws.wait_for(lambda: any("Did you mean job-123?" in ws.plain(m) for m in ada.direct.messages))


async def test_in_a_channel_without_the_bot_the_asker_is_told_to_invite_it(ws: Workspace) -> None:
    ada = ws.person("ada")
    await ada.command("/sysom diagnose job-123", channel="random")
    await ws.wait_for(lambda: found(ws, "random", "/invite @sysom"))
    await ws.wait_for(lambda: found(ws, "random", "job-123 is slow"))
    await ws.wait_for(lambda: found(ws, "random", "Evidence"))
    assert {m.ephemeral_to for m in ws.channel("random").messages} == {ada.id}


async def test_a_rate_limit_delays_the_answer_and_not_the_acknowledgement(ws: Workspace) -> None:
    ws.rate_limit("chat.postMessage", retry_after=1)
    delivery = await ws.person("ada").command("/sysom diagnose job-123")
    assert delivery.acknowledged
    await ws.wait_for(lambda: found(ws, "training", "job-123 is slow"))
