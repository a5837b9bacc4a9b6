"""The cgroup probe on this kernel: real groups with real limits, against the kernel's own counters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes.host.cgroup import CgroupProbe
from probes.host.cgroup_tree import mounts
from tests.probes.cgroup_files import read
from tests.probes.conftest import Start
from tests.probes.processes import until

SPIN = "print(1, flush=True)\nwhile True: pass"
EATS = """
import mmap, sys
print(1, flush=True)
sys.stdin.readline()
area = mmap.mmap(-1, 64 << 20)
for page in range(0, 64 << 20, 4096):
    area[page] = 1
"""


@pytest.fixture
def group(request: pytest.FixtureRequest, start: Start) -> Iterator[Path]:
    """A new group of the controller that the test names; it goes when the children have ended."""
    name = f"sysom-test-{os.getpid()}"
    mount = next((m for m in mounts() if m.version == 1 and request.param in m.controllers), None)
    if mount is None or os.geteuid() != 0 or not os.access(mount.point, os.W_OK):
        pytest.skip(f"needs root and a writable hierarchy of version 1 with the controller {request.param}")
    folder = Path(mount.point) / name
    folder.mkdir()
    yield folder
    for pid in (folder / "cgroup.procs").read_text().split():
        Path(mount.point, "cgroup.procs").write_text(pid)
    folder.rmdir()


@pytest.mark.parametrize("group", ["cpu"], indirect=True)
def test_a_real_quota_throttles_as_the_kernels_own_counter_says(group: Path, start: Start) -> None:
    child = start(SPIN)
    (group / "cgroup.procs").write_text(str(child.pid))
    (group / "cpu.cfs_quota_us").write_text("20000")
    probe = CgroupProbe()

    def throttled() -> dict[str, int]:
        rows = (line.split() for line in (group / "cpu.stat").read_text().splitlines())
        return {name: int(value) for name, value in rows}

    outer, within, inner = throttled(), read(probe, child.pid), throttled()
    where = (f"/{group.name}", "20000", "100000")
    assert within["cpu_quota_ratio", *where] == 0.2
    files = {
        "cpu_throttled_ns": "throttled_time",
        "cpu_throttled_periods": "nr_throttled",
        "cpu_periods": "nr_periods",
    }
    told = dict.fromkeys(files, 0.0)
    before_last: dict[str, int] = {}

    def look() -> bool:
        before_last.update(throttled())
        seen = read(probe, child.pid)
        for name in told:
            told[name] += seen.get((name, *where), 0)
        return told["cpu_throttled_periods"] >= 5

    until(look, "the quota bites")
    last = throttled()
    for name, file in files.items():
        assert before_last[file] - inner[file] <= told[name] <= last[file] - outer[file], name
        assert told[name] > 0


@pytest.mark.parametrize("group", ["memory"], indirect=True)
def test_a_real_memory_limit_is_hit_and_kills(group: Path, start: Start) -> None:
    eater, bystander = start(EATS), start("import sys; print(1, flush=True); sys.stdin.readline()")
    for child in (eater, bystander):
        assert child.line() == "1"
        (group / "cgroup.procs").write_text(str(child.pid))
    (group / "memory.limit_in_bytes").write_text(str(16 << 20))
    probe = CgroupProbe()
    first = read(probe, bystander.pid)
    cgroup = f"/{group.name}"
    assert first["memory_limit_bytes", cgroup, "max"] == 16 << 20
    eater.tell("eat")
    told = {"memory_limit_hits": 0.0, "memory_oom_kills": 0.0}

    def killed() -> bool:
        seen = read(probe, bystander.pid)
        told["memory_limit_hits"] += seen.get(("memory_limit_hits", cgroup, "max"), 0)
        told["memory_oom_kills"] += seen.get(("memory_oom_kills", cgroup), 0)
        return told["memory_oom_kills"] > 0

    until(killed, "the kernel kills what passes the limit")
    assert told["memory_oom_kills"] == 1
    assert told["memory_limit_hits"] > 0
    assert eater.process.wait() == -9


@pytest.mark.parametrize("group", ["io"], indirect=True)
def test_a_real_limit_of_a_device_is_told_by_the_devices_name(group: Path, start: Start) -> None:
    devices = [path for path in Path("/sys/block").iterdir() if (path / "device").exists()]
    if not devices:
        pytest.skip("this machine has no disk")
    child = start("import sys; print(1, flush=True); sys.stdin.readline()")
    (group / "cgroup.procs").write_text(str(child.pid))
    number = (devices[0] / "dev").read_text().strip()
    (group / "blkio.throttle.read_bps_device").write_text(f"{number} 3000000")
    seen = read(CgroupProbe(), child.pid)
    assert seen["io_limit_read_bytes", f"/{group.name}", devices[0].name] == 3_000_000


@pytest.mark.parametrize("group", ["freezer"], indirect=True)
def test_a_real_freeze_is_told_while_it_lasts(group: Path, start: Start) -> None:
    child = start("import sys; print(1, flush=True); sys.stdin.readline()")
    (group / "cgroup.procs").write_text(str(child.pid))
    probe = CgroupProbe()
    held = ("cgroup_frozen", f"/{group.name}")
    assert held not in read(probe, child.pid)
    (group / "freezer.state").write_text("FROZEN")
    try:
        until(lambda: held in read(probe, child.pid), "it is held")
    finally:
        (group / "freezer.state").write_text("THAWED")
    until(lambda: held not in read(probe, child.pid), "it goes on")
