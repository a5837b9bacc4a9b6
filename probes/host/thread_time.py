"""The thread-time probe: where the watched threads' time goes, who had the CPU while they wanted one, what they
wait for while they are blocked, and who wakes them.

User space's side of bpf/thread_time.bpf.c. Threads are watched from the moment another probe sees them, or
on request by :meth:`ThreadTimeProbe.watch`. All times are nanoseconds, instants CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import platform
import struct
import time
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from probes.bpf import BpfUnavailable, Kernel, has_tracepoint, kernel_release, next_load, possible_cpus
from probes.host.blocks import BlockReasons, Wake
from probes.host.reasons import REASONS, SYSCALL_NUMBER
from probes.records import Role

CUT = struct.Struct(f"<7Q2I{len(REASONS)}Q")
"""``struct cut`` of bpf/thread_time.h."""

RUNNING, RUNNABLE, BLOCKED = 1, 2, 3
ROLES = (Role.DRIVING, Role.COMMUNICATION, Role.HELPER)
QUIET_CALLS = 5
"""An occupant is forgotten after so many calls in which it took nothing."""
MAX_COMPANIONS = 16
"""As in bpf/thread_time.h."""
MAX_WANTED = 1024
"""Size of the map `wanted`."""
MAX_HELPERS = 512
"""Helpers that are watched at most: half of the map `threads`, so that ranks find room."""
TRACEPOINT = b"raw_tracepoint__"
"""How BCC names the program of a raw tracepoint, before the tracepoint's own name."""


class Cut(NamedTuple):
    """Cumulative times of one thread at one instant; ``running + runnable + blocked == at_ns − since_ns``.

    With ``tid`` 0: sums over a process's communication threads, which do not add up to wall time; ``since_ns``
    is when the youngest began to be watched.
    """

    since_ns: int
    at_ns: int
    running_ns: int
    runnable_ns: int
    blocked_ns: int
    uninterruptible_ns: int
    interrupted_ns: int
    tid: int
    role: Role
    blocked_by: tuple[int, ...] = ()
    """Parts of ``blocked_ns`` by the reasons' numbers (``probes.host.reasons.REASONS``); number 0 is what is not
    known (yet)."""


class Stay(NamedTuple):
    """A process had the CPU for ``ns`` while thread ``tid`` was runnable. ``pid`` 0 is the idle CPU."""

    tid: int
    pid: int
    ns: int
    comm: str
    """Name of its thread that had the CPU last."""
    cgroup_id: int
    last_ns: int = 0
    """Until when it had the CPU."""


def read_cut(raw: bytes, offset: int) -> Cut:
    """A :class:`Cut` from the kernel's bytes."""
    since, at, running, runnable, blocked, uninterruptible, interrupted, tid, role, *blocked_by = (
        CUT.unpack_from(raw, offset)
    )
    return Cut(
        since,
        at,
        running,
        runnable,
        blocked,
        uninterruptible,
        interrupted,
        tid,
        ROLES[role],
        tuple(blocked_by),
    )


class ThreadTimeProbe:
    """Loads the probe; it is attached from then on. Not safe for several threads."""

    def __init__(self, kernel: Kernel, *, prev_state: bool | None = None) -> None:
        """``prev_state``: whether sched_switch tells the state of the thread that leaves (Linux ≥ 5.18); None asks
        the kernel's version. Raises :class:`BpfUnavailable`."""
        if not has_tracepoint("sched", "sched_switch"):
            raise BpfUnavailable("this kernel has no scheduler tracepoints (CONFIG_FTRACE, CONFIG_TRACING)")
        self.load = next_load()
        """For :class:`probes.nccl.gloo.GlooProbe`, which uses these maps, too."""
        defines: dict[str, int | None] = {"CPUS": possible_cpus()}
        if kernel_release() >= (5, 18) if prev_state is None else prev_state:
            defines["HAVE_PREV_STATE"] = None
            if platform.machine() in SYSCALL_NUMBER:
                defines["SYSCALL_NUMBER"] = SYSCALL_NUMBER[platform.machine()]
        if has_tracepoint("irq_vectors", "local_timer_entry"):
            defines["HAVE_LOCAL_TIMER"] = None
        self._bpf: Any = kernel.compile("thread_time.bpf.c", defines, self.load)
        self._threads = self._bpf[b"threads_%d" % self.load]
        self._occupants = self._bpf[b"occupants"]
        self._wanted = self._bpf[b"wanted"]
        self._companions = self._bpf[b"companions_%d" % self.load]
        self._control = self._bpf[b"control_%d" % self.load]
        self._asked = self._control.Leaf()
        self._reasons = BlockReasons(self._bpf)
        self._attached = True
        self._left_out: set[int] = set()
        """Helpers that are not watched, since there are too many."""
        self._communicating: dict[int, list[int]] = {}
        """Process → its communication threads, those of the last two heartbeats."""
        self._together: dict[int, tuple[int, ...]] = {}
        self._credited: dict[tuple[int, int], tuple[int, int]] = {}
        """(thread, process) → (ns credited in all, calls since it last grew)."""
        self.seen: dict[int, tuple[int, Role]] = {}
        """Watched thread → (process, role), as the last heartbeat found them."""
        self.rows_read = 0
        """Rows of the kernel's maps that came to user space since the probe was loaded."""
        self.name_reasons(ROLES)

    def watch(self, tids: dict[int, Role]) -> None:
        """Watch these threads too, at most ``MAX_WANTED``: each from its next switch on. Of all that are watched at
        most ``MAX_HELPERS`` are helpers; :attr:`missing` says how many were left out.

        Replaces what was asked for before."""
        known = sum(role == Role.HELPER for _, role in self.seen.values())
        fresh = [tid for tid, role in tids.items() if role == Role.HELPER and tid not in self.seen]
        self._left_out = set(fresh[max(0, MAX_HELPERS - known) :])
        wanted = [(tid, role) for tid, role in tids.items() if tid not in self._left_out]
        self._wanted.clear()
        for tid, role in wanted[:MAX_WANTED]:
            self._wanted[self._wanted.Key(tid)] = self._wanted.Leaf(int(role))
        self._ask(wanted=len(wanted))

    def name_occupants(self, on: bool) -> None:
        """Whether it is written down who had the CPU: the dearer half of what a switch costs."""
        self._ask(no_occupants=int(not on))

    def name_reasons(self, roles: Collection[Role]) -> None:
        """Threads of which roles are asked why they block, and who woke them: a kernel stack for each block. None
        are where the kernel does not name its functions (:attr:`missing` says so)."""
        self._ask(reasons=0 if self._reasons.why_none else sum(1 << role for role in roles))

    @property
    def missing(self) -> list[str]:
        """What this kernel does not have or tell, and how many helpers are not watched, in words."""
        missing = [self._reasons.why_none] if self._reasons.why_none else []
        if self._left_out:
            missing.append(f"helpers not watched: {len(self._left_out)} (at most {MAX_HELPERS} are)")
        return missing

    def pause(self) -> None:
        """Detach, and forget the watched threads; the programs stay loaded, since other probes share their maps."""
        if not self._attached:
            return
        self._ask(paused=1)
        for tracepoint in list(self._bpf.raw_tracepoint_fds):
            self._bpf.detach_raw_tracepoint(tracepoint)
        self._attached = False
        self._forget()

    def resume(self) -> None:
        """Attach again. Threads are watched anew from when another probe sees them, or on request."""
        if self._attached:
            return
        self._forget()
        self._bpf[b"cpus_%d" % self.load].clear()
        for name in list(self._bpf.funcs):
            self._bpf.attach_raw_tracepoint(tp=name.removeprefix(TRACEPOINT), fn_name=name)
        self._attached = True
        self._ask(paused=0)

    @property
    def attached(self) -> bool:
        """Whether it watches: false while it pauses."""
        return self._attached

    def programs(self) -> list[int]:
        """File descriptors of its loaded programs."""
        return [function.fd for function in self._bpf.funcs.values()]

    def _ask(self, **flags: int) -> None:
        for name, value in flags.items():
            setattr(self._asked, name, value)
        self._control[self._control.Key(0)] = self._asked

    def _forget(self) -> None:
        for table in (self._threads, self._companions, self._wanted, self._occupants):
            table.clear()
        self._reasons.forget()
        self._together.clear()
        self._communicating.clear()
        self._credited.clear()
        self._left_out = set()
        self.seen = {}

    def heartbeat(self, apart: Collection[int] = ()) -> dict[int, list[Cut]]:
        """Process → where its time went up to now, the time in progress included: one cut per driving thread and
        one for its communication threads together (``tid`` 0), or, of processes in ``apart``, one for each.

        A process that helps a rank (``Role.HELPER``) is told under its own number.

        An entry that the kernel was changing while it was read shows it (its sum does not fit) and is left
        out: the next cut has its time.
        """
        self.rows_read += self._reasons.learn()
        if self._reasons.why_none and self._asked.reasons:
            self._ask(reasons=0)
        driving: dict[int, list[Cut]] = {}
        communication: dict[int, list[tuple[int, Cut | None]]] = {}
        self.seen = {}
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        for task, thread in self._threads.items():  # reads an entry only when it is its turn
            self.rows_read += 1
            self.seen[thread.tid] = (thread.tgid, ROLES[thread.role])
            cut = self._cut(thread, now)
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            if thread.role == Role.COMMUNICATION:
                communication.setdefault(thread.tgid, []).append((task.value, cut))
            elif cut is not None:
                driving.setdefault(thread.tgid, []).append(cut)
        for pid, threads in communication.items():
            self._keep_together(pid, tuple(sorted(task for task, _ in threads)[:MAX_COMPANIONS]))
            cuts = [cut for _, cut in threads if cut is not None]
            if pid in apart:
                driving.setdefault(pid, []).extend(cuts)
            elif len(cuts) == len(threads) <= MAX_COMPANIONS:
                driving.setdefault(pid, []).append(_sum(cuts))
        for pid in self._together.keys() - communication.keys():
            del self._together[pid]
            del self._companions[self._companions.Key(pid)]
        self._reasons.keep(self.seen)
        self._communicating = {}
        for tid, (pid, role) in self._reasons.seen.items():
            if role == Role.COMMUNICATION:
                self._communicating.setdefault(pid, []).append(tid)
        return driving

    def settled(self, pid: int, cuts: Iterable[Cut]) -> list[Cut]:
        """Cuts that the kernel made (:func:`read_cut`) of process ``pid``, with what became known only after blocks
        had ended. Those of :meth:`heartbeat` have it already. Call it after that."""
        together = self._communicating.get(pid, ())
        return [
            cut._replace(
                blocked_by=self._reasons.settled(
                    [cut.tid] if cut.tid else together, cut.at_ns, cut.blocked_by
                )
            )
            for cut in cuts
        ]

    def wakers(self) -> list[Wake]:
        """Who ended the sleeps of the threads of which it is asked, since the last call."""
        wakes = self._reasons.wakes()
        self.rows_read += len(wakes)
        return wakes

    def _cut(self, thread: Any, now: int) -> Cut | None:
        """A cut of a ``struct thread`` as read from the map; None when the kernel was changing it.

        ``now`` is from before it was read: it holds for then if it had not changed since, else for when it last
        changed. The time after the reading would count a state as going on that may have ended: this process
        may have waited for a CPU meanwhile."""
        now = max(now, thread.at)
        parts = {RUNNING: thread.running, RUNNABLE: thread.runnable, BLOCKED: thread.blocked}
        blocked_by = list(thread.blocked_by)
        whole = sum(parts.values()) == thread.at - thread.since and sum(blocked_by) == thread.blocked
        if thread.seq & 1 or not whole or thread.state not in parts:
            return None
        parts[thread.state] += now - thread.at
        if thread.state == BLOCKED:
            blocked_by[self._reasons.in_progress(thread.reason, thread.stack, now - thread.at)] += (
                now - thread.at
            )
        return Cut(
            since_ns=thread.since,
            at_ns=now,
            running_ns=parts[RUNNING],
            runnable_ns=parts[RUNNABLE],
            blocked_ns=parts[BLOCKED],
            uninterruptible_ns=thread.uninterruptible,
            interrupted_ns=thread.interrupted,
            tid=thread.tid,
            role=ROLES[thread.role],
            blocked_by=self._reasons.settled([thread.tid], now, tuple(blocked_by)),
        )

    def _keep_together(self, pid: int, tasks: tuple[int, ...]) -> None:
        if self._together.get(pid) == tasks:
            return
        leaf = self._companions.Leaf()
        for index, task in enumerate(tasks):
            leaf.task[index] = task
        self._companions[self._companions.Key(pid)] = leaf
        self._together[pid] = tasks

    def occupants(self) -> list[Stay]:
        """Who had the CPU while watched threads were runnable, since the last call."""
        stays: list[Stay] = []
        credited: dict[tuple[int, int], tuple[int, int]] = {}
        for key, value in self._occupants.items_lookup_batch():
            pair, total = (key.tid, key.tgid), value.ns
            before, quiet = self._credited.get(pair, (0, 0))
            grown = total - before if total >= before else total  # less: the entry was evicted and made anew
            if grown:
                comm = value.comm.decode("utf-8", "replace")
                stays.append(Stay(key.tid, key.tgid, grown, comm, value.cgroup, value.last))
                credited[pair] = (total, 0)
            elif quiet < QUIET_CALLS:
                credited[pair] = (total, quiet + 1)
            else:
                with contextlib.suppress(KeyError):  # the kernel made room for another meanwhile
                    del self._occupants[self._occupants.Key(key.tid, key.tgid)]
        self._credited = credited
        self.rows_read += len(credited)
        return stays

    def close(self) -> None:
        """Detach."""
        self._bpf.cleanup()


def _sum(cuts: list[Cut]) -> Cut:
    return Cut(
        since_ns=max(cut.since_ns for cut in cuts),
        at_ns=cuts[-1].at_ns,
        running_ns=sum(cut.running_ns for cut in cuts),
        runnable_ns=sum(cut.runnable_ns for cut in cuts),
        blocked_ns=sum(cut.blocked_ns for cut in cuts),
        uninterruptible_ns=sum(cut.uninterruptible_ns for cut in cuts),
        interrupted_ns=sum(cut.interrupted_ns for cut in cuts),
        tid=0,
        role=Role.COMMUNICATION,
        blocked_by=tuple(map(sum, zip(*(cut.blocked_by for cut in cuts), strict=True))),
    )
