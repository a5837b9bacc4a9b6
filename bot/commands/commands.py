"""``sysom commands``: what was asked of agents, by whom, and what became of it."""

from __future__ import annotations

import time

import click

from bot.settings import load


@click.command()
@click.option("--last", type=click.IntRange(1, 10_000), default=20, show_default=True, help="So many.")
def commands(last: int) -> None:
    """List what was asked of agents (captures, probes switched on and off), the newest first.

    Example: sysom commands --last 5
    """
    from bot.housekeeping import asked_text
    from diagnosis.store import open_store

    store = open_store(load().store_url(), read_only=True)
    try:
        click.echo(asked_text(store.commands(last), time.time_ns()), nl=False)
    finally:
        store.close()
