"""Faults of memory: a limit below what the rank needs, so that its pages are taken and read again."""

from __future__ import annotations

from collections.abc import Generator

from tests.scenarios.fault import Expected, Fault, Run
from tests.scenarios.ground import ControlGroup, control_group, disk

FILE_BYTES = 48 << 20
PAGES = 500
"""Touched in each step."""
LEFT_BYTES = 8 << 20
"""For the page cache, where the file needs 48 MiB."""


def limit(run: Run) -> Generator[None, None, None]:
    """The limit of the rank's control group goes down to what it has allocated and little more: the pages of the
    file that it works on are reclaimed, and are major faults when they are touched."""
    with disk("mapped") as data, control_group("memory", "limit") as group:
        run.option(run.rank, "--work", f"touches:{data.file('table', FILE_BYTES)}:{PAGES}")
        run.words.append(group.path.name)
        yield
        group.take(run.pid(run.rank))  # before it allocates: what is charged elsewhere stays there
        yield
        group.set("memory.limit_in_bytes", allocated(group) + LEFT_BYTES)
        yield
        group.set("memory.limit_in_bytes", -1)


def allocated(group: ControlGroup) -> int:
    """Bytes that cannot be reclaimed without swap, and the kernel's own."""
    stat = dict(line.split() for line in group.get("memory.stat").splitlines())
    return int(group.get("memory.usage_in_bytes")) - int(stat["total_cache"])


FAULTS = (
    Fault(
        "memory-limit", limit, Expected("slow", cause="memory-reclaim", or_cause="page-faults", owner="node")
    ),
)
