"""``sysom capture``: watch a job's ranks at full detail for a while."""

from __future__ import annotations

import click

from bot.settings import load
from bot.terminal import fail, say
from probes.records import MAX_CAPTURE_S

DEFAULT_S = 30


@click.command()
@click.argument("job")
@click.option(
    "--seconds",
    type=click.IntRange(1, MAX_CAPTURE_S),
    default=DEFAULT_S,
    show_default=True,
    help="How long; it ends by itself.",
)
@click.option("--end", is_flag=True, help="End the capture that runs.")
def capture(job: str, seconds: int, end: bool) -> None:
    """Watch the ranks of JOB at full detail for a while, on all nodes where they run.

    The agents are asked through the store, so this runs on the server's machine, as its user.

    Example: sysom capture job-123 --seconds 60
    """
    import time

    from bot import asking
    from diagnosis.store import open_store
    from probes.records import Command, CommandKind

    settings = load()
    store = open_store(settings.store_url(), read_only=True)
    try:
        nodes = asking.nodes_with(store, job, time.time_ns())
    except asking.NobodyToAsk as error:
        fail(str(error))
    finally:
        store.close()
    if end:
        asking.ask(settings, nodes, lambda id: Command(id=id, kind=CommandKind.CAPTURE_END, job=job))
        say(f"The end of the capture of {job} is {asking.told(nodes)}")
    else:
        asking.ask(
            settings,
            nodes,
            lambda id: Command(id=id, kind=CommandKind.CAPTURE_START, job=job, seconds=seconds),
        )
        say(f"A capture of {job} for {seconds} s is {asking.told(nodes)}")
