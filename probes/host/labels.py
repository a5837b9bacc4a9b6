"""Processes as labels of metrics: few names, short ones, and the largest values only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from probes.discovery import read_process

LONGEST = 64
OTHERS = "other"
"""Stands for all that are not listed by name."""


def process_label(pid: int, seen_as: str, proc: Path = Path("/proc")) -> str:
    """A process's name. One that has ended keeps the name that its thread had; the kernel's workers, whose names
    change all the time, are one."""
    process = read_process(proc, pid)
    name = process.name if process is not None else seen_as
    return "kworker" if name.startswith("kworker/") else name[:LONGEST]


def largest(values: Mapping[tuple[str, str], int], listed: int) -> dict[tuple[str, str], int]:
    """(process, something else) → value: processes beyond the ``listed`` ones with the largest sums become
    ``OTHERS``."""
    sums: dict[str, int] = {}
    for (process, _), value in values.items():
        sums[process] = sums.get(process, 0) + value
    kept = names_of_largest(sums, listed)
    told: dict[tuple[str, str], int] = {}
    for (process, what), value in values.items():
        key = (process if process in kept else OTHERS, what)
        told[key] = told.get(key, 0) + value
    return told


def names_of_largest(sums: Mapping[str, int], listed: int) -> set[str]:
    """The ``listed`` names with the largest values."""
    return set(sorted(sums, key=lambda name: -sums[name])[:listed])
