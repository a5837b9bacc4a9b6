"""``sysom agent``: the node agent, until a signal ends it."""

from __future__ import annotations

import signal
import threading

import click

from bot.settings import load
from bot.terminal import ending_signals, fail


@click.command()
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
    settings = load()
    if not settings.node_token:
        fail("SYSOM_NODE_TOKEN is not set: the server's SYSOM_NODE_TOKENS holds this node's token")
    stop = threading.Event()
    for number in ending_signals():
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
        fail(str(error))
