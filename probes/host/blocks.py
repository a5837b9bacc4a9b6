"""What is known of blocks by their kernel stacks: user space's half of why a thread is blocked, and who woke it.

The kernel tells stacks by number. Those that it has not seen before are looked at once a second and given a reason;
what was blocked in them until then is kept by thread and stack, and assigned afterwards.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from probes.host.kernel_symbols import KernelSymbols, SymbolsHidden
from probes.host.reasons import CALLS, REASONS, UNKNOWN, reason_of
from probes.records import Role

LONG_NS = 2_000_000_000
"""A block in a stack that the kernel did not know when it began is told under its reason once it has lasted so
long; a shorter one when it has ended. Until then the kernel's own cuts have it under number 0."""
KEPT = 3
"""Instants at which something was assigned late, by thread: cuts that are still to come are younger than two
heartbeats."""
PROGRAM = "bpf_prog_"
"""Our own frames of the stack."""


class Wake(NamedTuple):
    """Thread ``tid`` slept ``slept_ns`` until it was woken by a thread, or by an interrupt (``pid`` 0)."""

    tid: int
    reason: str
    pid: int
    waker_tid: int
    comm: str
    slept_ns: int


class _Late(NamedTuple):
    """From ``at_ns`` on a thread's parts are these larger; number 0 is smaller by their sum."""

    at_ns: int
    parts: tuple[int, ...]


class BlockReasons:
    """The maps ``stacks``, ``reasons``, ``unclassified``, ``late`` and ``wakes`` of bpf/thread_time.bpf.c."""

    def __init__(self, bpf: Any, symbols: KernelSymbols | None = None) -> None:
        names = (b"stacks", b"reasons", b"unclassified", b"late", b"wakes")
        self._stacks, self._reasons, self._unclassified, self._late_ns, self._wakes = (
            bpf[name] for name in names
        )
        self._symbols = symbols or KernelSymbols()
        self._reason_of: dict[int, int] = {}
        """Stack → number of its reason."""
        self._late: dict[int, list[_Late]] = {}
        self._unassigned: list[tuple[int, int, int]] = []
        self.seen: dict[int, tuple[int, Role]] = {}
        """Watched thread → (process, role): those of the last two heartbeats."""
        self._seen_last: dict[int, tuple[int, Role]] = {}
        self.why_none = self._symbols.why_none()
        """Why no stack can be given a reason; empty when all can."""
        calls = bpf[b"calls"]
        for reason, numbers in CALLS.get(platform.machine(), {}).items():
            for number in numbers:
                calls[calls.Key(number)] = calls.Leaf(REASONS.index(reason))

    def learn(self) -> int:
        """Look at the stacks that the kernel has not seen before, and assign what was blocked in them. Returns how
        many rows were read."""
        fresh = [stack for stack, _ in self._unclassified.items_lookup_batch()]
        for stack in fresh:
            if not self.why_none:
                self._classify(stack)
            self._unclassified.pop(self._unclassified.Key(stack), None)
        return len(fresh) + self._assign()

    def _classify(self, stack: int) -> None:
        addresses = [address for address in self._stacks[self._stacks.Key(stack)].ip if address]
        try:
            names = self._symbols.names(addresses)
        except SymbolsHidden as error:
            self.why_none = str(error)
            return
        number = REASONS.index(reason_of([name for name in names if not name.startswith(PROGRAM)]))
        self._reason_of[stack] = number
        self._reasons[self._reasons.Key(stack)] = self._reasons.Leaf(number)

    def _assign(self) -> int:
        """Give the time of blocks that ended before their stack had a reason to that reason."""
        late = [(key.tid, key.stack, ns) for key, ns in self._late_ns.items_lookup_and_delete_batch()]
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        found: dict[int, list[int]] = {}
        unassigned = []
        for tid, stack, ns in [*self._unassigned, *late]:
            number = self._number(stack)
            if number == UNKNOWN:  # it came after the stacks were looked at
                unassigned.append((tid, stack, ns))
                continue
            if tid not in found:
                before = self._late.get(tid)
                found[tid] = list(before[-1].parts) if before else [0] * len(REASONS)
            found[tid][number] += ns
            found[tid][UNKNOWN] -= ns
        self._unassigned = unassigned if not self.why_none else []
        for tid, parts in found.items():
            self._late[tid] = [*self._late.get(tid, []), _Late(now, tuple(parts))][-KEPT:]
        return len(late)

    def settled(self, tids: Iterable[int], at_ns: int, parts: tuple[int, ...]) -> tuple[int, ...]:
        """Parts of a thread's blocked time, or of several threads' sum, as the kernel had them at an instant, with
        what was assigned up to then."""
        for tid in tids:
            known = [late.parts for late in self._late.get(tid, ()) if late.at_ns <= at_ns]
            if known:
                parts = tuple(map(sum, zip(parts, known[-1], strict=True)))
        return parts

    def in_progress(self, number: int, stack: int, lasted_ns: int) -> int:
        """Number of the reason of a block in progress, for which the kernel has ``number``."""
        if number != UNKNOWN or lasted_ns < LONG_NS:
            return number
        return self._number(stack)

    def _number(self, stack: int) -> int:
        """Of a stack's reason; the kernel tells one that it knew without a stack as −1 − its number."""
        return -1 - stack if stack < 0 else self._reason_of.get(stack, UNKNOWN)

    def keep(self, seen: Mapping[int, tuple[int, Role]]) -> None:
        """Forget threads that were watched neither at this heartbeat nor at the last one: their last cuts are taken
        after they have gone."""
        self.seen = {**self._seen_last, **seen}
        self._seen_last = dict(seen)
        for tid in self._late.keys() - self.seen.keys():
            del self._late[tid]

    def wakes(self) -> list[Wake]:
        """Who ended the sleeps since the last call."""
        slept: dict[tuple[int, str, int, int], tuple[int, str]] = {}
        for key, wake in self._wakes.items_lookup_and_delete_batch():
            reason = REASONS[self._number(key.stack)]
            who = (key.tid, reason, key.tgid, key.waker)
            slept[who] = (slept.get(who, (0, ""))[0] + wake.slept, wake.comm.decode("utf-8", "replace"))
        return [
            Wake(tid, reason, pid, waker, comm, ns)
            for (tid, reason, pid, waker), (ns, comm) in slept.items()
            if ns
        ]

    def forget(self) -> None:
        """Nothing is watched any more; reasons of stacks stay."""
        for table in (self._unclassified, self._late_ns, self._wakes):
            table.clear()
        self._late.clear()
        self._unassigned = []
        self.seen, self._seen_last = {}, {}
