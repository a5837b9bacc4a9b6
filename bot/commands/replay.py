"""``sysom replay``: recordings again, into the store or to a server."""

from __future__ import annotations

import time
from pathlib import Path

import click

from bot.settings import load
from bot.terminal import fail, say


@click.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option("--job", default="", metavar="NAME", help="Call the job NAME.  [default: as it was]")
@click.option("--live", is_flag=True, help="As it went: a second per second.  [default: all at once]")
@click.option(
    "--send", is_flag=True, help="Send it to SYSOM_SERVER with SYSOM_NODE_TOKEN.  [default: the store]"
)
def replay(files: tuple[Path, ...], job: str, live: bool, send: bool) -> None:
    """Play recordings (FILES, one per node) as if it were now: their last second is this one, with --live their
    first.

    Works on the store alone, without a server.

    Example: sysom replay slow.sysomrec && sysom diagnose job-123
    """
    from probes.credentials import token_file
    from probes.recording import read
    from probes.replay import end_utc_ns, play, retimed, to_server
    from probes.shipper import open_client

    settings = load()
    recordings = [read(file) for file in files]
    for recording in recordings:
        if recording.cut_short:
            say(recording.cut_short)
        if recording.header.note:
            say(f"Note: {recording.header.note}")
    ends = [end_utc_ns(batch) for recording in recordings for batch in recording.batches]
    end = time.time_ns() + (max(ends) - min(ends) if live and ends else 0)
    batches = retimed(recordings, end, job=job)
    if send:
        if not settings.node_token and not settings.node_token_file:
            fail(
                "neither SYSOM_NODE_TOKEN nor SYSOM_NODE_TOKEN_FILE is set: take that of the recording's node"
            )
        token = settings.node_token or token_file(Path(settings.node_token_file))
        ca = Path(settings.server_ca) if settings.server_ca else None
        try:
            client = open_client(settings.server, token, ca)
        except ValueError as error:  # a server's address, a token or a certificate that cannot be used
            fail(str(error))
        with client:
            count = play(batches, to_server(client, wait=time.sleep), live=live, wait=time.sleep)
    else:
        from diagnosis.ingest import Ingest
        from diagnosis.store import open_store

        store = open_store(settings.store_url())
        try:
            ingest = Ingest(store, {})

            def deliver(node: str, wire: bytes) -> None:
                ingest.accept(node, wire)

            count = play(batches, deliver, live=live, wait=time.sleep)
        finally:
            store.close()
    jobs = sorted(
        {rank.job for recording in recordings for batch in recording.batches for rank in batch.ranks}
    )
    say(f"{count} batches played. Now: sysom diagnose {job or (jobs[0] if jobs else 'JOB')}")
