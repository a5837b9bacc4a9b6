"""``sysom agent``: the node agent, until a signal ends it; and the kill switch for all agents of the node."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bot.settings import Settings, SettingsError, address, load
from bot.terminal import ending_signals, fail, say

if TYPE_CHECKING:
    from probes.agent import AgentConfig

LEAST_MEMORY_MB = 64
"""Below this an agent could not even load its programs."""


@click.command()
@click.option(
    "--detach-all", is_flag=True, help="Kill switch: take all probes off this node, and keep them off."
)
@click.option("--why", metavar="TEXT", help="With --detach-all: the reason, for those who come later.")
@click.option("--attach", is_flag=True, help="Take --detach-all back.")
@click.option("--end-with-parent", type=int, metavar="PID", hidden=True)
def agent(detach_all: bool, why: str | None, attach: bool, end_with_parent: int | None) -> None:
    """Watch this node's training processes and send what is seen to the server.

    Needs root. Ends on SIGTERM or Ctrl-C, sends what is left, and leaves nothing attached.

    --detach-all makes every agent of this node take its probes off within a second, kills those that do not, and
    ends with status 0 only when nothing is left. It holds until --attach or a reboot, for later agents too.

    Example: sudo SYSOM_SERVER=http://server:8750 SYSOM_NODE_TOKEN=… sysom agent
    """
    if (detach_all and attach) or (why is not None and not detach_all):
        raise click.UsageError("--why goes with --detach-all, and --attach alone")
    if detach_all or attach:
        _kill_switch(on=detach_all, why=why or "")
        return
    from probes import agent as node_agent
    from probes.lifetime import end_with_parent as follow

    if end_with_parent is not None:
        follow(end_with_parent)
    config = _config(load())
    stop = threading.Event()
    for number in ending_signals():
        signal.signal(number, lambda *_: stop.set())
    try:
        node_agent.run(config, stop)
    except ValueError as error:  # a server's address, a token or a certificate that cannot be used
        fail(str(error))


def _kill_switch(*, on: bool, why: str) -> None:
    """Works whatever the settings are: a mistake in them must not keep probes attached."""
    from probes import kill_switch

    try:
        settings = load()
    except SettingsError as error:
        settings = Settings()
        say(f"The settings cannot be read ({error}): {settings.runtime} is used.")
    if on:
        sys.exit(0 if kill_switch.detach_all(Path(settings.runtime), why, say) else 1)
    kill_switch.attach(Path(settings.runtime), say)


def _config(settings: Settings) -> AgentConfig:
    """The settings as the agent takes them; ends with words for what cannot be used."""
    from probes.agent import AgentConfig
    from probes.budget import Limits
    from probes.orders import public_key

    if settings.node_token and settings.node_token_file:
        fail("both SYSOM_NODE_TOKEN and SYSOM_NODE_TOKEN_FILE are set: unset one of them")
    if not settings.node_token and not settings.node_token_file:
        fail(
            "SYSOM_NODE_TOKEN is not set, nor SYSOM_NODE_TOKEN_FILE: the server's SYSOM_NODE_TOKENS holds this "
            "node's token"
        )
    if not 0 < settings.cpu_budget_percent <= 100:
        fail(
            f"SYSOM_CPU_BUDGET_PERCENT is {settings.cpu_budget_percent:g}: it must be above 0, and 100 at most"
        )
    if settings.memory_budget_mb < LEAST_MEMORY_MB:
        fail(f"SYSOM_MEMORY_BUDGET_MB is {settings.memory_budget_mb}: {LEAST_MEMORY_MB} are the least")
    if settings.events_budget < 1:
        fail(f"SYSOM_EVENTS_BUDGET is {settings.events_budget}: it must be 1 or more")
    try:
        key = public_key(settings.command_key) if settings.command_key else None
        metrics = (
            address(settings.metrics_listen, "SYSOM_METRICS_LISTEN") if settings.metrics_listen else None
        )
    except ValueError as error:
        fail(str(error))
    return AgentConfig(
        server=settings.server,
        token=settings.node_token,
        token_file=Path(settings.node_token_file) if settings.node_token_file else None,
        ca=Path(settings.server_ca) if settings.server_ca else None,
        node=settings.node_name(),
        state=settings.state_folder(),
        spool_bytes=settings.spool_mb << 20,
        runtime=Path(settings.runtime),
        limits=Limits(
            cpu_share=settings.cpu_budget_percent / 100,
            memory_bytes=settings.memory_budget_mb * 1_000_000,
            events_per_s=settings.events_budget,
        ),
        command_key=key,
        metrics=metrics,
    )
