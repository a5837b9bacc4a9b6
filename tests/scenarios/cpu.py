"""Faults of the CPU: others on it, and a limit on how much of it there is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from tests.scenarios.fault import BUSIER, Expected, Fault, Run
from tests.scenarios.ground import control_group

PERIOD_US = 100_000
HOG_THREADS = 4


def hog(run: Run) -> Generator[None, None, None]:
    """A process that wants the rank's CPU all the time, with several threads."""
    run.options = list(BUSIER)
    yield
    yield
    with hog_process(run) as process:
        run.words.append(str(process.pid))
        yield


@contextmanager
def hog_process(run: Run) -> Iterator[subprocess.Popen[bytes]]:
    """The demo's, on the CPU of the first rank."""
    command = [sys.executable, "-m", "bot.demo.hog", "--name", run.intruder(), "--cpu", str(run.cpu)]
    process = subprocess.Popen([*command, "--threads", str(HOG_THREADS), "--parent", str(os.getpid())])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def quota(run: Run) -> Generator[None, None, None]:
    """The rank's control group may use a few ms of each 100."""
    with control_group("cpu", "quota") as group:
        run.words.append(group.path.name)
        yield
        group.take(run.pid(run.rank))
        group.set("cpu.cfs_period_us", PERIOD_US)
        yield
        group.set("cpu.cfs_quota_us", run.draw.randrange(1_500, 3_001))
        yield
        group.set("cpu.cfs_quota_us", -1)


FAULTS = (
    Fault("cpu-hog", hog, Expected("slow", cause="cpu-contention", owner="node")),
    Fault("cpu-quota", quota, Expected("slow", cause="cpu-quota", owner="node")),
)
