"""Making a recording: watches this node as the agent does, into a file instead of to a server."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from probes.agent import BOOT_ID, INTERVAL_S, to_batch
from probes.bpf import kernel_release
from probes.recording import Header, RecordingError, Writer
from probes.records import Batch
from probes.status import detached
from probes.watch import NodeWatch


def record(
    path: Path,
    stop: threading.Event,
    *,
    cache: Path,
    runtime: Path,
    node: str,
    job: str = "",
    note: str = "",
    seconds: float = float("inf"),
    tell: Callable[[Batch, Writer], None] = lambda batch, writer: None,
) -> int:
    """Watch until ``stop`` is set or ``seconds`` are over; gives the number of batches. ``job``: keep this job's
    ranks alone. ``tell`` hears of each batch.

    Raises :class:`probes.bpf.BpfUnavailable` when this machine cannot be watched, and :class:`RecordingError`.
    """
    kernel = ".".join(map(str, kernel_release()))
    header = Header(node=node, made_ns=time.time_ns(), kernel=kernel, cpus=os.cpu_count() or 1, note=note)
    if why := detached(runtime):
        raise RecordingError(
            f"nothing may be attached on this node ({why}): sysom agent --attach takes that back"
        )
    watch = NodeWatch(cache, host=node)
    try:
        writer = Writer(path, header)
        try:
            boot, agent = BOOT_ID.read_text().strip(), secrets.token_hex(8)
            end = time.monotonic() + seconds
            while not stop.wait(max(0.0, min(INTERVAL_S, end - time.monotonic()))):
                batch = to_batch(watch.gather(), node, boot, agent, writer.batches)
                writer.add(of_job(batch, job) if job else batch)
                tell(batch, writer)
                if time.monotonic() >= end:
                    break
        finally:
            writer.close()
    finally:
        watch.close()
    if not writer.batches:
        path.unlink()
        raise RecordingError("nothing was recorded: a second is the least")
    return writer.batches


def of_job(batch: Batch, job: str) -> Batch:
    """What a batch tells of one job and of the node."""
    return msgspec.structs.replace(
        batch,
        ranks=[rank for rank in batch.ranks if rank.job == job],
        events=[event for event in batch.events if event.job in ("", job)],
    )
