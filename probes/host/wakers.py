"""Who ended the sleeps of a rank's threads: from what the kernel summed up to rows of a batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from probes.host.blocks import Wake
from probes.records import Role, Waker

LISTED = 10
"""Wakers sent per thread and batch, the largest; the rest is sent as one sum with pid −1."""
INTERRUPT = "interrupt"
OTHERS = "other wakers"


def name_wakers(wakes: Iterable[Wake], threads: Mapping[int, tuple[int, Role]]) -> dict[int, list[Waker]]:
    """Process → who woke its watched threads, the largest first.

    ``threads``: watched thread → (its process, role). A waker has the name that its thread had when it first
    woke this one, whether it lives or not. An interrupt (a timer, a device, a packet that came in) has pid 0: whom
    it interrupted is nobody's business. What a helper's threads waited for stands under the helper's process.
    """
    by_thread: dict[int, list[Wake]] = defaultdict(list)
    for wake in wakes:
        if wake.tid in threads:
            by_thread[wake.tid].append(wake)
    named: dict[int, list[Waker]] = defaultdict(list)
    for tid, all_of_it in by_thread.items():
        largest = sorted(all_of_it, key=lambda wake: -wake.slept_ns)
        rows = [_row(wake) for wake in largest[:LISTED]]
        rest = sum(wake.slept_ns for wake in largest[LISTED:])
        if rest:
            rows.append(Waker(tid=tid, reason="", pid=-1, waker_tid=-1, name=OTHERS, slept_ns=rest))
        named[threads[tid][0]] += rows
    return dict(named)


def _row(wake: Wake) -> Waker:
    return Waker(
        tid=wake.tid,
        reason=wake.reason,
        pid=wake.pid,
        waker_tid=wake.waker_tid,
        name=wake.comm if wake.pid else INTERRUPT,
        slept_ns=wake.slept_ns,
    )
