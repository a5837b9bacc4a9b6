"""The on_cpu probe on the running kernel: in what code real processes run, against clocks of their own."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from probes.bpf import BpfUnavailable, Kernel
from probes.discovery import Process, RankProcess
from probes.host.code import Codes
from probes.host.on_cpu import DRIVING, HZ, PERIOD_NS, OnCpuProbe
from probes.records import Metric
from tests.probes import processes
from tests.probes.processes import Child, until

pytestmark = pytest.mark.live

ENOUGH_S = 2.0
"""CPU time of a thread, from which on shares are known to some 5 %: 98 samples."""
PYTHON = """
def work():
    count = 0
    for number in range(20000): count += number * number
"""
MEMORY = """
import ctypes
memory = ctypes.create_string_buffer(1 << 20)
def work(): ctypes.memset(memory, 1, len(memory))
"""
KERNEL = """
import os
file, memory = os.open("/dev/zero", os.O_RDONLY), bytearray(1 << 20)
def work(): os.readv(file, [memory])
"""
STATS = """
import os
def work():
    for number in range(100): os.path.lexists(f"/none/{number}")
"""
COLLECTED = """
import gc, time
kept = [{number: [number]} for number in range(60000)]
began = took = 0.0
def timed(phase, info):
    global began, took
    if phase == "start": began = time.thread_time()
    else: took += time.thread_time() - began
gc.disable()
gc.callbacks.append(timed)
def work():
    start = time.thread_time()
    gc.collect()
    until = 2 * time.thread_time() - start
    count = 0
    while time.thread_time() < until: count += 1
"""
"""As long in the collector as elsewhere, by the collector's own word."""
LOOP = """
import sys, time
print(flush=True)
for line in sys.stdin:
    until = time.thread_time() + float(line)
    before = globals().get("took", 0.0)
    while time.thread_time() < until: work()
    print(globals().get("took", 0.0) - before, flush=True)
"""
"""Works for so much CPU time as it is told, and says how much of it the collector took."""


@pytest.fixture(scope="module")
def loaded(root_and_bpf: Kernel) -> Iterator[OnCpuProbe]:
    probe = OnCpuProbe(root_and_bpf)
    yield probe
    probe.close()


@pytest.fixture
def probe(loaded: OnCpuProbe) -> OnCpuProbe:
    loaded.read({})  # nobody is watched
    loaded.read({})
    return loaded


Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[Child] = []

    def begin(code: str, *arguments: str, program: str = sys.executable, **env: str) -> Child:
        children.append(processes.start([program, "-S", "-c", code, *arguments], env))
        children[-1].line()
        return children[-1]

    yield begin
    for child in children:
        child.end()


def as_rank(*pids: int) -> dict[int, RankProcess]:
    return {
        pid: RankProcess("job-1", 0, 1, 0, Process(pid, 1, 1, "python"), Path("/libtorch_cpu.so"), {})
        for pid in pids
    }


def watch(probe: OnCpuProbe, *pids: int) -> dict[int, RankProcess]:
    """From now on; their main threads drive."""
    ranks = as_rank(*pids)
    probe.follow({pid: pid for pid in pids})
    probe.read(ranks)
    return ranks


def shares(metrics: list[Metric], thread: str = DRIVING) -> dict[str, float]:
    """Parts of a thread's time: by library where that is told, else by kind."""
    of = {m.labels.get("library") or m.labels["in"]: m.value for m in metrics if ran(m, thread)}
    whole = sum(of.values())
    return {name: value / whole for name, value in of.items()}


def ran(metric: Metric, thread: str) -> bool:
    return metric.name == "on_cpu_ns" and metric.labels["thread"] == thread


def worked(probe: OnCpuProbe, child: Child, seconds: float = ENOUGH_S) -> tuple[list[Metric], float]:
    """What is told of a child that works for so much CPU time, and what it says itself."""
    ranks = watch(probe, child.pid)
    child.tell(str(seconds))
    said = float(child.line())
    return list(probe.read(ranks).ranks[child.pid]), said


def times(pid: int) -> tuple[float, float]:
    """Seconds in the program and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


def told_apart() -> bool:
    """Whether this interpreter has symbols."""
    codes = Codes()
    codes.begin(os.getpid(), 1.0)
    address = ctypes.cast(ctypes.pythonapi.PyObject_Str, ctypes.c_void_p).value
    assert address is not None
    return codes.kind_at(os.getpid(), address, 1.0).kind == "python"


def test_the_collector_takes_what_its_own_callbacks_say(probe: OnCpuProbe, start: Start) -> None:
    child = start(COLLECTED + LOOP)
    metrics, took = worked(probe, child, 2 * ENOUGH_S)
    assert took == pytest.approx(ENOUGH_S, rel=0.2), "about half"
    if not told_apart():
        assert shares(metrics)["interpreter"] > 0.8
        return
    # 196 samples: a deviation is 0.036.
    assert shares(metrics)["gc"] == pytest.approx(took / (2 * ENOUGH_S), abs=0.15)


def test_python_is_python(probe: OnCpuProbe, start: Start) -> None:
    metrics, _ = worked(probe, start(PYTHON + LOOP))
    assert shares(metrics)["python" if told_apart() else "interpreter"] > 0.8
    assert shares(metrics).get("gc", 0.0) < 0.05


def test_native_code_goes_by_its_library(probe: OnCpuProbe, start: Start) -> None:
    metrics, _ = worked(probe, start(MEMORY + LOOP))
    assert max((share, name) for name, share in shares(metrics).items())[1].startswith(
        ("libc.", "libc-", "ld-musl")
    )


def test_what_the_kernel_does_is_the_kernel(probe: OnCpuProbe, start: Start) -> None:
    metrics, _ = worked(probe, start(KERNEL + LOOP))
    assert shares(metrics)["kernel"] > 0.8


def test_system_calls_are_as_much_kernel_as_the_kernel_says(probe: OnCpuProbe, start: Start) -> None:
    child = start(STATS + LOOP)
    user, system = times(child.pid)
    metrics, _ = worked(probe, child, 2 * ENOUGH_S)
    user, system = times(child.pid)[0] - user, times(child.pid)[1] - system
    assert shares(metrics)["kernel"] == pytest.approx(system / (user + system), abs=0.2)


def test_samples_stand_for_the_time_that_a_thread_ran(probe: OnCpuProbe, start: Start) -> None:
    metrics, _ = worked(probe, start(PYTHON + LOOP), 2 * ENOUGH_S)
    whole = sum(m.value for m in metrics if ran(m, DRIVING))
    samples = sum(m.value for m in metrics if m.name == "on_cpu_samples")
    assert whole == samples * PERIOD_NS
    # What a virtual machine's host takes, the clock does not see.
    expected = 2 * ENOUGH_S * HZ
    assert 0.5 * expected < samples < expected + 5 * math.sqrt(expected)


def test_threads_are_told_apart_and_go_by_their_names(probe: OnCpuProbe, start: Start) -> None:
    child = start(
        MEMORY
        + """
import threading
def spin():
    open(f"/proc/self/task/{threading.get_native_id()}/comm", "w").write("spinner\\n<x>")
    print(threading.get_native_id(), flush=True)
    count = 0
    while True: count += 1
print(flush=True)
threading.Thread(target=spin, daemon=True).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
        + LOOP
    )
    name = f"spinner\n<x> ({child.line()})"
    child.line()
    ranks, before = watch(probe, child.pid), sum(times(child.pid))
    child.tell("0.02")  # it waits for Python's lock most of the time
    child.line()
    until(lambda: sum(times(child.pid)) - before > 1.0, "the other one spins")
    metrics = list(probe.read(ranks).ranks[child.pid])
    kinds = {m.labels["thread"]: m.labels["in"] for m in metrics if m.labels["thread"] != DRIVING}
    assert set(kinds) == {name}, "the one that waits has no sample"
    assert shares(metrics, name).keys() <= {"python", "interpreter", "kernel", "native", "gc"}
    assert (
        sum(share for kind, share in shares(metrics, name).items() if kind in ("python", "interpreter")) > 0.6
    )


def test_another_program_in_the_same_process_is_another(probe: OnCpuProbe, start: Start) -> None:
    other = MEMORY + LOOP
    child = start(
        PYTHON
        + LOOP.replace("for line in sys.stdin:", "for line in [sys.stdin.readline()]:")
        + f"import os\nsys.stdin.readline()\nos.execv(sys.executable, [sys.executable, '-S', '-c', {other!r}])"
    )
    first, _ = worked(probe, child, 0.5)
    child.tell("go")
    child.line()
    second, _ = worked(probe, child, 1.0)
    assert sum(shares(first).get(kind, 0.0) for kind in ("python", "interpreter")) > 0.6
    assert sum(share for name, share in shares(second).items() if name.startswith(("libc", "ld-"))) > 0.6


def test_a_process_that_ends_is_told_to_its_end(probe: OnCpuProbe, start: Start) -> None:
    child = start(PYTHON + LOOP)
    worked(probe, child, 0.2)
    ranks = as_rank(child.pid)
    child.tell("60")
    until(lambda: sum(times(child.pid)) > 1.0, "it works")
    child.end()
    metrics = list(probe.read(ranks).ranks[child.pid])
    assert shares(metrics).get("unknown", 0.0) < 0.5, "what was known of it holds"
    assert probe.read({}).ranks == {}


def test_one_that_ended_before_it_was_looked_at_is_unknown(probe: OnCpuProbe, start: Start) -> None:
    child = start(PYTHON + LOOP)
    ranks = watch(probe, child.pid)
    child.tell("60")
    until(lambda: sum(times(child.pid)) > 1.0, "it works")
    child.end()
    assert shares(list(probe.read(ranks).ranks[child.pid])).keys() <= {"unknown", "kernel"}


def test_who_is_no_rank_is_not_sampled(probe: OnCpuProbe, start: Start) -> None:
    child = start(PYTHON + LOOP)
    before = probe.rows_read
    child.tell("0.5")
    child.line()
    assert probe.read({}).ranks == {}
    assert probe.rows_read == before
    watch(probe, child.pid)
    child.tell("0.3")
    child.line()
    assert probe.read({}).ranks == {}, "it is none any more"
    assert probe.rows_read > before


def test_a_stripped_interpreter_is_told_as_such(
    probe: OnCpuProbe, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exported functions tell next to nothing: none is guessed from the nearest one."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if " r-xp " in line and "/" in line}
    library = next((path for path in paths if "/libpython" in path), "")
    whole = Path(library or os.path.realpath(sys.executable))
    copy = tmp_path / whole.name
    subprocess.run(["strip", "-o", copy, whole], check=True)
    collects = "import gc\nkept = [[] for _ in range(200_000)]\nwork = gc.collect\n" + LOOP
    if library:
        child = start(collects, LD_LIBRARY_PATH=str(tmp_path))
    else:
        child = start(collects, program=str(copy), PYTHONHOME=sys.base_prefix)
    metrics, _ = worked(probe, child)
    assert shares(metrics)["interpreter"] > 0.8
    assert not shares(metrics).keys() & {"gc", "python"}
    words = (
        f"the collector cannot be told apart from Python in {str(copy)[:200]}: it has no symbols (.symtab)"
    )
    assert words in probe.missing
    monkeypatch.setattr(probe._codes, "blind", dict.fromkeys("abcdef", "why"))
    assert len(probe.missing) == 5
    assert probe.missing[-1] == "nor in 2 other files"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the code is x86-64's")
def test_code_that_no_file_holds_is_told_as_such(probe: OnCpuProbe, start: Start) -> None:
    child = start(
        """
import ctypes, mmap
code = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)  # readable, writable, executable
code.write(bytes.fromhex("48ffcf75fbc3"))  # dec rdi; jnz -5; ret
loop = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
def work(): loop(1_000_000)
"""
        + LOOP
    )
    metrics, _ = worked(probe, child, 0.9)
    assert shares(metrics)["[anonymous]"] > 0.8


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the code is x86-64's")
def test_code_that_was_unmapped_before_it_was_looked_at_is_unknown(probe: OnCpuProbe, start: Start) -> None:
    child = start(
        """
import ctypes, mmap
def work():
    code = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
    code.write(bytes.fromhex("48ffcf75fbc3"))  # dec rdi; jnz -5; ret
    holder = ctypes.c_char.from_buffer(code)
    ctypes.CFUNCTYPE(None, ctypes.c_uint64)(ctypes.addressof(holder))(500_000_000)
    del holder
    code.close()
"""
        + LOOP
    )
    metrics, _ = worked(probe, child, 0.3)
    assert shares(metrics).get("unknown", 0.0) > 0.7


def test_there_is_one_event_per_cpu_and_none_stays(root_and_bpf: Kernel) -> None:
    def events() -> int:
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum("perf_event" in link for link in links)

    before = events()
    probe = OnCpuProbe(root_and_bpf)
    cpus = os.sysconf("SC_NPROCESSORS_ONLN")
    assert events() - before == cpus
    assert probe.ticks_per_s == HZ * cpus
    probe.close()
    assert events() == before


def test_cpus_that_cannot_be_sampled_are_said(root_and_bpf: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    library = root_and_bpf.bcc.libbcc.lib
    attach = library.bpf_attach_perf_event_raw
    refused: list[int] = [0]

    class Refuses:
        def __getattr__(self, name: str) -> object:
            return getattr(library, name)

        def bpf_attach_perf_event_raw(self, *arguments: int) -> int:
            return -1 if arguments[3] in refused else int(attach(*arguments))

    monkeypatch.setattr(root_and_bpf.bcc.libbcc, "lib", Refuses())
    probe = OnCpuProbe(root_and_bpf)
    try:
        assert len(probe.missing) == 1
        assert probe.missing[0].startswith(
            f"1 of {os.sysconf('SC_NPROCESSORS_ONLN')} CPUs cannot be sampled ("
        )
    finally:
        probe.close()
    refused.extend(range(os.cpu_count() or 1))
    with pytest.raises(BpfUnavailable, match="the CPU clock cannot be sampled"):
        OnCpuProbe(root_and_bpf)


def test_samples_that_find_no_room_are_counted(probe: OnCpuProbe, start: Start) -> None:
    child = start(PYTHON + LOOP)
    ranks = watch(probe, child.pid)
    table = probe._bpf[b"samples"]
    keys, values = (table.Key * table.max_entries)(), (table.Leaf * table.max_entries)()
    for number, key in enumerate(keys):
        key.ip = number + 2
    table.items_update_batch(keys, values)
    child.tell("1")
    child.line()
    assert probe.lost > 0
    probe.read(ranks)  # which makes room
    lost = probe.lost
    child.tell("0.5")
    child.line()
    assert probe.read(ranks).ranks[child.pid]
    assert probe.lost == lost


def test_reading_is_cheap(probe: OnCpuProbe, start: Start) -> None:
    """Mappings and symbols are read once, not with each reading."""
    child = start(PYTHON + LOOP)
    worked(probe, child, 0.5)
    before = time.process_time()
    worked(probe, child, 0.5)
    assert time.process_time() - before < 0.05
