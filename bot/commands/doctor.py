"""``sysom doctor``: what this node offers."""

from __future__ import annotations

import sys

import click

from bot.settings import load


@click.command()
def doctor() -> None:
    """Say what this node offers: kernel, BCC, headers, ranks; which probes can run; what is missing, and how to
    get it. Exit status 0 when everything can run, 1 otherwise.

    Example: sudo sysom doctor
    """
    from probes.doctor import examine

    findings = examine(load().state_folder() / "cache")
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        click.echo(f"{'ok     ' if finding.ok else 'missing'}  {finding.name:<{width}}  {finding.words}")
    sys.exit(0 if all(finding.ok for finding in findings) else 1)
