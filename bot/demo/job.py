"""Starts and ends the small training job of `bot/demo/train.py`: one process per rank."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bot.demo.train import FIRST_STEP

TRAIN = "bot.demo.train"
LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LAST_LINES = 5
"""Of what a rank said, shown when it ended: the exception and where it came from."""


@dataclass
class TrainingJob:
    """A running job. Rank r is ``ranks[r]``."""

    job: str
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    words: Path | None = None
    """Folder of what the ranks say."""

    def log(self, rank: int) -> Path:
        """The file with what a rank says."""
        return self.words / f"rank-{rank}.log" if self.words else Path(os.devnull)

    def last_words(self) -> str:
        """How the ranks that ended did so: their status and the last lines that they said."""
        ends = []
        for rank, process in enumerate(self.ranks):
            if process.poll() is not None:
                lines = self.log(rank).read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
                ends.append("\n  ".join([f"rank {rank} ended with status {process.returncode}", *lines]))
        return "\n".join(ends)

    def trains(self) -> bool:
        """Whether all ranks have done a step, as far as what they say is kept."""
        return all(
            FIRST_STEP in self.log(rank).read_text(errors="replace") for rank in range(len(self.ranks))
        )

    def running(self) -> bool:
        """Whether all ranks run."""
        return all(process.poll() is None for process in self.ranks)

    def stop(self) -> None:
        """End all ranks and wait for them."""
        for process in self.ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self.ranks:
            process.wait()


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on.

    A rank listens on it only after the seconds that importing PyTorch takes: until then the kernel may give one out
    of its own range (ip(7), ip_local_port_range) to any connection, so this one lies below that range.
    """
    lowest = int(LOCAL_PORTS.read_text().split()[0])
    for _ in range(100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", max(1024, lowest - 1 - secrets.randbelow(10_000))))
            port: int = probe.getsockname()[1]
            return port
    raise OSError(errno.EADDRINUSE, "no TCP port of the loopback address is free for a job's ranks to meet")


def start(
    job: str,
    *,
    cpus: Sequence[int] = (-1, -1, -1, -1),
    options: Sequence[str] = (),
    rank_options: Mapping[int, Sequence[str]] | None = None,
    logs: Path | None = None,
    words: Path | None = None,
    script: str | None = None,
) -> TrainingJob:
    """Start one rank per entry of ``cpus`` (−1: any CPU), in a process group of its own: Ctrl-C is for its starter.
    (Not in a session of its own: the kernel shares CPUs out among sessions first, sched(7) "autogroup", and what
    gets in the way of a rank would have half of the CPU at most.)

    ``options`` go to every rank's command line, ``rank_options[r]`` to rank r's; with ``logs`` each rank writes
    its true step times to ``logs/steps-RANK.jsonl``. What it says goes to ``words/rank-RANK.log`` (``words``
    defaults to ``logs``), or nowhere. ``script``: a module that trains likewise, instead of ``bot.demo.train``.
    When one rank cannot be started, those before it are ended.
    """
    started = TrainingJob(job, words=words or logs)
    port = free_port()
    try:
        for rank, cpu in enumerate(cpus):
            command = [sys.executable, "-m", script or TRAIN, "--cpu", str(cpu), "--parent", str(os.getpid())]
            command += [*options, *(rank_options or {}).get(rank, ())]
            if logs:
                command += ["--log", str(logs / f"steps-{rank}.jsonl")]
            environment = rank_environment(os.environ, job, rank, len(cpus), port)
            with started.log(rank).open("wb") as said:
                process = subprocess.Popen(
                    command, env=environment, stdout=said, stderr=said, process_group=0
                )
            started.ranks.append(process)
    except BaseException:
        started.stop()
        raise
    return started


def rank_environment(
    environ: Mapping[str, str], job: str, rank: int, world: int, port: int
) -> dict[str, str]:
    """What torchrun would set for one rank, and none of sysom's settings, which hold secrets."""
    kept = {name: value for name, value in environ.items() if not name.startswith(("SYSOM_", "SLACK_"))}
    return kept | {
        "SYSOM_JOB_ID": job,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
