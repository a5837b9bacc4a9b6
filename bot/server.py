"""The server: takes batches from agents, answers in Slack. The event loop moves messages and nothing heavy:
storing has a process, and a few more have the diagnoses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bot.intake import InProcess
from bot.settings import Settings, SettingsError, address
from bot.slack import Home, Inbound, SlackAway, running_bot, running_http_bot
from bot.terminal import has_terminal
from bot.web.app import create_app
from bot.web.certificate import Certificate
from bot.web.listening import listening
from bot.web.metrics import Metrics
from bot.worker import Workers
from diagnosis.service import diagnose_job
from diagnosis.store import JobInfo, Keep, Store, UnknownJob, open_store
from diagnosis.tokens import Tokens
from diagnosis.verdict import Verdict
from diagnosis.writer import Place

log = logging.getLogger(__name__)

WORKERS = max(2, min(4, (os.cpu_count() or 1) // 2))
"""Diagnoses at a time. Each has a process with SciPy (about 100 MB, and 250 MB more for a job of 256 ranks) that
is started when it is needed first and stays."""
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 60.0
"""Between attempts to start the bot while Slack is away; doubled from the first to the longest."""
MAX_FILES = 65_536
"""Open files, where the system allows as many: so many agents can be connected."""


class Diagnoses:
    """Answers questions about jobs: the bot's ``Diagnoser``. ``WORKERS`` diagnoses at a time; further questions
    wait their turn."""

    def __init__(self, store_url: str, store: Store, workers: Workers, metrics: Metrics) -> None:
        self._url = store_url
        self._store = store
        self._workers = workers
        self._metrics = metrics

    async def diagnose(self, job: str) -> Verdict:
        """The verdict on a job, now. Raises ``UnknownJob``, ``StoreError`` and ``WorkerDied``."""
        async with self._workers.turn() as worker:
            result = "failed"
            try:
                with self._metrics.diagnosis_seconds.time():
                    verdict = await worker.call(diagnose_job, self._url, job, now_ns=time.time_ns())
                result = "finished"
                return verdict
            except UnknownJob:
                result = "unknown_job"  # a typing mistake is nobody's failure
                raise
            finally:
                self._metrics.diagnoses.labels(result).inc()

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
    metrics: Metrics
    inbound: Inbound | None
    """Where Slack's requests come in, in HTTP mode."""
    reload: Callable[[], None]
    """Read the file of tokens and the certificate again, now."""


@contextlib.asynccontextmanager
async def running_server(settings: Settings) -> AsyncIterator[Running]:
    """Store, HTTP and diagnoses for the length of an ``async with``; without Slack.

    Raises ``SettingsError``, ``TokensError``, ``CertificateError``, ``SlackRefused``, ``StoreError``,
    ``SigningError``, and OSError when the address cannot be had.
    """
    try:
        settings.state_folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"the folder {settings.state_folder()} cannot be made ({error.strerror}): give SYSOM_STATE one "
            "in which this user may write"
        ) from error
    file = Path(settings.node_tokens_file) if settings.node_tokens_file else None
    tokens = Tokens(settings.node_tokens, file)
    certificate = Certificate(Path(settings.tls_cert), Path(settings.tls_key)) if settings.tls_cert else None
    inbound = Inbound(settings.slack_signing_secret) if settings.slack_signing_secret else None
    _allow_many_connections()
    metrics, url = Metrics(), settings.store_url()
    keep = Keep(settings.keep_days, settings.keep_gb)
    async with contextlib.AsyncExitStack() as stack:
        intake = InProcess(Place(url, settings.command_key_file(), keep), tokens)
        stack.push_async_callback(intake.close)
        await intake.open()
        store = await asyncio.to_thread(open_store, url, read_only=True)
        stack.push_async_callback(asyncio.to_thread, store.close)
        workers = Workers(WORKERS)
        stack.push_async_callback(workers.close)
        await workers.start()
        metrics.diagnoses_waiting.set_function(lambda: workers.waiting)
        metrics.diagnoses_running.set_function(lambda: workers.running)
        app = create_app(
            intake,
            metrics=metrics,
            routes=[inbound.route()] if inbound else [],
            refreshed=[_refreshed(certificate)] if certificate else [],
        )
        host, port = address(settings.listen, "listen")
        try:
            served = await stack.enter_async_context(listening(app, host, port, certificate=certificate))
        except OSError as error:
            why = error.strerror.partition(" (while")[0] if error.strerror else str(error)
            raise OSError(f"SYSOM_LISTEN: the server cannot listen on {settings.listen}: {why}") from error
        log.info("the server listens on %s, its store is %s", served, url)

        def reload() -> None:
            tokens.refresh()
            if certificate is not None:
                certificate.refresh()

        yield Running(served, url, Diagnoses(url, store, workers, metrics), metrics, inbound, reload)


def slack_bot(
    settings: Settings, running: Running, *, base_url: str | None = None
) -> contextlib.AbstractAsyncContextManager[Home]:
    """The bot in the Slack that is set, by HTTP where a signing secret is, else by Socket Mode.

    ``base_url``: another address of Slack's Web API. Raises ``SlackRefused`` when entered.
    """
    if running.inbound is not None:
        if settings.slack_app_token:
            log.info(
                "SYSOM_SLACK_SIGNING_SECRET and SLACK_APP_TOKEN are both set: HTTP is used, and not Socket Mode"
            )
        return running_http_bot(
            settings.slack_bot_token,
            running.inbound,
            running.diagnoses,
            base_url=base_url,
            meter=running.metrics,
        )
    return running_bot(
        settings.slack_bot_token,
        settings.slack_app_token,
        running.diagnoses,
        base_url=base_url,
        meter=running.metrics,
    )


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run the server, and the bot where Slack's tokens are set, until ``stop``. While Slack is away batches are
    taken all the same, and the bot is started when it is back.

    Raises as :func:`running_server`, and ``SlackRefused`` for what is wrong with the settings.
    """
    hangup = None if has_terminal() else _heeded_hangup()
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_server(settings))
        if hangup is not None:
            reloading = asyncio.create_task(_reload_at(hangup, running))
            stack.callback(reloading.cancel)
        if settings.has_slack():
            stopped = asyncio.create_task(stop.wait())
            stack.callback(stopped.cancel)
            await when_there(lambda: slack_bot(settings, running), stack, stopped)
        else:
            log.warning("SLACK_BOT_TOKEN and SLACK_APP_TOKEN are not set: no Slack")
        await stop.wait()


async def when_there(
    bot: Callable[[], contextlib.AbstractAsyncContextManager[Home]],
    stack: contextlib.AsyncExitStack,
    stopped: asyncio.Task[Any],
    first_wait_s: float = FIRST_WAIT_S,
) -> None:
    """Enter ``bot()`` into ``stack`` as soon as Slack lets it, or return when ``stopped``, also in the middle of an
    attempt: Slack may take a minute to say nothing. Each trouble is said once. Raises ``SlackRefused`` for what
    waiting does not mend."""
    said, wait_s = "", first_wait_s
    while not stopped.done():
        entering = asyncio.create_task(stack.enter_async_context(bot()))
        try:
            await asyncio.wait({entering, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not entering.done():
                return
            entering.result()
            return
        except SlackAway as away:
            if str(away) != said:
                said = str(away)
                log.warning("no Slack yet, it is tried again and again (batches are taken): %s", said)
        finally:
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)
        await asyncio.wait([stopped], timeout=wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _heeded_hangup() -> asyncio.Event | None:
    """Set at each SIGHUP from now on. At a terminal it says that the terminal is gone; to a daemon, by custom, that
    files are to be read again, and never to end. None where whoever started us wants it ignored."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return None
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, heard.set)
    return heard


async def _reload_at(hangup: asyncio.Event, running: Running) -> None:
    while True:
        await hangup.wait()
        hangup.clear()
        await asyncio.to_thread(running.reload)


def _refreshed(certificate: Certificate) -> Callable[[], str]:
    def look() -> str:
        if certificate.stale():
            certificate.refresh()
        return " ".join(filter(None, (certificate.problem, certificate.warning())))

    return look


def _allow_many_connections() -> None:
    """Each connection is an open file, and the usual limit of 1024 is a cluster's size."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, MAX_FILES)), most))
