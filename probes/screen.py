"""What ``sysom doctor`` found, as one screen of text: what to read first stands first."""

from __future__ import annotations

import re
import textwrap

from probes.doctor import Examination, Finding
from probes.status import AgentStatus, is_fresh

WIDTH = 80
HEIGHT = 40
MAX_IN_FULL = 2
"""Agents shown in full; of more there is a line each."""
LABEL = 16
"""Width of the first column."""


def lines(found: Examination) -> list[str]:
    """The screen, ``WIDTH`` columns at most; ``HEIGHT`` lines, by saying less where it would be more."""
    for depth in (4, 2, 1):
        text = _lines(found, depth)
        if len(text) <= HEIGHT:
            return text
    return [*text[: HEIGHT - 1], f"… {len(text) - HEIGHT + 1} lines more: sysom doctor --json"]


def _lines(found: Examination, depth: int) -> list[str]:
    """``depth``: lines that one entry may take."""
    text = [
        _cut(f"{found.node}, Linux {found.kernel}, {found.cpus} CPUs, {found.at}"),
        *textwrap.wrap(found.summary, WIDTH),
    ]
    if found.detached:
        text += _entry("  kill switch", f"on since {found.detached_since}: {found.detached}", depth)
    for agent in found.agents[:MAX_IN_FULL]:
        text += ["", *_agent(agent, found, depth)]
    text += [_cut(_heading(agent, found)) for agent in found.agents[MAX_IN_FULL:]]
    text += ["", "THIS NODE"]
    for finding in sorted(found.findings, key=_rank):
        text += _entry(f"  {_mark(finding)} {finding.name}", finding.words, depth, LABEL + 12)
    return text


def _agent(agent: AgentStatus, found: Examination, depth: int) -> list[str]:
    text = [
        _cut(_heading(agent, found)),
        f"  {'probe':<{LABEL}}{'state':<13}{'ms/s':>8}{'% of node':>11}{'hits':>13}{'lost':>9}",
    ]
    for probe in agent.probes:
        text.append(
            _row(probe.name, probe.state, probe.cost_ms_per_s, found.cpus)
            + f"{probe.hits:>13,}{probe.lost:>9,}"
        )
        if probe.why:
            text += _entry("", probe.why, depth, LABEL + 2)
    text.append(_row("the agent itself", "", agent.agent_ms_per_s, found.cpus))
    total = agent.agent_ms_per_s + sum(max(0.0, probe.cost_ms_per_s) for probe in agent.probes)
    budget = f"  of {agent.budget_ms_per_s:.1f} ms/s" if agent.budget_ms_per_s else ""
    over = ", OVER" if 0 < agent.budget_ms_per_s < total else ""
    text.append(_row("together", "", total, found.cpus) + budget + over)
    memory = f"{agent.memory_bytes / 1e6:.0f} of {agent.memory_budget_bytes / 1e6:.0f} MB"
    text += _entry(
        "  memory, events",
        f"{memory}; {agent.events_per_s:,.0f} of {agent.events_budget:,} events per second",
        depth,
    )
    text += _entry("  given up", "; ".join(agent.shed) or "nothing", depth)
    if agent.captures:
        left = [f"{job} for {seconds:.0f} s more" for job, seconds in sorted(agent.captures.items())]
        text += _entry("  full detail", ", ".join(left), depth)
    text += _entry("  batches", _batches(agent), depth)
    return text


def _heading(agent: AgentStatus, found: Examination) -> str:
    ranks = f"{len(agent.ranks)} rank{'s' * (len(agent.ranks) != 1)}"
    words = f"AGENT {agent.pid} ({agent.node}), up {_age(found.at_ns - agent.started_ns)}, {ranks}"
    if agent.detached:
        words += ", DETACHED"
    if not is_fresh(agent):
        words += f", SILENT FOR {_age(found.at_ns - agent.at_ns)}"
    return words


def _row(name: str, state: str, ms_per_s: float, cpus: int) -> str:
    share = ms_per_s / 10 / cpus
    cost = f"{ms_per_s:>8.2f}{share:>11.3f}" if ms_per_s >= 0 else f"{'–':>8}{'–':>11}"
    return f"  {name[:LABEL]:<{LABEL}}{state[:12]:<13}{cost}"


def _batches(agent: AgentStatus) -> str:
    lost = {
        name: count for name, count in agent.batches.items() if name not in ("stored", "duplicate") and count
    }
    words = f"{agent.batches.get('stored', 0):,} stored by the server, {agent.spool_batches:,} wait here"
    if agent.lag_s >= 10:
        words += f" (the oldest for {_age(int(agent.lag_s * 1e9))})"
    words += "".join(f", {count:,} {name}" for name, count in sorted(lost.items()))
    return f"{words}: {agent.shipping}" if agent.shipping else words


def _mark(finding: Finding) -> str:
    return "ok     " if finding.ok else "MISSING" if finding.needed else "note   "


def _rank(finding: Finding) -> int:
    """What is missing first."""
    return 2 if finding.ok else 0 if finding.needed else 1


def _age(ns: int) -> str:
    seconds = max(0, ns) // 1_000_000_000
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _entry(label: str, words: str, depth: int, column: int = LABEL + 2) -> list[str]:
    """A label and words beside it, folded; what does not fit ``depth`` lines is cut off."""
    words = re.sub(r"\s+", " ", words).strip()
    folded = textwrap.wrap(words, WIDTH - column, max_lines=depth, placeholder=" …") or [""]
    return [f"{label:<{column}}{folded[0]}", *(" " * column + line for line in folded[1:])]


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
