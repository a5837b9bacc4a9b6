"""Faults of a process: stopped, killed, and one that does not come."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator

from tests.scenarios.fault import Expected, Fault, Run


def stopped(run: Run) -> Generator[None, None, None]:
    """Stopped for some seconds, and let go on."""
    yield
    yield
    pid = run.pid(run.rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(run.draw.uniform(5.0, 7.0))
    finally:
        os.kill(pid, signal.SIGCONT)
    yield


def killed(run: Run) -> Generator[None, None, None]:
    """Ended by a signal that nothing can catch."""
    yield
    yield
    run.words.append("SIGKILL")
    os.kill(run.pid(run.rank), signal.SIGKILL)
    yield


def never_comes(run: Run) -> Generator[None, None, None]:
    """Waits for something that does not happen, while its peers wait for it."""
    wrong = run.goes_wrong(run.rank, "never-comes:")
    yield
    yield
    wrong()
    yield


HANG_S = 45.0
"""What stands still is called so after 30 s."""

FAULTS = (
    Fault("sigstop", stopped, Expected("slow", cause="process-stopped"), after_s=15.0),
    Fault("killed", killed, Expected("hang", cause="process-ended"), bite="stops", after_s=8.0),
    Fault("never-comes", never_comes, Expected("hang", cause="never-came"), bite="stops", after_s=HANG_S),
)
