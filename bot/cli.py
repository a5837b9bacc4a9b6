"""The command line: the commands of ``bot/commands/`` in the order in which one meets them."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from bot.commands.agent import agent
from bot.commands.capture import capture
from bot.commands.commands import commands
from bot.commands.diagnose import diagnose
from bot.commands.doctor import doctor
from bot.commands.import_ import import_
from bot.commands.jobs import jobs
from bot.commands.key import key
from bot.commands.probe import probe
from bot.commands.record import record
from bot.commands.replay import replay
from bot.commands.serve import serve
from bot.commands.store import store
from bot.commands.up import up
from bot.terminal import PrintableFormatter, errors_in_words

COMMANDS = (
    up,
    diagnose,
    jobs,
    import_,
    capture,
    probe,
    commands,
    agent,
    serve,
    store,
    key,
    doctor,
    record,
    replay,
)


class _Group(click.Group):
    """Shows commands in the order in which one meets them; every error of theirs ends with words and status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        with errors_in_words():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [command.name or "" for command in COMMANDS]


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="sysom")
@click.option("-v", "--verbose", is_flag=True, help="Say more about what is done.")
def main(verbose: bool) -> None:
    """Finds out why a distributed AI-training job is slow.

    Settings come from SYSOM_… variables and /etc/sysom.toml (or the file that SYSOM_CONFIG names).
    """
    level = logging.INFO if verbose else logging.WARNING
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    for noisy in ("httpx", "slack_bolt", "slack_sdk", "uvicorn", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


for _command in COMMANDS:
    main.add_command(_command)


if __name__ == "__main__":
    main()
