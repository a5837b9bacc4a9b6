"""A flood of UDP packets through a pair of virtual network devices, received on a CPU of choice."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.probes import processes

ADDRESS = "198.18.77.1"
"""Of the range for benchmarks of networks: RFC 2544."""
SEND = """
import os, socket, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # ends with the test
os.sched_setaffinity(0, {int(sys.argv[2])})
os.nice(-15)  # other tests keep the CPUs busy
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print(flush=True)
while True:
    try:
        sender.sendto(b"x" * 64, (sys.argv[1], 9))
    except OSError:  # nobody listens there, and the kernel says so at times
        pass
"""


@dataclass(frozen=True)
class Link:
    """A pair of virtual devices; who sends is in a network namespace of its own."""

    device: str
    """The end that packets come in at."""
    namespace: str
    cpu: int
    """Where packets are handled when they are steered."""
    sender_cpu: int

    def received(self) -> int:
        """Packets that came in so far, by the device's own counter."""
        return int(Path(f"/sys/class/net/{self.device}/statistics/rx_packets").read_text())

    @contextlib.contextmanager
    def flooded(self, *, steered: bool = True) -> Iterator[None]:
        """Packets come in as fast as one process sends; without steering they are handled on the sender's CPU."""
        queue = Path(f"/sys/class/net/{self.device}/queues/rx-0/rps_cpus")
        queue.write_text(_mask(self.cpu) if steered else "0")
        command = ["ip", "netns", "exec", self.namespace, sys.executable, "-S", "-c", SEND, ADDRESS]
        sender = processes.start([*command, str(self.sender_cpu)])
        try:
            sender.line()
            yield
        finally:
            sender.end()


@contextlib.contextmanager
def link() -> Iterator[Link]:
    """Skips where there is one CPU only or no network devices can be made."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("receiving is steered from one CPU to another: there is one only")
    if shutil.which("ip") is None:
        pytest.skip("no ip(8): apt-get install iproute2")
    number = os.getpid() % 10_000
    here, there, namespace = f"sy{number}a", f"sy{number}b", f"sysom-{number}"
    try:
        try:
            ip("netns", "add", namespace)
            ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", namespace)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no pair of virtual network devices can be made: {error.stderr.strip()}")
        ip("addr", "add", f"{ADDRESS}/30", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", namespace, "addr", "add", "198.18.77.2/30", "dev", there)
        ip("-n", namespace, "link", "set", there, "up")
        yield Link(here, namespace, cpus[-1], cpus[0])
    finally:
        for command in (["link", "del", here], ["netns", "del", namespace]):
            subprocess.run(["ip", *command], capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _mask(cpu: int) -> str:
    """Groups of 32 bits, the highest first."""
    words = [0] * (cpu // 32 + 1)
    words[cpu // 32] = 1 << cpu % 32
    return ",".join(f"{word:08x}" for word in reversed(words))
