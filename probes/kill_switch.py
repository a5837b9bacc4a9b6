"""The kill switch: take every probe of every agent off this node, now, and say what was done and what is left.

A file in the runtime folder (``probes.status``), so that it works from any shell, without an agent's settings, and
on an agent that starts later; a reboot takes it away. Agents look for it at each interval; one that does not follow
is killed, and the kernel takes away what it had attached.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from probes import in_kernel, status
from probes.in_kernel import CannotLook
from probes.status import AgentStatus, RuntimeFolderError

FOLLOW_S = 5.0
"""How long an agent may take to detach: five of its intervals."""
GONE_S = 20.0
"""How long the kernel may take to end a killed process, and to free the last program: each uprobe of each rank is
taken out by itself, and on a full node that takes seconds."""
LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Left:
    """Something of ours that is in the kernel although nothing should be."""

    what: str
    """Program or uprobe, and who holds it."""
    remedy: str


def engage(folder: Path, why: str) -> None:
    """Have no agent of this node attach anything. Raises :class:`probes.status.RuntimeFolderError`, OSError."""
    status.prepare(folder)
    status.replace(folder / status.SWITCH, (why.strip() + "\n").encode(errors="replace"), 0o644)


def release(folder: Path) -> bool:
    """Let agents attach again; False when the switch was not on. Raises OSError."""
    try:
        (folder / status.SWITCH).unlink()
    except FileNotFoundError:
        return False
    return True


def detach_all(folder: Path, why: str, say: Callable[[str], None], *, follow_s: float = FOLLOW_S) -> bool:
    """Engage the switch, wait for every agent of ``folder``, kill those that do not follow within ``follow_s``
    seconds, and look at what is left. ``say`` gets a line of words at a time. True: nothing of ours is loaded.

    Raises :class:`probes.status.RuntimeFolderError`, also without root; OSError.
    """
    _require_root()
    engage(folder, why)
    begun = time.monotonic_ns()
    say(f"The kill switch is on ({folder / status.SWITCH}): no agent of this node attaches anything.")
    followed, stubborn = _wait(folder, begun, follow_s)
    for agent in followed:
        say(f"{_name(agent)} took its probes off; it runs on, and reports that they are off.")
    for agent in stubborn:
        say(_end(agent, follow_s))
    if not followed and not stubborn:
        say(f"No agent that writes to {folder} runs here.")
    status.sweep(folder)
    try:
        left = _left()
    except CannotLook as error:
        say(f"Whether anything is left is not known: {error}. `bpftool prog list` shows programs.")
        return False
    for one in left:
        say(f"STILL THERE: {one.what}. {one.remedy}")
    if not left:
        say("No BPF program and no uprobe of sysom is loaded in this kernel.")
    say("It holds until `sysom agent --attach`, or a reboot.")
    return not left


def attach(folder: Path, say: Callable[[str], None]) -> None:
    """Take the switch back, and say what follows.

    Raises :class:`probes.status.RuntimeFolderError` without root; OSError."""
    _require_root()
    why = status.detached(folder)
    if not release(folder):
        say(f"The kill switch was not on ({folder / status.SWITCH} is not there).")
    else:
        say(f"The kill switch is off. It was on because: {why}")
    agents = status.living(folder)
    for agent in agents:
        say(f"{_name(agent)} attaches again within some seconds: `sysom doctor` shows its probes.")
    if not agents:
        say("No agent runs here.")


def _require_root() -> None:
    if os.geteuid() != 0:
        raise RuntimeFolderError("the kill switch acts on the whole node and needs root: run it with sudo")


def _wait(folder: Path, begun_ns: int, follow_s: float) -> tuple[list[AgentStatus], list[AgentStatus]]:
    """The agents that say that they have detached since ``begun_ns``, and those that did not within the time.

    Agents are listed anew each time: one that was starting writes its first status meanwhile."""
    deadline = time.monotonic() + follow_s
    while True:
        agents = status.living(folder)
        followed = [agent for agent in agents if agent.detached and agent.at_ns >= begun_ns]
        stubborn = [agent for agent in agents if agent not in followed]
        if not stubborn or time.monotonic() >= deadline:
            return followed, stubborn
        time.sleep(LOOK_EVERY_S)


def _end(agent: AgentStatus, follow_s: float) -> str:
    """Kill one agent, through a descriptor that can only mean this one life of the pid; says what came of it."""
    late = f"{_name(agent)} did not follow within {follow_s:g} s"
    try:
        handle = os.pidfd_open(agent.pid)
    except ProcessLookupError:
        return f"{late}, and has ended since."
    try:
        if not status.is_alive(
            agent
        ):  # asked while the descriptor is held: from now on the pid is not used again
            return f"{late}, and has ended since; process {agent.pid} is another one now and was left alone."
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        ended, _, _ = select.select([handle], [], [], GONE_S)
    finally:
        os.close(handle)
    if not ended:
        return f"{late}: SIGKILL was sent, and it is still ending after {GONE_S:g} s."
    return f"{late}: killed. The kernel takes away what it had attached; jobs go on."


def _left() -> list[Left]:
    """What is still loaded once the kernel has had its time to free things. Raises :class:`CannotLook`."""
    deadline = time.monotonic() + GONE_S
    while True:
        found = in_kernel.programs()
        uprobes = in_kernel.uprobes()
        if not (found or uprobes) or time.monotonic() >= deadline:
            break
        time.sleep(LOOK_EVERY_S)
    by_holders: dict[tuple[int, ...], list[str]] = {}
    for program in found:
        by_holders.setdefault(program.holders, []).append(f"{program.name} (id {program.id})")
    left = []
    for holders, names in by_holders.items():
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if holders:
            pids = " ".join(map(str, holders))
            left.append(
                Left(
                    f"BPF programs {listed}, held by process {pids} ({_command(holders[0])})",
                    f"An agent with another SYSOM_RUNTIME? This takes them away: kill -KILL {pids}",
                )
            )
        else:
            left.append(
                Left(f"BPF programs {listed}, held by no process", "`bpftool link list` shows by what.")
            )
    left += [
        Left(
            f"uprobe {line}",
            f"echo '-:{line.split()[0].partition(':')[2]}' >> /sys/kernel/tracing/uprobe_events",
        )
        for line in uprobes
    ]
    return left


def _command(pid: int) -> str:
    """A process's name."""
    try:
        return (Path("/proc") / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return "ended"


def _name(agent: AgentStatus) -> str:
    ranks = f", watching {len(agent.ranks)} rank{'s' * (len(agent.ranks) != 1)}" if agent.ranks else ""
    return f"Agent {agent.pid} ({agent.node}{ranks})"
