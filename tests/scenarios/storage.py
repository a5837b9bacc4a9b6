"""Faults of storage: slow reads where data is loaded, in the main thread and in a worker; fsync."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator

from tests.scenarios.fault import Course, Expected, Fault, Run
from tests.scenarios.ground import ControlGroup, Disk, control_group, disk
from tests.scenarios.rank import READ_BYTES

FILE_BYTES = 8 << 20
STORM = """
import ctypes, os, sys
from probes.lifetime import end_with_parent
end_with_parent(int(sys.argv[3]))
ctypes.CDLL(None).prctl(15, sys.argv[1].encode()[:15])  # PR_SET_NAME
file, block = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT), os.urandom(1 << 20)
while True:
    os.pwrite(file, block, 0)
    os.fsync(file)
"""


def slow_reads(work: str) -> Course:
    """All ranks read their data from a disk; one rank's control group may read in two or three steps' time what a
    step needs."""

    def course(run: Run) -> Generator[None, None, None]:
        with disk("data") as data, control_group("blkio", "reads") as group:
            for rank in range(run.world):
                run.option(rank, "--work", f"{work}:{data.file(f'rank-{rank}', FILE_BYTES)}")
            run.words.append(data.name)
            yield
            yield
            group.take(run.pid(run.rank))
            throttle(group, "read", data, int(READ_BYTES / (run.usual_step_s() * run.draw.uniform(2.0, 3.0))))
            yield
            throttle(group, "read", data, 0)

    return course


def throttle(group: ControlGroup, what: str, on: Disk, bytes_per_s: int) -> None:
    """0 takes the limit away."""
    group.set(f"blkio.throttle.{what}_bps_device", f"{on.device} {bytes_per_s}")


def fsync_storm(run: Run) -> Generator[None, None, None]:
    """One rank saves in each step; another process begins to save much more on the same disk, which is slow."""
    with disk("saves") as saves, control_group("blkio", "saves") as group:
        run.option(run.rank, "--work", f"saves:{saves.folder / 'state'}")
        yield
        yield
        name = run.intruder()
        group.take(run.pid(run.rank))
        throttle(group, "write", saves, run.draw.randrange(4 << 20, 6 << 20))
        command = [sys.executable, "-c", STORM, name, str(saves.folder / "storm"), str(os.getpid())]
        storm = subprocess.Popen(command)
        try:
            group.take(storm.pid)
            yield
        finally:
            throttle(group, "write", saves, 0)
            storm.kill()
            storm.wait()


SLOW_READ = Expected("slow", cause="storage-read", owner="node")
FAULTS = (
    Fault("slow-reads", slow_reads("reads"), SLOW_READ),
    Fault("slow-reads-in-worker", slow_reads("reads-in-worker"), SLOW_READ),
    Fault("fsync-storm", fsync_storm, Expected("slow", cause="storage-write", owner="node")),
)
