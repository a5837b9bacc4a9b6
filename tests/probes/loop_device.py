"""A block device of a test's own, on a file; and a limit on how fast a process may read the disk under a file."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

BLKIO, IO = Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class DiskStats:
    """Since the device is there (Documentation/admin-guide/iostats.rst)."""

    reads: int
    read_bytes: int
    read_ms: int
    writes: int
    written_bytes: int
    write_ms: int
    waited_ms: int
    """Of all requests together."""
    flushes: int


@dataclass(frozen=True)
class LoopDevice:
    path: Path
    file: Path

    @property
    def name(self) -> str:
        return self.path.name

    def stats(self) -> DiskStats:
        n = [int(word) for word in Path(f"/sys/block/{self.name}/stat").read_text().split()]
        return DiskStats(n[0], n[2] * 512, n[3], n[4], n[6] * 512, n[7], n[10], n[15])

    def schedule(self, scheduler: str) -> None:
        """Use this scheduler; skips where the kernel has it not."""
        try:
            Path(f"/sys/block/{self.name}/queue/scheduler").write_text(scheduler)
        except OSError:
            pytest.skip(f"this kernel has no scheduler {scheduler}")


@contextlib.contextmanager
def loop_device(folder: Path, size: int) -> Iterator[LoopDevice]:
    """Reads and writes go to the file's own disk, past the page cache where that can be. Skips where no loop device
    can be made."""
    if shutil.which("losetup") is None:
        pytest.skip("no losetup(8): apt-get install mount")
    file = folder / "disk"
    file.write_bytes(os.urandom(size))
    with file.open("rb") as written:
        os.fsync(written.fileno())
    made = subprocess.run(
        ["losetup", "--find", "--show", str(file)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"no loop device can be made: {made.stderr.strip()}")
    path = Path(made.stdout.strip())
    try:
        subprocess.run(["losetup", "--direct-io=on", str(path)], capture_output=True, check=False)
        yield LoopDevice(path, file)
    finally:
        Path(f"/sys/block/{path.name}/queue/scheduler").write_text("none")
        subprocess.run(["losetup", "--detach", str(path)], check=True)


def disk_under(path: Path) -> tuple[str, str]:
    """(name, major:minor) of the disk that holds a file; skips where that is no block device."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        pytest.skip(f"{path} lies on no block device")
    folder = device.resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    return folder.name, (folder / "dev").read_text().strip()


@contextlib.contextmanager
def read_limit(disk: str, bytes_per_s: int) -> Iterator[Path]:
    """A control group, to whose ``cgroup.procs`` processes are added, that reads a disk (major:minor) this fast at
    most. End its processes first. Skips where there is no such controller."""
    name = f"sysom-test-{os.getpid()}"
    if (BLKIO / "blkio.throttle.read_bps_device").exists():
        folder, file, limit = BLKIO / name, "blkio.throttle.read_bps_device", f"{disk} {bytes_per_s}"
    elif (IO / "cgroup.subtree_control").exists() and "io" in (
        (IO / "cgroup.subtree_control").read_text().split()
    ):
        folder, file, limit = IO / name, "io.max", f"{disk} rbps={bytes_per_s}"
    else:
        pytest.skip("no control groups for disks, of neither version")
    folder.mkdir()
    try:
        (folder / file).write_text(limit)
        yield folder
    finally:
        folder.rmdir()
