"""Which processes of this node are ranks of which job.

A rank is a process that has a collectives library mapped and whose environment gives it a number
(``launchers.py`` says which variables), or whose communicator does (:meth:`Discovery.number`). Above it may
stand what started it (torchrun, mp.spawn, a task of Slurm), below it its helpers (DataLoader workers, compile
workers), which inherit its variables: neither is a rank.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from probes import launchers, procfs
from probes.environ import Environments
from probes.launchers import Claim, Grade, Place

RECHECK_SHARE = 8
"""A process is looked at again after an eighth of the time it has been known: programs are replaced (exec),
libraries loaded and variables set mostly when a process is young. Every scan while it is younger than 8 s."""
RECHECK_S = 60.0
"""… at most this, when it has no collectives library mapped;"""
RECHECK_RANK_S = 5.0
"""… this, when it has a rank's environment, but not the library yet;"""
RECHECK_ENVIRONMENT_S = 30.0
"""… and this, for the present environment of one that has the library. Whether it lives is asked at each scan."""
NAMELESS_S = 5.0
"""A rank without anything to name its job by is told after this: programs set one variable after another."""
TASK_S = 30.0
"""A task of Slurm or MPI that no communicator has numbered is told as a rank after this: it may be about to start
ranks of its own."""
STARTERS = ("torchrun", "accelerate", "deepspeed")
"""Names of processes that start ranks and never are any, though a pod may have numbered them."""
YOUNG_S = 60.0
"""A process that has had the library for longer changes its numbers only when two looks in turn agree: training
programs set these variables for programs they start, too."""

NOWHERE = Place("")

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
    """Address of its arguments: a new one with each exec, the parent's after fork."""
    size: int = field(default=0, compare=False)
    """Bytes of its address space: another one after a library was loaded."""


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


@dataclass(frozen=True)
class RankCandidate:
    """A process that could be a rank: it has the library, and its environment names a job or a rendezvous, but not
    which rank it is. Its first communicator tells."""

    pid: int
    job: str
    process: Process
    library: Path
    env: dict[str, str]


@dataclass
class _Known:
    inode: int
    process: Process
    since: float
    """When its program was first seen."""
    check_at: float = 0.0
    env: dict[str, str] = field(default_factory=dict)
    """Allowed keys of its environment, the latest that was believed."""
    doubted: dict[str, str] | None = None
    """An environment with other numbers, seen once."""
    env_check_at: float = 0.0
    claim: Claim | None = None
    job: str = ""
    family: str = ""
    """The job's name as far as the environment alone gives it: the same in a rank and its helpers."""
    seen: tuple[int, int] | None = None
    """(rank, world size) as its communicator has it."""
    mapped_size: int = -1
    """Size of its address space when its mappings were last read."""
    library: Path | None = None
    library_since: float = 0.0
    environ_at: int | None = None
    """Where its C library keeps the address of its environment."""
    launcher: bool = False
    """Has been seen above ranks of a higher grade."""
    helps: tuple[str, int] | None = None
    """(job, rank) below which it was seen: it stays a helper when that ends first, and leaves it to init."""

    @property
    def grade(self) -> Grade | None:
        return Grade.SEEN if self.seen else self.claim.grade if self.claim else None

    @property
    def numbers(self) -> tuple[int, int] | None:
        return self.seen or ((self.claim.rank, self.claim.world_size) if self.claim else None)


@dataclass
class Discovery:
    """Looks through /proc, and remembers what cannot have changed. Call :meth:`scan` every second or so."""

    library: str
    """Regular expression for the file name of the collectives library."""
    proc: Path = Path("/proc")
    clock: Callable[[], float] = time.monotonic
    host: str = field(default_factory=lambda: os.uname().nodename)
    """The node's name, for jobs whose own name means something on one node only."""
    _known: dict[int, _Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._environments = Environments(launchers.ENV_ALLOWED, self.proc)
        self._file = procfs.IN_ANY_FOLDER + self.library.encode()
        # The first process's is the node's; where that may not be looked at, the agent's own is taken for it.
        self._network = procfs.network_namespace(self.proc, "1") or procfs.network_namespace(
            self.proc, "self"
        )

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
        self._relate()
        return {
            pid: RankProcess(
                known.job,
                *known.numbers,
                launchers.local_rank(known.env),
                known.process,
                known.library,
                known.env,
            )
            for pid, known in self._known.items()
            if known.library and known.numbers and _is_rank(known) and _is_sure(known, now)
        }

    def unnumbered(self) -> dict[int, RankCandidate]:
        """Processes that could be ranks, by pid, as the last scan found them."""
        now = self.clock()
        return {
            pid: RankCandidate(pid, known.job, known.process, known.library, known.env)
            for pid, known in self._known.items()
            if known.library and self._is_candidate(known, now)
        }

    def number(self, pid: int, rank: int, world_size: int) -> None:
        """A communicator of process ``pid`` says which rank it is: so it is told from the next scan on, whatever
        its environment says, until its program ends or is replaced. Numbers that cannot be, and processes that
        have ended, are passed over."""
        known = self._known.get(pid)
        if known and known.library and 0 <= rank < world_size <= launchers.MAX_WORLD:
            known.seen, known.launcher, known.helps = (rank, world_size), False, None

    def rank_of(self, pid: int) -> tuple[str, int] | None:
        """(job, rank) of which ``pid`` is a process: the rank itself or one of its helpers."""
        known = self._known.get(pid)
        if known is None or known.helps:
            return known.helps if known else None
        if known.numbers:
            return (known.job, known.numbers[0]) if _is_rank(known) else None
        above = next((other for other in self._above(known) if _is_told(other)), None)
        return (above.job, above.numbers[0]) if above and above.numbers else None

    def helpers(self, ranks: Mapping[int, RankProcess]) -> dict[int, int]:
        """Processes that work for these ranks (DataLoader workers and the like), with the rank's process each."""
        pids = {(rank.job, rank.rank): pid for pid, rank in ranks.items()}
        helping: dict[int, int] = {}
        for pid in self._known:
            of = self.rank_of(pid) if pid not in ranks else None
            if of in pids:
                helping[pid] = pids[of]
        return helping

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
        if known is None or _program(known.process) != _program(process):
            known = self._known[pid] = _Known(inode, process, since=now)
            if not process.kernel:
                self._believe(known, self._environments.at_start(pid))
        known.inode, known.process = inode, process
        if process.kernel:
            known.check_at = float("inf")
            return
        if known.library is None and process.size != known.mapped_size:
            self._look_for_library(known, now)
        if known.library and now >= known.env_check_at:
            self._look_at_environment(known, now)
        limit = 0.0 if known.library else RECHECK_RANK_S if known.claim else RECHECK_S
        known.check_at = now + min(limit, (now - known.since) / RECHECK_SHARE)

    def _look_for_library(self, known: _Known, now: float) -> None:
        pid = known.process.pid
        known.mapped_size = known.process.size
        maps = procfs.read(f"{self.proc}/{pid}/maps", procfs.MAPS_LIMIT) or b""
        mapping = procfs.mapping_of(maps, self._file, executable=True)
        if mapping is not None:
            known.library, known.library_since = procfs.mapped_file(self.proc, pid, mapping), now
            known.environ_at = self._environments.locate(pid, maps)

    def _look_at_environment(self, known: _Known, now: float) -> None:
        """Take over what the process has set itself since it started."""
        age = now - known.library_since
        known.env_check_at = now + min(RECHECK_ENVIRONMENT_S, age / RECHECK_SHARE)
        if known.environ_at is None:
            return
        env = self._environments.live(known.process.pid, known.environ_at)
        if env is None or env == known.env:
            known.doubted = None
            return
        claim = launchers.claim(env)
        if known.claim and (claim is None or (age > YOUNG_S and env != known.doubted)):
            known.doubted = env
            return
        self._believe(known, env)

    def _believe(self, known: _Known, env: dict[str, str]) -> None:
        claim, family = launchers.claim(env), launchers.job_name(env, NOWHERE)
        if (claim, family) != (known.claim, known.family):
            known.helps = None
        known.env, known.claim, known.family, known.doubted = env, claim, family, None
        known.job = launchers.job_name(
            env, self._place(known.process) if launchers.is_local(env) else NOWHERE
        )

    def _place(self, process: Process) -> Place:
        network = procfs.network_namespace(self.proc, str(process.pid))
        return Place(self.host, 0 if network == self._network else network, process.parent)

    def _relate(self) -> None:
        """Find who stands above ranks, and who below."""
        for known in self._known.values():
            if known.library and known.grade:
                for above in self._above(known):
                    above.launcher = above.launcher or _launches(above, known)
        for known in self._known.values():
            if known.seen or known.helps or not (known.claim or known.library):
                continue
            for above in self._above(known):
                if _is_told(above) and above.numbers and _shares_environment(known, above):
                    known.helps = (above.job, above.numbers[0])
                    break

    def _is_candidate(self, known: _Known, now: float) -> bool:
        if known.seen or known.launcher or not launchers.names_job(known.env):
            return False
        if known.claim and (known.claim.grade > Grade.TASK or (not known.helps and _is_sure(known, now))):
            return False
        above = next((other for other in self._above(known) if other.library), None)
        if above is None or above.env != known.env:
            return True
        # The same variables: a process forked from it, as a DataLoader's worker is, does not train by itself.
        return not above.seen and above.process.image != known.process.image

    def _above(self, known: _Known) -> Iterator[_Known]:
        """Its parent, and so on. /proc is no snapshot: pids may be used again while it is read, so parents may
        go in a circle."""
        passed = {known.process.pid}
        above = self._known.get(known.process.parent)
        while above is not None and above.process.pid not in passed:
            passed.add(above.process.pid)
            yield above
            above = self._known.get(above.process.parent)


def _program(process: Process) -> tuple[int, int]:
    """What names one program's run in one process: its start, and the exec."""
    return process.start_ticks, process.image


def _is_rank(known: _Known) -> bool:
    return bool(known.seen) or not (known.helps or known.launcher or known.process.name in STARTERS)


def _is_sure(known: _Known, now: float) -> bool:
    """Whether a process whose environment numbers it had time enough to say otherwise."""
    age = now - known.library_since
    if known.seen or known.claim is None:
        return bool(known.seen)
    if known.claim.grade == Grade.TASK and age < TASK_S:
        return False
    return launchers.names_job(known.env) or age >= NAMELESS_S


def _is_told(known: _Known) -> bool:
    return known.library is not None and known.numbers is not None and _is_rank(known)


def _launches(above: _Known, known: _Known) -> bool:
    """Whether ``above`` is no rank but what started the rank ``known``. A rank may start ranks of another job (to
    evaluate, to sample): then the names differ, and it stays one."""
    if not above.library or above.grade is None or known.grade is None or above.grade >= known.grade:
        return False
    return known.grade != Grade.SEEN or above.grade == Grade.TASK or above.family == known.family


def _shares_environment(known: _Known, above: _Known) -> bool:
    """Whether a process has its variables from a rank above it."""
    if known.claim is None:
        return known.env == above.env
    if above.grade is None or known.claim.grade > above.grade:
        return False  # what starts ranks told it a number of its own, which may be the same
    same = known.claim == above.claim or (known.claim.rank, known.claim.world_size) == above.numbers
    return same and known.family == above.family


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
    return Process(pid, int(fields[1]), int(fields[19]), name, kernel, image, size=int(fields[20]))
