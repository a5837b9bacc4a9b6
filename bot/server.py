"""The server: takes batches from agents, answers in Slack. The event loop moves messages and nothing heavy:
storing has a thread, a diagnosis has a process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from bot.settings import Settings, address
from bot.slack import running_bot
from bot.web.app import create_app
from bot.web.listening import listening
from bot.worker import Worker
from diagnosis.ingest import Ingest
from diagnosis.service import diagnose_job
from diagnosis.store import JobInfo, Store, open_store
from diagnosis.verdict import Verdict

log = logging.getLogger(__name__)


class Diagnoses:
    """Answers questions about jobs: the bot's ``Diagnoser``. One diagnosis at a time, as each holds SciPy (about
    100 MB); further questions wait their turn."""

    def __init__(self, store_url: str, store: Store, worker: Worker) -> None:
        self._url = store_url
        self._store = store
        self._worker = worker

    async def diagnose(self, job: str) -> Verdict:
        """The verdict on a job, now. Raises ``UnknownJob``, ``StoreError`` and ``WorkerDied``."""
        return await self._worker.call(diagnose_job, self._url, job, now_ns=time.time_ns())

    async def jobs(self) -> list[JobInfo]:
        """All jobs, the one with the newest data first. Raises ``StoreError``."""
        return await asyncio.to_thread(self._store.jobs)


@dataclass(frozen=True)
class Running:
    """A server that runs."""

    url: str
    """Where agents send batches."""
    store_url: str
    diagnoses: Diagnoses


@contextlib.asynccontextmanager
async def running_server(settings: Settings) -> AsyncIterator[Running]:
    """Store, HTTP and diagnoses for the length of an ``async with``; without Slack.

    Raises ``StoreError``, and OSError when the address cannot be had.
    """
    settings.state_folder().mkdir(parents=True, exist_ok=True)
    store = await asyncio.to_thread(open_store, settings.store_url())
    try:
        worker = Worker()
        try:
            await worker.start()
            host, port = address(settings.listen, "listen")
            app = create_app(Ingest(store, settings.node_tokens))
            async with listening(app, host, port) as url:
                log.info("the server listens on %s, its store is %s", url, settings.store_url())
                yield Running(url, settings.store_url(), Diagnoses(settings.store_url(), store, worker))
        finally:
            await worker.close()
    finally:
        await asyncio.to_thread(store.close)


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run the server, and the bot where Slack's tokens are set, until ``stop``.

    Raises as :func:`running_server`, and ``SlackRefused``.
    """
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_server(settings))
        if settings.has_slack():
            bot = running_bot(settings.slack_bot_token, settings.slack_app_token, running.diagnoses)
            await stack.enter_async_context(bot)
        else:
            log.warning("SLACK_BOT_TOKEN and SLACK_APP_TOKEN are not set: no Slack")
        await stop.wait()
