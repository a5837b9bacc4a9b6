"""The agent killed and started again, over and over, beside a job that trains: step times, and what was kept.

Kills come at random moments of an agent's life, half of them before it watches (while it imports, compiles and
attaches), half after its first batch. Windows with and without kills take turns.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.stack import NODE, TOKEN, server_thread, until
from bot.demo import job as demo_job
from bot.settings import Settings
from probes import in_kernel

ROUNDS, KILLS_A_ROUND = 5, 10
QUIET_S = 8.0
EARLY_S = 3.0
"""Compiling and attaching take two to four seconds."""
LATE_S = 1.5
START_S = 180.0
"""What starts takes seconds, on a machine full of other work minutes: an agent is niced."""
LIGHT = ("--device-ms", "25", "--compute", "2")


@dataclass
class Outcome:
    """What came of it. Medians of the true step times in ms, one per window."""

    quiet: list[float] = field(default_factory=list)
    killing: list[float] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)
    """Sequence numbers that the server has."""
    rows: int = 0
    spooled: int = 0
    """Numbers that the spool has given out."""
    early: int = 0
    late: int = 0
    words: str = ""
    """What the ranks said."""

    def ratio(self) -> float:
        """Step time while agents are killed, to the time without."""
        return statistics.median(self.killing) / statistics.median(self.quiet)

    def noise(self) -> float:
        """Slowest to fastest of the windows without an agent."""
        return max(self.quiet) / min(self.quiet)


def held(pid: int) -> set[int]:
    """Ids of the BPF programs that a process of ours holds."""
    return {program.id for program in in_kernel.programs() if pid in program.holders}


def kill(agent: subprocess.Popen[bytes]) -> None:
    """SIGKILL, and wait until what it had loaded is gone. Other agents may run on this machine."""
    agent.send_signal(signal.SIGSTOP)  # so that it loads nothing more once we have looked
    had = held(agent.pid)
    agent.kill()
    agent.wait()
    until(
        lambda: not had & {program.id for program in in_kernel.programs()},
        "the kernel's removal of the killed agent's programs",
        60,
    )


def run(folder: Path, *, rounds: int = ROUNDS, kills: int = KILLS_A_ROUND) -> Outcome:
    """Kill ``rounds`` × ``kills`` agents. Raises AssertionError when a rank ends, an agent ends by itself, or
    something stays attached."""
    out = Outcome()
    draw = random.Random(rounds * kills)
    settings = Settings(state=str(folder / "server"), listen="127.0.0.1:0", node_tokens={NODE: [TOKEN]})
    training = demo_job.start("job-kills", cpus=(0, 0, 1, 1), options=LIGHT, logs=folder)
    try:
        until(lambda: len(_starts_ns(folder)) > 20 or _all_run(training), "the job's first steps", START_S)
        with server_thread(settings) as url:
            for _ in range(rounds):
                out.quiet.append(_window(folder, lambda: time.sleep(QUIET_S)))
                out.killing.append(
                    _window(folder, lambda: _kill_some(url, folder, kills, draw, training, out))
                )
            had = _next_seq(folder)
            with _agent(url, folder) as last:
                _until_it_spooled(last, folder, had)
                spool = folder / "agent" / "spool"
                until(lambda: not list(spool.glob("*.batch")), "an empty spool", START_S)
                last.send_signal(signal.SIGTERM)
                assert last.wait(timeout=60) == 0, _words(folder)
            out.numbers, out.rows = _stored(folder, settings) or (set(), 0)
            out.spooled = _state(folder)["next_seq"]
        _all_run(training)
        out.words = "".join(path.read_text() for path in sorted(folder.glob("rank-*.log"))).strip()
    finally:
        training.stop()
    return out


def _kill_some(
    url: str,
    folder: Path,
    kills: int,
    draw: random.Random,
    training: demo_job.TrainingJob,
    out: Outcome,
) -> None:
    for number in range(kills):
        had = _next_seq(folder)
        with _agent(url, folder) as agent:
            if number % 2:
                _until_it_spooled(agent, folder, had)
                time.sleep(draw.uniform(0, LATE_S))
                out.late += 1
            else:
                time.sleep(draw.uniform(0.1, EARLY_S))
                out.early += 1
            _runs(agent, folder)
            kill(agent)
        _all_run(training)


def _until_it_spooled(agent: subprocess.Popen[bytes], folder: Path, had: int) -> None:
    until(lambda: _next_seq(folder) > had or _runs(agent, folder), "a batch in the spool", START_S)


def _window(folder: Path, during: Callable[[], None]) -> float:
    begun = time.monotonic_ns()
    during()
    ended = time.monotonic_ns()
    starts = [start for start in _starts_ns(folder) if begun <= start <= ended]
    return statistics.median(b - a for a, b in itertools.pairwise(starts)) / 1e6


def _starts_ns(folder: Path) -> list[int]:
    path = folder / "steps-0.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["start_ns"] for line in lines]


def _all_run(training: demo_job.TrainingJob) -> None:
    assert training.running(), training.last_words()


def _runs(agent: subprocess.Popen[bytes], folder: Path) -> None:
    assert agent.poll() is None, f"the agent ended by itself:\n{_words(folder)}"


@contextmanager
def _agent(url: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An agent, which does not outlive what fails here."""
    environment = os.environ | {
        "SYSOM_SERVER": url,
        "SYSOM_NODE": NODE,
        "SYSOM_NODE_TOKEN": TOKEN,
        "SYSOM_STATE": str(folder / "agent"),
        "SYSOM_RUNTIME": str(folder / "run"),
    }
    with (folder / "agent.log").open("ab") as said:
        command = [sys.executable, "-m", "bot.cli", "agent"]
        agent = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    try:
        yield agent
    finally:
        agent.kill()
        agent.wait()


def _words(folder: Path) -> str:
    return (folder / "agent.log").read_text(errors="replace")


def _state(folder: Path) -> dict[str, int]:
    path = folder / "agent" / "spool" / "state.json"
    told: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    return told


def _next_seq(folder: Path) -> int:
    return _state(folder).get("next_seq", 0)


def _stored(folder: Path, settings: Settings) -> tuple[set[int], int] | None:
    """Sequence numbers that the server has of this spool's agent, and how many rows that is."""
    path = settings.store_url().removeprefix("sqlite://")
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        rows = db.execute(
            "SELECT seq FROM batch JOIN sender ON sender.id = batch.sender WHERE agent = ?",
            (_state(folder)["agent"],),
        ).fetchall()
    return ({seq for (seq,) in rows}, len(rows)) if rows else None


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="sysom-kills-") as folder:
        out = run(Path(folder))
    print(
        f"{out.early} agents killed before they watched, {out.late} after; no rank ended, nothing stayed attached"
    )
    print(f"step medians without an agent, ms: {' '.join(f'{value:.1f}' for value in out.quiet)}")
    print(f"step medians while killing, ms:    {' '.join(f'{value:.1f}' for value in out.killing)}")
    print(f"ratio {out.ratio():.3f}; windows without an agent differ by up to {out.noise():.3f}")
    print(
        f"batches: {out.spooled} numbers given out, {len(out.numbers)} at the server in {out.rows} rows, "
        f"{out.spooled - len(out.numbers)} numbers used up by kills"
    )
