"""Playing recordings: the same batches again, told as of now, through the door that agents use.

A replay has an agent id and boot ids of its own, so that a recording can be played often and each time is stored
anew; what the records say of ranks, threads and processes stays as it was. Recordings of several nodes keep the
order they had by their clocks.
"""

from __future__ import annotations

import heapq
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import httpx
import msgspec

from probes import codec
from probes.pace import retry_after_s
from probes.recording import Recording, RecordingError
from probes.records import Batch
from probes.shipper import PATH, receipt

Deliver = Callable[[str, bytes], None]
"""Takes a node's batch as it goes over the wire, and returns once it is stored."""
TRIES = 30
LONGEST_WAIT_S = 10.0


def retimed(recordings: Sequence[Recording], end_ns: int, *, job: str = "") -> Iterator[Batch]:
    """All batches in order of time, the last of which ends at ``end_ns`` (UTC). ``job``: a new name for the jobs,
    for recordings that hold one job.

    Raises :class:`RecordingError` when there is no batch, or ``job`` is given and they hold several.
    """
    if not any(recording.batches for recording in recordings):
        raise RecordingError(
            "there is no batch in the recording: it was ended before its first second was over"
        )
    if job and len(names := {rank.job for r in recordings for b in r.batches for rank in b.ranks}) > 1:
        raise RecordingError(f"the recording holds {len(names)} jobs: they cannot all be called {job}")
    later = end_ns - max(end_utc_ns(batch) for recording in recordings for batch in recording.batches)
    agent = secrets.token_hex(8)
    boots: dict[str, str] = {}

    def told(recording: Recording) -> Iterator[Batch]:
        for seq, batch in enumerate(recording.batches):
            boot = boots.setdefault(f"{batch.node} {batch.boot_id}", f"replay-{secrets.token_hex(8)}")
            batch = msgspec.structs.replace(
                batch, agent=agent, boot_id=boot, seq=seq, utc_offset_ns=batch.utc_offset_ns + later
            )
            yield _renamed(batch, job) if job else batch

    return heapq.merge(*(told(recording) for recording in recordings), key=end_utc_ns)


def end_utc_ns(batch: Batch) -> int:
    """When a batch ended, UTC."""
    return batch.end_ns + batch.utc_offset_ns


def play(batches: Iterator[Batch], deliver: Deliver, *, live: bool, wait: Callable[[float], object]) -> int:
    """Deliver all batches, ``live`` each when its second is over; ``wait`` waits so many seconds. Gives how many
    there were. Raises what ``deliver`` raises."""
    count = 0
    for batch in batches:
        if live and (seconds := (end_utc_ns(batch) - time.time_ns()) / 1e9) > 0:
            wait(seconds)
        deliver(batch.node, codec.encode(batch))
        count += 1
    return count


def to_server(client: httpx.Client, *, wait: Callable[[float], object]) -> Deliver:
    """Delivers over HTTP, waiting where the server asks for it. Raises :class:`RecordingError` with the server's
    words when it refuses."""

    def deliver(node: str, wire: bytes) -> None:
        for attempt in range(TRIES):
            try:
                response = client.post(PATH, content=wire)
            except httpx.HTTPError as error:
                raise RecordingError(f"the server {client.base_url} cannot be reached: {error}") from error
            if receipt(response) is not None:
                return
            if response.status_code not in (429, 503):
                break
            asked_s = retry_after_s(response.headers.get("Retry-After", ""), response.headers.get("Date", ""))
            wait(min(asked_s or 0.1 * 2**attempt, LONGEST_WAIT_S))
        raise RecordingError(
            f"the server {client.base_url} does not take the batch of node {node!r}: "
            f"{response.status_code} {response.text[:300]}"
        )

    return deliver


def _renamed(batch: Batch, job: str) -> Batch:
    ranks = [
        msgspec.structs.replace(
            rank,
            job=job,
            occupants=[
                msgspec.structs.replace(occupant, rank_job=job) if occupant.rank_job else occupant
                for occupant in rank.occupants
            ],
        )
        for rank in batch.ranks
    ]
    events = [msgspec.structs.replace(event, job=job) if event.job else event for event in batch.events]
    return msgspec.structs.replace(batch, ranks=ranks, events=events)
