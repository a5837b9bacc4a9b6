"""The process probe: real processes against what they did, and a made-up /proc for what cannot be had here."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from probes.discovery import Process, RankProcess
from probes.host.process import NUMA_S, ProcessProbe
from probes.records import Metric
from tests.probes.conftest import Start
from tests.probes.fake_proc import Clock
from tests.probes.processes import until

PAGE = resource.getpagesize()


def a_rank(pid: int, start: int = 100) -> RankProcess:
    return RankProcess("job-1", 0, 4, 0, Process(pid, 1, start, "python"), Path("/lib/libtorch_cpu.so"), {})


def read(probe: ProcessProbe, *pids: int) -> dict[int, dict[str, Metric]]:
    reading = probe.read({pid: a_rank(pid) for pid in pids})
    return {
        pid: {metric.name: metric for metric in metrics} for pid, metrics in reading.ranks.items() if metrics
    }


# --- a made-up machine


class Machine:
    def __init__(self, root: Path, *, nodes: int = 1) -> None:
        self.root, self.clock = root, Clock()
        self.put("sys/devices/system/cpu/online", "0-7\n")
        for node in range(nodes):
            width = 8 // nodes
            cpus = f"{node * width}-{node * width + width - 1}\n"
            self.put(f"sys/devices/system/node/node{node}/cpulist", cpus)
        self.put("proc/self/sched", "se.nr_migrations   :   9\n")
        self.put("proc/self/numa_maps", "")

    def put(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def thread(
        self,
        pid: int,
        tid: int = 0,
        *,
        state: str = "S",
        faults: tuple[int, int] = (0, 0),
        whole: tuple[int, int] = (0, 0),
        switches: tuple[int, int] = (0, 0),
        migrations: int = 0,
        cpu: int = 0,
        cpus: str = "0-7",
        tracer: int = 0,
    ) -> None:
        folder = f"proc/{pid}/task/{tid or pid}"
        self.put(f"{folder}/stat", stat(pid, state, faults, cpu))
        self.put(f"proc/{pid}/stat", stat(pid, state, whole, cpu))
        self.put(f"{folder}/sched", f"se.nr_migrations      :      {migrations}\nnuma_pages_migrated : 5\n")
        self.put(
            f"{folder}/status",
            f"Name:\ta:b (x)\nState:\t{state} (odd)\nTracerPid:\t{tracer}\nVmRSS:\t    2048 kB\n"
            f"VmSwap:\t       4 kB\nCpus_allowed_list:\t{cpus}\nvoluntary_ctxt_switches:\t{switches[0]}\n"
            f"nonvoluntary_ctxt_switches:\t{switches[1]}\n",
        )

    def probe(self) -> ProcessProbe:
        return ProcessProbe(self.root / "proc", self.root / "sys", self.clock)


def stat(pid: int, state: str, faults: tuple[int, int], cpu: int) -> str:
    """52 fields, of which 10, 12 and 39 count here (proc_pid_stat(5)); the name holds what would break a split."""
    fields = [str(number) for number in range(1, 53)]
    fields[0], fields[1], fields[2] = str(pid), "(a) b (", state
    fields[9], fields[11], fields[38] = str(faults[0]), str(faults[1]), str(cpu)
    fields[1] += ")"
    return " ".join(fields) + "\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_what_was_counted_since_the_last_look_is_told(machine: Machine) -> None:
    machine.thread(42, faults=(10, 1), whole=(100, 5), switches=(7, 3), migrations=2, cpu=3)
    probe = machine.probe()
    first = read(probe, 42)[42]
    assert {name: metric.value for name, metric in first.items()} == {
        "last_cpu": 3,
        "resident_bytes": 2 << 20,
        "swapped_bytes": 4096,
    }
    machine.thread(42, faults=(12, 4), whole=(150, 9), switches=(107, 33), migrations=5)
    after = {name: metric.value for name, metric in read(probe, 42)[42].items()}
    assert after == {
        "minor_faults": 50,
        "major_faults": 4,
        "driving_minor_faults": 2,
        "driving_major_faults": 3,
        "voluntary_switches": 100,
        "involuntary_switches": 30,
        "migrations": 3,
        "last_cpu": 0,
        "resident_bytes": 2 << 20,
        "swapped_bytes": 4096,
    }


def test_the_driving_thread_is_the_one_that_is_named(machine: Machine) -> None:
    machine.thread(42, switches=(1000, 0))
    machine.thread(42, 77, switches=(5, 0), state="D", cpu=6)
    probe = machine.probe()
    probe.follow({42: 77})
    read(probe, 42)
    machine.thread(42, switches=(9000, 0))
    machine.thread(42, 77, switches=(15, 0), state="D", cpu=6)
    after = read(probe, 42)[42]
    assert after["voluntary_switches"].value == 10
    assert after["last_cpu"].value == 6
    assert after["thread_state"].labels == {"state": "D"}
    probe.follow({})
    assert "voluntary_switches" not in read(probe, 42)[42], "another thread's counter is no difference"


def test_ranks_pinned_to_the_same_cpus_are_counted(machine: Machine) -> None:
    machine.thread(1, cpus="2-3")
    machine.thread(2, cpus="2-3")
    machine.thread(3, cpus="4")
    machine.thread(4)
    found = read(machine.probe(), 1, 2, 3, 4)
    assert found[1]["cpus_allowed"].value == 2
    assert found[1]["ranks_on_these_cpus"].value == 2
    assert found[1]["ranks_on_these_cpus"].labels == {"cpus": "2-3"}
    assert found[3]["cpus_allowed"].value == 1
    assert "ranks_on_these_cpus" not in found[3]
    assert "cpus_allowed" not in found[4], "it may run anywhere"


def test_the_share_of_memory_on_other_nodes_is_looked_at_rarely(tmp_path: Path) -> None:
    machine = Machine(tmp_path, nodes=2)
    machine.thread(42, cpu=5)
    # 3 pages of 4 kB on node 0 and 1 on node 1; one of 2 MB on node 1; one mapping without pages.
    numa_maps = (
        "7f00 default file=/x mapped=4 N0=3 N1=1 kernelpagesize_kB=4\n"
        "7f10 default anon=1 dirty=1 N1=1 kernelpagesize_kB=2048\n7f20 default\n"
    )
    machine.put("proc/42/numa_maps", numa_maps)
    probe = machine.probe()
    told = read(probe, 42)[42]["memory_on_other_nodes_ratio"]
    assert told.labels == {"node": "1"}
    assert told.value == pytest.approx(12 / (12 + 4 + 2048))
    machine.clock.now += NUMA_S - 1
    assert "memory_on_other_nodes_ratio" not in read(probe, 42)[42]
    machine.clock.now += 1
    assert "memory_on_other_nodes_ratio" in read(probe, 42)[42]


def test_with_one_node_pages_are_never_looked_at(machine: Machine) -> None:
    machine.thread(42)
    machine.put("proc/42/numa_maps", "7f10 default anon=1 N0=1 kernelpagesize_kB=4\n")
    assert "memory_on_other_nodes_ratio" not in read(machine.probe(), 42)[42]


def test_what_the_kernel_does_not_tell_is_said(tmp_path: Path) -> None:
    machine = Machine(tmp_path, nodes=2)
    (tmp_path / "proc/self/sched").unlink()
    (tmp_path / "proc/self/numa_maps").unlink()
    missing = machine.probe().missing
    assert [words.partition(":")[0] for words in missing] == ["/proc/PID/sched", "/proc/PID/numa_maps"]
    machine.thread(42)
    assert "last_cpu" in read(machine.probe(), 42)[42], "the rest works"


def test_a_process_that_has_ended_is_left_out_and_a_new_one_of_its_pid_begins_anew(machine: Machine) -> None:
    machine.thread(42, whole=(100, 5))
    probe = machine.probe()
    probe.read({42: a_rank(42), 43: a_rank(43)})
    machine.thread(42, whole=(9000, 800))
    names = {metric.name for metric in probe.read({42: a_rank(42, start=999)}).ranks[42]}
    assert not names & {"minor_faults", "major_faults"}
    assert 43 not in probe.read({43: a_rank(43)}).ranks


# --- real processes

TOUCHES = """
import mmap, os, sys
area = mmap.mmap(-1, {pages} * {page})
area.madvise(mmap.MADV_NOHUGEPAGE)
print(os.getpid(), flush=True)
sys.stdin.readline()
for index in range({pages}):
    area[index * {page}] = 1
print("touched", flush=True)
sys.stdin.readline()
"""


def test_pages_that_a_process_touches_are_its_minor_faults(start: Start) -> None:
    child = start(TOUCHES.format(pages=3000, page=PAGE))
    child.line()
    probe = ProcessProbe()
    resident = read(probe, child.pid)[child.pid]["resident_bytes"].value
    child.tell("touch")
    assert child.line() == "touched"
    after = read(probe, child.pid)[child.pid]
    assert 3000 <= after["minor_faults"].value < 3300
    assert 3000 <= after["driving_minor_faults"].value < 3300
    assert after["resident_bytes"].value - resident == pytest.approx(3000 * PAGE, rel=0.2)


def test_sleeps_are_voluntary_switches(start: Start) -> None:
    code = (
        "import sys, time\nprint(1, flush=True)\nsys.stdin.readline()\n"
        "for _ in range(50): time.sleep(0.001)\nprint(2, flush=True)\nsys.stdin.readline()"
    )
    child = start(code)
    child.line()
    probe = ProcessProbe()
    read(probe, child.pid)
    child.tell("sleep")
    assert child.line() == "2"
    assert 50 <= read(probe, child.pid)[child.pid]["voluntary_switches"].value <= 60


def test_a_move_between_cpus_is_a_migration_and_pins_are_told(start: Start) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("this machine has one CPU only")
    child = start("print(1, flush=True)\nwhile True: pass")
    child.line()
    os.sched_setaffinity(child.pid, {cpus[0]})
    probe = ProcessProbe()
    told = read(probe, child.pid)[child.pid]
    assert told["cpus_allowed"].value == 1
    assert told["cpus_allowed"].labels == {"cpus": str(cpus[0])}
    until(lambda: read(probe, child.pid)[child.pid]["last_cpu"].value == cpus[0], "it runs on the first")
    os.sched_setaffinity(child.pid, {cpus[1]})
    moved = {"migrations": 0.0}

    def look() -> bool:
        seen = read(probe, child.pid)[child.pid]
        moved["migrations"] += seen["migrations"].value if "migrations" in seen else 0
        return seen["last_cpu"].value == cpus[1]

    until(look, "it runs on the second")
    assert moved["migrations"] == 1


def test_a_stopped_process_is_told_as_such(start: Start) -> None:
    child = start("import sys; print(1, flush=True); sys.stdin.readline()")
    child.line()
    probe = ProcessProbe()
    assert "thread_state" not in read(probe, child.pid)[child.pid]
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert read(probe, child.pid)[child.pid]["thread_state"].labels == {"state": "T"}
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: "thread_state" not in read(probe, child.pid)[child.pid], "it goes on")


def test_a_zombie_is_told_as_such(start: Start) -> None:
    child = start("")
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert read(ProcessProbe(), child.pid)[child.pid]["thread_state"].labels == {"state": "Z"}


TRACES = """
import ctypes, os, sys
pid = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE = 0x4206  # include/uapi/linux/ptrace.h
if libc.ptrace(PTRACE_SEIZE, pid, None, None) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
print("traces", flush=True)
sys.stdin.readline()
"""


def test_who_traces_a_process_is_named(start: Start) -> None:
    child = start("import sys; print(1, flush=True); sys.stdin.readline()")
    child.line()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", TRACES, str(child.pid)], stdin=pipe, stdout=pipe) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == b"traces\n"
        told = read(ProcessProbe(), child.pid)[child.pid]["traced"].labels
        tracer.kill()
    assert told["tracer_pid"] == str(tracer.pid)
    assert told["tracer"].startswith("python")
