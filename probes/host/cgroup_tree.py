"""Where the control groups of a process lie: its folders in each hierarchy, from its own up to the root.

/proc/PID/cgroup names the groups (cgroups(7)), /proc/self/mountinfo where the hierarchies are mounted
(proc_pid_mountinfo(5)). Both are told as seen from this process's cgroup namespace.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from probes import procfs

CONTROLLERS = {
    "cpu": "cpu",
    "memory": "memory",
    "blkio": "io",
    "io": "io",
    "cpuset": "cpuset",
    "freezer": "freezer",
}
"""Names in /proc → the controller's name in version 2."""
MOUNTS_LIMIT = 4 << 20
"""Bytes of mountinfo: nodes with hundreds of containers have thousands of mounts."""
ESCAPED = re.compile(r"\\([0-7]{3})")
LONGEST_LABEL = 64


@dataclass(frozen=True)
class Mount:
    """One mounted hierarchy."""

    version: int
    controllers: frozenset[str]
    """Version 1: those of :data:`CONTROLLERS` that it has. Version 2: those that its root has."""
    root: str
    """The group that stands at the mount point."""
    point: str


@dataclass(frozen=True)
class Level:
    """One group as one controller has it."""

    controller: str
    version: int
    cgroup: str
    """Its path, as this process sees it."""
    folder: str
    leaf: bool
    """The process is in this very group, not only below it."""


def mounts(proc: Path = Path("/proc")) -> list[Mount]:
    """All hierarchies that are mounted where this process sees them, those whose root is there first."""
    found = []
    raw = procfs.read(f"{proc}/self/mountinfo", MOUNTS_LIMIT) or b""
    for line in raw.decode("utf-8", "surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        fields = before.split(" ")
        if kind not in ("cgroup", "cgroup2") or len(fields) < 5:
            continue
        root, point = _unescaped(fields[3]), _unescaped(fields[4])
        if kind == "cgroup2":
            listed = procfs.read(f"{point}/cgroup.controllers") or b""
            names = listed.decode("ascii", "replace").split()
        else:
            names = options.rpartition(" ")[2].split(",")
        controllers = frozenset(CONTROLLERS[name] for name in names if name in CONTROLLERS)
        if kind == "cgroup2" or controllers:
            found.append(Mount(2 if kind == "cgroup2" else 1, controllers, root, point))
    return sorted(found, key=lambda mount: len(mount.root))


def levels(membership: bytes, mounted: Sequence[Mount]) -> tuple[list[Level], list[str]]:
    """The groups of a process, per controller from its own up to the mounted root, and which of its groups cannot
    be reached, as ``controllers:path``.

    ``membership``: its /proc/PID/cgroup. A group of version 2 is listed once for each controller that is on in it,
    and once as ``core``, for what every group has.
    """
    found: list[Level] = []
    beyond: list[str] = []
    for line in membership.decode("utf-8", "surrogateescape").splitlines():
        hierarchy, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if path.endswith(" (deleted)"):
            continue
        unified = hierarchy == "0" and not names
        wanted = {CONTROLLERS[name] for name in names.split(",") if name in CONTROLLERS}
        if not unified and not wanted:
            continue
        places = [mount for mount in mounted if _serves(mount, unified, wanted)]
        place = next((mount for mount in places if _below(path, mount.root) is not None), None)
        if place is None:
            beyond.append(f"{names or 'version 2'}:{label(path)}")
            continue
        for depth, (cgroup, folder) in enumerate(_upwards(path, place)):
            if unified:
                listed = procfs.read(f"{folder}/cgroup.controllers") or b""
                wanted = {"core"} | {
                    CONTROLLERS[name]
                    for name in listed.decode("ascii", "replace").split()
                    if name in CONTROLLERS
                }
            for controller in sorted(wanted):
                found.append(Level(controller, place.version, cgroup, folder, depth == 0))
    return found, beyond


def label(path: str) -> str:
    """A group's path as a label, at most 64 characters: of a long one the middle is left out, since containers
    differ in the end and their machines' slices in the beginning. Bytes that are no text are marked."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if len(text) <= LONGEST_LABEL:
        return text
    return text[:24] + "…" + text[-(LONGEST_LABEL - 25) :]


def _serves(mount: Mount, unified: bool, wanted: set[str]) -> bool:
    return mount.version == 2 if unified else mount.version == 1 and bool(mount.controllers & wanted)


def _below(path: str, root: str) -> str | None:
    """What leads from the mounted group to ``path``; None where nothing does. ``..`` stands for a group above this
    process's namespace, whose name is not known here."""
    if root == "/":
        return None if path.startswith("/..") else path.strip("/")
    if path == root or path.startswith(root + "/"):
        return path[len(root) :].strip("/")
    return None


def _upwards(path: str, mount: Mount) -> list[tuple[str, str]]:
    """(group, folder) from the process's own up to the one at the mount point."""
    parts = [part for part in (_below(path, mount.root) or "").split("/") if part]
    top = "" if mount.root == "/" else mount.root
    return [
        ("/".join([top, *parts[:depth]]) or "/", "/".join([mount.point, *parts[:depth]]))
        for depth in range(len(parts), -1, -1)
    ]


def _unescaped(field: str) -> str:
    """Spaces, tabs, newlines and backslashes stand as octal numbers in mountinfo."""
    return ESCAPED.sub(lambda match: chr(int(match[1], 8)), field)
