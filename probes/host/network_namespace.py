"""Doing something in the network namespace of another process: what is asked by netlink is asked there."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from probes import procfs

Result = TypeVar("Result")
CLONE_NEWNET = 0x40000000
"""include/uapi/linux/sched.h"""
_LIBC = ctypes.CDLL(None, use_errno=True)


def within(pid: int, do: Callable[[], Result], proc: Path = Path("/proc")) -> Result:
    """What ``do`` gives in the namespace of a process (0: this one's). Raises OSError, also where the process has
    ended, and what ``do`` raises."""
    # Of one that has ended the number is 0: what is said here is not what is said there.
    if not pid or procfs.network_namespace(proc, str(pid)) == procfs.network_namespace(proc, "self"):
        return do()
    given: list[Result] = []
    failed: list[Exception] = []

    def there() -> None:
        try:
            with Path(f"{proc}/{pid}/ns/net").open() as namespace:
                if _LIBC.setns(namespace.fileno(), CLONE_NEWNET):
                    error = ctypes.get_errno()
                    raise OSError(error, f"cannot look into a rank's network namespace: {os.strerror(error)}")
            given.append(do())
        except Exception as error:  # for whoever waits for this thread
            failed.append(error)

    # A thread of its own ends there, and need not find back.
    thread = threading.Thread(target=there, daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return given[0]
