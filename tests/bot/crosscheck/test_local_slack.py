"""The bot's whole scenario in a Slack that others wrote, in both modes.

What `local-slack` cannot show: it has no limits on blocks, sizes or rates, checks no token, and does not deliver
again. What the bot has not: buttons; a mention is acknowledged and nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from bot.slack import Inbound, running_bot, running_http_bot
from bot.slack.inbound import PATH
from bot.web.listening import listening
from diagnosis.store import JobInfo, UnknownJob
from diagnosis.verdict import Verdict
from tests.bot import verdicts
from tests.bot.crosscheck import needs_local_slack
from tests.bot.crosscheck.local_slack import ADA, BOT, LocalSlack, running_local_slack

pytestmark = needs_local_slack
SECRET = "9f0c36c2b1a14a6f8d3e5b7a90c1d2e3"


class Engine:
    """Answers when ``go`` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def diagnose(self, job: str) -> Verdict:
        await self.go.wait()
        if job != "job-123":
            raise UnknownJob(job, ["job-123"])
        return verdicts.SLOW

    async def jobs(self) -> list[JobInfo]:
        return [JobInfo("job-123", 4, 4, 1, 0, 0)]


@contextlib.asynccontextmanager
async def by_socket(engine: Engine, folder: Path) -> AsyncIterator[LocalSlack]:
    async with contextlib.AsyncExitStack() as stack:
        slack = await stack.enter_async_context(running_local_slack(folder))
        bot = running_bot(slack.bot_token, slack.app_token, engine, base_url=slack.api_url)
        await stack.enter_async_context(bot)
        yield slack


@contextlib.asynccontextmanager
async def by_http(engine: Engine, folder: Path) -> AsyncIterator[LocalSlack]:
    inbound = Inbound(SECRET)
    async with contextlib.AsyncExitStack() as stack:
        server = listening(Starlette(routes=[inbound.route()]), "127.0.0.1", 0)
        address = await stack.enter_async_context(server) + PATH
        running = running_local_slack(folder, request_url=address, signing_secret=SECRET)
        slack = await stack.enter_async_context(running)
        bot = running_http_bot(slack.bot_token, inbound, engine, base_url=slack.api_url)
        await stack.enter_async_context(bot)
        yield slack


MODES = pytest.mark.parametrize("mode", [by_socket, by_http])


def saying(words: str) -> Any:
    """Finds the message with these words in its fallback text."""
    return lambda messages: next((m for m in messages if words in m["text"]), None)


@MODES
async def test_a_person_asks_and_one_message_becomes_the_answer(mode: Any, tmp_path: Path) -> None:
    engine = Engine()
    async with mode(engine, tmp_path) as slack:
        await slack.command("diagnose job-123")
        progress = await slack.wait_for(saying("reading what its ranks did"))
        engine.go.set()
        answer = await slack.wait_for(saying("job-123 is slow: rank 2 on node-7"))
        assert answer["ts"] == progress["ts"]
        assert answer["edited"]["user"] == BOT
        evidence = await slack.wait_for(saying("Evidence for: job-123"))
        assert evidence["thread_ts"] == answer["ts"]
        assert len(await slack.messages()) == 2
        assert await _answered(slack, "slash_commands")


@MODES
async def test_lists_and_mistakes_reach_the_asker_alone(mode: Any, tmp_path: Path) -> None:
    engine = Engine()
    engine.go.set()
    async with mode(engine, tmp_path) as slack:
        for line, words in (("jobs", "4 of 4 ranks on 1 node"), ("diagnos x", "is not a command")):
            await slack.command(line)
            assert (await slack.wait_for(saying(words)))["ephemeral_to"] == ADA
        await slack.command("diagnose jab-123")
        await slack.wait_for(saying("Did you mean `job-123`?"))


@MODES
async def test_what_people_write_is_acknowledged_and_left_alone(mode: Any, tmp_path: Path) -> None:
    async with mode(Engine(), tmp_path) as slack:
        await slack.say(f"<@{BOT}> why is it slow?")
        assert await _answered(slack, "events_api")
        assert [message["user"] for message in await slack.messages()] == [ADA]


async def _answered(slack: LocalSlack, kind: str) -> bool:
    """Whether all that was delivered of this kind was acknowledged."""
    log = await slack.log()
    sent = [entry for entry in log if entry["direction"] == "to_bot" and entry["kind"] == kind]
    if slack_is_http := any(entry["summary"].startswith("POST") for entry in sent):
        answers = [e["summary"] for e in log if e["direction"] == "from_bot" and e["kind"] == kind]
    else:
        answers = [e["summary"] for e in log if e["kind"] == "ack"]
    good = [answer for answer in answers if answer.startswith("HTTP 200" if slack_is_http else "ack")]
    return bool(sent) and len(good) == len(answers) == len(sent)
