"""``sysom serve``: the server, with the bot where Slack's tokens are set."""

from __future__ import annotations

import click

from bot.settings import load
from bot.terminal import fail, run_until_stopped


@click.command()
def serve() -> None:
    """Take batches from agents, and answer in Slack where its tokens are set.

    SIGHUP has it read the file of tokens and the certificate again, where there is no terminal.

    Example: SYSOM_LISTEN=0.0.0.0:8750 SYSOM_NODE_TOKENS=node-1=…,node-2=… SLACK_BOT_TOKEN=xoxb-…
    SLACK_APP_TOKEN=xapp-… sysom serve
    """
    from bot import server

    settings = load()
    if not settings.node_tokens and not settings.node_tokens_file:
        fail(
            "SYSOM_NODE_TOKENS is not set: no agent could send anything; give node=token,node=token, or "
            "SYSOM_NODE_TOKENS_FILE"
        )
    run_until_stopped(lambda stop: server.serve(settings, stop))
