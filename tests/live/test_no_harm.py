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

from bench.kills import held, kill
from bench.stack import agent_process, until
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
    with agent_process(stack.url, tmp_path / "agent") as agent:
        until(lambda: held(agent.pid), "the second agent's programs", 60)
        job.seconds_of_steps(2)
        kill(agent)
        job.seconds_of_steps(2)
    assert job.training.running()
