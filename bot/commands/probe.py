"""``sysom probe``: switch a probe off, or on again."""

from __future__ import annotations

import click

from bot.settings import load
from bot.terminal import fail, say


@click.command()
@click.argument("switch", type=click.Choice(["on", "off"]))
@click.argument("probe")
@click.option("--node", help="On this node.")
@click.option("--job", help="On all nodes where ranks of this job run.")
def probe(switch: str, probe: str, node: str | None, job: str | None) -> None:
    """Switch PROBE off, or on again, on a node or where a job runs.

    The agents are asked through the store, so this runs on the server's machine, as its user.

    Example: sysom probe off gloo --node node-7
    """
    import time

    from bot import asking
    from diagnosis.store import names_like, open_store
    from probes.records import Command, CommandKind

    if (node is None) == (job is None):
        fail("say where, with one of --node NODE and --job JOB")
    settings = load()
    store = open_store(settings.store_url(), read_only=True)
    try:
        nodes = (
            asking.nodes_with(store, job, time.time_ns())
            if job is not None
            else [asking.known_node(store, node or "")]
        )
        there = store.probes()
    except asking.NobodyToAsk as error:
        fail(str(error))
    finally:
        store.close()
    known = sorted({one.name for at in nodes for one in there.get(at, [])})
    if probe not in known:
        nearest = names_like(known, probe)
        hint = f"did you mean {', '.join(nearest)}?" if nearest else f"there are {', '.join(known) or 'none'}"
        fail(f"no probe named {probe!r} is known on {', '.join(nodes[:5])}; {hint}")
    kind = CommandKind.PROBE_ON if switch == "on" else CommandKind.PROBE_OFF
    asking.ask(settings, nodes, lambda id: Command(id=id, kind=kind, probe=probe))
    say(f"To switch {probe} {switch} is {asking.told(nodes)}")
