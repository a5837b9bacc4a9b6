"""Which processes of this node are ranks of which job.

A rank is the topmost process, in a line of parents, that has RANK and WORLD_SIZE in its environment and a
collectives library mapped. Its children inherit both (DataLoader workers, compile workers) and are its
helpers; a launcher's shell has the variables and not the library. Only ``ENV_ALLOWED`` leaves the node.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from probes import procfs

ENV_ALLOWED = (
    "SYSOM_JOB_ID",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
"""Environment keys that the agent may read and send; never the whole environment or the command line."""

_ALLOWED = re.compile(rb"(?:(?<=\0)|^)(" + "|".join(ENV_ALLOWED).encode() + rb")=([^\0]*)")
VALUE_LIMIT = 128
MAX_WORLD = 1 << 20
RECHECK_S = 60.0
"""A process that is no rank is looked at again after as long as it has been known, at most this: programs are
replaced (exec) and libraries loaded mostly when a process is young."""
RECHECK_RANK_S = 5.0
"""The same for a process with a rank's environment that has no collectives library mapped yet."""

PF_KTHREAD = 0x00200000
"""include/linux/sched.h; field 9 of /proc/PID/stat."""


@dataclass(frozen=True)
class Process:
    """One process of the node, as /proc shows it."""

    pid: int
    parent: int
    start_ticks: int
    """Clock ticks since boot: with ``pid`` the name of one life."""
    name: str
    kernel: bool = False
    image: int = 0
    """Address of its arguments: a new one with each exec."""


@dataclass(frozen=True)
class RankProcess:
    """A process that is a rank."""

    job: str
    rank: int
    world_size: int
    local_rank: int
    process: Process
    library: Path
    """The mapped collectives library, as this node's root sees it."""
    env: dict[str, str]


@dataclass
class _Known:
    inode: int
    since: float
    check_at: float
    process: Process
    identity: tuple[str, int, int, dict[str, str]] | None = None
    """(job, rank, world size, allowed environment)."""
    library: Path | None = None
    helper: bool = False
    """Has been seen below its rank: it stays a helper when that ends first, and leaves it to init."""


@dataclass
class Discovery:
    """Looks through /proc, and remembers what cannot have changed. Call :meth:`scan` every second or so."""

    library: str
    """Regular expression for the file name of the collectives library."""
    proc: Path = Path("/proc")
    clock: Callable[[], float] = time.monotonic
    _known: dict[int, _Known] = field(default_factory=dict)

    def scan(self) -> dict[int, RankProcess]:
        """All ranks that run now, by pid."""
        now = self.clock()
        present: set[int] = set()
        with os.scandir(self.proc) as entries:
            for entry in entries:
                if not entry.name.isdigit():
                    continue
                pid = int(entry.name)
                present.add(pid)
                known = self._known.get(pid)
                # A new inode is a new entry in /proc: the pid may have been used again.
                if known is None or known.inode != entry.inode() or now >= known.check_at:
                    self._look(pid, entry.inode(), now)
        for pid in self._known.keys() - present:
            del self._known[pid]
        for known in self._known.values():
            known.helper = known.helper or self._has_rank_above(known)
        return {
            pid: RankProcess(job, rank, world, _local_rank(env), known.process, known.library, env)
            for pid, known in self._known.items()
            if known.identity and known.library and not known.helper
            for job, rank, world, env in (known.identity,)
        }

    def rank_of(self, pid: int) -> tuple[str, int] | None:
        """(job, rank) of which ``pid`` is a process: the rank itself or one of its helpers."""
        known = self._known.get(pid)
        return (known.identity[0], known.identity[1]) if known and known.identity else None

    def threads(self, pid: int, name: str) -> list[int]:
        """Threads of a process whose name matches the regular expression."""
        try:
            tasks = list((self.proc / str(pid) / "task").iterdir())
        except (FileNotFoundError, ProcessLookupError):  # ended
            return []
        found = []
        for task in tasks:
            comm = procfs.read(f"{task}/comm")
            if comm and re.fullmatch(name, comm.decode("utf-8", "replace").rstrip("\n")):
                found.append(int(task.name))
        return found

    def _look(self, pid: int, inode: int, now: float) -> None:
        process = read_process(self.proc, pid)
        if process is None:
            self._known.pop(pid, None)
            return
        known = self._known.get(pid)
        since, identity, library, helper = now, None, None, False
        if known is not None and known.process.start_ticks == process.start_ticks:
            since = known.since
            if known.process.image == process.image:
                identity, library, helper = known.identity, known.library, known.helper
        if known is None or known.process != process:
            identity = None if process.kernel else _identity(self._environment(pid))
        if identity and not library:
            library = self._library(pid)
        # A rank is looked at each time, cheaply: it may have been replaced by exec.
        limit = RECHECK_RANK_S if identity else RECHECK_S
        wait = 1.0 if library else min(limit, max(1.0, now - since))
        self._known[pid] = _Known(inode, since, now + wait, process, identity, library, helper)

    def _has_rank_above(self, known: _Known) -> bool:
        """Whether a process above has the same rank and a library: then this one is its helper."""
        if known.identity is None:
            return False
        seen = {known.process.pid}
        parent = self._known.get(known.process.parent)
        while parent is not None and parent.process.pid not in seen:
            seen.add(parent.process.pid)
            if parent.library and parent.identity and parent.identity[:3] == known.identity[:3]:
                return True
            parent = self._known.get(parent.process.parent)
        return False

    def _environment(self, pid: int) -> dict[str, str]:
        try:
            raw = (self.proc / str(pid) / "environ").read_bytes()
        except OSError:  # ended, or not ours to read
            return {}
        return {
            key.decode(): value[:VALUE_LIMIT].decode("utf-8", "replace")
            for key, value in _ALLOWED.findall(raw)
        }

    def _library(self, pid: int) -> Path | None:
        mapping = re.compile(
            rb"^(\S+) ..x. \S+ \S+ \S+ +(/(?:[^\n]*/)?" + self.library.encode() + rb")( \(deleted\))?$",
            re.MULTILINE,
        )
        try:
            found = mapping.search((self.proc / str(pid) / "maps").read_bytes())
        except OSError:  # ended
            return None
        if found is None:
            return None
        addresses, path, deleted = found.groups()
        if deleted:
            return self.proc / str(pid) / "map_files" / os.fsdecode(addresses)
        return self.proc / str(pid) / "root" / os.fsdecode(path).lstrip("/")


def read_process(proc: Path, pid: int) -> Process | None:
    """A process as /proc shows it; None when it has ended."""
    raw = procfs.read(f"{proc}/{pid}/stat")
    if not raw:
        return None
    stat = raw.decode("utf-8", "replace")
    # The name may hold spaces and parentheses: it ends at the last one (proc_pid_stat(5)).
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    kernel = bool(int(fields[6]) & PF_KTHREAD)
    image = int(fields[45]) if len(fields) > 45 else 0  # arg_start, since Linux 3.5
    return Process(pid, int(fields[1]), int(fields[19]), name, kernel, image)


def _identity(env: Mapping[str, str]) -> tuple[str, int, int, dict[str, str]] | None:
    """(job, rank, world size, environment) when the environment is that of a rank."""
    try:
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    if not 0 <= rank < world <= MAX_WORLD:
        return None
    run = env.get("TORCHELASTIC_RUN_ID", "")
    job = env.get("SYSOM_JOB_ID") or (run if run not in ("", "none") else "")
    if not job:  # torchrun without --rdzv-id: its rendezvous still tells jobs of one node apart
        job = f"{env.get('MASTER_ADDR', 'unknown')}:{env.get('MASTER_PORT', '0')}"
    return "".join(c if c.isprintable() else "?" for c in job), rank, world, dict(env)


def _local_rank(env: Mapping[str, str]) -> int:
    local = env.get("LOCAL_RANK", "")
    number = int(local) if local.isdecimal() else -1
    return number if number < MAX_WORLD else -1
