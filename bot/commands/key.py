"""``sysom key``: what agents check the server's commands with."""

from __future__ import annotations

import click

from bot.settings import load


@click.command()
def key() -> None:
    """Print the server's public key, which agents get as SYSOM_COMMAND_KEY; make the pair where there is none.

    Run it as the server's user. The private key stays in command.key in the server's state folder.

    Example: SYSOM_STATE=/var/lib/sysom sysom key
    """
    from diagnosis.orders import signer

    click.echo(signer(load().command_key_file()).public)
