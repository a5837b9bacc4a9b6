"""Captures: jobs whose ranks are watched at full detail for a while. No kernel here: who, until when, how much."""

from __future__ import annotations

from dataclasses import dataclass, field

from probes.records import MAX_CAPTURE_S, RankBatch


@dataclass
class Capture:
    """One job's capture. Instants are CLOCK_MONOTONIC seconds."""

    job: str
    started: float
    until: float
    ranks: set[int] = field(default_factory=set)
    collectives: int = 0
    cuts: int = 0

    def add(self, batch: RankBatch) -> None:
        """Count what one interval of one of its ranks brought."""
        self.ranks.add(batch.rank)
        self.collectives += len(batch.collectives.seq)
        self.cuts += sum(len(thread.at_ns) for thread in batch.threads)

    def words(self, now: float) -> str:
        """What came of it."""
        return (
            f"after {min(now, self.until) - self.started:.0f} s: {len(self.ranks)} ranks, "
            f"{self.collectives} collectives, {self.cuts} cuts of thread time"
        )


def check_seconds(seconds: float) -> None:
    """Raises ValueError for a length that no capture may have."""
    if not 1 <= seconds <= MAX_CAPTURE_S:
        raise ValueError(f"a capture lasts 1 to {MAX_CAPTURE_S} seconds, not {seconds:g}")
