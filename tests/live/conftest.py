"""A real server, a real agent under real eBPF, and real training jobs: one server and agent for all tests here."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from bench.stack import NODE, TOKEN, agent_process, server_thread, until
from bot.demo import job as demo_job
from bot.demo.job import TrainingJob
from bot.settings import Settings
from diagnosis.verdict import Verdict

LIGHT = ("--device-ms", "25", "--compute", "2")
"""Little work: two cores carry four ranks, the agent, the server and the tests."""
BALANCED = (0, 0, 1, 1)
"""Ranks' CPUs when nobody is to be apart."""
START_S = 180.0


@dataclass
class Stack:
    """The server's address, the store, and the agent's process."""

    url: str
    store: str
    folder: Path
    agent: subprocess.Popen[bytes]

    def diagnose(self, job: str) -> Verdict:
        """As a user does: the command, its JSON, and its exit status held against the status."""
        run = subprocess.run(
            # Niced: what asks is no part of what is watched, and shares a CPU with ranks that are to be cleared.
            ["nice", "-n", "10", sys.executable, "-m", "bot.cli", "diagnose", job, "--json"],
            env=os.environ | {"SYSOM_STORE": self.store},
            capture_output=True,
            text=True,
        )
        verdict = msgspec.json.decode(run.stdout, type=Verdict) if run.stdout else None
        assert verdict is not None, run.stderr
        assert run.returncode == {"healthy": 0, "slow": 1, "hang": 1, "insufficient": 3}[verdict.status]
        return verdict


def keep_off(cpus: set[int], spared: Collection[int] = ()) -> None:
    """Keep these tests and all that they have started, but for some processes, off these CPUs; off none: as at the
    beginning."""
    others = set(range(os.cpu_count() or 1)) - cpus
    for pid in {os.getpid(), *children()} - set(spared):
        for task in tasks(pid):
            with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
                os.sched_setaffinity(task, others)


def tasks(pid: int) -> list[int]:
    """Threads of a process that runs."""
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def children() -> list[int]:
    """Processes that these tests have started: the agent, the server's, ranks."""
    found: list[int] = []
    for task in tasks(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


@dataclass
class Watched:
    """A job under the agent."""

    name: str
    training: TrainingJob
    logs: Path
    stack: Stack
    marks: dict[str, int] = field(default_factory=dict)

    def starts_ns(self, rank: int = 0) -> list[int]:
        """True starts of this rank's steps (CLOCK_MONOTONIC), as the job logged them."""
        path = self.logs / f"steps-{rank}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line)["start_ns"] for line in lines]

    def last_start_ns(self, rank: int = 0) -> int:
        """The newest of :meth:`starts_ns`, read cheaply: it is asked for many times while nothing may disturb."""
        with (self.logs / f"steps-{rank}.jsonl").open("rb") as log:
            log.seek(-min(200, log.seek(0, os.SEEK_END)), os.SEEK_END)
            start_ns: int = json.loads(log.read().split(b"\n")[-2])["start_ns"]
            return start_ns

    def seconds_of_steps(self, seconds: float) -> None:
        """Let the job train for so long."""
        begun = self.last_start_ns()
        until(
            lambda: self.last_start_ns() - begun >= seconds * 1e9 or self.check(),
            f"{seconds} s of steps",
            20 * seconds + 60,
        )

    def alone_on(self, cpu: int) -> None:
        """Leave this CPU to the ranks that run there: the agent, the server and these tests go elsewhere."""
        keep_off({cpu}, {rank.pid for rank in self.training.ranks})

    def started(self) -> None:
        until(lambda: len(self.starts_ns()) > 5 or self.check(), f"steps of {self.name}", START_S)

    def check(self) -> None:
        """Fail with the job's own words when a rank has ended."""
        if not self.training.running():
            words = "\n".join(path.read_text() for path in sorted(self.logs.glob("rank-*.log")))
            raise AssertionError(f"{self.name} ended: {words}")

    def true_step_ms(self, since_ns: int, until_ns: int, newest: int | None = None) -> float:
        """Mean of the true step times between two instants, ms; of so many steps, the newest of them."""
        starts = [start for start in self.starts_ns() if since_ns <= start <= until_ns]
        starts = starts if newest is None else starts[-newest - 1 :]
        return (starts[-1] - starts[0]) / (len(starts) - 1) / 1e6

    def true_median_ms(self, since_ns: int, until_ns: int) -> float:
        """Median of the true step times between two instants, ms."""
        starts = [start for start in self.starts_ns() if since_ns <= start <= until_ns]
        return statistics.median(b - a for a, b in itertools.pairwise(starts)) / 1e6


@pytest.fixture(scope="session")
def stack(root_and_bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    settings = Settings(state=str(folder / "server"), listen="127.0.0.1:0", node_tokens={NODE: TOKEN})
    with server_thread(settings) as url, agent_process(url, folder / "agent") as agent:
        yield Stack(url, settings.store_url(), folder, agent)
        assert agent.poll() is None, "the agent ended during the tests"


@pytest.fixture
def watched(stack: Stack, tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Start a job under the agent: ``watched("name", cpus=…, options=…, rank_options=…)``; ended with the test."""
    started: list[TrainingJob] = []

    def start(
        name: str,
        *,
        cpus: Sequence[int] = BALANCED,
        options: Sequence[str] = LIGHT,
        rank_options: Mapping[int, Sequence[str]] | None = None,
    ) -> Watched:
        logs = tmp_path / name
        logs.mkdir()
        training = demo_job.start(name, cpus=cpus, options=options, rank_options=rank_options, logs=logs)
        started.append(training)
        job = Watched(name, training, logs, stack)
        job.started()
        return job

    try:
        yield start
    finally:
        for training in started:
            training.stop()
        keep_off(set())


@contextlib.contextmanager
def cpu_hog(cpu: int, name: str, threads: int = 4) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that wants one CPU all the time."""
    command = [sys.executable, "-m", "bot.demo.hog", "--name", name, "--cpu", str(cpu)]
    process = subprocess.Popen([*command, "--threads", str(threads)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
