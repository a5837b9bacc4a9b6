"""A person asks, the desk answers: what happens after a command was acknowledged."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from bot.slack import ephemeral, grammar, messages
from bot.slack.blocks import Message
from bot.slack.clock import Clock
from bot.slack.ephemeral import Post
from bot.slack.once import Once
from bot.slack.outbox import NotDeliveredError, Outbox, Posting
from bot.slack.service import Diagnoser
from diagnosis.store import StoreError, UnknownJob

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 3.0
PATIENCE_S = 120.0
"""After this long the search is given up: an answer that comes later finds nobody waiting."""
CLOSING_S = 5.0
"""What shutting down may spend on telling those who wait."""


@dataclass(frozen=True)
class Home:
    """The workspace and the bot in it, as Slack says."""

    team: str
    team_id: str
    enterprise_id: str
    bot: str
    bot_id: str
    user_id: str


@dataclass(frozen=True)
class Asked:
    """One command as it came in."""

    text: str
    channel: str
    user: str
    response_url: str


@dataclass(frozen=True)
class _Answer:
    root: Message
    details: Message | None = None
    alone: Message | None = None
    """The root as it reads where there is no thread."""


class Desk:
    """Answers commands of one workspace. ``close`` it: those who wait are told."""

    def __init__(self, diagnoser: Diagnoser, outbox: Outbox, post: Post, home: Home, clock: Clock) -> None:
        self._diagnoser = diagnoser
        self._outbox = outbox
        self._post = post
        self._home = home
        self._clock = clock
        self._once = Once()
        self._open: set[tuple[str, str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, body: Mapping[str, Any]) -> None:
        """Begin with a command's payload; returns at once. A payload that was here before is left alone."""
        if self._once.again(str(body.get("trigger_id", ""))):
            log.info("a command was delivered again, and answered once")
            return
        asked = Asked(
            text=str(body.get("text") or ""),
            channel=str(body.get("channel_id", "")),
            user=str(body.get("user_id", "")),
            response_url=str(body.get("response_url", "")),
        )
        if is_outsider(body, self._home):
            self._start(self._whisper(asked, messages.outsider()))
        else:
            self._start(self._handle(asked))

    async def close(self) -> None:
        """Stop looking, and tell those who wait that there is no answer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._outbox.close(CLOSING_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _whisper(self, asked: Asked, message: Message) -> None:
        await ephemeral.whisper(self._post, self._clock, asked.response_url, message)

    async def _handle(self, asked: Asked) -> None:
        try:
            command = grammar.parse(asked.text)
        except grammar.GrammarError as error:
            await self._whisper(asked, messages.not_understood(error))
            return
        match command:
            case grammar.Help():
                await self._whisper(asked, messages.help_())
            case grammar.Jobs():
                await self._whisper(asked, await self._jobs())
            case grammar.Diagnose(job=job) if (asked.channel, job) in self._open:
                await self._whisper(asked, messages.busy(job))
            case grammar.Diagnose(job=job):
                self._open.add((asked.channel, job))
                try:
                    await self._diagnose(asked, job)
                finally:
                    self._open.discard((asked.channel, job))

    async def _jobs(self) -> Message:
        try:
            return messages.jobs(await self._diagnoser.jobs(), time.time_ns())
        except StoreError as error:
            return messages.store_failed(error)
        except Exception:
            return messages.unexpected(_logged("the list of jobs"))

    async def _diagnose(self, asked: Asked, job: str) -> None:
        """One message in the channel: who asked and what for, then the answer in its place."""
        posting = self._outbox.post(asked.channel, messages.progress(job, asked.user))
        uninvited = self._start(self._tell_if_uninvited(posting, asked))
        try:
            answer = await self._watched(job, asked, posting)
        except asyncio.CancelledError:
            uninvited.cancel()
            posting.show(messages.stopped(job), urgent=True)
            raise
        posting.show(answer.root, urgent=True)
        try:
            await posting.delivered()
        except NotDeliveredError:
            await uninvited  # first why, then the answer
            for part in (answer.alone or answer.root, answer.details):
                if part is not None:
                    await self._whisper(asked, part)
            return
        if answer.details is not None:
            self._outbox.post(asked.channel, answer.details, parent=posting)

    async def _watched(self, job: str, asked: Asked, posting: Posting) -> _Answer:
        """The answer, with the time that it takes shown while it is sought."""
        began = self._clock.now()
        search = asyncio.create_task(self._answer(job, asked.user))
        try:
            while True:
                tick = asyncio.create_task(self._clock.sleep(PROGRESS_EVERY_S))
                try:
                    ends: set[asyncio.Future[Any]] = {search, tick}
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    tick.cancel()
                if search.done():
                    return search.result()
                waited = self._clock.now() - began
                if waited >= PATIENCE_S:
                    log.error("diagnosing %r took over %g s and was given up", job, PATIENCE_S)
                    return _Answer(messages.patience_over(job, PATIENCE_S))
                posting.show(messages.progress(job, asked.user, waited))
        finally:
            search.cancel()

    async def _answer(self, job: str, asker: str) -> _Answer:
        try:
            verdict = await self._diagnoser.diagnose(job)
            return _Answer(
                messages.root(verdict, asker),
                messages.details(verdict),
                messages.root(verdict, asker, thread=False),
            )
        except UnknownJob as error:
            return _Answer(messages.unknown_job(error))
        except StoreError as error:
            return _Answer(messages.store_failed(error, job))
        except Exception:
            return _Answer(messages.unexpected(_logged(f"diagnosing {job!r}"), job))

    async def _tell_if_uninvited(self, posting: Posting, asked: Asked) -> None:
        try:
            await posting.delivered()
        except NotDeliveredError as error:
            if error.closed:
                await self._whisper(asked, messages.uninvited(self._home.bot))


def is_outsider(body: Mapping[str, Any], home: Home) -> bool:
    """Whether a command comes from another organisation, as far as its payload says."""
    if str(body.get("is_ext_shared_channel", "")).lower() == "true":
        return True
    team, enterprise = str(body.get("team_id") or ""), str(body.get("enterprise_id") or "")
    if not team or team == home.team_id:
        return False
    return not (enterprise and enterprise == home.enterprise_id)


def _logged(what: str) -> str:
    """Write the exception at hand to the log; gives the id under which it stands there."""
    error_id = secrets.token_hex(4)
    log.exception("error %s: %s failed", error_id, what)
    return error_id
