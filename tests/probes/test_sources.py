"""Rules that all BPF programs keep, whatever they watch."""

from __future__ import annotations

import re

import pytest

from probes.bpf import SOURCES

PROGRAMS = sorted(path.name for path in SOURCES.glob("*.bpf.c"))


def code(name: str) -> str:
    """Without comments."""
    return re.sub(r"/\*.*?\*/", "", (SOURCES / name).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_tracepoints_program_keeps_its_event_from_others(name: str) -> None:
    """What it returns tells the kernel whether others of the same tracepoint get the event (trace_call_bpf)."""
    bodies = re.findall(r"^TRACEPOINT_PROBE\([^)]*\) \{.*?\}$", code(name), re.MULTILINE | re.DOTALL)
    macros = {
        macro: body
        for macro, body in re.findall(r"#define (\w+)\([^)]*\)((?:.*\\\n)*.*)", code(name))
        if "return" in body
    }
    for body in bodies:
        used = [text for macro, text in macros.items() if re.search(rf"\b{macro}\(", body)]
        assert not re.search(r"return 0;", "".join([body, *used])), body.splitlines()[0]
        assert "return " in body


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_attached_to_the_end_of_a_function(name: str) -> None:
    """A C++ exception cannot pass a uretprobe's trampoline."""
    assert "uretprobe" not in code(name)
