"""All of sysom on one machine: server, bot, node agent; without a Slack the local workspace, and for those who
want to see it at work a small real training job with a slow rank, or, where nothing can be watched, a recording
of one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from bot.demo import show
from bot.server import running_server, slack_bot
from bot.settings import Settings, address
from bot.slack import running_bot
from bot.workspace import Workspace
from diagnosis.orders import signer
from probes.credentials import token_file
from probes.recording import Recording

AGENTS = (
    "server_ca",
    "node_token_file",
    "command_key",
    "cpu_budget_percent",
    "memory_budget_mb",
    "events_budget",
    "runtime",
    "metrics_listen",
    "spool_mb",
)
"""Settings that are the agent's as they stand."""
DEMO_BUDGET_PERCENT = 10.0
"""The demo shows everything, on however small a machine: two CPUs' budget would leave it little room."""
AGENT_STOP_S = 10.0
"""How long the agent may take to end: it sends what is left."""


class AgentFailed(RuntimeError):
    """The node agent ended by itself; its own words went to the terminal before."""


async def up(settings: Settings, *, demo: bool, stop: asyncio.Event, say: Callable[[str], None]) -> None:
    """Run everything until ``stop``. ``say`` prints a line for the person at the terminal.

    Raises what :func:`bot.server.running_server` and :func:`bot.slack.running_bot` raise,
    :class:`AgentFailed`, and :class:`bot.demo.show.DemoFailed`.
    """
    async with contextlib.AsyncExitStack() as stack:
        shown = _shown(settings, await _why_not_live(settings), say) if demo else None
        folder = ""
        if shown is not None:
            temporary = tempfile.TemporaryDirectory(prefix="sysom-demo-", ignore_cleanup_errors=True)
            folder = stack.enter_context(temporary)
            settings = _for_demo(settings, folder)
        if isinstance(shown, show.Places):
            os.sched_setaffinity(0, shown.others)
        if isinstance(shown, Recording):
            settings = _with_token(msgspec.structs.replace(settings, node=shown.header.node))
        else:
            settings = _with_token(settings)
        running = await stack.enter_async_context(running_server(settings))
        say(f"Server: {running.url} (store {running.store_url})")
        workspace: Workspace | None = None
        if settings.has_slack():
            home = await stack.enter_async_context(slack_bot(settings, running))
            say(f"Slack: connected as {home.bot} in {home.team}. Type there: /sysom jobs")
        else:
            host, port = address(settings.workspace_listen, "workspace_listen")
            workspace = await stack.enter_async_context(Workspace(host=host, port=port))
            bot = running_bot(
                workspace.bot_token,
                workspace.app_token,
                running.diagnoses,
                base_url=workspace.api_url,
                meter=running.metrics,
            )
            await stack.enter_async_context(bot)
            say(
                f"No Slack is set (SLACK_BOT_TOKEN, SLACK_APP_TOKEN): a local workspace stands in: {workspace.url}"
            )
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait())]
        agent = None
        if not isinstance(shown, Recording):
            if not settings.command_key:
                own = await asyncio.to_thread(signer, settings.command_key_file())
                settings = msgspec.structs.replace(settings, command_key=own.public)
            agent = await stack.enter_async_context(_agent(settings, running.url))
            tasks.append(asyncio.create_task(agent.wait()))
        if workspace is not None and isinstance(shown, show.Places):
            tasks.append(
                asyncio.create_task(show.demo(workspace, running.diagnoses, shown, Path(folder), say))
            )
        if workspace is not None and isinstance(shown, Recording):
            server = (running.url, settings.node_token)
            tasks.append(asyncio.create_task(show.replayed(workspace, shown, server, say)))
        try:
            await _until_stopped(tasks, agent)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            say("Stopping.")


async def _until_stopped(tasks: list[asyncio.Task[Any]], agent: asyncio.subprocess.Process | None) -> None:
    """Return when told to stop (the first task); raise when the agent ended (the second, where there is one) or
    the demo failed."""
    pending = set(tasks)
    while pending and not tasks[0].done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if agent is not None and tasks[1] in done:
            raise AgentFailed(f"the node agent ended with status {agent.returncode}")
        for task in done:
            task.result()


async def _why_not_live(settings: Settings) -> str:
    """Why this machine cannot be watched; empty when it can."""
    cache = settings.state_folder() / "cache"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "probes.preflight",
        str(cache.resolve()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    words, errors = await process.communicate()
    if process.returncode != 0:
        return f"trying it failed: {errors.decode(errors='replace').strip()[-500:]}"
    return words.decode(errors="replace").strip()


def _shown(
    settings: Settings, why_not_live: str, say: Callable[[str], None]
) -> show.Places | Recording | None:
    """What the demo shows: where a real job's parts run; a recording where none can be watched, and why; None,
    and why, when there is no demo."""
    if settings.has_slack():
        say("A Slack is set: no demo job is started.")
        return None
    if why_not_live:
        say(f"Live watching is not possible here: {why_not_live}")
        return show.recording()
    places = show.places()
    if places is None:
        say(
            "This machine has a single CPU for us, and a live demo needs one for the slow rank alone and another."
        )
        return show.recording()
    return places


def _for_demo(settings: Settings, folder: str) -> Settings:
    """Everything that the demo writes goes to a folder that ends with it, unless a place was set."""
    changes: dict[str, Any] = {}
    if not settings.state:
        changes["state"] = folder
    defaults = Settings()
    if settings.listen == defaults.listen:
        changes["listen"] = "127.0.0.1:0"
    if settings.cpu_budget_percent == defaults.cpu_budget_percent:
        changes["cpu_budget_percent"] = DEMO_BUDGET_PERCENT
    return msgspec.structs.replace(settings, **changes)


def _with_token(settings: Settings) -> Settings:
    """This machine's agent needs a token; one is made where none is set."""
    node = settings.node_name()
    given = settings.node_tokens.get(node, "")
    known = given if isinstance(given, str) else next(iter(given), "")
    file = settings.node_token_file
    token = known or settings.node_token or (token_file(Path(file))() if file else secrets.token_urlsafe(24))
    return msgspec.structs.replace(
        settings, node_token=token, node_tokens={**settings.node_tokens, node: given or token}
    )


@contextlib.asynccontextmanager
async def _agent(settings: Settings, server: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The node agent as a process of its own, ended with SIGTERM so that it sends what is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bot.cli",
        "agent",
        "--end-with-parent",
        str(os.getpid()),
        env=_agent_environment(os.environ, settings, server),
        start_new_session=True,  # Ctrl-C is for us; the agent is told in its turn
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), AGENT_STOP_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def _agent_environment(environ: Mapping[str, str], settings: Settings, server: str) -> dict[str, str]:
    """What the agent needs, and no secret of the server's."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(("SYSOM_", "SLACK_")) or name == "SYSOM_CONFIG"
    }
    return kept | {
        "SYSOM_SERVER": server,
        "SYSOM_NODE": settings.node_name(),
        "SYSOM_NODE_TOKEN": "" if settings.node_token_file else settings.node_token,
        "SYSOM_STATE": str(settings.state_folder().resolve()),
        **{f"SYSOM_{name.upper()}": str(getattr(settings, name)) for name in AGENTS},
    }
