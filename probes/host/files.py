"""What the probes share that read files only."""

from __future__ import annotations


class FilesProbe:
    """Nothing is loaded into the kernel, and nothing is held between readings."""

    rows_read = 0
    """What came to be read since it was made: groups, ranks or files."""
    lost = 0
    ticks_per_s = 0.0

    def programs(self) -> list[int]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing to detach."""
