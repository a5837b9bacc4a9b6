"""The interrupts probe on the running kernel, against the kernel's own counters of interrupts and softirqs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from probes.bpf import BpfUnavailable, Kernel
from probes.discovery import Process, RankProcess
from probes.host.interrupts import LISTED, InterruptsProbe, largest_by_cpu
from probes.host.reading import Reading
from probes.host.thread_time import ThreadTimeProbe
from probes.records import Metric, Role
from tests.probes import processes
from tests.probes.flood import Link, link
from tests.probes.processes import Child, until

pytestmark = pytest.mark.live

SPIN = "import os\nos.nice(-5)\nprint(flush=True)\nwhile True: pass"
CPUS = os.cpu_count() or 1


@pytest.fixture
def probe(root_and_bpf: Kernel) -> Iterator[InterruptsProbe]:
    probe = InterruptsProbe(root_and_bpf)
    yield probe
    probe.close()


@pytest.fixture(scope="module")
def quiet() -> Iterator[Link]:
    with link() as made:
        yield made


@pytest.fixture
def flooded(quiet: Link) -> Iterator[Link]:
    with quiet.flooded():
        yield quiet


@pytest.fixture(scope="module")
def threads(root_and_bpf: Kernel) -> Iterator[ThreadTimeProbe]:
    probe = ThreadTimeProbe(root_and_bpf)
    yield probe
    probe.close()


@pytest.fixture
def spinning() -> Iterator[Child]:
    child = processes.python(SPIN)
    child.line()
    yield child
    child.end()


def as_rank(pid: int) -> dict[int, RankProcess]:
    process = Process(pid=pid, parent=1, start_ticks=1, name="python")
    return {pid: RankProcess("job-1", 0, 1, 0, process, Path("/libtorch_cpu.so"), {})}


def total(metrics: list[Metric], name: str, **labels: str) -> float:
    """Sum of a metric's values over all labels that are not given."""
    return sum(
        metric.value for metric in metrics if metric.name == name and labels.items() <= metric.labels.items()
    )


def softirq_counts() -> Counter[str]:
    """Softirqs by vector since boot."""
    lines = Path("/proc/softirqs").read_text().splitlines()[1:]
    return Counter({line.split(":")[0].strip(): sum(map(int, line.split()[1:])) for line in lines})


def hardirq_counts() -> Counter[str]:
    """Interrupts of devices by number since boot."""
    lines = Path("/proc/interrupts").read_text().splitlines()[1:]
    fields = {line.split(":")[0].strip(): line.split()[1:] for line in lines}
    return Counter(
        {
            name: sum(int(count) for count in counts[:CPUS] if count.isdigit())
            for name, counts in fields.items()
            if name.isdigit()
        }
    )


def gather(probe: InterruptsProbe, ranks: Mapping[int, RankProcess], into: list[Reading]) -> list[Reading]:
    into.append(probe.read(ranks))
    return into


def node(readings: list[Reading]) -> list[Metric]:
    return [metric for reading in readings for metric in reading.node]


def of_rank(readings: list[Reading], pid: int) -> list[Metric]:
    return [metric for reading in readings for metric in reading.ranks.get(pid, ())]


def test_softirqs_are_as_many_as_the_kernel_counts(probe: InterruptsProbe) -> None:
    outer = softirq_counts()
    probe.read({})
    inner = softirq_counts()
    until(lambda: (softirq_counts() - inner).total() > 100, "softirqs have run")
    inner = softirq_counts() - inner
    counted = node([probe.read({})])
    outer = softirq_counts() - outer
    for vector, most in outer.items():
        # One may be in progress on each CPU: the kernel counts it when it begins, the probe when it ends.
        assert inner[vector] - CPUS <= total(counted, "softirqs", vector=vector) <= most + CPUS, vector


def test_interrupts_are_as_many_as_the_kernel_counts_and_go_by_the_names_of_their_devices(
    probe: InterruptsProbe, tmp_path: Path
) -> None:
    written = os.open(tmp_path / "written", os.O_CREAT | os.O_WRONLY)

    def interrupts() -> bool:
        os.pwrite(written, b"x", 0)
        os.fsync(written)  # the disk interrupts when it is done; an idle machine has few interrupts else
        return (hardirq_counts() - inner).total() > 20

    outer = hardirq_counts()
    probe.read({})
    inner = hardirq_counts()
    until(interrupts, "interrupts have come")
    os.close(written)
    inner = hardirq_counts() - inner
    counted = node([probe.read({})])
    outer = hardirq_counts() - outer
    assert outer
    names = Path("/proc/interrupts").read_text()
    for irq, most in outer.items():
        assert inner[irq] - CPUS <= total(counted, "hardirqs", irq=irq) <= most + CPUS, irq
    for metric in counted:
        if metric.labels.get("irq", "").isdigit():
            line = re.search(rf"^ *{metric.labels['irq']}: .*$", names, re.MULTILINE)
            assert line is not None
            assert line[0].endswith(" " + metric.labels["device"])


def test_receiving_is_told_by_cpu_device_and_rank(
    probe: InterruptsProbe, flooded: Link, spinning: Child
) -> None:
    os.sched_setaffinity(spinning.pid, {flooded.cpu})
    ranks = as_rank(spinning.pid)
    cpu = str(flooded.cpu)
    readings: list[Reading] = []
    came: list[int] = []

    def named() -> bool:
        came.append(flooded.received())
        shares = [m for m in gather(probe, ranks, readings)[-1].node if m.name == "net_rx_share"]
        taken = total(of_rank(readings, spinning.pid), "softirq_ns", vector="NET_RX")
        return taken > 5e6 and any(m.labels == {"cpu": cpu, "device": flooded.device} for m in shares)

    until(named, "the flood's device is named on the rank's CPU, and the rank has lost time to it")
    counted = total(node(readings), "net_rx_packets", device=flooded.device)
    assert 0 < counted <= flooded.received() - came[0]
    assert total(node(readings), "net_rx_packets", device=flooded.device, cpu=cpu) >= 0.9 * counted
    lost = total(of_rank(readings, spinning.pid), "softirq_ns", vector="NET_RX")
    gather(probe, ranks, readings)  # a rank's rows are read after those of the node: packets came between
    assert lost <= total(node(readings), "softirq_ns", vector="NET_RX", cpu=cpu)
    lost = total(of_rank(readings, spinning.pid), "softirq_ns", vector="NET_RX")
    on_cpu = total(of_rank(readings, spinning.pid), "softirq_cpu_ns", vector="NET_RX", cpu=cpu)
    assert 0.5 * lost <= on_cpu <= lost


def test_packets_are_as_many_as_the_device_received(probe: InterruptsProbe, flooded: Link) -> None:
    probe.read({})
    came: list[int] = []

    def begun() -> bool:
        came[:] = [flooded.received()]
        probe.read({})
        return b"net:netif_receive_skb" in probe._bpf.tracepoint_fds

    until(begun, "packets are counted")
    inner = flooded.received()
    until(lambda: flooded.received() - inner > 1000, "packets have come")
    inner = flooded.received() - inner
    metrics = node([probe.read({})])
    queued = int(Path("/proc/sys/net/core/netdev_max_backlog").read_text())  # received, and not yet handled
    counted = total(metrics, "net_rx_packets", device=flooded.device)
    assert inner - queued <= counted <= flooded.received() - came[0] + queued
    assert counted > 0.5 * inner
    assert b"net:netif_receive_skb" not in probe._bpf.tracepoint_fds, "a packet costs nothing from now on"


@pytest.mark.parametrize("steered", [False, True], ids=["on-the-senders-cpu", "steered"])
def test_time_in_softirqs_is_what_the_kernels_ticks_see(
    probe: InterruptsProbe, quiet: Link, steered: bool
) -> None:
    """The kernel looks some 250 times per second what a CPU does; the probe has it to the nanosecond. Steered
    packets come with an interrupt from the other CPU: what that takes beside its handler is a softirq's to the
    tick."""
    readings: list[Reading] = []
    cpu = str(quiet.cpu if steered else quiet.sender_cpu)

    def ticks_ns() -> int:
        (line,) = (x for x in Path("/proc/stat").read_text().splitlines() if x.startswith(f"cpu{cpu} "))
        return int(line.split()[7]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")

    with quiet.flooded(steered=steered):
        probe.read({})
        before = ticks_ns()
        until(
            lambda: total(node(gather(probe, {}, readings)), "softirq_ns", cpu=cpu) > 300e6,
            "softirqs took 0.3 s of the CPU",
        )
        seen = ticks_ns() - before
    measured = total(node(readings), "softirq_ns", cpu=cpu)
    assert 0.65 * seen * (0.4 if steered else 1) - 30e6 <= measured <= 1.35 * seen + 30e6


def test_the_time_of_the_cpus_own_thread_for_softirqs_is_told_apart(
    probe: InterruptsProbe, flooded: Link, spinning: Child
) -> None:
    os.sched_setaffinity(spinning.pid, {flooded.cpu})
    threads = [p for p in Path("/proc").glob("[0-9]*") if _comm(p).startswith("ksoftirqd/")]

    def ran_ns() -> int:
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)

    assert len(threads) == CPUS
    readings: list[Reading] = []
    outer = ran_ns()
    probe.read({})
    inner = ran_ns()

    def measured() -> float:
        return total(node(gather(probe, {}, readings)), "softirq_ns", **{"in": "ksoftirqd"})

    until(lambda: measured() > 0 and ran_ns() - inner > 5e6, "ksoftirqd has run")
    inner = ran_ns() - inner
    told = measured()
    # It does little else; the kernel adds up its runs at switches and ticks.
    assert 0.4 * (inner - 5e6) <= told <= 1.1 * (ran_ns() - outer) + 10e6
    assert total(node(readings), "softirq_ns", **{"in": "interrupt"}) > 0


def test_what_a_rank_lost_is_what_the_thread_time_probe_calls_interrupted(
    threads: ThreadTimeProbe, probe: InterruptsProbe, flooded: Link, spinning: Child
) -> None:
    """Another program, which knows nothing of vectors and numbers; it sees the local timer and no calls."""
    os.sched_setaffinity(spinning.pid, {flooded.cpu})
    threads.watch({spinning.pid: Role.DRIVING})
    until(lambda: spinning.pid in threads.heartbeat(), "the process is watched")
    ranks = as_rank(spinning.pid)
    probe.read(ranks)
    readings: list[Reading] = []
    first = threads.heartbeat()[spinning.pid][0]
    until(
        lambda: total(of_rank(gather(probe, ranks, readings), spinning.pid), "softirq_ns") > 20e6,
        "the rank lost 20 ms to softirqs",
    )
    last = threads.heartbeat()[spinning.pid][0]
    lost = total(of_rank(readings, spinning.pid), "softirq_ns")
    lost += total(of_rank(readings, spinning.pid), "hardirq_ns")
    lost -= total(of_rank(readings, spinning.pid), "hardirq_ns", irq="CAL")
    interrupted = last.interrupted_ns - first.interrupted_ns
    # One program's own run time stands in the other's figure: some 0.2 µs per interrupt, of some 6.
    assert lost == pytest.approx(interrupted, rel=0.3, abs=6e6)


def test_a_rank_that_is_none_any_more_is_forgotten(probe: InterruptsProbe, spinning: Child) -> None:
    ranks = as_rank(spinning.pid)
    readings: list[Reading] = []
    until(lambda: bool(of_rank(gather(probe, ranks, readings), spinning.pid)), "the rank was interrupted")
    probe.read({})
    assert list(probe._bpf[b"ranks"].keys()) == []
    assert probe.read(ranks).ranks == {}, "counted anew from here"


def test_a_kernel_that_does_not_tell_devices_has_the_rest(
    root_and_bpf: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probes.host.interrupts.has_tracepoint", lambda category, _: category == "irq")
    probe = InterruptsProbe(root_and_bpf)
    try:
        assert [words.partition(": ")[0] for words in probe.missing] == [
            "irq_vectors:call_function_single_entry",
            "net:netif_receive_skb",
        ]
        readings: list[Reading] = []
        until(lambda: total(node(gather(probe, {}, readings)), "softirqs") > 20, "softirqs have run")
        assert total(node(readings), "hardirqs", irq="CAL") == 0
    finally:
        probe.close()


def test_a_kernel_without_the_tracepoints_is_named(
    root_and_bpf: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probes.host.tracepoints.has_tracepoint", lambda _, event: "softirq" not in event)
    with pytest.raises(BpfUnavailable, match=r"irq:softirq_entry, irq:softirq_exit"):
        InterruptsProbe(root_and_bpf)


def test_the_largest_rows_keep_their_cpu_and_no_time_is_left_out() -> None:
    """Of 40 CPUs, number n lost n/10 ms: those below 0.1 ms and beyond the list are one row."""
    rows = [(cpu, {"vector": "TIMER"}, cpu * 100_000) for cpu in range(40)] + [(0, {"vector": "RCU"}, 99_999)]
    metrics = list(largest_by_cpu("softirq_ns", rows))
    told = {m.labels["cpu"]: m.value for m in metrics if m.labels["vector"] == "TIMER"}
    assert set(told) == {str(cpu) for cpu in range(40 - LISTED, 40)} | {"other"}
    assert told["39"] == 3_900_000
    assert told["other"] == 100_000 * sum(range(40 - LISTED))
    (rcu,) = (m for m in metrics if m.labels["vector"] == "RCU")
    assert (rcu.labels["cpu"], rcu.value) == ("other", 99_999)


def _comm(process: Path) -> str:
    try:
        return (process / "comm").read_text()
    except OSError:  # ended
        return ""
