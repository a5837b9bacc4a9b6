"""Starts and ends the small training job of `bot/demo/train.py`: one process per rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TRAIN = "bot.demo.train"


@dataclass
class TrainingJob:
    """A running job. Rank r is ``ranks[r]``."""

    job: str
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)

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
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(
    job: str,
    *,
    cpus: Sequence[int] = (-1, -1, -1, -1),
    options: Sequence[str] = (),
    rank_options: Mapping[int, Sequence[str]] | None = None,
    logs: Path | None = None,
    output: int = subprocess.DEVNULL,
) -> TrainingJob:
    """Start one rank per entry of ``cpus`` (−1: any CPU).

    ``options`` go to every rank's command line, ``rank_options[r]`` to rank r's; with ``logs`` each rank writes
    its true step times to ``logs/steps-RANK.jsonl`` and its words to ``logs/rank-RANK.log``.
    """
    world = len(cpus)
    started = TrainingJob(job)
    port = free_port()
    for rank, cpu in enumerate(cpus):
        environment = os.environ | {
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
        command = [
            sys.executable,
            "-m",
            TRAIN,
            "--cpu",
            str(cpu),
            *options,
            *(rank_options or {}).get(rank, ()),
        ]
        if logs:
            command += ["--log", str(logs / f"steps-{rank}.jsonl")]
            with (logs / f"rank-{rank}.log").open("wb") as words:
                process = subprocess.Popen(command, env=environment, stdout=words, stderr=words)
        else:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        started.ranks.append(process)
    return started
