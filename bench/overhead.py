"""What watching costs a real training job, three ways: step time with the agent on and off, the agent's CPU and
memory, and BPF run time plus traps.

One job, its agent started and stopped in turns (off, on, off, on, …); the first seconds of each turn, in which
programs are compiled and attached, do not count for the step time. Prints the ratio of step times (median over
pairs of neighbouring turns, with a bootstrap interval), and says so when that does not resolve 0.4 %.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.stack import NODE, TOKEN, agent_process, server_thread, until
from bot.demo import job as demo_job
from bot.demo.show import OPTIONS
from probes.costs import TRAP_S

PAIRS = 10
TURN_S = 20.0
SETTLE_S = 8.0
BOUND = 0.004
CPUS = os.cpu_count() or 1


@dataclass
class Turn:
    """One stretch of the job."""

    steps_ms: np.ndarray
    agent_cpu: float = 0.0
    """Share of one CPU."""
    agent_mib: float = 0.0
    bpf: float = 0.0
    """Share of one CPU, by the kernel's statistics."""
    traps: float = 0.0
    """Per second."""


def main() -> None:
    from bot.settings import Settings

    with tempfile.TemporaryDirectory(prefix="sysom-bench-") as name:
        folder = Path(name)
        settings = Settings(state=str(folder / "server"), listen="127.0.0.1:0", node_tokens={NODE: TOKEN})
        training = demo_job.start(
            "bench", cpus=[cpu % CPUS for cpu in range(4)], options=OPTIONS, logs=folder
        )
        try:
            until(lambda: len(_starts(folder)) > 20, "the job's first steps", 180)
            with server_thread(settings) as url, _bpf_statistics():
                turns = [_pair(folder, url, number) for number in range(PAIRS)]
        finally:
            training.stop()
    _report(turns, settings.store_url())


def _pair(folder: Path, url: str, number: int) -> tuple[Turn, Turn]:
    """One turn without and one with the agent."""
    off = _measure(folder, None)
    with agent_process(url, folder / f"agent-{number}", quiet=True) as agent:
        until(lambda: "gloo" in _programs(), "the agent's programs", 60)
        on = _measure(folder, agent.pid)
    print(
        f"  pair {number + 1}: off {np.median(off.steps_ms):.2f} ms, on {np.median(on.steps_ms):.2f} ms",
        flush=True,
    )
    return off, on


def _measure(folder: Path, agent: int | None) -> Turn:
    time.sleep(SETTLE_S)
    begin = time.monotonic()
    cpu, bpf = (_cpu_s(agent), _bpf_s()) if agent else (0.0, 0.0)
    time.sleep(TURN_S)
    seconds = time.monotonic() - begin
    starts = np.array([start for start in _starts(folder) if start >= begin * 1e9])
    turn = Turn(np.diff(starts) / 1e6)
    if agent:
        turn.agent_cpu = (_cpu_s(agent) - cpu) / seconds
        turn.agent_mib = _resident_mib(agent)
        turn.bpf = (_bpf_s() - bpf) / seconds
        turn.traps = 2 * 4 * len(turn.steps_ms) / seconds  # one all-reduce: an arrival and an end, on 4 ranks
    return turn


def _report(turns: list[tuple[Turn, Turn]], store: str) -> None:
    ratios = np.array([np.mean(on.steps_ms) / np.mean(off.steps_ms) for off, on in turns])
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    resolved = high - 1 <= BOUND or low - 1 > BOUND
    print(
        f"(a) step time, agent on / off: {np.median(ratios):.4f} (95 %: {low:.4f} to {high:.4f}, {len(turns)} pairs"
        f" of {TURN_S:.0f} s)" + ("" if resolved else f": this does not resolve {BOUND:.1%}")
    )
    on = [turn for _, turn in turns]
    cpu, bpf, traps = (float(np.median([getattr(t, n) for t in on])) for n in ("agent_cpu", "bpf", "traps"))
    print(
        f"(b) agent: {cpu * 1e3:.1f} ms CPU per second, {np.median([t.agent_mib for t in on]):.0f} MiB resident"
    )
    print(
        f"(c) BPF {bpf * 1e3:.2f} ms/s by the kernel, and {traps:.0f} traps/s × {TRAP_S * 1e6:.0f} µs"
        f" = {traps * TRAP_S * 1e3:.2f} ms/s"
    )
    total = (cpu + bpf + traps * TRAP_S) / CPUS
    print(f"    together {total:.2%} of this node's {CPUS} CPUs (bound {BOUND:.1%})")


def _starts(folder: Path) -> list[int]:
    path = folder / "steps-0.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["start_ns"] for line in lines]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _programs() -> str:
    return subprocess.run(["bpftool", "prog", "show"], capture_output=True, text=True, check=True).stdout


def _bpf_s() -> float:
    """Run time of all BPF programs of this machine, seconds."""
    return sum(int(ns) for ns in re.findall(r"run_time_ns (\d+)", _programs())) / 1e9


@contextmanager
def _bpf_statistics() -> Iterator[None]:
    switch = Path("/proc/sys/kernel/bpf_stats_enabled")
    before = switch.read_text()
    switch.write_text("1")
    try:
        yield
    finally:
        switch.write_text(before)


if __name__ == "__main__":
    sys.exit(main())
