"""The memory probe on the running kernel, against the kernel's own tracing and what a limit makes inevitable."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes.bpf import BpfUnavailable, Kernel
from probes.discovery import Process, RankProcess
from probes.host.labels import largest
from probes.host.memory import MemoryProbe
from probes.host.reading import Reading
from probes.records import Metric
from tests.probes import processes
from tests.probes.kernel_trace import trace
from tests.probes.memory_limit import Limited, memory_limit
from tests.probes.processes import Child

pytestmark = pytest.mark.live

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
LIMIT = 16 * MIB
FILE = 96 * MIB
RECLAIM = ("vmscan/mm_vmscan_memcg_reclaim_begin", "vmscan/mm_vmscan_memcg_reclaim_end")
COMPACTION = ("compaction/mm_compaction_begin", "compaction/mm_compaction_end")
READ = """
import os, sys, threading
open("/proc/self/comm", "w").write("reader\\n<x>")
buffer = bytearray(1 << 20)
def read():
    print(threading.get_native_id(), flush=True)
    sys.stdin.readline()
    file = os.open(sys.argv[1], os.O_RDONLY)
    while os.readv(file, [buffer]): pass
    print("read", flush=True)
    sys.stdin.readline()
thread = threading.Thread(target=read)
thread.start()
thread.join()
"""
"""Fills the page cache with a file, in a thread that is not its main one."""
HOARD = """
import sys
open("/proc/self/comm", "w").write("hoarder\\n<x>")
print(flush=True)
sys.stdin.readline()
bytearray(1 << 28)
"""
COMPACT = """
import os, sys, time
print(flush=True)
for line in sys.stdin:
    began = time.monotonic_ns()
    os.write(os.open("/proc/sys/vm/compact_memory", os.O_WRONLY), b"1")
    print(time.monotonic_ns() - began, flush=True)
"""


@pytest.fixture
def probe(root_and_bpf: Kernel) -> Iterator[MemoryProbe]:
    probe = MemoryProbe(root_and_bpf)
    yield probe
    probe.close()


@pytest.fixture
def limited() -> Iterator[Limited]:
    with memory_limit(LIMIT) as group:
        yield group


@pytest.fixture
def reader(limited: Limited, tmp_path: Path) -> Iterator[Child]:
    """Will read a file six times as large as its limit when it is told to."""
    file = tmp_path / "file"
    file.touch()
    os.truncate(file, FILE)  # nothing is on the disk: reading takes memory only
    child = processes.python(READ, str(file))
    yield child
    child.end()


def as_rank(pid: int) -> dict[int, RankProcess]:
    process = Process(pid=pid, parent=1, start_ticks=1, name="python")
    return {pid: RankProcess("job-1", 3, 4, 3, process, Path("/libtorch_cpu.so"), {})}


def total(metrics: list[Metric], name: str, **labels: str) -> float:
    """Sum of a metric's values over all labels that are not given."""
    return sum(m.value for m in metrics if m.name == name and labels.items() <= m.labels.items())


def gather(readings: list[Reading], pid: int) -> list[Metric]:
    return [metric for reading in readings for metric in reading.ranks.get(pid, ())]


def test_reclaim_for_a_limit_is_told_by_rank_and_thread(
    probe: MemoryProbe, limited: Limited, reader: Child
) -> None:
    tid = reader.line()
    limited.add(reader.pid)
    ranks = as_rank(reader.pid)
    with trace(RECLAIM, f"common_pid == {tid}") as kernels:
        began = time.monotonic_ns()
        reader.tell("read")
        assert reader.line() == "read"
        wall = time.monotonic_ns() - began
        metrics = gather([probe.read(ranks)], reader.pid)
        lasted = kernels.pairs_ns("mm_vmscan_memcg_reclaim_begin", "mm_vmscan_memcg_reclaim_end")
    assert lasted
    assert total(metrics, "reclaims", kind="memcg") == len(lasted)
    took = total(metrics, "reclaim_ns", kind="memcg")
    assert took == pytest.approx(sum(lasted), rel=0.1, abs=2e6)
    assert took <= wall
    # What came in, some of it more than once, has gone, but for what is still there.
    came = FILE + limited.statistic("workingset_refault_file") * PAGE
    gone = total(metrics, "reclaimed_bytes", kind="memcg")
    assert came - LIMIT - 0.1 * came <= gone <= 1.1 * came
    if took >= 1e6:
        assert total(metrics, "reclaim_thread_ns", kind="memcg", tid=tid) == took
    assert {m.labels["kind"] for m in metrics} == {"memcg"}
    assert probe.read(ranks).ranks == {}, "told once"


def test_who_is_no_rank_goes_by_its_name(probe: MemoryProbe, limited: Limited, reader: Child) -> None:
    reader.line()
    limited.add(reader.pid)
    reader.tell("read")
    reader.line()
    reading = probe.read({})
    assert total(list(reading.node), "reclaim_ns", kind="memcg", process="reader\n<x>") > 0
    assert reading.ranks == {}


def test_compaction_is_told_while_it_goes_on_and_once_in_all(probe: MemoryProbe) -> None:
    child = processes.python(COMPACT)
    try:
        child.line()
        ranks = as_rank(child.pid)
        readings = [probe.read(ranks)]

        def going_on() -> bool:
            readings.append(probe.read(ranks))
            names = {metric.name for metric in gather(readings[-1:], child.pid)}
            return "compaction_ns" in names and "compactions" not in names

        wall = 0
        with trace(COMPACTION, f"common_pid == {child.pid}") as kernels:
            for _ in range(5):  # it may be done before it is looked at
                child.tell("compact")
                seen = False
                while not select.select([child.process.stdout], [], [], 0.003)[0]:
                    seen = going_on() or seen
                wall += int(child.line())
                if seen:
                    break
            else:
                pytest.fail("no compaction was told while it went on")
            readings += [probe.read(ranks), probe.read(ranks)]
            lasted = kernels.pairs_ns("mm_compaction_begin", "mm_compaction_end")
        metrics = gather(readings, child.pid)
        assert total(metrics, "compactions") == len(lasted) > 0
        assert total(metrics, "compaction_ns") == pytest.approx(sum(lasted), rel=0.05, abs=1e6)
        assert total(metrics, "compaction_ns") <= wall
    finally:
        child.end()


def test_a_process_killed_for_want_of_memory_is_an_event(probe: MemoryProbe, limited: Limited) -> None:
    child = processes.python(HOARD)
    try:
        child.line()
        limited.add(child.pid)
        ranks = as_rank(child.pid)
        before = time.monotonic_ns()
        child.tell("take")
        assert child.process.wait(timeout=processes.DEADLINE_S) == -9
        if not limited.killed():
            pytest.skip("the machine swaps: nothing had to be killed")
        (event,) = (e for e in probe.read(ranks).events if f"(pid {child.pid})" in e.detail)
    finally:
        child.end()
    assert (event.kind, event.job, event.rank) == ("oom-kill", "job-1", 3)
    assert before < event.at_ns < time.monotonic_ns()
    assert event.detail.startswith(f"hoarder\n<x> (pid {child.pid}) held ")
    held = int(event.detail.partition(" held ")[2].partition(" MiB")[0])
    assert held <= LIMIT / MIB + 32, "the limit, and what it had before"
    assert event.detail.endswith(f"was killed for want of memory: hoarder\n<x> (pid {child.pid}) wanted more")
    assert probe.read(ranks).events == [], "told once"


def test_an_older_kernel_has_the_rest(
    root_and_bpf: Kernel, limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compaction and reclaim of nodes, and whose mark_victim tells a pid only (before Linux 6.8)."""
    monkeypatch.setattr(
        "probes.host.tracepoints.has_tracepoint",
        lambda category, event: category != "compaction" and "_node_" not in event,
    )
    monkeypatch.setattr("probes.host.memory._has_field", lambda *_: False)
    probe = MemoryProbe(root_and_bpf)
    child = processes.python(HOARD)
    try:
        assert probe.missing == [
            "vmscan:mm_vmscan_node_reclaim_begin, vmscan:mm_vmscan_node_reclaim_end: reclaim of one NUMA node "
            "(vm.zone_reclaim_mode) is not told",
            "compaction:mm_compaction_begin, compaction:mm_compaction_end: compaction is not told",
        ]
        child.line()
        limited.add(child.pid)
        child.tell("take")
        assert child.process.wait(timeout=processes.DEADLINE_S) == -9
        (event,) = (e for e in probe.read({}).events if f"(pid {child.pid}) was killed" in e.detail)
        assert (event.job, event.rank) == ("", -1)
    finally:
        child.end()
        probe.close()


def test_a_kernel_without_any_of_them_is_named(root_and_bpf: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.host.tracepoints.has_tracepoint", lambda *_: False)
    with pytest.raises(BpfUnavailable, match="no tracepoints of memory management"):
        MemoryProbe(root_and_bpf)


def test_the_largest_processes_are_named_and_the_rest_is_one() -> None:
    spent = {("a", "direct"): 5, ("a", "memcg"): 1, ("b", "memcg"): 4, ("c", "direct"): 2, ("d", "direct"): 1}
    assert largest(spent, 2) == {
        ("a", "direct"): 5,
        ("a", "memcg"): 1,
        ("b", "memcg"): 4,
        ("other", "direct"): 3,
    }
