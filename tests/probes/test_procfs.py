"""Reading /proc: mappings, the way to a mapped file, namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from probes import procfs
from probes.procfs import Mapping, in_initial_pid_namespace, mapped_file, mapping_of
from tests.probes import processes

MAPS = b"""\
7f00-7f10 r--p 00000000 fe:00 42                         /opt/a b/lib.so
7f10-7f20 r-xp 00010000 fe:00 42                         /opt/a b/lib.so
7f30-7f40 rw-p 00000000 00:00 0
7f40-7f50 r-xp 00000000 fe:00 43                         /opt/lib.so.1
7f50-7f60 r-xp 00002000 fe:00 44                         /opt/other.so (deleted)
7f60-7f70 r-xp 00000000 00:00 0                          [vdso]
"""


def test_the_first_mapping_of_a_file_and_the_first_of_its_code_are_told_apart() -> None:
    file = rb"/(?:[^\n]*/)?lib\.so"
    assert mapping_of(MAPS, file) == Mapping(0x7F00, 0x7F10, 0, b"/opt/a b/lib.so")
    assert mapping_of(MAPS, file, executable=True) == Mapping(0x7F10, 0x7F20, 0x10000, b"/opt/a b/lib.so")


def test_a_deleted_file_is_found_by_its_name_and_a_longer_name_is_another_file() -> None:
    deleted = mapping_of(MAPS, rb"/opt/other\.so")
    assert deleted == Mapping(0x7F50, 0x7F60, 0x2000, b"/opt/other.so (deleted)")
    assert deleted.range == "7f50-7f60"
    assert mapping_of(MAPS, rb"/opt/lib\.so") is None
    assert mapping_of(MAPS, rb"\[vdso\]", executable=True) is not None


def test_a_process_with_as_many_mappings_as_it_may_have_is_looked_through_in_milliseconds() -> None:
    others = b"".join(
        b"7f%08x000-7f%08x000 r-xp 00000000 fe:00 42              /usr/lib/x86_64-linux-gnu/lib%d.so\n"
        % (i, i + 1, i)
        for i in range(65_529)
    )
    last = b"7fff-7fff1 r--p 00000000 fe:00 43 /opt/libtorch.so\n"
    last += b"7fff1-7fff2 r-xp 00001000 fe:00 43 /opt/libtorch.so\n"
    begun = time.thread_time()
    assert mapping_of(others, rb"/(?:[^\n]*/)?libtorch\.so", executable=True) is None
    found = mapping_of(others + last, rb"/(?:[^\n]*/)?libtorch\.so", executable=True)
    assert time.thread_time() - begun < 0.15, "each line by itself takes half a second"
    assert found == Mapping(0x7FFF1, 0x7FFF2, 0x1000, b"/opt/libtorch.so")


def test_of_a_long_file_as_much_is_read_as_asked_for(tmp_path: Path) -> None:
    long = tmp_path / "long"
    long.write_bytes(b"x" * 3_000_000)
    assert len(procfs.read(str(long)) or b"") == procfs.SIZE
    assert len(procfs.read(str(long), 2_500_000) or b"") == 2_500_000
    assert len(procfs.read(str(long), 9_000_000) or b"") == 3_000_000
    assert procfs.read(str(tmp_path / "none")) is None


LOAD = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1]); print('loaded', flush=True); sys.stdin.readline()"


def mapped(pid: int, name: bytes) -> Path:
    found = mapping_of(Path(f"/proc/{pid}/maps").read_bytes(), rb"/(?:[^\n]*/)?" + name, executable=True)
    assert found is not None
    return mapped_file(Path("/proc"), pid, found)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may follow map_files")
def test_a_file_that_took_the_place_of_the_mapped_one_is_not_taken_for_it(tmp_path: Path) -> None:
    library = processes.stand_in(tmp_path)
    before = library.read_bytes()
    child = processes.python(LOAD, str(library))
    try:
        child.line()
        assert mapped(child.pid, rb"libtorch_cpu\.so") == Path(f"/proc/{child.pid}/root{library}")
        other = tmp_path / "other"
        other.write_bytes(b"another build")
        other.rename(library)  # as pip does
        assert mapped(child.pid, rb"libtorch_cpu\.so").read_bytes() == before
    finally:
        child.end()


def in_a_pid_namespace(code: str) -> str:
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    if run.returncode and "unshare" in run.stderr:
        pytest.skip(f"no namespaces can be made here: {run.stderr}")
    assert not run.returncode, run.stderr
    return run.stdout.strip()


def test_an_agent_in_a_pid_namespace_of_its_own_is_told_to_leave_it() -> None:
    asks = "from probes import procfs; print(procfs.in_initial_pid_namespace())"
    assert in_a_pid_namespace(asks) == "False"
    assert "hostPID: true" in procfs.HOST_PID_WORDS


def test_a_kernel_without_pid_namespaces_has_one(tmp_path: Path) -> None:
    assert in_initial_pid_namespace(tmp_path)


def test_a_namespace_that_cannot_be_looked_at_has_no_number(tmp_path: Path) -> None:
    assert procfs.network_namespace(tmp_path, "1") == 0
    assert procfs.network_namespace(Path("/proc"), "self") == Path("/proc/self/ns/net").stat().st_ino
