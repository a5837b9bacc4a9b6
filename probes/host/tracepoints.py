"""What the probes share whose BPF programs sit on tracepoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from probes.bpf import Kernel, has_tracepoint, next_load

log = logging.getLogger(__name__)


class TracepointProbe:
    """The programs of one file of bpf/, in the kernel from when it is made until it is closed."""

    rows_read = 0
    """Rows that came to user space since it was loaded."""
    ticks_per_s = 0.0
    """Interrupts that it causes by itself: none, but for the clocks that it starts."""

    def __init__(self, kernel: Kernel, source: str, defines: Mapping[str, int | None]) -> None:
        """As :meth:`Kernel.compile`. BCC attaches at once what is named after its tracepoint. Raises
        :class:`BpfUnavailable`."""
        self._bpf: Any = kernel.compile(source, defines, next_load())

    def programs(self) -> list[int]:
        """File descriptors of its loaded programs."""
        return [function.fd for function in self._bpf.funcs.values()]

    def close(self) -> None:
        """Detach, and unload."""
        self._bpf.cleanup()


def lacking(points: Iterable[tuple[str, str]]) -> list[str]:
    """Those of (category, event) that the running kernel does not have, as ``category:event``."""
    return [f"{category}:{event}" for category, event in points if not has_tracepoint(category, event)]


def take_off(bpf: Any, point: bytes) -> None:
    """Take the program off one classic tracepoint, ``category:event``."""
    try:
        bpf.detach_tracepoint(point)
    except Exception as error:  # BCC raises bare Exception
        log.info("detaching from %s: %s", point.decode(), error)
        # BCC has closed its number by then but keeps it, and would close it once more at the end, when it may be
        # another's.
        bpf.tracepoint_fds.pop(point, None)
