"""Which programs in the kernel are ours: told by their names and their maps', whoever holds them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from bench.stack import until
from probes import in_kernel
from probes.bpf import SOURCES, Kernel
from probes.host.thread_time import ThreadTimeProbe

LOOKALIKE = r"""
BPF_HASH(somebodys, u32, u64);
RAW_TRACEPOINT_PROBE(sched_switch) {
  u32 key = 0;
  somebodys.increment(key);
  return 0;
}
"""


def held() -> dict[int, in_kernel.Program]:
    """Programs that this process holds, by id."""
    return {program.id: program for program in in_kernel.programs() if os.getpid() in program.holders}


@pytest.mark.live
def test_our_programs_are_found_with_who_holds_them_and_gone_when_they_are_gone(root_and_bpf: Kernel) -> None:
    before = held()
    probe = ThreadTimeProbe(root_and_bpf)
    try:
        loaded = [program for number, program in held().items() if number not in before]
        assert {"sched_switch", "raw_tracepoint_"} & {program.name for program in loaded}
        wanted = re.findall(
            r"^RAW_TRACEPOINT_PROBE", (SOURCES / "thread_time.bpf.c").read_text(), re.MULTILINE
        )
        assert len(loaded) in range(len(wanted) - 2, len(wanted) + 1), (
            "all but the timer's, where there is none"
        )
    finally:
        probe.close()
    until(lambda: held() == before, "the programs' end", 60)


@pytest.mark.live
def test_another_tools_program_of_the_same_name_is_not_ours(root_and_bpf: Kernel) -> None:
    before = held()
    other = root_and_bpf.bcc.BPF(text=LOOKALIKE.encode())
    try:
        assert held() == before
    finally:
        other.cleanup()


def test_uprobes_of_tracefs_are_ours_when_bcc_made_them_for_the_library(tmp_path: Path) -> None:
    ours = (
        "p:uprobes/p__proc_7_root_lib_libtorch_cpu_so_0x10_7_bcc_4711 /proc/7/root/lib/libtorch_cpu.so:0x10"
    )
    other = "p:uprobes/p__bin_bash_0x20_bcc_99 /bin/bash:0x20"
    by_hand = "p:mine/entry /lib/libtorch_cpu.so:0x10"
    (tmp_path / "uprobe_events").write_text(f"{other}\n{ours}\n{by_hand}\n")
    assert in_kernel.uprobes(tmp_path) == [ours]
    assert in_kernel.uprobes(tmp_path / "nowhere") == []


def test_every_program_and_map_of_our_sources_is_known() -> None:
    functions, maps = in_kernel._names()
    for path in SOURCES.glob("*.bpf.c"):
        text = path.read_text()
        for name in re.findall(r"attach_\w+|\b(gloo_\w+)\(struct pt_regs", text):
            assert name[:15] in functions
        for name in re.findall(r"^BPF_\w+\((?:\"[^\"]*\", [\w ]+, [\w ]+, )?(\w+)", text, re.MULTILINE):
            assert name.removesuffix("_LOAD")[:15] in maps, name
    assert {"sched_switch", "raw_tracepoint_", "gloo_end"} <= functions
    assert {"threads", "gloo_events", "occupants"} <= maps
