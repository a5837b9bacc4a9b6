"""``sysom up``: everything on this machine."""

from __future__ import annotations

import click

from bot.settings import load
from bot.terminal import run_until_stopped, say


@click.command()
@click.option(
    "--demo", is_flag=True, help="Without a Slack: start a small training job with a slow rank, and ask."
)
def up(demo: bool) -> None:
    """Run server, bot and node agent on this machine; without a Slack a local workspace stands in.

    Needs root, for the agent. Ctrl-C ends everything.

    Example: sudo sysom up --demo
    """
    from bot.up import up as run_up

    settings = load()
    run_until_stopped(lambda stop: run_up(settings, demo=demo, stop=stop, say=say))
