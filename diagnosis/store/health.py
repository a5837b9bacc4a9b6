"""What needs a person about the store, in words, from numbers; and how fast it grows. Pure."""

from __future__ import annotations

from collections import deque

from diagnosis.store import Keep

LOW_FREE_BYTES = 1_000_000_000
"""Less than this on the disk is said, whatever the rate: other programs fill disks, too."""
SOON_S = 3 * 86_400.0
"""A disk that will be full within this is said: a weekend and a day to act."""
WAL_MUCH_BYTES = 256 << 20
"""A write-ahead log of this size says that somebody has been reading for very long: it cannot start anew."""
MEASURED_NS = 3_600_000_000_000
"""The present rate is that of the last hour: packing of minutes and pauses of jobs even out."""
SHORTEST_NS = 50_000_000_000
"""Over less than this no rate is given: tails of the running minute are larger than what they become."""


class Growth:
    """How fast a file fills, deletions not counted."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque()  # (instant, bytes grown since the first)
        self._used = 0

    def measured(self, now_ns: int, used_bytes: int) -> None:
        """``used_bytes`` are in use now, before anything is deleted."""
        if self._samples and now_ns <= self._samples[-1][0]:  # the clock was set back
            self._samples.clear()
        grown = self._samples[-1][1] + used_bytes - self._used if self._samples else 0
        self._samples.append((now_ns, grown))
        self._used = used_bytes
        while now_ns - self._samples[0][0] > MEASURED_NS and len(self._samples) > 2:
            self._samples.popleft()

    def deleted(self, used_bytes: int) -> None:
        """``used_bytes`` are in use after deletions."""
        self._used = used_bytes

    @property
    def bytes_per_s(self) -> float:
        """0 until it was measured, and where nothing grew."""
        if len(self._samples) < 2:
            return 0.0
        (since, before), (now, after) = self._samples[0], self._samples[-1]
        return max(0.0, (after - before) / (now - since) * 1e9) if now - since >= SHORTEST_NS else 0.0


def disk_warning(
    folder: str, free_bytes: int, size_bytes: int, bytes_per_s: float, keep: Keep | None
) -> str | None:
    """Whether the disk will be full before the store has the size at which the oldest goes."""
    lasts_s = free_bytes / bytes_per_s if bytes_per_s > 0 else None
    to_grow = max(0.0, keep.gb * 1e9 - size_bytes) if keep else float("inf")
    soon = lasts_s is not None and lasts_s < SOON_S and free_bytes < to_grow
    if free_bytes >= LOW_FREE_BYTES and not soon:
        return None
    rate = f", at the present rate for {duration(lasts_s)}" if lasts_s is not None and soon else ""
    lower = f", or lower SYSOM_KEEP_GB (now {keep.gb:g}; {amount(size_bytes)} are used)" if keep else ""
    return (
        f"the disk under {folder} has {amount(free_bytes)} left{rate}: free some space{lower}; when it is full, "
        "agents keep what they have, and drop their oldest once their spools are full"
    )


def wal_warning(path: str, wal_bytes: int) -> str | None:
    """Whether the write-ahead log has grown without end."""
    if wal_bytes < WAL_MUCH_BYTES:
        return None
    return (
        f"the write-ahead log {path}-wal has grown to {amount(wal_bytes)}: something reads the store for very "
        "long (a backup, a sqlite3 shell): end it"
    )


def amount(size: float) -> str:
    """Bytes in words of three digits: "1.2 GB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            value = size / factor
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{size:.0f} bytes"


def duration(seconds: float) -> str:
    """A length of time in its largest unit: "5 hours"."""
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            number = int(seconds / length)
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return "less than a minute"
