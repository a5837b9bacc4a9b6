"""What a running agent tells on its own node, and the kill switch: files in one folder that a reboot empties.

/run/sysom/agent-4711.json    what agent 4711 does and costs, replaced each second
/run/sysom/detached           while this is there, no agent of this node attaches anything; it holds why
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from probes.records import Probe

FRESH_NS = 10_000_000_000
"""A status older than this (CLOCK_MONOTONIC) is of an agent that hangs or ended without taking it along."""


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One agent, now. Instants are CLOCK_MONOTONIC nanoseconds."""

    pid: int
    node: str
    state: str
    """Its state folder."""
    server: str
    started_ns: int
    at_ns: int
    ranks: list[str] = []
    """Ranks watched: "job-123 rank 0 (pid 4711)"."""
    probes: list[Probe] = []
    captures: list[str] = []
    """Jobs watched at full detail."""
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
    """Since the agent started: stored, duplicate, refused, dropped, damaged."""
    shipping: str = ""
    """What keeps batches on this node, in words; empty when nothing does."""


def write(folder: Path, status: AgentStatus) -> None:
    """Replace this agent's status. Raises OSError."""
    path = folder / f"agent-{status.pid}.json"
    beside = path.with_suffix(".tmp")
    with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
        file.write(msgspec.json.encode(status))
    beside.replace(path)


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


def detached(folder: Path) -> str:
    """Why nothing may be attached on this node; empty when agents may attach."""
    try:
        return (folder / "detached").read_text(errors="replace")[:500].strip() or "no reason was given"
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"the kill switch cannot be read: {error}"  # in doubt nothing is attached
