"""Ending with one's parent, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""include/uapi/linux/prctl.h"""


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel send this process SIGTERM when the process that started it ends.

    ``parent``: its pid, as it told us; ends at once when that is gone already. None: whoever it is now.
    """
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != expected:
        sys.exit("the process that started this one is gone")
