"""``sysom import``: traces, dumps and tables that others wrote, into the store as a job."""

from __future__ import annotations

import re
from pathlib import Path

import click

from bot.settings import load
from bot.terminal import fail, say

_NODE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?=(.{1,512})")
_MAX_RANKS = 1 << 20
"""Ranks that one --node may name."""
MUCH_BYTES = 200_000_000
"""So much takes long enough to say so first."""


def nodes_of(texts: tuple[str, ...]) -> dict[int, str]:
    """Rank → node of "0=node-a" and "0-7=node-a". Raises ``click.BadParameter``."""
    nodes: dict[int, str] = {}
    for text in texts:
        found = _NODE.fullmatch(text)
        if found is None:
            raise click.BadParameter(
                f"{text!r} does not say which rank ran where: as in 0=node-a or 0-7=node-a"
            )
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 <= last - first < _MAX_RANKS:
            raise click.BadParameter(f"{text!r}: from rank {first} to {last} is no range of ranks")
        for rank in range(first, last + 1):
            if nodes.setdefault(rank, found[3]) != found[3]:
                raise click.BadParameter(f"rank {rank} is said to be on {nodes[rank]} and on {found[3]}")
    return nodes


def _named(_context: click.Context, _option: click.Parameter, job: str) -> str:
    from probes.codec import MAX_NAME

    if not job.strip() or len(job) > MAX_NAME:
        raise click.BadParameter(f"a job's name has 1 to {MAX_NAME} characters")
    return job


@click.command("import")
@click.argument("paths", nargs=-1, required=True, metavar="PATH…", type=click.Path(path_type=Path))
@click.option("--job", required=True, metavar="NAME", callback=_named, help="Store it as the job NAME.")
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="RANK=NODE",
    callback=lambda _context, _option, texts: nodes_of(texts),
    help="Where a rank ran, or ranks: 0=node-a, 0-7=node-a. As often as needed.  [default: as the files say]",
)
@click.option("--replace", "replacing", is_flag=True, help="In the place of an earlier import of NAME.")
@click.option("--partial", is_flag=True, help="Leave out files that cannot be used, and say which.")
def import_(paths: tuple[Path, ...], job: str, nodes: dict[int, str], replacing: bool, partial: bool) -> None:
    """Store what trace files tell as a job: Kineto traces, Flight Recorder dumps, NCCL Inspector logs, operation
    tables. All files of one job at once; a folder stands for all files in it.

    Works on the store alone, without a server. All is stored, or nothing.

    Example: sysom import traces/ --job job-123 && sysom diagnose job-123
    """
    from bot.importing import digests_of, found_text, imported_as, store_import
    from diagnosis.store import JobExists, open_store
    from probes.importers import gather

    gathered = gather(paths)
    size = sum(path.stat().st_size for path in gathered.files)
    if size > MUCH_BYTES:
        say(f"Reading {len(gathered.files):,} files, {size / 1e9:.1f} GB …")
    digests = digests_of(gathered.files)
    store = open_store(load().store_url())
    try:
        there = next((info for info in store.jobs() if info.job == job), None)
        if there is not None and there.imported == imported_as(gathered, digests, nodes):
            say(f"These files are stored as {job} already: nothing to do. Now: sysom diagnose {job}")
            return
        if there is not None and (not replacing or not there.imported):
            fail(str(JobExists(job, there.imported)))
        found = store_import(
            store,
            gathered,
            job=job,
            digests=digests,
            nodes=nodes,
            partial=partial,
            replacing=replacing,
        )
    finally:
        store.close()
    say(found_text(found, gathered, job))
