"""A control group with a limit for memory, whichever version of control groups the machine has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limited:
    folder: Path

    def add(self, pid: int) -> None:
        """What the process takes from now on counts."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def statistic(self, name: str) -> int:
        """A line of memory.stat."""
        lines = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return int(lines.get(f"total_{name}", lines.get(name, 0)))  # version 1's, version 2's

    def killed(self) -> int:
        """Processes that the kernel has killed for this limit."""
        counts = self.folder / "memory.oom_control"
        if not counts.exists():
            counts = self.folder / "memory.events"
        return int(dict(line.split() for line in counts.read_text().splitlines())["oom_kill"])


@contextlib.contextmanager
def memory_limit(limit: int) -> Iterator[Limited]:
    """A group of at most ``limit`` bytes; remove its processes first. Skips where there is no such controller."""
    name = f"sysom-test-{os.getpid()}"
    if (ROOT / "memory" / "memory.limit_in_bytes").exists():
        folder, file = ROOT / "memory" / name, "memory.limit_in_bytes"
    elif "memory" in _read(ROOT / "cgroup.subtree_control").split():
        folder, file = ROOT / name, "memory.max"
    else:
        pytest.skip("no control groups for memory, of neither version")
    folder.mkdir()
    try:
        (folder / file).write_text(str(limit))
        yield Limited(folder)
    finally:
        folder.rmdir()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
