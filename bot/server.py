"""The server: takes batches from agents, answers in Slack. The event loop moves messages and nothing heavy:
storing has a thread, a diagnosis has a process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import signal
import time
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from bot.settings import Settings, address
from bot.slack import running_bot
from bot.web.app import create_app
from bot.web.listening import listening
from diagnosis.ingest import Ingest
from diagnosis.service import diagnose_job
from diagnosis.store import JobInfo, Store, open_store
from diagnosis.verdict import Verdict

log = logging.getLogger(__name__)

DIAGNOSES_AT_A_TIME = 1
"""Processes for diagnoses; each holds SciPy (about 100 MB). Further questions wait their turn."""


class Diagnoses:
    """Answers questions about jobs: the bot's ``Diagnoser``."""

    def __init__(self, store_url: str, store: Store) -> None:
        self._url = store_url
        self._store = store
        # spawn: this process has threads, which a fork would tear.
        self._pool = ProcessPoolExecutor(
            DIAGNOSES_AT_A_TIME, mp_context=multiprocessing.get_context("spawn"), initializer=_worker
        )

    async def warm(self) -> None:
        """Start the worker, so that the first question does not wait for its imports."""
        await asyncio.get_running_loop().run_in_executor(self._pool, _ready)

    async def diagnose(self, job: str) -> Verdict:
        """The verdict on a job, now. Raises ``UnknownJob`` and ``StoreError``."""
        ask = functools.partial(
            diagnose_job, self._url, job, start_ns=None, end_ns=None, now_ns=time.time_ns()
        )
        return await asyncio.get_running_loop().run_in_executor(self._pool, ask)

    async def jobs(self) -> list[JobInfo]:
        """All jobs, the one with the newest data first. Raises ``StoreError``."""
        return await asyncio.to_thread(self._store.jobs)

    async def close(self) -> None:
        """End the worker; a diagnosis that runs is waited for."""
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)


def _worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server ends its worker


def _ready() -> bool:
    return True


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
        diagnoses = Diagnoses(settings.store_url(), store)
        try:
            warming = asyncio.create_task(diagnoses.warm())
            host, port = address(settings.listen, "listen")
            app = create_app(Ingest(store, settings.node_tokens))
            async with listening(app, host, port) as url:
                log.info("the server listens on %s, its store is %s", url, settings.store_url())
                yield Running(url, settings.store_url(), diagnoses)
            await warming
        finally:
            await diagnoses.close()
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
