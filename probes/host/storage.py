"""The storage probe: requests to block devices, by device, operation and process.

User space's side of bpf/storage.bpf.c. A request's time is the device's own: from issue to completion. What it
waited before, in a scheduler's queue, is told apart; what a control group's limit held back is no request yet.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes import procfs
from probes.bpf import BpfUnavailable, Kernel, has_tracepoint, kernel_release
from probes.discovery import RankProcess
from probes.host.labels import LONGEST, OTHERS, names_of_largest, process_label
from probes.host.reading import Reading
from probes.host.tracepoints import TracepointProbe, lacking
from probes.records import Metric

OPERATIONS = ("read", "write", "flush", "discard")
"""By number, as in bpf/storage.bpf.c."""
POINTS = (("block", "block_rq_issue"), ("block", "block_rq_complete"))
INSERT, REQUEUE = "block_rq_insert", "block_rq_requeue"
PROGRAMS = {
    "block_rq_issue": b"issued",
    "block_rq_complete": b"completed",
    INSERT: b"inserted",
    REQUEUE: b"requeued",
}
"""Raw tracepoint → program."""
LISTED = 5
"""Processes, beside ranks, that are told by name for each operation: those whose requests took longest."""
OLD_NS = 100_000_000
"""A request that is in flight for longer is told while it is."""
FLUSH_NS = 60_000_000_000
"""A flush in flight for longer was completed, and that was missed."""
NEVER_ISSUED_NS = 60_000_000_000
"""The entry is idle, or its request was merged into another one: it may go when there are many."""
KEPT_IDLE = 2048
"""Entries in all from which on idle ones are removed; the map has room for 8,192."""
NAMES_S = 60.0
"""A device's number may go to another one."""
MINOR_BITS = 20
"""Of a device's number inside of the kernel: include/linux/kdev_t.h."""


@dataclass
class _Sum:
    requests: int = 0
    bytes: int = 0
    ns: int = 0
    queued_ns: int = 0
    max_ns: int = 0
    errors: int = 0

    def add(self, other: Any) -> None:
        self.requests += other.requests
        self.bytes += other.bytes
        self.ns += other.ns
        self.queued_ns += other.queued_ns
        self.max_ns = max(self.max_ns, other.max_ns)
        self.errors += other.errors


@dataclass
class _InFlight:
    """Requests that a device has at one moment."""

    ns: int = 0
    """Sum of the times since they were issued."""
    oldest_ns: int = 0


_Sums = dict[tuple[str, str], _Sum]
"""(Device, operation) → its requests."""


class StorageProbe(TracepointProbe):
    """Loads the probe; it is attached from then on. Not safe for several threads."""

    def __init__(self, kernel: Kernel, *, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> None:
        """Raises :class:`BpfUnavailable`."""
        if absent := lacking(POINTS):
            raise BpfUnavailable(
                f"this kernel lacks the tracepoints {', '.join(absent)} (CONFIG_BLOCK, CONFIG_TRACING)"
            )
        self.missing: list[str] = []
        """Tracepoints that this kernel does not have, and what is not told without them."""
        self.lost = 0
        """Requests that are not told: no room, nothing told what they are, or their completion was missed."""
        defines: dict[str, int | None] = {"REQUEST": 0 if kernel_release() >= (5, 11) else 1}
        if has_tracepoint("block", INSERT):
            defines["HAVE_INSERT"] = None
        else:
            self.missing.append(
                f"block:{INSERT}: requests out of a scheduler's queue are a kworker's, their wait is not told"
            )
        if has_tracepoint("block", REQUEUE):
            defines["HAVE_REQUEUE"] = None
        else:
            self.missing.append(
                f"block:{REQUEUE}: a request that a device refuses at first is its second issuer's, as a new one"
            )
        self._proc, self._sysfs, self._devices = proc, sysfs, _Devices(sysfs)
        super().__init__(kernel, "storage.bpf.c", defines)
        self._points = [*(event for _, event in POINTS)]
        self._points += [
            event for event, name in ((INSERT, "HAVE_INSERT"), (REQUEUE, "HAVE_REQUEUE")) if name in defines
        ]
        self._unplaced = 0
        self._had: dict[str, _InFlight] = {}
        self._read_at = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._attach()

    def read(self, ranks: Mapping[int, RankProcess]) -> Reading:
        """Requests that were completed since the last call, and how many were in flight meanwhile."""
        whole: _Sums = {}
        of_ranks: dict[int, _Sums] = {}
        others: dict[tuple[str, str, str], _Sum] = {}
        names: dict[int, str] = {}
        # Those completed are taken first: what completes meanwhile is told by the next reading.
        rows = list(self._bpf[b"sums"].items_lookup_and_delete_batch())
        self.rows_read += len(rows)
        for key, value in rows:
            what = (self._devices.name(key.dev), OPERATIONS[key.operation])
            whole.setdefault(what, _Sum()).add(value)
            if key.tgid in ranks:
                of_ranks.setdefault(key.tgid, {}).setdefault(what, _Sum()).add(value)
                continue
            if key.tgid not in names:
                comm = value.comm.decode("utf-8", "replace")
                names[key.tgid] = process_label(key.tgid, comm, self._proc)
            others.setdefault((names[key.tgid], *what), _Sum()).add(value)
        self._count_lost()
        return Reading(
            node=[*_metrics(whole), *self._depth(whole), *_by_process(others)],
            ranks={pid: list(_metrics(sums)) for pid, sums in of_ranks.items()},
        )

    def _attach(self) -> None:
        try:
            # First: it tells the raw one, which comes after it, what is issued.
            self._bpf.attach_tracepoint(tp=b"block:block_rq_issue", fn_name=b"describe")
            for event in self._points:
                self._bpf.attach_raw_tracepoint(tp=event.encode(), fn_name=PROGRAMS[event])
        except Exception as error:  # BCC raises bare Exception
            self.close()
            raise BpfUnavailable(f"the kernel refuses to attach to the block tracepoints: {error}") from error

    # --- the kernel's rows

    def _count_lost(self) -> None:
        unplaced = int(self._bpf[b"unplaced"][0].value)
        self.lost, self._unplaced = self.lost + unplaced - self._unplaced, unplaced

    def _in_flight(self) -> tuple[int, dict[str, _InFlight]]:
        """(Now, device → what it has). An entry whose completion was missed looks as if it were in flight: of old
        ones no more are believed than the device itself has."""
        table = self._bpf[b"requests"]
        entries = list(table.items_lookup_batch())
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        ages: dict[tuple[str, bool], list[tuple[int, int]]] = {}
        for address, entry in entries:
            if entry.issued:
                what = (self._devices.name(entry.dev), OPERATIONS[entry.operation] == "flush")
                ages.setdefault(what, []).append((max(0, now - entry.issued), address))
            elif len(entries) > KEPT_IDLE and now - entry.inserted > NEVER_ISSUED_NS:
                table.pop(table.Key(address), None)
        found: dict[str, _InFlight] = {}
        for (device, flush), requests in ages.items():
            requests.sort(reverse=True)
            while requests and self._missed(device, flush, requests):
                table.pop(table.Key(requests.pop(0)[1]), None)
                self.lost += 1
            self.rows_read += len(requests)
            there = found.setdefault(device, _InFlight())
            there.ns += sum(age for age, _ in requests)
            there.oldest_ns = max([there.oldest_ns, *(age for age, _ in requests[:1])])
        return now, found

    def _missed(self, device: str, flush: bool, requests: list[tuple[int, int]]) -> bool:
        """Whether the oldest of these requests must have been completed."""
        oldest = requests[0][0]
        if flush or oldest < OLD_NS:  # the device does not count flushes
            return oldest > FLUSH_NS
        counts = procfs.read(f"{self._sysfs}/block/{device}/inflight")
        return counts is not None and sum(map(int, counts.split())) < len(requests)

    def _depth(self, whole: _Sums) -> Iterator[Metric]:
        """Mean requests in flight over the interval: the time that all of them spent there in it, by its length."""
        now, found = self._in_flight()
        had, self._had = self._had, found
        elapsed, self._read_at = now - self._read_at, now
        spent: dict[str, int] = {device: there.ns for device, there in found.items()}
        for (device, _), sum_ in whole.items():
            spent[device] = spent.get(device, 0) + sum_.ns
        for device, ns in spent.items():
            mean = (ns - had.get(device, _InFlight()).ns) / elapsed
            if mean > 0:
                yield Metric(name="block_depth", value=mean, unit="1", labels={"device": device})
        for device, there in found.items():
            if there.oldest_ns >= OLD_NS:
                labels = {"device": device}
                yield Metric(name="block_oldest_ns", value=there.oldest_ns, unit="ns", labels=labels)


class _Devices:
    """Names of block devices by their numbers."""

    def __init__(self, sysfs: Path) -> None:
        self._folder = sysfs / "dev" / "block"
        self._known: dict[int, tuple[float, str]] = {}

    def name(self, number: int) -> str:
        """As in /dev; ``major:minor`` where it has gone."""
        now = time.monotonic()
        at, name = self._known.get(number, (-NAMES_S, ""))
        if now - at < NAMES_S:
            return name
        numbers = f"{number >> MINOR_BITS}:{number & (1 << MINOR_BITS) - 1}"
        try:
            name = (self._folder / numbers).readlink().name[:LONGEST]
        except OSError:
            name = name or numbers
        self._known[number] = now, name
        return name


def _metrics(sums: _Sums) -> Iterator[Metric]:
    """Of each device and operation: how many, how large, how long in all and at most, how long queued before."""
    for (device, operation), sum_ in sums.items():
        values = [
            (f"block_{operation}_requests", sum_.requests, "1"),
            (f"block_{operation}_bytes", sum_.bytes, "B"),
            (f"block_{operation}_ns", sum_.ns, "ns"),
            (f"block_{operation}_max_ns", sum_.max_ns, "ns"),
            (f"block_{operation}_queued_ns", sum_.queued_ns, "ns"),
            (f"block_{operation}_errors", sum_.errors, "1"),
        ]
        yield from _told(values, device=device)


def _by_process(others: Mapping[tuple[str, str, str], _Sum]) -> Iterator[Metric]:
    """Who else had requests: of each operation those whose requests took longest, the rest together."""
    for operation in OPERATIONS:
        took: dict[str, int] = {}
        for (process, _, what), sum_ in others.items():
            if what == operation:
                took[process] = took.get(process, 0) + sum_.ns
        kept = names_of_largest(took, LISTED)
        told: dict[tuple[str, str], _Sum] = {}
        for (process, device, what), sum_ in others.items():
            if what == operation:
                told.setdefault((process if process in kept else OTHERS, device), _Sum()).add(sum_)
        for (process, device), sum_ in told.items():
            values = [
                (f"block_process_{operation}_bytes", sum_.bytes, "B"),
                (f"block_process_{operation}_ns", sum_.ns, "ns"),
            ]
            yield from _told(values, device=device, process=process)


def _told(values: Iterable[tuple[str, int, str]], **labels: str) -> Iterator[Metric]:
    for name, value, unit in values:
        if value:
            yield Metric(name=name, value=value, unit=unit, labels=labels)
