"""``sysom doctor``: what this node offers, and what watching it costs now."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bot.settings import load
from bot.terminal import say


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Say what the agents of this node do and cost now, what the kernel offers, what is missing, and how to get
    it. Exit status 0 when watching works, or would; 1 otherwise, also while the kill switch is on.

    Example: sudo sysom doctor
    """
    import msgspec

    from probes.doctor import examine
    from probes.screen import lines

    settings = load()
    found = examine(settings.state_folder() / "cache", Path(settings.runtime))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        say("\n".join(lines(found)))
    sys.exit(0 if found.ok else 1)
