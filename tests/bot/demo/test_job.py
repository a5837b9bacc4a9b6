"""The demo's processes: what they are told, what they say, and that none is left behind."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bot.demo import job
from tests.bot.processes import is_gone, wait_until


def test_a_rank_is_told_its_place_and_none_of_our_secrets():
    environ = {
        "PATH": "/bin",
        "SYSOM_NODE_TOKENS": "a=hush",
        "SLACK_BOT_TOKEN": "hush",
        "SYSOM_JOB_ID": "other",
    }
    told = job.rank_environment(environ, "job-1", 2, 4, 1234)
    assert "hush" not in str(told)
    assert told["PATH"] == "/bin"
    assert [told[name] for name in ("SYSOM_JOB_ID", "RANK", "WORLD_SIZE", "MASTER_PORT")] == [
        "job-1",
        "2",
        "4",
        "1234",
    ]


def test_the_port_where_ranks_meet_is_none_that_the_kernel_gives_to_a_connection():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.create_server(("127.0.0.1", job.free_port())) as taken:
        assert taken.getsockname()[1] < lowest
        ports = {job.free_port() for _ in range(50)}
        assert len(ports) > 40
        assert taken.getsockname()[1] not in ports


@pytest.fixture
def training(monkeypatch):
    """Stands in for bot/demo/train.py: says which rank it is, rank 1 fails, the others sleep."""
    module = "tests.bot.demo.rank"
    monkeypatch.setattr(job, "TRAIN", module)


@pytest.mark.usefixtures("training")
def test_each_rank_has_a_process_group_of_its_own_and_its_words_are_kept(tmp_path):
    running = job.start("job-1", cpus=[-1, -1], words=tmp_path)
    try:
        assert running.ranks[1].wait(20) == 3
        wait_until(lambda: "rank 0" in (tmp_path / "rank-0.log").read_text(), "rank 0")
        pid = running.ranks[0].pid
        assert (os.getpgid(pid), os.getsid(pid)) == (pid, os.getsid(0))
        assert not running.running()
        assert running.last_words() == "\n  ".join(
            [
                "rank 1 ended with status 3",
                "line 5",
                "line 6",
                "line 7",
                "line 8",
                "ModuleNotFoundError: torch",
            ]
        )
    finally:
        running.stop()
    assert all(rank.returncode is not None for rank in running.ranks)


@pytest.mark.usefixtures("training")
def test_ranks_that_were_started_are_ended_when_a_later_one_cannot_be(monkeypatch, tmp_path):
    started = []
    popen = subprocess.Popen

    def third_fails(*arguments, **named):
        if len(started) == 2:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(popen(*arguments, **named))
        return started[-1]

    monkeypatch.setattr(job.subprocess, "Popen", third_fails)
    with pytest.raises(OSError, match="temporarily unavailable"):
        job.start("job-1", words=tmp_path)
    assert len(started) == 2
    assert all(rank.returncode is not None for rank in started)


STARTER = """
import sys, subprocess, time
process = subprocess.Popen([sys.executable, "-m", "bot.demo.hog", "--name", "x", "--cpu", sys.argv[1],
                            "--parent", sys.argv[2] if len(sys.argv) > 2 else str(__import__("os").getpid())])
print(process.pid, flush=True)
time.sleep(600)
"""


def test_the_fault_ends_with_its_starter_however_that_ends():
    cpu = str(min(os.sched_getaffinity(0)))
    with subprocess.Popen([sys.executable, "-c", STARTER, cpu], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout
        pid = int(starter.stdout.readline())
        starter.kill()
    wait_until(lambda: is_gone(pid), "the fault's end")


def test_the_fault_does_not_begin_when_its_starter_is_gone_already():
    cpu = str(min(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "bot.demo.hog", "--name", "x", "--cpu", cpu, "--parent", "1"]
    ended = subprocess.run(command, timeout=20, check=False, capture_output=True, text=True)
    assert "is gone" in ended.stderr
