"""What bpf/signals.bpf.c tells: the kinds and rows of its ring buffer, and the signals that it is asked for."""

from __future__ import annotations

import ctypes
import signal

SIGNALS = (
    *(
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGABRT,
        signal.SIGBUS,
    ),
    *(signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGCHLD, signal.SIGCONT),
    *(
        signal.SIGSTOP,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
        signal.SIGXCPU,
        signal.SIGXFSZ,
        signal.SIGSYS,
    ),
)
"""Those that stop, continue or end a process, unless it handles them."""
SENT, CHILD, EXIT, VICTIM = 1, 2, 3, 4
DELIVERED, IGNORED = 0, 1
CLD_EXITED, CLD_KILLED, CLD_DUMPED, CLD_STOPPED, CLD_CONTINUED = 1, 2, 3, 5, 6
SI_KERNEL = 0x80
"""include/uapi/asm-generic/siginfo.h"""


class Row(ctypes.Structure):
    """``struct event`` of bpf/signals.bpf.c."""

    _fields_ = (
        ("at", ctypes.c_uint64),
        ("cgroup", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("target", ctypes.c_uint32),
        ("process", ctypes.c_uint32),
        ("sender", ctypes.c_uint32),
        ("uid", ctypes.c_uint32),
        ("signal", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("result", ctypes.c_int32),
        ("comm", ctypes.c_char * 16),
    )
