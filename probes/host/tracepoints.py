"""Taking a loaded program off its tracepoints and putting it back, and which of them this kernel has.

BCC attaches a program by its name when it loads it: ``TRACEPOINT_PROBE(category, event)`` and
``RAW_TRACEPOINT_PROBE(event)``. Programs with other names are attached by whoever loaded them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from probes.bpf import BpfUnavailable, has_tracepoint

log = logging.getLogger(__name__)

CLASSIC, RAW = b"tracepoint__", b"raw_tracepoint__"
"""How BCC names such programs, before the tracepoint's own name."""


def lacking(points: Iterable[tuple[str, str]]) -> list[str]:
    """Those of (category, event) that the running kernel does not have, as ``category:event``."""
    return [f"{category}:{event}" for category, event in points if not has_tracepoint(category, event)]


def attach(bpf: Any) -> None:
    """Attach all programs that are named after a tracepoint and are not attached. Raises
    :class:`BpfUnavailable`; then none of them is."""
    try:
        for name in list(bpf.funcs):
            if name.startswith(RAW):
                if name.removeprefix(RAW) not in bpf.raw_tracepoint_fds:
                    bpf.attach_raw_tracepoint(tp=name.removeprefix(RAW), fn_name=name)
            elif name.startswith(CLASSIC):
                point = name.removeprefix(CLASSIC).replace(b"__", b":")
                if point not in bpf.tracepoint_fds:
                    bpf.attach_tracepoint(tp=point, fn_name=name)
    except Exception as error:  # BCC raises bare Exception
        detach(bpf)
        raise BpfUnavailable(f"the kernel refuses to attach to a tracepoint: {error}") from error


def detach(bpf: Any) -> None:
    """Take all programs off their tracepoints; they stay loaded, and their maps as they are."""
    for point in list(bpf.raw_tracepoint_fds):
        bpf.detach_raw_tracepoint(point)
    for point in list(bpf.tracepoint_fds):
        take_off(bpf, point)


def take_off(bpf: Any, point: bytes) -> None:
    """Take the program off one classic tracepoint, ``category:event``."""
    try:
        bpf.detach_tracepoint(point)
    except Exception as error:  # BCC raises bare Exception
        log.info("detaching from %s: %s", point.decode(), error)
        # BCC has closed its number by then but keeps it, and would close it once more at the end, when it may be
        # another's.
        bpf.tracepoint_fds.pop(point, None)
