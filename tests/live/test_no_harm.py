"""The agent never changes what a job does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.kills import programs
from bench.stack import agent_process, until
from probes.discovery import Discovery
from probes.nccl.gloo import LIBRARY
from tests.live.conftest import Stack, Watched

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]


def last_words(job: Watched, rank: int) -> str:
    """The rank's own last line, without what differs from run to run (ports, source lines)."""
    text = (job.logs / f"rank-{rank}.log").read_text().strip().split("\n")[-1]
    return re.sub(r"\[?127\.0\.0\.1\]?:\d+|\[[^]]*\.cc:\d+\]", "…", text)


def survivors_of(job: Watched, victim: int) -> dict[int, tuple[int, str]]:
    """Kill one rank; what becomes of the others: exit status and last words."""
    job.training.ranks[victim].kill()
    return {
        rank: (process.wait(timeout=60), last_words(job, rank))
        for rank, process in enumerate(job.training.ranks)
        if rank != victim
    }


def kind(words: str) -> str:
    """Exception and what happened to the connection, which depends on who noticed first."""
    found = re.match(r"rank \d+: (\w+): ", words)
    assert found, words
    return found[1]


def test_survivors_of_a_killed_rank_get_the_same_python_exception_as_without_the_agent(
    stack: Stack, watched: Callable[..., Watched], tmp_path: Path
) -> None:
    with_agent = watched("job-killed")
    until(lambda: "job-killed" in jobs(stack), "the agent's first batch of the job", 60)
    with_agent.seconds_of_steps(3)
    under = survivors_of(with_agent, victim=1)

    os.kill(stack.agent.pid, signal.SIGSTOP)  # a stopped agent attaches to nothing that starts now
    try:
        alone = watched("job-killed-alone")
        assert "job-killed-alone" not in jobs(stack)
        without = survivors_of(alone, victim=1)
    finally:
        os.kill(stack.agent.pid, signal.SIGCONT)
    assert {rank: status for rank, (status, _) in under.items()} == dict.fromkeys((0, 2, 3), 1)
    assert {rank: status for rank, (status, _) in without.items()} == dict.fromkeys((0, 2, 3), 1)
    assert {kind(words) for _, words in under.values()} == {kind(words) for _, words in without.values()}
    assert not any("terminate called" in words for _, words in under.values())


def jobs(stack: Stack) -> str:
    return subprocess.run(
        [sys.executable, "-m", "bot.cli", "jobs"],
        env=os.environ | {"SYSOM_STORE": stack.store},
        capture_output=True,
        text=True,
    ).stdout


def test_killing_the_agent_leaves_the_job_untouched_and_nothing_attached(
    stack: Stack, watched: Callable[..., Watched], tmp_path: Path
) -> None:
    job = watched("job-agent-killed")
    until(lambda: job.name in jobs(stack), "the first agent's watching of the job", 60)
    before = programs()
    with agent_process(stack.url, tmp_path / "agent") as agent:
        until(lambda: programs() - before, "the second agent's programs", 60)
        job.seconds_of_steps(2)
        agent.kill()
        agent.wait()
        until(lambda: not programs() - before, "the kernel's removal of the killed agent's programs", 10)
        job.seconds_of_steps(2)
    assert job.training.running()


def test_ranks_of_torchrun_are_found_and_its_launcher_is_none(root_and_bpf: None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-id", "run-7"]
    command += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "-m",
        "bot.demo.train",
        "--steps",
        "0",
    ]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        discovery = Discovery(LIBRARY)

        def both() -> bool:
            assert launcher.poll() is None
            return {(r.job, r.rank, r.world_size) for r in discovery.scan().values()} >= {
                ("run-7", 0, 2),
                ("run-7", 1, 2),
            }

        until(both, "both ranks of torchrun", 120)
        found = [rank for rank in discovery.scan().values() if rank.job == "run-7"]
        assert len(found) == 2
        assert launcher.pid not in {rank.process.pid for rank in found}
    finally:
        launcher.terminate()
        launcher.wait(timeout=30)
