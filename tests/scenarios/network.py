"""Faults of the network: interrupts of a flood on a rank's CPU, too little bandwidth, and lost packets.

For the latter two each rank has a network namespace with a link to one bridge; rank 0's address is the master's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.scenarios.fault import BUSIER, Expected, Fault, Run
from tests.scenarios.ground import inside, named, namespaces, tell

LINK = "net0"
ADDRESS = "10.77.0.{}"
FLOODER = """
import ctypes, os, socket, sys, time
from probes.lifetime import end_with_parent
end_with_parent(int(sys.argv[4]))
ctypes.CDLL(None).prctl(15, sys.argv[1].encode()[:15])  # PR_SET_NAME
os.sched_setaffinity(0, {int(sys.argv[3])})
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
data, to = bytes(16_000), (sys.argv[2], 9)
while True:
    until = time.monotonic() + 0.004
    while time.monotonic() < until:
        out.sendto(data, to)
    time.sleep(0.002)
"""


@contextmanager
def own_networks(run: Run) -> Iterator[tuple[str, list[str]]]:
    """A namespace per rank, linked to a bridge in one more: gives that one and the ranks'."""
    hub, ranks = named("hub"), [named(f"rank-{rank}") for rank in range(run.world)]
    with namespaces([hub, *ranks]):
        tell("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
        tell("ip", "-n", hub, "link", "set", "bridge0", "up")
        for rank, own in enumerate(ranks):
            port = f"port{rank}"
            tell("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", LINK, "netns", own)
            tell("ip", "-n", hub, "link", "set", port, "master", "bridge0", "up")
            tell("ip", "-n", own, "address", "add", f"{ADDRESS.format(rank + 1)}/24", "dev", LINK)
            tell("ip", "-n", own, "link", "set", LINK, "up")
            master = ADDRESS.format(1)
            run.option(rank, "--namespace", own, "--interface", LINK, "--master", master)
        yield hub, ranks


def bandwidth(run: Run) -> Generator[None, None, None]:
    """One rank may send no more than so many Mbit/s."""
    with own_networks(run) as (_, ranks):
        yield
        yield
        rate = f"{run.draw.randrange(30, 60)}mbit"
        own = ranks[run.rank]
        run.words[:] = [f"tbf {rate.removesuffix('mbit')} Mbit/s", LINK]
        tell(
            "tc", "-n", own, "qdisc", "add", "dev", LINK, "root", "tbf",
            "rate", rate, "burst", "32kb", "latency", "50ms",
        )  # fmt: skip
        yield
        tell("tc", "-n", own, "qdisc", "delete", "dev", LINK, "root")


def loss(run: Run) -> Generator[None, None, None]:
    """Of what one rank sends some packets are lost on the way."""
    with own_networks(run) as (hub, _):
        yield
        command = ["ip", "netns", "exec", hub, sys.executable, "-m", "tests.scenarios.drop"]
        command += [f"port{run.rank}", str(run.draw.randrange(4, 8)), str(run.folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as drop:
            assert drop.stdin is not None
            assert drop.stdout is not None
            try:
                assert drop.stdout.readline() == "ready\n", "the program that drops packets does not load"
                yield
                print("go", file=drop.stdin, flush=True)
                assert drop.stdout.readline() == "drops\n", "the program that drops packets does not attach"
                yield
            finally:
                drop.stdin.close()


def flood(run: Run) -> Generator[None, None, None]:
    """UDP that nobody wants comes in, and its interrupts are steered to the rank's CPU."""
    run.options = list(BUSIER)
    sender, receiver = named("sender"), named("receiver")
    with namespaces([sender, receiver]):
        tell(
            "ip", "-n", sender, "link", "add", LINK, "type", "veth", "peer", "name", "in0", "netns", receiver
        )
        for own, link, address in ((sender, LINK, 1), (receiver, "in0", 2)):
            tell("ip", "-n", own, "address", "add", f"{ADDRESS.format(address)}/24", "dev", link)
            tell("ip", "-n", own, "link", "set", link, "up")
        steering = Path("/sys/class/net/in0/queues/rx-0/rps_cpus")
        inside(receiver, "sh", "-c", f"echo {1 << run.cpu:x} > {steering}")
        yield
        yield
        other = next(cpu for cpu in sorted(os.sched_getaffinity(0)) if cpu != run.cpu)
        command = ["ip", "netns", "exec", sender, sys.executable, "-c", FLOODER, run.intruder()]
        run.words[:] = ["NET_RX"]
        process = subprocess.Popen([*command, ADDRESS.format(2), str(other), str(os.getpid())])
        try:
            yield
        finally:
            process.kill()
            process.wait()


FAULTS = (
    Fault("udp-flood", flood, Expected("slow", cause="interrupts", owner="node")),
    Fault(
        "bandwidth-cap",
        bandwidth,
        Expected("slow", cause="slow-link", layer="nccl", owner="network"),
        spread=True,
    ),
    Fault(
        "packet-loss",
        loss,
        Expected("slow", cause="packet-loss", layer="nccl", owner="network"),
        spread=True,
        after_s=30.0,
    ),
)
