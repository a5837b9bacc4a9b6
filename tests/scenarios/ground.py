"""What runs stand on and must leave nothing of: control groups, disks of their own, network namespaces, and folders
with the agents that work in them.

All carry the pid of the process that made them in their names, so that a later run takes away what one that was
killed left behind (:func:`sweep`), and nothing of one that runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "sysom-scenario"
CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "blkio", "memory")
"""Of control groups version 1, which the faults use."""
NAMESPACES = Path("/run/netns")
TEMPORARY = Path(tempfile.gettempdir())
DISK_MB = 96
EMPTY_WITHIN_S = 10.0


class NoGround(RuntimeError):
    """This machine lacks what a fault needs; the message says what."""


def named(kind: str) -> str:
    """A name for this process's things of one kind."""
    return f"{PREFIX}-{os.getpid()}-{kind}"


def tell(*command: str) -> str:
    """Run a command that must succeed; gives what it says."""
    if shutil.which(command[0]) is None:
        raise NoGround(f"there is no command {command[0]} here")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoGround(f"{' '.join(command)} says: {done.stderr.strip() or done.returncode}")
    return done.stdout


# --- control groups ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ControlGroup:
    """A control group of one controller."""

    path: Path

    def take(self, pid: int) -> None:
        """Move a process here, with its threads and all that it started."""
        for one in [pid, *descendants(pid)]:
            (self.path / "cgroup.procs").write_text(str(one))

    def set(self, file: str, value: object) -> None:
        (self.path / file).write_text(str(value))

    def get(self, file: str) -> str:
        return (self.path / file).read_text()


@contextmanager
def control_group(controller: str, kind: str) -> Iterator[ControlGroup]:
    """A new control group; what runs in it at the end goes back to where this process is. Raises NoGround."""
    above = _own_group(controller)
    path = above / named(kind)
    try:
        path.mkdir()
    except OSError as error:
        raise NoGround(f"no control group can be made at {path}: {error.strerror}") from error
    try:
        yield ControlGroup(path)
    finally:
        _remove_group(path)


def _own_group(controller: str) -> Path:
    """Where this process is in that controller's hierarchy: limits on its own group hold below it, too."""
    root = CGROUPS / controller
    if not (root / "cgroup.procs").exists():
        raise NoGround(f"there is no control group hierarchy (version 1) at {root}")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return root / path.lstrip("/")
    return root


def _remove_group(path: Path) -> None:
    deadline = time.monotonic() + EMPTY_WITHIN_S
    while path.exists():
        with contextlib.suppress(OSError):
            for pid in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it has ended
                    (path.parent / "cgroup.procs").write_text(pid)
        try:
            path.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                raise NoGround(f"the control group {path} cannot be removed: {error.strerror}") from error
            time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """All that a process started, and what these started."""
    found: list[int] = []
    for task in _listed(Path(f"/proc/{pid}/task")):
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


# --- disks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disk:
    """A file system of its own on a loop device, so that what is throttled here holds up nobody else."""

    folder: Path
    device: str
    """MAJOR:MINOR"""
    name: str

    def file(self, name: str, size: int) -> Path:
        """A file of so many bytes that is in no cache."""
        path = self.folder / name
        with path.open("wb") as file:
            file.write(os.urandom(size))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return path


@contextmanager
def disk(kind: str) -> Iterator[Disk]:
    """A new empty disk. Raises NoGround."""
    image, folder = _image(kind), _mount(kind)
    folder.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(DISK_MB << 20)
        tell("mkfs.ext4", "-q", "-F", str(image))
        tell("mount", "-o", "loop", str(image), str(folder))
        number = folder.stat().st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        name = Path(f"/sys/dev/block/{device}").resolve().name
        yield Disk(folder, device, name)
    finally:
        _remove_disk(image, folder)


def _image(kind: str) -> Path:
    return TEMPORARY / f"{named(kind)}.img"


def _mount(kind: str) -> Path:
    return TEMPORARY / f"{named(kind)}.mount"


def _remove_disk(image: Path, folder: Path) -> None:
    if folder.is_mount():
        # Lazily: a rank that was killed a moment ago may still be in its last read.
        tell("umount", "-l", str(folder))
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()
    image.unlink(missing_ok=True)


# --- networks ----------------------------------------------------------------------------------------------


def inside(namespace: str, *command: str) -> str:
    """Run a command in a network namespace."""
    return tell("ip", "netns", "exec", namespace, *command)


@contextmanager
def namespaces(names: Iterable[str]) -> Iterator[list[str]]:
    """Network namespaces, each with its loopback up. What is in them goes with them."""
    made: list[str] = []
    try:
        for name in names:
            tell("ip", "netns", "add", name)
            made.append(name)
            tell("ip", "-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for name in made:
            tell("ip", "netns", "delete", name)


# --- folders -----------------------------------------------------------------------------------------------


@contextmanager
def own_folder(kind: str) -> Iterator[Path]:
    """A new folder, for a server and an agent to work in; goes with all that is in it."""
    path = TEMPORARY / f"{named(kind)}.folder"
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _end_agents(folder: Path) -> None:
    """End agents that keep their state in a folder: they do not end with who started them."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SYSOM_STATE={folder}/".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


# --- what others left --------------------------------------------------------------------------------------


def sweep() -> list[str]:
    """Take away what processes that are gone left behind; gives its names."""
    gone = []
    for name in sorted(_names()):
        pid = name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _take_away(name)
            gone.append(name)
    return gone


def _names() -> set[str]:
    found = {path.name for path in _listed(NAMESPACES)}
    found |= {path.stem for path in _listed(TEMPORARY) if path.suffix in (".img", ".mount", ".folder")}
    for controller in CONTROLLERS:
        with contextlib.suppress(NoGround):
            found |= {path.name for path in _listed(_own_group(controller))}
    return {name for name in found if name.startswith(f"{PREFIX}-")}


def _take_away(name: str) -> None:
    if (NAMESPACES / name).exists():
        tell("ip", "netns", "delete", name)
    _remove_disk(TEMPORARY / f"{name}.img", TEMPORARY / f"{name}.mount")
    folder = TEMPORARY / f"{name}.folder"
    if folder.exists():
        _end_agents(folder)
        shutil.rmtree(folder)
    for controller in CONTROLLERS:
        with contextlib.suppress(NoGround):
            path = _own_group(controller) / name
            if path.exists():
                _remove_group(path)
