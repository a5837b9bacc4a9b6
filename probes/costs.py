"""What the loaded programs cost now, by the kernel's own statistics, which are on for a second every half minute.

The statistics are switched on by a file descriptor (``BPF_ENABLE_STATS``, Linux ≥ 5.8): the kernel switches them
off when it is closed or its process ends, and the sysctl stays as it is. While they are on each run of a
program takes some 60 ns longer, which the figures contain. They do not contain a uprobe's trap: that is
``TRAP_S`` for each hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import statistics
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from probes.bpf import BPF_SYSCALL

TRAP_S = 14e-6
"""Cost of one uprobe hit, which the kernel's BPF statistics do not contain: measured on a virtual machine, the
dearest case known (bench/trap.py measures it)."""
TICK_S = 14e-6
"""Cost of one interrupt of a perf event's clock, which the statistics do not contain either: 14.5 µs were measured
on a virtual machine, where setting the next one leaves the guest."""

EVERY_S = 30.0
"""How often a window of about one second is measured, …"""
SOON_S = 5.0
"""… and how often when the last figure is new, or near a budget."""
KEPT = 3
"""A figure is the median of so many windows: a single odd second does not count."""

_OBJ_GET_INFO_BY_FD = 15
_ENABLE_STATS = 32
"""include/uapi/linux/bpf.h, enum bpf_cmd."""
_INFO_BYTES = 208
_RUN_TIME = struct.Struct("<2Q")
_RUN_TIME_AT = 192
"""``run_time_ns`` and ``run_cnt`` in struct bpf_prog_info, include/uapi/linux/bpf.h."""


@dataclass(frozen=True)
class Cost:
    """What watching takes now, and what it may take. CPU in milliseconds per second."""

    probes_ms_per_s: dict[str, float]
    """By probe that is on: run time of its programs, traps included; −1 while it was not measured."""
    agent_ms_per_s: float
    """The agent's process in the last interval, without compiling."""
    compile_ms: float
    """CPU time that compiling and loading programs took since the agent started. It is not held against the
    budget: it happens once per job, and doing without probes would not give it back."""
    budget_ms_per_s: float
    memory_bytes: int
    memory_budget_bytes: int
    events_per_s: float
    events_budget_per_s: float
    why_unmeasured: str = ""
    """Why the kernel gives no run times."""


class StatisticsUnavailable(OSError):
    """The kernel gives no run times; the message says why."""


def _bpf(command: int, attributes: bytes, what: str) -> int:
    number = BPF_SYSCALL.get(platform.machine())
    if number is None:
        raise StatisticsUnavailable(f"bpf(2) has no known number on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(number, command, attributes, len(attributes)))
    if result < 0:
        raise StatisticsUnavailable(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def enable() -> int:
    """Switch the statistics on; a descriptor that switches them off when it is closed. Raises
    :class:`StatisticsUnavailable`."""
    return _bpf(_ENABLE_STATS, struct.pack("<I", 0), "the kernel's BPF statistics cannot be switched on")


def run_time(program: int) -> tuple[int, int]:
    """(nanoseconds run, runs) of a loaded program by its descriptor, counted while statistics were on. Raises
    :class:`StatisticsUnavailable`."""
    info = ctypes.create_string_buffer(_INFO_BYTES)
    request = struct.pack("<IIQ", program, _INFO_BYTES, ctypes.addressof(info))
    _bpf(_OBJ_GET_INFO_BY_FD, request, "a program's statistics cannot be read")
    run_ns, runs = _RUN_TIME.unpack_from(info.raw, _RUN_TIME_AT)
    return run_ns, runs


class CostMeter:
    """Run time of each probe's programs, CPU seconds per second. Call :meth:`tick` once per interval."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._opened_at = 0.0
        self._next_at = 0.0
        self._before: dict[str, dict[int, int]] = {}
        self._windows: dict[str, deque[float]] = {}
        self._stale: set[str] = set()
        self.why = ""
        """Why nothing is measured; empty when it is."""

    def tick(self, now: float, programs: Mapping[str, Sequence[int]], *, near: bool = False) -> None:
        """Open a window when one is due, or close the one that is open. ``programs``: probe → descriptors of its
        programs; ``near``: measure more often, because the figures matter. ``now`` in seconds."""
        try:
            if self._descriptor >= 0:
                self._close_window(now, programs)
            elif now >= self._next_at and any(programs.values()):
                self._descriptor = enable()
                self.why = ""
                self._opened_at = now
                self._before = _read(programs)
                few = any(len(self._windows.get(name, ())) < KEPT for name in programs)
                self._next_at = now + (SOON_S if near or few else EVERY_S)
        except StatisticsUnavailable as error:
            self.why = str(error)
            self.close()
            self._next_at = now + EVERY_S

    def rate(self, probe: str) -> float | None:
        """CPU seconds per second that a probe's programs ran; None while it was not measured."""
        windows = self._windows.get(probe)
        return statistics.median(windows) if windows else None

    def changed(self) -> None:
        """What runs has changed: the figures hold until new ones are there, which are taken soon."""
        self._stale = set(self._windows)
        self._next_at = 0.0

    def close(self) -> None:
        """Switch the statistics off if they are on, and forget the open window: its programs may be gone."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def _close_window(self, now: float, programs: Mapping[str, Sequence[int]]) -> None:
        after = _read(programs)
        self.close()
        seconds = now - self._opened_at
        for probe, ran in after.items():
            before = self._before.get(probe)
            if before is None or seconds <= 0:
                continue
            grown = sum(ns - before.get(program, 0) for program, ns in ran.items())
            if probe in self._stale:
                self._stale.discard(probe)
                self._windows[probe].clear()
            self._windows.setdefault(probe, deque(maxlen=KEPT)).append(max(0, grown) / 1e9 / seconds)


def _read(programs: Mapping[str, Sequence[int]]) -> dict[str, dict[int, int]]:
    return {
        probe: {program: run_time(program)[0] for program in descriptors}
        for probe, descriptors in programs.items()
    }
