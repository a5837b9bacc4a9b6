"""What a running agent tells on its own node, and the kill switch: files in one folder that a reboot empties.

/run/sysom/agent-4711.json    what agent 4711 does and costs, replaced each second
/run/sysom/detached           while this is there, no agent of this node attaches anything; it holds why
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import msgspec

from probes import procfs
from probes.records import Probe

PROC = Path("/proc")
SWITCH = "detached"
"""Name of the kill switch's file."""
FRESH_NS = 10_000_000_000
"""A status older than this (CLOCK_MONOTONIC) is of an agent that hangs or ended without taking it along."""


class RuntimeFolderError(RuntimeError):
    """The folder for status and kill switch cannot be used; the message says why and what to do."""


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One agent, now. Instants are CLOCK_MONOTONIC nanoseconds."""

    pid: int
    start_ticks: int = 0
    """Clock ticks from boot to its start: with ``pid`` the name of one life."""
    node: str
    state: str
    """Its state folder."""
    server: str
    started_ns: int
    at_ns: int
    ranks: list[str] = []
    """Ranks watched: "job-123 rank 0 (pid 4711)"."""
    probes: list[Probe] = []
    captures: dict[str, float] = {}
    """Jobs watched at full detail, each with the seconds that are left."""
    shed: list[str] = []
    """What was given up to stay within the budgets, in words."""
    detached: str = ""
    """Why nothing is attached, when the kill switch says so."""
    agent_ms_per_s: float = 0.0
    """CPU time of the agent's own process, milliseconds per second."""
    budget_ms_per_s: float = 0.0
    """What probes and agent may take together."""
    memory_bytes: int = 0
    memory_budget_bytes: int = 0
    events_per_s: float = 0.0
    events_budget: int = 0
    spool_batches: int = 0
    spool_bytes: int = 0
    batches: dict[str, int] = {}
    """Since the agent started, by what became of them: stored, duplicate, refused, dropped, damaged."""
    lag_s: float = 0.0
    """Age of the oldest batch that the server does not have; 0 when it has all."""
    commands: dict[str, int] = {}
    """What the server asked for, since the agent started: done, refused, unbelieved."""
    intervals_lost: int = 0
    """Intervals in which watching failed, since the agent started."""
    shipping: str = ""
    """What keeps batches on this node, in words; empty when nothing does."""


def prepare(folder: Path) -> None:
    """Make ``folder`` (0755) where it is not, and see that nobody else can write into it: what lies there decides
    which process is killed, and whether agents watch. Raises :class:`RuntimeFolderError`."""
    try:
        if not folder.exists():
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            folder.chmod(0o755)  # whatever the umask
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeFolderError(
            f"the folder {folder} for status and kill switch cannot be used ({error.strerror}): it must be a "
            "folder, not a link, and writable; SYSOM_RUNTIME names another one"
        ) from error
    try:
        found = os.fstat(handle)
    finally:
        os.close(handle)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise RuntimeFolderError(
            f"the folder {folder} for status and kill switch can be written by others (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}): chown root {folder} && chmod 755 {folder}, or delete it"
        )


def replace(path: Path, content: bytes, mode: int) -> None:
    """Write ``path`` whole or not at all; a reader never sees a part. Raises OSError."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.unlink(missing_ok=True)
        with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask
            file.write(content)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def write(folder: Path, status: AgentStatus) -> None:
    """Replace this agent's status. Raises OSError."""
    replace(folder / f"agent-{status.pid}.json", msgspec.json.encode(status), 0o644)


def remove(folder: Path, pid: int) -> None:
    """Take an ended agent's status away."""
    (folder / f"agent-{pid}.json").unlink(missing_ok=True)


def read_all(folder: Path) -> list[AgentStatus]:
    """All agents that have told something here, by pid; files that are no status are passed over."""
    found = []
    for path in sorted(folder.glob("agent-*.json")) if folder.is_dir() else ():
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=AgentStatus))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue  # just replaced, or not ours
    return sorted(found, key=lambda status: status.pid)


def is_alive(status: AgentStatus, proc: Path = PROC) -> bool:
    """Whether the process that wrote this still runs: its pid alone may be another process's by now, and what was
    killed stays a zombie until its parent asks."""
    raw = procfs.read(f"{proc}/{status.pid}/stat")
    if not raw:
        return False
    state, *fields = raw.decode("utf-8", "replace").rpartition(")")[2].split()
    return state not in "ZX" and int(fields[18]) == status.start_ticks  # proc_pid_stat(5), fields 3 and 22


def is_fresh(status: AgentStatus) -> bool:
    """Whether it was written lately; a living agent whose status is not fresh hangs, or is stopped."""
    return time.monotonic_ns() - status.at_ns <= FRESH_NS


def living(folder: Path, proc: Path = PROC) -> list[AgentStatus]:
    """The agents that run now, by pid; files of those that were killed are passed over."""
    return [status for status in read_all(folder) if is_alive(status, proc)]


def sweep(folder: Path, proc: Path = PROC) -> None:
    """Take away what killed agents left."""
    for status in read_all(folder):
        if not is_alive(status, proc):
            remove(folder, status.pid)


def detached(folder: Path) -> str:
    """Why nothing may be attached on this node; empty when agents may attach."""
    try:
        return (folder / SWITCH).read_text(errors="replace")[:500].strip() or "no reason was given"
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"the kill switch cannot be read: {error}"  # in doubt nothing is attached
