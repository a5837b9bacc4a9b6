"""The thread-time probe: where the watched threads' time goes, and who had the CPU while they wanted one.

User space's side of bpf/thread_time.bpf.c. Threads are watched from the moment another probe sees them, or
on request by :meth:`ThreadTimeProbe.watch`. All times are nanoseconds, instants CLOCK_MONOTONIC.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import Any

from probes.bpf import BpfUnavailable, Kernel, has_tracepoint, kernel_release, possible_cpus
from probes.records import Role

CUT = struct.Struct("<7Q2I")
"""``struct cut`` of bpf/thread_time.h."""

RUNNING, RUNNABLE, BLOCKED = 1, 2, 3


@dataclass(frozen=True)
class Cut:
    """Cumulative times of one thread at one instant; ``running + runnable + blocked == at_ns − since_ns``."""

    since_ns: int
    at_ns: int
    running_ns: int
    runnable_ns: int
    blocked_ns: int
    uninterruptible_ns: int
    interrupted_ns: int
    tid: int
    role: Role


@dataclass(frozen=True)
class Stay:
    """A process had the CPU for ``ns`` while thread ``tid`` was runnable. ``pid`` 0 is the idle CPU."""

    tid: int
    pid: int
    ns: int
    comm: str
    cgroup_id: int


def read_cut(raw: bytes, offset: int) -> Cut:
    """A :class:`Cut` from the kernel's bytes."""
    since, at, running, runnable, blocked, uninterruptible, interrupted, tid, role = CUT.unpack_from(raw, offset)
    return Cut(since, at, running, runnable, blocked, uninterruptible, interrupted, tid, Role(role))


class ThreadTimeProbe:
    """Loads the probe; it is attached from then on. Not safe for several threads."""

    def __init__(self, kernel: Kernel, *, prev_state: bool | None = None) -> None:
        """``prev_state``: whether sched_switch tells the state of the thread that leaves (Linux ≥ 5.18); None asks
        the kernel's version. Raises :class:`BpfUnavailable`."""
        if not has_tracepoint("sched", "sched_switch"):
            raise BpfUnavailable("this kernel has no scheduler tracepoints (CONFIG_FTRACE, CONFIG_TRACING)")
        defines: dict[str, int | None] = {"CPUS": possible_cpus()}
        if kernel_release() >= (5, 18) if prev_state is None else prev_state:
            defines["HAVE_PREV_STATE"] = None
        if has_tracepoint("irq_vectors", "local_timer_entry"):
            defines["HAVE_LOCAL_TIMER"] = None
        self._bpf: Any = kernel.compile("thread_time.bpf.c", defines)
        self._threads = self._bpf["threads"]
        self._occupants = self._bpf["occupants"]
        self._wanted = self._bpf["wanted"]
        self._credited: dict[tuple[int, int], int] = {}
        self._seen: set[int] = set()

    def watch(self, tids: dict[int, Role]) -> None:
        """Watch these threads too: each from its next switch on. Replaces what was asked for before."""
        self._wanted.clear()
        for tid, role in tids.items():
            self._wanted[self._wanted.Key(tid)] = self._wanted.Leaf(int(role))
        count = self._bpf["wanted_count"]
        count[count.Key(0)] = count.Leaf(len(tids))

    def heartbeat(self) -> dict[int, list[Cut]]:
        """Process → where its watched threads' time went up to now, the time in progress included.

        An entry that the kernel was changing while it was read shows it (its sum does not fit) and is left
        out: the next cut has its time.
        """
        cuts: dict[int, list[Cut]] = {}
        self._seen.clear()
        for _, thread in self._threads.items():
            self._seen.add(thread.tid)
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            parts = {RUNNING: thread.running, RUNNABLE: thread.runnable, BLOCKED: thread.blocked}
            whole = sum(parts.values()) == thread.at - thread.since
            if thread.seq & 1 or not whole or now < thread.at or thread.state not in parts:
                continue
            parts[thread.state] += now - thread.at
            cuts.setdefault(thread.tgid, []).append(
                Cut(
                    since_ns=thread.since,
                    at_ns=now,
                    running_ns=parts[RUNNING],
                    runnable_ns=parts[RUNNABLE],
                    blocked_ns=parts[BLOCKED],
                    uninterruptible_ns=thread.uninterruptible,
                    interrupted_ns=thread.interrupted,
                    tid=thread.tid,
                    role=Role(thread.role),
                )
            )
        return cuts

    def occupants(self) -> list[Stay]:
        """Who had the CPU while watched threads were runnable, since the last call."""
        stays, credited = [], {}
        for key, value in self._occupants.items():
            pair, total = (key.tid, key.tgid), value.ns
            before = self._credited.get(pair, 0)
            credited[pair] = total
            grown = total - before if total >= before else total  # less: the entry was evicted and made anew
            if grown:
                comm = value.comm.decode("utf-8", "replace")
                stays.append(Stay(key.tid, key.tgid, grown, comm, value.cgroup))
            elif key.tid not in self._seen:
                del self._occupants[key]  # the thread that waited has gone
                del credited[pair]
        self._credited = credited
        return stays

    def close(self) -> None:
        """Detach."""
        self._bpf.cleanup()
