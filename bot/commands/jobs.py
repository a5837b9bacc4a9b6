"""``sysom jobs``: what the store knows."""

from __future__ import annotations

import time

import click

from bot.settings import load


@click.command()
def jobs() -> None:
    """List the jobs that the store knows, the one with the newest data first.

    Example: sysom jobs
    """
    from bot.rendering import jobs_text
    from diagnosis.store import open_store

    store = open_store(load().store_url(), read_only=True)
    try:
        click.echo(jobs_text(store.jobs(), time.time_ns()))
    finally:
        store.close()
