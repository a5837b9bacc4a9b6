"""The machine probe: recorded files of other machines below a made-up /proc and /sys, and this machine's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from probes.discovery import Process, RankProcess
from probes.host import network_counters
from probes.host.machine import LISTED, ROUND, MachineProbe
from probes.host.network_counters import PROTOCOLS
from probes.records import Metric
from tests.probes.processes import until

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def a_rank(pid: int) -> RankProcess:
    return RankProcess("job-1", 0, 4, 0, Process(pid, 1, 100, "python"), Path("/lib/libtorch_cpu.so"), {})


def named(metrics: list[Metric] | tuple[Metric, ...]) -> dict[tuple[str, ...], float]:
    """(name, label values …) → value."""
    found = {(metric.name, *metric.labels.values()): metric.value for metric in metrics}
    assert len(found) == len(metrics), "two metrics of one name and the same labels"
    return found


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.put("proc/1/ns/net", "")
        self.put("proc/1/net/snmp", "")

    def put(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def probe(self) -> MachineProbe:
        return MachineProbe(self.root / "proc", self.root / "sys")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def node(probe: MachineProbe) -> dict[tuple[str, ...], float]:
    return named(list(probe.read({}).node))


def test_pressure_is_told_by_resource_as_time(machine: Machine) -> None:
    # As Linux 5.15 writes them: no "full" for the CPU yet, no file for interrupts.
    machine.put("proc/pressure/cpu", "some avg10=9.00 avg60=2.53 avg300=0.60 total=1000\n")
    memory = (
        "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"
    )
    machine.put("proc/pressure/memory", memory.format(50, 40))
    probe = machine.probe()
    assert node(probe) == {}
    machine.put("proc/pressure/cpu", "some avg10=9.00 avg60=2.53 avg300=0.60 total=251000\n")
    machine.put("proc/pressure/memory", memory.format(1050, 40))
    assert node(probe) == {
        ("pressure_stalled_ns", "cpu", "some"): 250_000_000,
        ("pressure_stalled_ns", "memory", "some"): 1_000_000,
    }


def cpus(*rows: tuple[int, int, int, int]) -> str:
    """(user, idle, iowait, steal) of each CPU, in ticks."""
    lines = [
        f"cpu{cpu} {user} 0 0 {idle} {iowait} 0 0 {steal} {user} 0"
        for cpu, (user, idle, iowait, steal) in enumerate(rows)
    ]
    return "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 4", "ctxt 3"]) + "\n"


def test_each_cpus_idle_waiting_and_stolen_time_is_told(machine: Machine) -> None:
    machine.put("proc/stat", cpus((10, 10, 10, 10), (0, 0, 0, 0), (5, 5, 5, 5)))
    probe = machine.probe()
    assert node(probe) == {}
    machine.put("proc/stat", cpus((100, 10, 10, 20), (5, 92, 3, 0), (55, 55, 5, 5)))
    assert node(probe) == {
        ("cpu_stolen_ns", "0"): 10 * TICK_NS,
        ("cpu_iowait_ns", "1"): 3 * TICK_NS,
        ("cpu_idle_ns", "1"): 92 * TICK_NS,
        ("cpu_idle_ns", "2"): 50 * TICK_NS,
        ("cpus_idle", "3"): 1,
    }


def test_of_many_cpus_the_largest_are_listed_and_the_rest_is_one_sum(machine: Machine) -> None:
    machine.put("proc/stat", cpus(*[(0, 0, 0, 0)] * 192))
    probe = machine.probe()
    node(probe)
    machine.put("proc/stat", cpus(*[(1, 1 + index, 0, 0) for index in range(192)]))
    after = node(probe)
    idle = {key[1]: value for key, value in after.items() if key[0] == "cpu_idle_ns"}
    assert len(idle) == LISTED + 1
    assert idle["191"] == 192 * TICK_NS
    assert sum(idle.values()) == 192 * 193 // 2 * TICK_NS
    assert "0" not in idle


def test_memory_that_is_taken_back_and_swapped_is_told_in_bytes(machine: Machine) -> None:
    def vmstat(*counts: int) -> None:
        names = (
            "pswpin",
            "pswpout",
            "pgmajfault",
            "pgsteal_kswapd",
            "pgsteal_direct",
            "allocstall_normal",
            "allocstall_movable",
            "oom_kill",
            "nr_free_pages",
        )
        rows = [f"{name} {count}" for name, count in zip(names, counts, strict=True)]
        machine.put("proc/vmstat", "\n".join(rows) + "\n")

    page = os.sysconf("SC_PAGE_SIZE")
    vmstat(1, 2, 3, 4, 5, 6, 7, 8, 9)
    probe = machine.probe()
    assert node(probe) == {}
    vmstat(3, 2, 13, 104, 25, 7, 10, 9, 99999)
    assert node(probe) == {
        ("swap_in_bytes",): 2 * page,
        ("node_major_faults",): 10,
        ("reclaimed_kswapd_bytes",): 100 * page,
        ("reclaimed_direct_bytes",): 20 * page,
        ("direct_reclaims",): 4,
        ("node_oom_kills",): 1,
    }


def net_dev(*rows: str) -> str:
    return (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast"
        "|bytes    packets errs drop fifo colls carrier compressed\n"
    ) + "".join(row + "\n" for row in rows)


def test_interfaces_are_told_with_what_they_lost_and_without_the_loopback(machine: Machine) -> None:
    machine.put(
        "proc/1/net/dev", net_dev("    lo: 9 1 1 1 0 0 0 0 9 1 1 1 0 0 0 0", "eth0:0 0 0 0 0 0 0 0 0 0 0")
    )
    probe = machine.probe()
    node(probe)
    machine.put(
        "proc/1/net/dev",
        net_dev(
            "    lo: 99 9 9 9 0 0 0 0 99 9 9 9 0 0 0 0",
            "  eth0: 5000 40 3 7 0 0 0 0 6000 50 2 1 0 0 0 0",
        ),
    )
    assert node(probe) == {}, "a line that was cut short is not taken for one; the next is a first look"
    machine.put("proc/1/net/dev", net_dev("  eth0: 5500 44 4 9 0 0 0 0 8000 60 7 5 0 0 0 0"))
    assert node(probe) == {
        ("interface_received_bytes", "eth0"): 500,
        ("interface_receive_errors", "eth0"): 1,
        ("interface_receive_drops", "eth0"): 2,
        ("interface_sent_bytes", "eth0"): 2000,
        ("interface_send_errors", "eth0"): 5,
        ("interface_send_drops", "eth0"): 4,
    }


SNMP = (
    "Ip: Forwarding DefaultTTL\nIp: 1 64\n"
    "Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens PassiveOpens AttemptFails EstabResets CurrEstab InSegs "
    "OutSegs RetransSegs InErrs OutRsts InCsumErrors\n"
    "Tcp: 1 200 120000 -1 9 9 9 {resets} 6 5000 {out} {again} 0 7 0\n"
)
NETSTAT = (
    "TcpExt: SyncookiesSent ListenDrops TCPTimeouts\nTcpExt: 0 {drops} {timeouts}\n"
    "IpExt: InNoRoutes\nIpExt: 5\n"
)


def test_tcp_is_told_of_the_node_and_of_a_rank_with_a_namespace_of_its_own(machine: Machine) -> None:
    machine.put("proc/42/ns/net", "")
    machine.put("proc/43/stat", "")
    (machine.root / "proc/43/ns").mkdir()
    os.link(machine.root / "proc/1/ns/net", machine.root / "proc/43/ns/net")

    def count(pid: int, **counts: int) -> None:
        machine.put(f"proc/{pid}/net/snmp", SNMP.format(**counts))
        machine.put(f"proc/{pid}/net/netstat", NETSTAT.format(**counts))

    first = {"resets": 0, "out": 100, "again": 1, "drops": 0, "timeouts": 0}
    count(1, **first)
    count(42, **first)
    count(43, **first)
    ranks = {42: a_rank(42), 43: a_rank(43)}
    probe = machine.probe()
    probe.read(ranks)
    count(1, **first | {"out": 110})
    count(42, resets=1, out=200, again=31, drops=4, timeouts=9)
    count(43, **first | {"out": 110})
    reading = probe.read(ranks)
    assert named(list(reading.node)) == {("tcp_sent_segments",): 10}
    assert list(reading.ranks) == [42], "43 is in the node's own namespace"
    assert named(list(reading.ranks[42])) == {
        ("tcp_sent_segments",): 100,
        ("tcp_retransmitted_segments",): 30,
        ("tcp_reset_connections",): 1,
        ("tcp_listen_drops",): 4,
        ("tcp_timeouts",): 9,
    }


def test_packets_that_found_no_room_on_a_cpu_are_told(machine: Machine) -> None:
    # Linux 6: 15 hexadecimal columns, the 13th is the CPU; CPU 1 is offline and has no line.
    row = "{:08x} {:08x} {:08x} 0 0 0 0 0 0 0 0 0 {:08x} 0 0\n"
    machine.put("proc/1/net/softnet_stat", row.format(900, 0, 0, 0) + row.format(10, 1, 2, 2))
    probe = machine.probe()
    node(probe)
    machine.put("proc/1/net/softnet_stat", row.format(999, 0, 0, 0) + row.format(99, 18, 3, 2))
    assert node(probe) == {("receive_queue_drops", "2"): 17, ("receive_cut_short", "2"): 1}


def test_links_that_went_and_the_clock_are_looked_at_now_and_then(machine: Machine) -> None:
    machine.put("sys/class/net/lo/carrier_changes", "9\n")
    machine.put("sys/class/net/eth1/carrier_changes", "2\n")
    machine.put("sys/class/net/eth1/speed", "10000\n")
    machine.put("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n")
    probe = machine.probe()
    standing = {("interface_speed", "eth1"): 1_250_000_000, ("clock_source", "hpet"): 1}
    assert node(probe) == standing
    machine.put("sys/class/net/eth1/carrier_changes", "4\n")
    seen = [node(probe) for _ in range(ROUND)]
    assert seen[:-1] == [{}] * (ROUND - 1)
    assert seen[-1] == standing | {("carrier_changes", "eth1"): 2}


def test_an_interface_whose_name_is_no_text_can_be_told(machine: Machine) -> None:
    machine.put("sys/class/net/a\udcff/speed", "1000\n")
    (metric,) = machine.probe().read({}).node
    assert metric.labels == {"interface": "a\N{REPLACEMENT CHARACTER}"}


def test_heat_and_frequencies_where_the_machine_tells_them(machine: Machine) -> None:
    for cpu in range(2):
        for file, khz in (
            ("scaling_cur_freq", 1_200_000),
            ("scaling_max_freq", 2_000_000),
            ("cpuinfo_max_freq", 3_400_000),
        ):
            machine.put(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/{file}", f"{khz + cpu}\n")
    folder = "sys/devices/system/cpu/cpu1/thermal_throttle"
    machine.put(f"{folder}/core_throttle_count", "5\n")
    machine.put(f"{folder}/package_throttle_count", "7\n")
    fields = ["S", *["0"] * 35, "1", *["0"] * 13]
    machine.put("proc/42/stat", f"42 (a ) b) {' '.join(fields)}\n")
    probe = machine.probe()
    rank = named(list(probe.read({42: a_rank(42)}).ranks[42]))
    assert rank == {
        ("cpu_frequency_hz", "1"): 1_200_001_000,
        ("cpu_frequency_limit_hz", "1"): 2_000_001_000,
        ("cpu_frequency_top_hz", "1"): 3_400_001_000,
    }
    later = [named(list(probe.read({42: a_rank(42)}).ranks[42])) for _ in range(ROUND)]
    asked = [("cpu_frequency_hz", "1") in seen for seen in later]
    assert asked == [False] * (ROUND - 1) + [True], "asking interrupts the CPU"
    machine.put(f"{folder}/core_throttle_count", "9\n")
    heat = [node(probe) for _ in range(ROUND)]
    assert {key: value for seen in heat for key, value in seen.items()} == {
        ("thermal_throttles", "1", "core"): 4
    }


def test_what_a_machine_does_not_have_is_said_and_the_rest_works(machine: Machine) -> None:
    (machine.root / "proc/1/net/snmp").unlink()
    machine.put("proc/stat", cpus((0, 0, 0, 0)))
    probe = machine.probe()
    assert [words.partition(":")[0] for words in probe.missing] == [
        "/proc/pressure",
        "cpufreq",
        "thermal_throttle",
        "/proc/1/net",
    ]
    node(probe)
    machine.put("proc/stat", cpus((0, 10, 0, 0)))
    assert node(probe)["cpus_idle", "1"] == 1


# --- this machine


def test_here_idle_and_pressure_agree_with_the_kernels_files() -> None:
    pressure = Path("/proc/pressure/cpu")
    if not pressure.exists():
        pytest.skip("this kernel tells no pressure")

    def stalled() -> int:
        return int(pressure.read_text().splitlines()[0].rpartition("=")[2]) * 1000

    probe = MachineProbe()
    outer = stalled()
    probe.read({})
    inner = stalled()
    total = 0.0

    def look() -> bool:
        nonlocal total
        total += node(probe).get(("pressure_stalled_ns", "cpu", "some"), 0)
        return total > 0

    with subprocess.Popen([sys.executable, "-c", HOGS], start_new_session=True) as hogs:
        try:
            until(look, "threads wait for CPUs")
        finally:
            os.killpg(hogs.pid, signal.SIGKILL)
    before = stalled()
    total += node(probe).get(("pressure_stalled_ns", "cpu", "some"), 0)
    assert before - inner <= total <= stalled() - outer


HOGS = "import os\nfor _ in range(2 * os.cpu_count()): os.fork() or [None for _ in iter(int, 1)]"

SENDS = """
import socket, sys
for line in sys.stdin:
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(int(line)):
        try:
            sender.sendto(b"x", ("127.0.0.1", 9))
        except ConnectionRefusedError:
            pass
    print("sent", flush=True)
"""


def test_packets_for_nobody_in_a_ranks_own_namespace_are_that_ranks() -> None:
    if os.geteuid() != 0:
        pytest.skip("making a network namespace needs root")
    command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$0" -c "$1"', sys.executable, SENDS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("1\n")
        assert process.stdout.readline() == "sent\n"
        ranks = {process.pid: a_rank(process.pid), os.getpid(): a_rank(os.getpid())}
        probe = MachineProbe()
        probe.read(ranks)
        process.stdin.write("57\n")
        assert process.stdout.readline() == "sent\n"
        reading = probe.read(ranks)
        process.kill()
    assert named(list(reading.ranks[process.pid]))["udp_without_receiver",] == 57
    assert os.getpid() not in reading.ranks


def test_of_a_namespace_with_many_interfaces_all_are_read() -> None:
    if os.geteuid() != 0:
        pytest.skip("making a network namespace needs root")
    cables = "".join(f"link add a{number} type veth peer name b{number}\n" for number in range(40))
    command = [
        "unshare",
        "-n",
        "sh",
        "-c",
        'printf "$0" | ip -batch - && echo there && exec sleep 60',
        cables,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        found = network_counters.interfaces(f"/proc/{process.pid}/net")
        process.kill()
    assert len(found) == 80


def test_all_counters_of_protocols_are_there_on_this_kernel() -> None:
    listed = set()
    for file in ("snmp", "netstat"):
        for line in Path(f"/proc/self/net/{file}").read_text().splitlines():
            protocol, _, names = line.partition(": ")
            listed |= {f"{protocol}.{name}" for name in names.split()}
    assert set(PROTOCOLS) <= listed
