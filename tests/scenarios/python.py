"""Faults of a rank's own code: slow Python, garbage collection, locks, work in the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator

from tests.scenarios.fault import Course, Expected, Fault, Run

READER = """
import ctypes, os, sys, time
from probes.lifetime import end_with_parent
end_with_parent(int(sys.argv[4]))
ctypes.CDLL(None).prctl(15, sys.argv[1].encode()[:15])  # PR_SET_NAME
pipe = os.open(sys.argv[2], os.O_RDONLY)
while os.read(pipe, int(sys.argv[5])):
    time.sleep(float(sys.argv[3]))
"""
LOG_BYTES, READER_BYTES = 60_000, 4096


def inside(fault: str) -> Course:
    """The rank's own code goes wrong; how much is drawn: ``{ms}``, ``{long}`` or ``{objects}``."""

    def course(run: Run) -> Generator[None, None, None]:
        ms, objects = run.draw.randrange(40, 70), run.draw.randrange(80_000, 120_000)
        wrong = run.goes_wrong(run.rank, fault.format(ms=ms, long=2 * ms, objects=objects, folder=run.folder))
        yield
        yield
        wrong()
        yield

    return course


def slow_pipe(run: Run) -> Generator[None, None, None]:
    """Logs much, into a pipe whose reader is slow."""
    pipe = run.folder / "log.pipe"
    os.mkfifo(pipe)
    name = run.intruder()
    wrong = run.goes_wrong(run.rank, f"logs:{pipe}:{LOG_BYTES}")
    yield
    yield
    delay_s = run.usual_step_s() * run.draw.uniform(2.0, 3.0) * READER_BYTES / LOG_BYTES
    command = [
        sys.executable,
        "-c",
        READER,
        name,
        str(pipe),
        f"{delay_s:.4f}",
        str(os.getpid()),
        str(READER_BYTES),
    ]
    reader = subprocess.Popen(command)
    try:
        wrong()
        yield
    finally:
        reader.kill()
        reader.wait()


FAULTS = (
    Fault("slow-python", inside("slow-python:{ms}"), Expected("slow", cause="slow-python", owner="job")),
    Fault("python-gc", inside("garbage:{objects}"), Expected("slow", cause="python-gc", owner="job")),
    Fault("gil", inside("spinner:prefetch"), Expected("slow", cause="gil", owner="job")),
    Fault("slow-pipe", slow_pipe, Expected("slow", cause="slow-pipe")),
    Fault(
        "stat-storm", inside("stats:{folder}:{ms}"), Expected("slow", cause="kernel-contention", owner="job")
    ),
    Fault("lock", inside("locked:{long}"), Expected("slow", cause="lock-contention", owner="job")),
)
