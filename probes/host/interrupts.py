"""The interrupts probe: what hardware interrupts and softirqs took, on which CPU, and of which rank.

User space's side of bpf/interrupts.bpf.c. Softirqs go by their vectors (NET_RX, TIMER, …), hardware interrupts by
number and the device that asked for it (/sys/kernel/irq/N/actions: Documentation/ABI/testing/sysfs-kernel-irq).
While receiving takes a CPU much time, packets are counted by network device, a second at a time.
"""

from __future__ import annotations

import logging
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from probes import procfs
from probes.bpf import BpfUnavailable, Kernel, has_tracepoint
from probes.discovery import RankProcess, read_process
from probes.host.percpu import PerCpuMap, possible_cpu_list
from probes.host.reading import Reading
from probes.host.tracepoints import TracepointProbe, lacking, take_off
from probes.records import Metric

log = logging.getLogger(__name__)

VECTORS = ("HI", "TIMER", "NET_TX", "NET_RX", "BLOCK", "IRQ_POLL", "TASKLET", "SCHED", "HRTIMER", "RCU")
"""By number, as the kernel prints them: ``enum`` and ``softirq_to_name``, kernel/softirq.c."""
UNNUMBERED = {
    0xFFFFFFFE: {"irq": "CAL", "device": "call from another CPU"},
    -1: {"irq": "other", "device": ""},
}
"""Interrupts without a number, as in bpf/interrupts.bpf.c and, if they are there, under the names of
/proc/interrupts. −1 stands for those that found no row."""
PLACES = ("interrupt", "ksoftirqd")
"""Where a softirq ran: in whatever was interrupted, or in the CPU's own thread for softirqs that take too long."""
NUMBERS, OF_RANK, DEVICES = 64, 8, 8
"""Rows for interrupt numbers per CPU, and per CPU of a rank, and for network devices per CPU: as in the program."""
VECTOR_ROWS = 16
"""Rows for vectors."""
MAX_RANKS = 64
"""Size of the map `ranks`."""
LISTED = 24
"""Rows sent per metric of the node, the largest; the rest is one sum over CPUs for each vector or interrupt."""
ROW_NS = 100_000
"""Less than this on one CPU is not worth a row of its own."""
RANK_ROW_NS, RANK_LISTED = 1_000_000, 8
"""The same for which CPU a rank lost time on."""
RECEIVING = 0.005
"""Share of a CPU that NET_RX takes from which on it is looked after which device the packets come from."""
DEVICES_EVERY_S = 10.0
"""A second of counting packets is followed by this much without: a packet costs some 0.2 µs more meanwhile."""
NAMES_S = 60.0
"""An interrupt's number may go to another device."""

_CPU = struct.Struct(f"<4Q2I{2 * VECTOR_ROWS * 2}Q" + "IIQ" * NUMBERS)
_RANK = struct.Struct(f"<Q{VECTOR_ROWS}Q" + "IIQ" * OF_RANK)
_DEVICES = struct.Struct("<Q" + "16sQ" * DEVICES)
_KSOFTIRQD_AT = 36
"""Of ``ksoftirqd`` in ``struct cpu``."""
_RECEIVE = b"net:netif_receive_skb"
_POINTS = (("irq", "irq_handler_entry"), ("irq", "irq_handler_exit"))
_SOFT_POINTS = (("irq", "softirq_entry"), ("irq", "softirq_exit"))


class _Took(NamedTuple):
    ns: int
    times: int


_Soft = dict[tuple[int, str, str], _Took]
"""(CPU, vector, place) → what it took there."""
_Hard = dict[tuple[int, int], _Took]
"""(CPU, interrupt number, or key of ``UNNUMBERED``) → what it took there."""


class InterruptsProbe(TracepointProbe):
    """Loads the probe; it is attached from then on. Not safe for several threads."""

    def __init__(self, kernel: Kernel, *, sysfs: Path = Path("/sys")) -> None:
        """Raises :class:`BpfUnavailable`."""
        if absent := lacking(_POINTS + _SOFT_POINTS):
            raise BpfUnavailable(
                f"this kernel lacks the tracepoints {', '.join(absent)} (CONFIG_FTRACE, CONFIG_TRACING)"
            )
        self.missing: list[str] = []
        """What this kernel does not have, in words."""
        self.lost = 0
        """Interrupts and packets that found no row, so that their number or device is not known."""
        defines: dict[str, int | None] = {}
        # Not the local timer: 250 to 1,000 times a second on each busy CPU, with no device to name.
        if has_tracepoint("irq_vectors", "call_function_single_entry"):
            defines["HAVE_CALL"] = None
        else:
            self.missing.append(
                "irq_vectors:call_function_single_entry: calls from other CPUs (TLB shootdowns) are not told"
            )
        if has_tracepoint("net", "netif_receive_skb"):
            defines["HAVE_RECEIVE"] = None
        else:
            self.missing.append(
                "net:netif_receive_skb: the network device that NET_RX worked for is not named"
            )
        self._names = _Names(sysfs / "kernel" / "irq")
        self._possible = possible_cpu_list(sysfs)
        super().__init__(kernel, "interrupts.bpf.c", defines)
        self._cpus = self._map(kernel, b"cpus", _CPU)
        self._ranks = self._map(kernel, b"ranks", _RANK)
        self._receive = "HAVE_RECEIVE" in defines
        if self._receive:
            self._devices = self._map(kernel, b"devices", _DEVICES)
            self._bpf.load_func(b"received", kernel.bcc.BPF.TRACEPOINT)
        self._before = {-1: self._first_rows()}
        """Of each rank, and of the node under −1: the rows as last read, by CPU."""
        self._read_at = time.monotonic()
        self._counting, self._count_at = False, 0.0
        self._shares: dict[int, tuple[float, dict[str, float]]] = {}
        """CPU → (when packets were counted there, device → its share of them)."""

    def read(self, ranks: Mapping[int, RankProcess]) -> Reading:
        """What interrupts took since the last call. A rank is told of from the call on in which it first stood in
        ``ranks``, up to ``MAX_RANKS`` of them."""
        now = time.monotonic()
        elapsed, self._read_at = now - self._read_at, now
        soft, hard = self._node()
        node = [*_softirqs(soft), *self._hardirqs(hard)]
        node += self._receiving(soft, now, elapsed)
        return Reading(node=node, ranks=self._of_ranks(ranks))

    # --- the kernel's rows

    def _map(self, kernel: Kernel, name: bytes, layout: struct.Struct) -> PerCpuMap:
        return PerCpuMap(kernel.bcc.libbcc.lib, self._bpf[name], layout.size, len(self._possible))

    def _first_rows(self) -> list[bytes]:
        """Empty rows, with the thread of each CPU that runs softirqs: written, and returned."""
        threads = _ksoftirqd()
        rows = []
        for cpu in self._possible:
            row = bytearray(_CPU.size)
            struct.pack_into("<I", row, _KSOFTIRQD_AT, threads.get(cpu, 0))
            rows.append(bytes(row))
        self._cpus.write(0, rows)
        return rows

    def _changed(
        self, whose: int, rows: list[bytes], layout: struct.Struct
    ) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """(CPU, the fields now, the fields before) where they are not the same as at the last reading."""
        before = self._before.get(whose) or [bytes(layout.size)] * len(rows)
        self._before[whose] = rows
        for cpu, row, last in zip(self._possible, rows, before, strict=True):
            if row != last:
                self.rows_read += 1
                yield cpu, layout.unpack(row), layout.unpack(last)

    def _node(self) -> tuple[_Soft, _Hard]:
        soft: _Soft = {}
        hard: _Hard = {}
        for cpu, now, before in self._changed(-1, self._cpus.read(0), _CPU):
            for place, name in enumerate(PLACES):
                for number, vector in enumerate(VECTORS):
                    at = 6 + 2 * (place * VECTOR_ROWS + number)
                    ns, count = now[at] - before[at], now[at + 1] - before[at + 1]
                    if count:
                        soft[cpu, vector, name] = _Took(ns, count)
            for number, took in _numbers(now, before, 6 + 4 * VECTOR_ROWS):
                hard[cpu, number] = took
            unplaced = now[4] - before[4] & 0xFFFFFFFF
            if unplaced:
                self.lost += unplaced
                hard[cpu, -1] = _Took(now[3] - before[3], unplaced)
        return soft, hard

    # --- metrics

    def _hardirqs(self, hard: _Hard) -> Iterator[Metric]:
        together: dict[int, _Took] = {}
        for (_, number), took in hard.items():
            had = together.get(number, _Took(0, 0))
            together[number] = _Took(had.ns + took.ns, had.times + took.times)
        yield from largest_by_cpu(
            "hardirq_ns", [(cpu, self._names.labels(number), took.ns) for (cpu, number), took in hard.items()]
        )
        for number, took in together.items():
            yield Metric(name="hardirqs", value=took.times, unit="1", labels=self._names.labels(number))

    def _of_ranks(self, ranks: Mapping[int, RankProcess]) -> dict[int, list[Metric]]:
        for pid in self._before.keys() - ranks.keys() - {-1}:
            self._ranks.remove(pid)
            del self._before[pid]
        told = {}
        for pid in ranks:
            if pid in self._before:
                metrics = list(self._of_rank(pid))
                if metrics:
                    told[pid] = metrics
            elif self._ranks.zero(pid):
                self._before[pid] = [bytes(_RANK.size)] * len(self._possible)
        return told

    def _of_rank(self, pid: int) -> Iterator[Metric]:
        soft: dict[tuple[int, str], int] = {}
        hard: dict[tuple[int, int], int] = {}
        for cpu, now, before in self._changed(pid, self._ranks.read(pid), _RANK):
            for at, vector in enumerate(VECTORS, start=1):
                if now[at] != before[at]:
                    soft[cpu, vector] = now[at] - before[at]
            for number, took in _numbers(now, before, 1 + VECTOR_ROWS):
                hard[cpu, number] = took.ns
            if now[0] != before[0]:
                hard[cpu, -1] = now[0] - before[0]
        yield from _of_rank("softirq", [(cpu, {"vector": vector}, ns) for (cpu, vector), ns in soft.items()])
        yield from _of_rank(
            "hardirq", [(cpu, self._names.labels(number), ns) for (cpu, number), ns in hard.items()]
        )

    # --- which network device

    def _receiving(self, soft: _Soft, now: float, elapsed: float) -> Iterator[Metric]:
        """Packets by CPU and device after a second of counting, and each device's share for as long as it is fresh
        and the CPU is busy with receiving. Begins and ends such seconds."""
        busy: dict[int, int] = {}
        for (cpu, vector, _), took in soft.items():
            if vector == "NET_RX":
                busy[cpu] = busy.get(cpu, 0) + took.ns
        busy = {cpu: ns for cpu, ns in busy.items() if ns >= RECEIVING * elapsed * 1e9}
        if self._counting:
            self._counting = False
            take_off(self._bpf, _RECEIVE)
            yield from self._packets(now)
        elif busy and self._receive and now >= self._count_at:
            self._count_at = now + DEVICES_EVERY_S
            self._count()
        self._shares = {
            cpu: (at, shares) for cpu, (at, shares) in self._shares.items() if now - at < 2 * DEVICES_EVERY_S
        }
        for cpu in busy:
            for device, share in self._shares.get(cpu, (0.0, {}))[1].items():
                labels = {"cpu": str(cpu), "device": device}
                yield Metric(name="net_rx_share", value=share, unit="ratio", labels=labels)

    def _count(self) -> None:
        self._devices.zero(0)
        try:
            self._bpf.attach_tracepoint(tp=_RECEIVE, fn_name=b"received")
        except Exception as error:  # BCC raises bare Exception
            self._receive = False
            words = f"net:netif_receive_skb: the network device that NET_RX worked for is not named: {error}"
            self.missing.append(words)
            log.warning("%s", words)
            return
        self._counting = True

    def _packets(self, now: float) -> Iterator[Metric]:
        for cpu, row in zip(self._possible, self._devices.read(0), strict=True):
            unplaced, *fields = _DEVICES.unpack(row)
            packets = {
                name.partition(b"\0")[0].decode("utf-8", "replace"): count
                for name, count in zip(fields[::2], fields[1::2], strict=True)
                if count
            }
            if unplaced:
                self.lost += unplaced
                packets["other"] = packets.get("other", 0) + unplaced
            whole = sum(packets.values())
            if not whole:
                continue
            self.rows_read += len(packets)
            self._shares[cpu] = now, {device: count / whole for device, count in packets.items()}
            for device, count in packets.items():
                labels = {"cpu": str(cpu), "device": device}
                yield Metric(name="net_rx_packets", value=count, unit="1", labels=labels)


class _Names:
    """Which device an interrupt's number belongs to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[int, tuple[float, str]] = {}

    def labels(self, number: int) -> dict[str, str]:
        """The labels ``irq`` and ``device``; the latter is empty where nobody handles it any more."""
        if number in UNNUMBERED:
            return UNNUMBERED[number]
        now = time.monotonic()
        at, name = self._known.get(number, (-NAMES_S, ""))
        if now - at >= NAMES_S:
            raw = procfs.read(f"{self._folder}/{number}/actions") or b""
            name = raw.decode("utf-8", "replace").strip()[:64] or name
            self._known[number] = now, name
        return {"irq": str(number), "device": name}


def _numbers(now: Sequence[int], before: Sequence[int], at: int) -> Iterator[tuple[int, _Took]]:
    """Interrupt numbers that came, from ``struct number`` rows that begin at field ``at``."""
    for row in range(at, len(now), 3):
        count = now[row + 1] - before[row + 1] & 0xFFFFFFFF
        if now[row] and count:
            yield now[row] - 1, _Took(now[row + 2] - before[row + 2], count)


def _softirqs(soft: _Soft) -> Iterator[Metric]:
    counts: dict[str, int] = {}
    for (_, vector, _), took in soft.items():
        counts[vector] = counts.get(vector, 0) + took.times
    yield from largest_by_cpu(
        "softirq_ns",
        [(cpu, {"vector": vector, "in": place}, took.ns) for (cpu, vector, place), took in soft.items()],
    )
    for vector, count in counts.items():
        yield Metric(name="softirqs", value=count, unit="1", labels={"vector": vector})


def largest_by_cpu(name: str, rows: list[tuple[int, dict[str, str], int]]) -> Iterator[Metric]:
    """The largest rows with their CPU, the rest summed over CPUs under "other"."""
    rest: dict[tuple[tuple[str, str], ...], int] = {}
    for place, (cpu, labels, ns) in enumerate(sorted(rows, key=lambda row: -row[2])):
        if place < LISTED and ns >= ROW_NS:
            yield Metric(name=name, value=ns, unit="ns", labels=labels | {"cpu": str(cpu)})
        elif ns:
            key = tuple(labels.items())
            rest[key] = rest.get(key, 0) + ns
    for key, ns in rest.items():
        yield Metric(name=name, value=ns, unit="ns", labels=dict(key) | {"cpu": "other"})


def _of_rank(kind: str, rows: list[tuple[int, dict[str, str], int]]) -> Iterator[Metric]:
    """What a rank lost, whole, and the largest parts of it by CPU."""
    whole: dict[tuple[tuple[str, str], ...], int] = {}
    for _, labels, ns in rows:
        key = tuple(labels.items())
        whole[key] = whole.get(key, 0) + ns
    for key, ns in whole.items():
        if ns:
            yield Metric(name=f"{kind}_ns", value=ns, unit="ns", labels=dict(key))
    for cpu, labels, ns in sorted(rows, key=lambda row: -row[2])[:RANK_LISTED]:
        if ns >= RANK_ROW_NS:
            yield Metric(name=f"{kind}_cpu_ns", value=ns, unit="ns", labels=labels | {"cpu": str(cpu)})


def _ksoftirqd(proc: Path = Path("/proc")) -> dict[int, int]:
    """CPU → its thread for softirqs."""
    threads = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        process = read_process(proc, int(entry.name))
        if process is not None and process.kernel:
            found = re.fullmatch(r"ksoftirqd/(\d+)", process.name)
            if found:
                threads[int(found[1])] = process.pid
    return threads
