"""What the files of a control group say, in both versions: limits, how often they were hit, what was used.

Formats: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/{memory,blkio-controller,cpusets}.rst,
Documentation/scheduler/sched-bwc.rst of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from probes import procfs
from probes.host.cgroup_tree import Level

UNLIMITED = 1 << 62
"""Version 1 writes "no limit" as the largest number of whole pages below 2^63."""
IO_LIMITS = {
    "rbps": "read_bytes",
    "wbps": "write_bytes",
    "riops": "read_operations",
    "wiops": "write_operations",
}
IO_USED = {
    "rbytes": "read_bytes",
    "wbytes": "write_bytes",
    "rios": "read_operations",
    "wios": "write_operations",
}
V1_IO_LIMITS = {
    "read_bps_device": "read_bytes",
    "write_bps_device": "write_bytes",
    "read_iops_device": "read_operations",
    "write_iops_device": "write_operations",
}
V1_IO_USED = {
    ("bytes", "Read"): "read_bytes",
    ("bytes", "Write"): "write_bytes",
    ("serviced", "Read"): "read_operations",
    ("serviced", "Write"): "write_operations",
}


@dataclass(frozen=True)
class CpuQuota:
    """The group's threads may run so long, together, in each period."""

    quota_us: int
    period_us: int


@dataclass(frozen=True)
class CpuThrottled:
    """Since the group was made."""

    periods: int
    throttled_periods: int
    throttled_ns: int
    """Summed over CPUs: each CPU on which the group wanted to run and might not."""


def cpu_quota(level: Level) -> CpuQuota | None:
    """None where none is set."""
    if level.version == 2:
        fields = _text(level, "cpu.max").split()
        if len(fields) != 2 or not fields[0].isdigit() or not fields[1].isdigit():
            return None  # "max 100000", or the root, which has no such file
        return CpuQuota(int(fields[0]), int(fields[1]))
    quota, period = _number(level, "cpu.cfs_quota_us"), _number(level, "cpu.cfs_period_us")
    return CpuQuota(quota, period) if quota and quota > 0 and period else None


def cpu_throttled(level: Level) -> CpuThrottled | None:
    """None where the group is not there any more."""
    stat = _table(level, "cpu.stat")
    if "nr_periods" not in stat:
        return None
    # Version 1 writes nanoseconds, version 2 microseconds.
    throttled = stat.get("throttled_usec", 0) * 1000 if level.version == 2 else stat.get("throttled_time", 0)
    return CpuThrottled(stat["nr_periods"], stat.get("nr_throttled", 0), throttled)


def memory_limits(level: Level) -> dict[str, int]:
    """Bytes by kind: ``max`` is never passed, ``high`` (version 2) slows down what passes it."""
    files = {"max": "memory.max", "high": "memory.high"}
    if level.version == 1:
        files = {"max": "memory.limit_in_bytes"}
    read = {kind: _number(level, file) for kind, file in files.items()}
    return {kind: limit for kind, limit in read.items() if limit is not None and limit < UNLIMITED}


def memory_used(level: Level) -> int:
    """Bytes, page cache included."""
    file = "memory.usage_in_bytes" if level.version == 1 else "memory.current"
    return _number(level, file) or 0


def memory_hits(level: Level) -> dict[str, int]:
    """How often the group came up against each of its own limits, since it was made."""
    if level.version == 1:
        return {"max": _number(level, "memory.failcnt") or 0}
    # The one without "local" (before Linux 5.2) counts what happened below, too.
    events = _table(level, "memory.events.local") or _table(level, "memory.events")
    return {kind: events.get(kind, 0) for kind in ("max", "high")}


def oom_kills(level: Level) -> int:
    """Processes of the group killed for lack of memory, since it was made."""
    file = "memory.oom_control" if level.version == 1 else "memory.events"
    return _table(level, file).get("oom_kill", 0)


def io_limits(level: Level) -> dict[tuple[str, str], int]:
    """(device as major:minor, kind) → bytes or operations per second."""
    found = {}
    if level.version == 1:
        for file, kind in V1_IO_LIMITS.items():
            for device, number in _pairs(_text(level, f"blkio.throttle.{file}")):
                found[device, kind] = number
        return found
    for device, values in _devices(_text(level, "io.max")):
        for name, kind in IO_LIMITS.items():
            if values.get(name, "max").isdigit():
                found[device, kind] = int(values[name])
    return found


def io_used(level: Level) -> dict[tuple[str, str], int]:
    """(device, kind) → bytes or operations since the group was made, with the groups below it."""
    used = {}
    if level.version == 2:
        for device, values in _devices(_text(level, "io.stat")):
            for name, kind in IO_USED.items():
                if values.get(name, "").isdigit():
                    used[device, kind] = int(values[name])
        return used
    for what, file in (("bytes", "io_service_bytes"), ("serviced", "io_serviced")):
        below = f"blkio.throttle.{file}_recursive"  # Linux ≥ 5.1
        for line in (_text(level, below) or _text(level, f"blkio.throttle.{file}")).splitlines():
            fields = line.split()
            if len(fields) == 3 and (what, fields[1]) in V1_IO_USED and fields[2].isdigit():
                used[fields[0], V1_IO_USED[what, fields[1]]] = int(fields[2])
    return used


def is_frozen(level: Level) -> bool:
    """Whether the group's processes are held, as ``docker pause`` does: by version 1's freezer, or in version 2."""
    if level.version == 1:
        return _text(level, "freezer.state").strip() == "FROZEN"
    return _table(level, "cgroup.events").get("frozen", 0) == 1


def cpus(level: Level) -> str:
    """The CPUs that the group may use, as a list like ``0-3,8``."""
    if level.version == 2:
        return _text(level, "cpuset.cpus.effective").strip()
    return (_text(level, "cpuset.effective_cpus") or _text(level, "cpuset.cpus")).strip()


def stalled_ns(path: str) -> dict[str, int]:
    """Of a file of pressure stall information: ``some`` (somebody waited) and ``full`` (all did) → nanoseconds in
    all. Documentation/accounting/psi.rst. Empty where the file is not there or the kernel has it switched off."""
    stalled = {}
    raw = (procfs.read(path) or b"").decode("ascii", "replace")
    for line in raw.splitlines():
        who, _, rest = line.partition(" ")
        total = rest.rpartition("total=")[2]
        if total.isdigit():
            stalled[who] = int(total) * 1000
    return stalled


def count_cpus(listed: str) -> int:
    """How many CPUs a list like ``0-3,8`` names; 0 for what is no such list."""
    count = 0
    for part in listed.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and (high.isdigit() or not high):
            count += max(0, int(high or low) - int(low) + 1)
    return count


def _text(level: Level, file: str) -> str:
    return (procfs.read(f"{level.folder}/{file}") or b"").decode("ascii", "replace")


def _number(level: Level, file: str) -> int | None:
    text = _text(level, file).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _table(level: Level, file: str) -> dict[str, int]:
    return dict(_pairs(_text(level, file)))


def _pairs(text: str) -> list[tuple[str, int]]:
    rows = (line.split() for line in text.splitlines())
    return [(row[0], int(row[1])) for row in rows if len(row) == 2 and row[1].isdigit()]


def _devices(text: str) -> list[tuple[str, dict[str, str]]]:
    """Lines like ``8:16 rbps=2097152 wbps=max``."""
    found = []
    for line in text.splitlines():
        device, *values = line.split()
        found.append((device, dict(value.split("=", 1) for value in values if "=" in value)))
    return found
