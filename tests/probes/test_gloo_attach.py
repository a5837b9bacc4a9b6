"""Attaching to processes that end and to libraries that go: a stand-in with PyTorch's symbols, real uprobes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes.bpf import Kernel
from probes.host.thread_time import ThreadTimeProbe
from probes.nccl.gloo import PREFIX, GlooProbe
from probes.records import Communicator
from tests.probes import processes
from tests.probes.processes import Child
from tests.probes.ranks import RANK

pytestmark = pytest.mark.live

FUNCTIONS = {
    "arrival": "9AsyncWorkC2ESt10shared_ptrIN4gloo7ContextEE6OpType",
    "end": "9AsyncWork14finishWorkGlooEv",
    "failed": "9AsyncWork19finishWorkGlooErrorEv",
    "identity": "10getContextEj",
}


@pytest.fixture(scope="module")
def gloo(root_and_bpf: Kernel) -> Iterator[GlooProbe]:
    threads = ThreadTimeProbe(root_and_bpf)
    probe = GlooProbe(root_and_bpf, threads.load)
    yield probe
    probe.close()
    threads.close()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Its code stands at other addresses than offsets in the file, as some linkers have it."""
    code = "".join(f"void {PREFIX}{name}(void) {{}}\n" for name in FUNCTIONS.values())
    path = tmp_path / "libtorch_cpu.so"
    options = ["-shared", "-fPIC", "-Wl,-Ttext-segment=0x400000", "-x", "c", "-", "-o", str(path)]
    subprocess.run(["gcc", *options], input=code.encode(), check=True)
    return path


@pytest.fixture
def rank(library: Path) -> Iterator[Child]:
    child = processes.python(RANK, str(library))
    child.line()
    yield child
    child.end()


def events() -> int:
    """Perf events that this process holds: a uprobe is one."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += "perf_event" in str(link.readlink())
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


def seen_by(rank: Child, library: Path) -> Path:
    return Path(f"/proc/{rank.pid}/root") / str(library).lstrip("/")


def test_a_rank_that_ended_and_a_library_that_went_keep_no_descriptor_open(
    gloo: GlooProbe, rank: Child, library: Path
) -> None:
    before = events()
    gloo.attach(rank.pid, seen_by(rank, library))
    assert events() == before + len(FUNCTIONS)
    rank.end()
    gloo.detach(rank.pid)
    gloo.forget(rank.pid)
    assert events() == before

    other = processes.python(RANK, str(library))
    try:
        other.line()
        gloo.attach(other.pid, seen_by(other, library))
        library.write_bytes(b"no library any more")
        gloo.detach(other.pid)
        assert events() == before
    finally:
        other.end()


def test_a_rank_that_ends_while_a_name_is_wanted_again_disturbs_no_other(
    gloo: GlooProbe, rank: Child, library: Path
) -> None:
    before = events()
    named = Communicator(uid="0", desc="default_pg", rank=0, size=2)
    gloo.attach(rank.pid, seen_by(rank, library), [named])
    traffic = gloo.traffic[rank.pid]
    traffic.relearn_until = time.monotonic()
    traffic.contexts[1] = 0
    gloo.collect()
    assert events() == before + 3, "its name is known: one uprobe less"
    rank.end()
    traffic.communicators.append(Communicator(uid="", desc="", rank=0, size=1))
    traffic.contexts[2] = 1
    gloo.collect()
    gloo.detach(rank.pid)
    gloo.forget(rank.pid)
    assert events() == before


def test_loaded_anew_both_programs_use_the_same_maps_whatever_took_the_old_descriptors(
    root_and_bpf: Kernel,
) -> None:
    """BCC remembers a shared map by the number that its descriptor had first."""
    first = ThreadTimeProbe(root_and_bpf)
    first.close()
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
    threads = ThreadTimeProbe(root_and_bpf)
    try:
        gloo = GlooProbe(root_and_bpf, threads.load)
        try:
            name = b"threads_%d" % threads.load
            ids = {_map_id(probe._bpf[name].map_fd) for probe in (threads, gloo)}
            assert len(ids) == 1
        finally:
            gloo.close()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        threads.close()


def _map_id(descriptor: int) -> str:
    text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    return text.partition("map_id:")[2].split()[0]
