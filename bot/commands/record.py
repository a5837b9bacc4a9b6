"""``sysom record``: what this node's agent would send, into a file."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bot.settings import load
from bot.terminal import ending_signals, say, window_ns

if TYPE_CHECKING:
    from probes.recording import Writer
    from probes.records import Batch


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--job", default="", help="Keep this job's ranks alone.  [default: all]")
@click.option(
    "--for",
    "duration",
    metavar="TIME",
    callback=lambda _context, _option, text: window_ns(text),
    help="End after this long: 90s, 10m.  [default: until Ctrl-C]",
)
@click.option("--note", default="", help="What you know about it, kept in the file.")
def record(file: Path, job: str, duration: int | None, note: str) -> None:
    """Record this node's training processes into FILE, to be looked at elsewhere with `sysom replay`.

    Needs root, and no server. FILE holds names of processes that shared a CPU with the ranks, their control
    groups, and the ranks' launch variables: look who gets it.

    Example: sudo sysom record slow.sysomrec --job job-123 --for 5m
    """
    from probes.record import record as make

    stop = threading.Event()
    for number in ending_signals():
        signal.signal(number, lambda *_: stop.set())
    seen: set[tuple[str, int]] = set()

    def tell(batch: Batch, writer: Writer) -> None:
        found = {(rank.job, rank.rank) for rank in batch.ranks if job in ("", rank.job)} - seen
        seen.update(found)
        if found:
            say("found " + ", ".join(f"{name} rank {number}" for name, number in sorted(found)))

    settings = load()
    count = make(
        file,
        stop,
        cache=settings.state_folder() / "cache",
        runtime=Path(settings.runtime),
        node=settings.node_name(),
        job=job,
        note=note,
        seconds=float("inf") if duration is None else duration / 1e9,
        tell=tell,
    )
    say(f"{file}: {count} s, {len(seen)} ranks, {file.stat().st_size / 1000:.0f} kB")
    if not seen:
        say("No rank was seen: sysom doctor says what counts as one, and which run here.")
