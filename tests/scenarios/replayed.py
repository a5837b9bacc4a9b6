"""A recorded run again, without root: through the ingest and a store to a verdict."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec

from diagnosis.engine import diagnose
from diagnosis.ingest import Ingest
from diagnosis.store.sqlite import SqliteStore
from diagnosis.verdict import Verdict
from probes.recording import Recording, read
from probes.replay import play, retimed


class Truth(msgspec.Struct, frozen=True):
    """What a run's recording says of it in its note (``runner.run`` writes it)."""

    fault: str
    seed: int
    world: int
    ranks: list[int]
    words: list[str]
    bit: bool
    before_ms: float
    after_ms: float | None
    cause: str | None = None
    """None: there was no rule for it when this was recorded."""


def truth(path: Path) -> Truth:
    """What was put in, and how the job's own log showed it."""
    return msgspec.convert(json.loads(read(path).header.note), Truth)


def verdict(recording: Recording, store: Path) -> Verdict:
    """What is said of a recording, played as if it ended now; ``store``: a file for it, which is new."""
    end_ns = time.time_ns()
    (job,) = {rank.job for batch in recording.batches for rank in batch.ranks}
    opened = SqliteStore(store)
    try:
        ingest = Ingest(opened, {})

        def deliver(node: str, wire: bytes) -> None:
            ingest.accept(node, wire)

        play(retimed([recording], end_ns), deliver, live=False, wait=lambda _: None)
        return diagnose(opened.evidence(job, 0, end_ns + 1))
    finally:
        opened.close()
