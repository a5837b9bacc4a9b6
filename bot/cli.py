"""The command line: ``sysom agent | serve | up | diagnose | jobs | doctor``.

Each command loads its parts when it runs: a node that has only the agent's dependencies can run ``agent`` and
``doctor``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import click

from bot import settings as settings_module
from bot.settings import Settings, SettingsError

EXIT_ERROR = 2


class _Group(click.Group):
    """Shows commands in the order in which one meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["up", "diagnose", "jobs", "agent", "serve", "doctor"]


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="sysom")
@click.option("-v", "--verbose", is_flag=True, help="Say more about what is done.")
def main(verbose: bool) -> None:
    """Finds out why a distributed AI-training job is slow.

    Settings come from SYSOM_… variables and /etc/sysom.toml (or the file that SYSOM_CONFIG names).
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for noisy in ("httpx", "slack_bolt", "slack_sdk", "uvicorn", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


@main.command()
@click.option("--end-with-parent", is_flag=True, hidden=True)
def agent(end_with_parent: bool) -> None:
    """Watch this node's training processes and send what is seen to the server.

    Needs root. Ends on SIGTERM or Ctrl-C, sends what is left, and leaves nothing attached.

    Example: sudo SYSOM_SERVER=http://server:8750 SYSOM_NODE_TOKEN=… sysom agent
    """
    from probes import agent as node_agent
    from probes.bpf import BpfUnavailable
    from probes.lifetime import end_with_parent as follow
    from probes.spool import SpoolError

    if end_with_parent:
        follow()
    settings = _settings()
    if not settings.node_token:
        _fail("SYSOM_NODE_TOKEN is not set: the server's SYSOM_NODE_TOKENS holds this node's token")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    config = node_agent.AgentConfig(
        server=settings.server,
        token=settings.node_token,
        node=settings.node_name(),
        state=settings.state_folder(),
        spool_bytes=settings.spool_mb << 20,
    )
    try:
        node_agent.run(config, stop)
    except (BpfUnavailable, SpoolError, ValueError, OSError) as error:
        _fail(str(error))


@main.command()
def serve() -> None:
    """Take batches from agents, and answer in Slack where its tokens are set.

    Example: SYSOM_LISTEN=0.0.0.0:8750 SYSOM_NODE_TOKENS=node-1=…,node-2=… SLACK_BOT_TOKEN=xoxb-…
    SLACK_APP_TOKEN=xapp-… sysom serve
    """
    from bot import server

    settings = _settings()
    if not settings.node_tokens:
        _fail("SYSOM_NODE_TOKENS is not set: no agent could send anything; give node=token,node=token")
    _run(lambda stop: server.serve(settings, stop))


@main.command()
@click.option(
    "--demo", is_flag=True, help="Without a Slack: start a small training job with a slow rank, and ask."
)
def up(demo: bool) -> None:
    """Run server, bot and node agent on this machine; without a Slack a local workspace stands in.

    Needs root, for the agent. Ctrl-C ends everything.

    Example: sudo sysom up --demo
    """
    from bot.up import up as run_up

    settings = _settings()
    _run(lambda stop: run_up(settings, demo=demo, stop=stop, say=click.echo))


@main.command()
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON object.")
def diagnose(job: str, as_json: bool) -> None:
    """Say why JOB is slow: the last ten minutes of what the store holds.

    Works on the store alone, without a server. Exit status: 0 healthy, 1 slow or hang, 2 an error, 3 not enough
    evidence.

    Example: sysom diagnose job-123
    """
    from bot.rendering import verdict_text
    from diagnosis.service import diagnose_job
    from diagnosis.store import StoreError, UnknownJob
    from diagnosis.verdict import EXIT_STATUS, to_json

    try:
        verdict = diagnose_job(
            _settings().store_url(), job, start_ns=None, end_ns=None, now_ns=time.time_ns()
        )
    except (UnknownJob, StoreError) as error:
        _fail(str(error))
    click.echo(to_json(verdict) if as_json else verdict_text(verdict))
    sys.exit(EXIT_STATUS[verdict.status])


@main.command()
def jobs() -> None:
    """List the jobs that the store knows, the one with the newest data first.

    Example: sysom jobs
    """
    from bot.rendering import jobs_text
    from diagnosis.store import StoreError, open_store

    try:
        store = open_store(_settings().store_url(), read_only=True)
        try:
            click.echo(jobs_text(store.jobs(), time.time_ns()))
        finally:
            store.close()
    except StoreError as error:
        _fail(str(error))


@main.command()
def doctor() -> None:
    """Say what this node offers: kernel, BCC, headers, ranks; which probes can run; what is missing, and how to
    get it. Exit status 0 when everything can run, 1 otherwise.

    Example: sudo sysom doctor
    """
    from probes.doctor import examine

    findings = examine(_settings().state_folder() / "cache")
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        click.echo(f"{'ok     ' if finding.ok else 'missing'}  {finding.name:<{width}}  {finding.words}")
    sys.exit(0 if all(finding.ok for finding in findings) else 1)


def _settings() -> Settings:
    try:
        return settings_module.load()
    except SettingsError as error:
        _fail(str(error))


def _fail(words: str) -> NoReturn:
    """Say what is wrong and end with status 2."""
    shown = "".join(c if c.isprintable() or c == "\n" else "�" for c in words)
    click.echo(f"sysom: {shown}", err=True)
    sys.exit(EXIT_ERROR)


def _run(main_part: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run until SIGINT or SIGTERM; a second one ends at once."""
    from bot.slack import SlackRefused
    from bot.up import AgentFailed
    from diagnosis.store import StoreError

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: os._exit(130) if stop.is_set() else stop.set())
        await main_part(stop)

    try:
        asyncio.run(run())
    except (SlackRefused, AgentFailed, StoreError, SettingsError, OSError, ValueError) as error:
        _fail(str(error))


if __name__ == "__main__":
    main()
