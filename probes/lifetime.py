"""Ending with one's parent, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""include/uapi/linux/prctl.h"""


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when the process that started it ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
