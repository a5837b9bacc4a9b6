"""``sysom diagnose``: a verdict from the store, without a server."""

from __future__ import annotations

import sys
import time

import click

from bot.settings import load
from bot.terminal import window_ns


@click.command()
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON object.")
@click.option(
    "--last",
    metavar="TIME",
    callback=lambda _ctx, _option, text: window_ns(text),
    help="Look at this long before now: 30s, 10m, 2h.  [default: the ten minutes before the newest data]",
)
def diagnose(job: str, as_json: bool, last: int | None) -> None:
    """Say why JOB is slow.

    Works on the store alone, without a server. Exit status: 0 healthy, 1 slow or hang, 2 an error, 3 not enough
    evidence.

    Example: sysom diagnose job-123 --last 5m
    """
    from bot.rendering import verdict_text
    from diagnosis.service import diagnose_job
    from diagnosis.verdict import EXIT_STATUS, to_json

    verdict = diagnose_job(load().store_url(), job, now_ns=time.time_ns(), last_ns=last)
    click.echo(to_json(verdict) if as_json else verdict_text(verdict))
    sys.exit(EXIT_STATUS[verdict.status])
