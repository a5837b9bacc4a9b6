"""The bot on a local workspace, by Socket Mode and by HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from starlette.applications import Starlette

from bot.slack import Diagnoser, Inbound, running_bot, running_http_bot
from bot.slack.clock import Clock
from bot.slack.inbound import PATH
from bot.web.listening import listening
from bot.workspace import Workspace
from diagnosis.store import JobInfo, UnknownJob
from diagnosis.verdict import Verdict
from tests.bot import verdicts

SECRET = "5c1a0e6f9b7d4832a1f0e9d8c7b6a594"


class HurriedClock:
    """Real time, ten times as fast: waiting for a second try takes a tenth."""

    def now(self) -> float:
        return time.monotonic() * 10

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


class Engine:
    async def diagnose(self, job: str) -> Verdict:
        if job != "job-123":
            raise UnknownJob(job, ["job-123"])
        return verdicts.SLOW

    async def jobs(self) -> list[JobInfo]:
        return [JobInfo("job-123", 4, 4, 1, 0, 0)]


def found(ws: Workspace, channel: str, words: str) -> str:
    """The first message with these words in it, as a person reads it; empty while there is none."""
    return next((ws.plain(m) for m in ws.channel(channel).messages if words in ws.plain(m)), "")


@contextlib.asynccontextmanager
async def by_socket(engine: Diagnoser, clock: Clock | None = None) -> AsyncIterator[Workspace]:
    async with contextlib.AsyncExitStack() as stack:
        ws = await stack.enter_async_context(Workspace())
        bot = running_bot(ws.bot_token, ws.app_token, engine, base_url=ws.api_url, clock=clock)
        await stack.enter_async_context(bot)
        yield ws


@contextlib.asynccontextmanager
async def by_http(engine: Diagnoser, clock: Clock | None = None) -> AsyncIterator[Workspace]:
    inbound = Inbound(SECRET)
    async with contextlib.AsyncExitStack() as stack:
        server = listening(Starlette(routes=[inbound.route()]), "127.0.0.1", 0)
        address = await stack.enter_async_context(server) + PATH
        ws = await stack.enter_async_context(Workspace(request_url=address, signing_secret=SECRET))
        bot = running_http_bot(ws.bot_token, inbound, engine, base_url=ws.api_url, clock=clock)
        await stack.enter_async_context(bot)
        yield ws


MODES = [by_socket, by_http]
