"""``sysom store``: how large the store is, what is in it, whether it is sound."""

from __future__ import annotations

import time

import click

from bot.settings import load
from bot.terminal import fail, say


@click.group()
def store() -> None:
    """Look after the store: its size and content, and whether it is sound.

    Works while the server runs, and without it.

    Example: sysom store stats
    """


@store.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def stats(as_json: bool) -> None:
    """Say how large the store is, what is in it, how long its disk lasts, and what goes next.

    Example: sysom store stats --json
    """
    import msgspec

    from bot.housekeeping import stats_text
    from diagnosis.store import Keep, file_of
    from diagnosis.store.stats import stats as counted

    settings = load()
    found = counted(file_of(settings.store_url()), Keep(settings.keep_days, settings.keep_gb))
    say(msgspec.json.encode(found).decode() if as_json else stats_text(found, time.time_ns()).rstrip("\n"))


@store.command()
def check() -> None:
    """Read the whole store and say whether it is sound; status 2 when it is not.

    Example: sysom store check
    """
    from diagnosis.store import file_of
    from diagnosis.store.integrity import damage, named
    from diagnosis.store.stats import check as checked

    path = file_of(load().store_url())
    problems = checked(path)
    if problems:
        fail(damage(path, named(problems)))
    say(f"the store {path} is sound: all pages, all indexes, all columns")
