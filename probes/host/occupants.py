"""Who had the CPU while a rank wanted it: from what the kernel credited to names that a person can act on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from probes import procfs
from probes.discovery import read_process
from probes.host.thread_time import Stay
from probes.records import Occupant, Role

NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
LISTED = 20
"""Occupants sent per rank and batch, the largest; the rest is sent as one sum with pid −1."""


def name_occupants(
    stays: Iterable[Stay],
    threads: Mapping[int, tuple[int, Role]],
    rank_of: Callable[[int], tuple[str, int] | None],
    proc: Path = Path("/proc"),
) -> dict[int, list[Occupant]]:
    """Process of a rank → who had the CPU while its threads were runnable.

    ``threads``: watched thread → (its process, role). ``rank_of``: (job, rank) that a process belongs to. A
    process that has ended keeps the name that its thread had on the CPU, and no cgroup; so does one whose pid
    is another process's by now, which shows by that having started after the CPU was had.
    """
    took: dict[tuple[int, Role, int], int] = {}
    seen_as: dict[int, tuple[int, str]] = {}
    for stay in stays:
        if stay.tid in threads:
            process, role = threads[stay.tid]
            key = (process, role, stay.pid)
            took[key] = took.get(key, 0) + stay.ns
            seen_as[stay.pid] = max(seen_as.get(stay.pid, (0, "")), (stay.last_ns, stay.comm))
    named: dict[int, list[Occupant]] = {}
    described: dict[int, tuple[str, str, bool, bool]] = {}
    for (process, role, pid), ns in sorted(took.items(), key=lambda item: -item[1]):
        listed = named.setdefault(process, [])
        if len(listed) >= LISTED:
            rest = listed.pop() if listed[-1].pid == -1 else None
            name, total = "other processes", ns + (rest.took_ns if rest else 0)
            listed.append(Occupant(role=role, pid=-1, name=name, cgroup="", took_ns=total))
            continue
        if pid not in described:
            described[pid] = _describe(proc, pid, *seen_as[pid])
        name, cgroup, kernel, gone = described[pid]
        job, rank = (None if gone else rank_of(pid)) or ("", -1)
        listed.append(
            Occupant(
                role=role,
                pid=pid,
                name=name,
                cgroup=cgroup,
                took_ns=ns,
                rank_job=job,
                rank=rank,
                kernel=kernel,
            )
        )
    return named


def _describe(proc: Path, pid: int, last_ns: int, seen_as: str) -> tuple[str, str, bool, bool]:
    """(name, cgroup, whether it is a kernel thread, whether another process has its pid now)."""
    if pid == 0:
        return "idle", "", True, False
    process = read_process(proc, pid)
    if process is None:  # it has ended; discovery may know yet which rank it was
        return seen_as, "", False, False
    if last_ns and _started_ns(process.start_ticks) > last_ns:
        return seen_as, "", False, True
    return process.name, cgroup_of(proc, pid), process.kernel, False


def _started_ns(ticks: int) -> int:
    """When a process started, CLOCK_MONOTONIC; at the earliest, since ticks are cut off to 10 ms. The kernel
    counts them in time since boot, which goes on while the machine is suspended."""
    suspended = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return ticks * NS_PER_TICK - suspended


def cgroup_of(proc: Path, pid: int) -> str:
    """The cgroup that limits a process's CPU: its path in the unified hierarchy, or where that is the root, in
    version 1's cpu hierarchy. Empty when the process has ended."""
    raw = procfs.read(f"{proc}/{pid}/cgroup")
    unified = cpu = ""
    for line in (raw or b"").decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            unified = path
        elif "cpu" in controllers.split(","):
            cpu = path
    return unified if unified not in ("", "/") else cpu or unified
