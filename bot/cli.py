"""The command line: ``sysom agent | serve | up | diagnose | jobs | doctor``.

Each command loads its parts when it runs: a node that has only the agent's dependencies can run ``agent`` and
``doctor``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

import click

from bot import settings as settings_module
from bot.settings import Settings

log = logging.getLogger(__name__)

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""


SHORTEST_WINDOW_S = 30
"""Shorter windows hold too few steps to tell ranks apart."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class _Group(click.Group):
    """Shows commands in the order in which one meets them; every error of theirs ends with words and status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        with _errors_in_words():
            return super().invoke(ctx)

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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    for noisy in ("httpx", "slack_bolt", "slack_sdk", "uvicorn", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


@main.command()
@click.option("--end-with-parent", type=int, metavar="PID", hidden=True)
def agent(end_with_parent: int | None) -> None:
    """Watch this node's training processes and send what is seen to the server.

    Needs root. Ends on SIGTERM or Ctrl-C, sends what is left, and leaves nothing attached.

    Example: sudo SYSOM_SERVER=http://server:8750 SYSOM_NODE_TOKEN=… sysom agent
    """
    from probes import agent as node_agent
    from probes.lifetime import end_with_parent as follow

    if end_with_parent is not None:
        follow(end_with_parent)
    settings = _settings()
    if not settings.node_token:
        _fail("SYSOM_NODE_TOKEN is not set: the server's SYSOM_NODE_TOKENS holds this node's token")
    stop = threading.Event()
    for number in _ending_signals():
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
    except ValueError as error:  # a server's address that cannot be used
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
    _run(lambda stop: run_up(settings, demo=demo, stop=stop, say=_say))


@main.command()
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON object.")
@click.option(
    "--last",
    metavar="TIME",
    callback=lambda _ctx, _option, text: window_ns(text),
    help="Look at this long before now: 30s, 10m, 2h.  [default: the ten minutes before the newest data]",
)
def diagnose(job: str, as_json: bool, last: int | None) -> None:
    """Say why JOB is slow.

    Works on the store alone, without a server. Exit status: 0 healthy, 1 slow or hang, 2 an error, 3 not enough
    evidence.

    Example: sysom diagnose job-123 --last 5m
    """
    from bot.rendering import verdict_text
    from diagnosis.service import diagnose_job
    from diagnosis.verdict import EXIT_STATUS, to_json

    verdict = diagnose_job(_settings().store_url(), job, now_ns=time.time_ns(), last_ns=last)
    click.echo(to_json(verdict) if as_json else verdict_text(verdict))
    sys.exit(EXIT_STATUS[verdict.status])


@main.command()
def jobs() -> None:
    """List the jobs that the store knows, the one with the newest data first.

    Example: sysom jobs
    """
    from bot.rendering import jobs_text
    from diagnosis.store import open_store

    store = open_store(_settings().store_url(), read_only=True)
    try:
        click.echo(jobs_text(store.jobs(), time.time_ns()))
    finally:
        store.close()


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


def window_ns(text: str | None) -> int | None:
    """Nanoseconds of "30s", "10m", "2h"; None stays None. Raises ``click.BadParameter``."""
    if text is None:
        return None
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS_S or not number.isascii() or not number.isdecimal() or len(number) > 6:
        raise click.BadParameter(
            f"{text!r} is not a time: a whole number and s, m, h or d, as in 30s, 10m, 2h"
        )
    seconds = int(number) * _UNITS_S[unit]
    if seconds < SHORTEST_WINDOW_S:
        raise click.BadParameter(
            f"{text} is too short: {SHORTEST_WINDOW_S}s at the least, below that too few steps are seen"
        )
    return seconds * 1_000_000_000


def _settings() -> Settings:
    return settings_module.load()


def printable(words: str, *, keep: str = "\n") -> str:
    """``words`` without characters that act on a terminal: what comes from outside may hold some."""
    return "".join(c if c.isprintable() or c in keep else "�" for c in words)


class PrintableFormatter(logging.Formatter):
    """One message is one line, and neither it nor a traceback can act on the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return printable(super().formatMessage(record), keep="")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _say(words: str) -> None:
    """To the person at the terminal, while there is one: what runs ends in order without it, too."""
    with contextlib.suppress(OSError):
        click.echo(printable(words))


def _fail(words: str) -> NoReturn:
    """Say what is wrong and end with status 2."""
    with contextlib.suppress(OSError):
        click.echo(f"sysom: {printable(words)}", err=True)
    sys.exit(EXIT_ERROR)


@contextlib.contextmanager
def _errors_in_words() -> Iterator[None]:
    """Status 1 says "slow": whatever fails ends with words and another one."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter fails once more when it ends
        sys.exit(EXIT_ERROR)
    except ModuleNotFoundError as error:
        log.info("an import failed", exc_info=True)
        _fail(f"{error.name or error} is not installed here: pip install 'sysom[server]'")
    except Exception as error:
        log.info("it failed here", exc_info=True)
        _fail(_words(error))


def _words(error: Exception) -> str:
    """What our own errors say is meant for people; of others the kind is said, too."""
    said = str(error)
    # OSError comes from the kernel, with the name of the file or address; ours are made in our own packages.
    ours = type(error).__module__.partition(".")[0] in ("bot", "diagnosis", "probes")
    if said and (ours or isinstance(error, OSError)):
        return said
    kind = type(error).__name__
    return f"unexpected {kind}{': ' if said else ''}{said} (sysom -v … shows where)"


def _ending_signals() -> list[signal.Signals]:
    """SIGHUP among them, the terminal's end, unless whoever started us wants it ignored (nohup)."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def _run(main_part: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run until a signal says to end. A second one cuts the ending short, a third ends at once."""

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        me = asyncio.current_task()
        assert me is not None

        def end() -> None:
            if not stop.is_set():
                stop.set()
            elif not me.cancelling():
                me.cancel()
            else:
                os._exit(EXIT_INTERRUPTED)

        for number in _ending_signals():
            loop.add_signal_handler(number, end)
        await main_part(stop)

    try:
        asyncio.run(run())
    except asyncio.CancelledError:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
