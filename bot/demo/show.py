"""The demo: a real training job, a real fault beside one rank, the question typed into the workspace, the answer
as it reads in Slack.

Which rank, which CPU, and the name of the process that gets in its way are drawn anew each time.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from bot.demo import job
from bot.slack import Diagnoser
from bot.workspace import Message, Workspace
from probes.recording import Recording, RecordingError, read
from probes.replay import play, retimed, to_server
from probes.shipper import open_client

JOB = "job-123"
RANKS = 4
OPTIONS = ("--device-ms", "25", "--compute", "2")
HOG_THREADS = 4
HEALTHY_S = 20.0
"""How long the job runs undisturbed: what it is compared with."""
SLOW_S = 25.0
"""How long it has been slow when the question is typed."""
START_S = 180.0
"""How long starting four ranks may take: importing PyTorch keeps two cores busy for some seconds."""
ANSWER_S = 60.0
TRADES = ("backup", "indexer", "rsync", "scanner", "compress", "updatedb", "thumbnail", "logship")


@dataclass(frozen=True)
class Places:
    """Where things run: the slow rank shares its CPU with the fault alone."""

    rank: int
    cpu: int
    others: frozenset[int]
    """CPUs of the other ranks, the agent and the server."""
    intruder: str

    def cpus(self) -> list[int]:
        """Rank → CPU."""
        others = sorted(self.others)
        return [self.cpu if rank == self.rank else others[rank % len(others)] for rank in range(RANKS)]


class DemoFailed(RuntimeError):
    """The demo could not be shown; the message says what came of it and what to do."""


def places() -> Places | None:
    """Draw the demo's places; None on a machine with a single CPU, where nobody can be apart."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        return None
    draw = random.SystemRandom()
    cpu = draw.choice(available)
    intruder = f"{draw.choice(TRADES)}-{secrets.token_hex(2)}"
    return Places(draw.randrange(RANKS), cpu, frozenset(available) - {cpu}, intruder)


async def demo(
    workspace: Workspace, diagnoser: Diagnoser, where: Places, folder: Path, say: Callable[[str], None]
) -> None:
    """Run the demo, and keep its job and its fault running until cancelled. What the ranks say goes into
    ``folder``. Raises :class:`DemoFailed`."""
    with _job(where, folder) as training:
        say(
            f"Training job {JOB}: PyTorch DDP over gloo, {RANKS} ranks on this machine's CPUs. Importing PyTorch …"
        )
        await _until_watched(diagnoser, training)
        say(f"All {RANKS} ranks train, and are watched. {HEALTHY_S:.0f} s undisturbed …")
        await asyncio.sleep(HEALTHY_S)
        with _intruder(where):
            say(f"Another process now takes the CPU of one rank. {SLOW_S:.0f} s …")
            await asyncio.sleep(SLOW_S)
            _check_running(training)
            await _ask(workspace, say)
            say(
                f"\nThe truth: process {where.intruder!r} was put on CPU {where.cpu} beside rank {where.rank}.\n"
                f"Go on typing at {workspace.url} (try /sysom jobs). Ctrl-C ends everything."
            )
            while training.running():  # noqa: ASYNC110 - processes end without an event of ours
                await asyncio.sleep(1)
            say(f"{JOB} has ended:\n{training.last_words()}")


def recording() -> Recording:
    """A recording of this demo, made by ``sysom record``. Raises :class:`probes.recording.RecordingError`."""
    with resources.as_file(resources.files("bot.demo").joinpath("recorded", "contention.sysomrec")) as path:
        return read(path)


async def replayed(
    workspace: Workspace, shown: Recording, server: tuple[str, str], say: Callable[[str], None]
) -> None:
    """The demo where nothing can be watched: a recorded run goes through the server's door, then the same
    question. ``server``: its URL and the token of the recording's node. Raises :class:`DemoFailed`."""
    made = time.strftime("%-d %B %Y", time.gmtime(shown.header.made_ns / 1e9))
    say(
        f"So this is a recording instead, of a real run on {made} (Linux {shown.header.kernel}, "
        f"{shown.header.cpus} CPUs, {len(shown.batches)} s), played as if it ended now. All else is as ever."
    )
    stop = threading.Event()

    def play_all() -> int:
        with open_client(*server) as client:
            batches = retimed([shown], time.time_ns())
            return play(batches, to_server(client, wait=stop.wait), live=False, wait=stop.wait)

    try:
        say(f"{await asyncio.to_thread(play_all)} batches are stored.")
    except (RecordingError, ValueError) as error:
        raise DemoFailed(f"the recording cannot be played: {error}") from error
    finally:
        stop.set()
    await _ask(workspace, say)
    say(
        f"\nThe truth, noted when it was recorded: {shown.header.note}\n"
        f"Go on typing at {workspace.url} (try /sysom jobs). Ctrl-C ends everything."
    )


async def _ask(workspace: Workspace, say: Callable[[str], None]) -> None:
    person = workspace.person("ada")
    line = f"/sysom diagnose {JOB}"
    say(f"\n#training  ada types: {line}\n")
    channel = workspace.channel("training")
    before = {message.ts for message in channel.messages}
    await person.command(line, channel=channel)

    def answer() -> Message | None:
        """The first verdict since the question."""
        return next((new for new in channel.messages if new.ts not in before and is_answer(new)), None)

    try:
        say(workspace.plain(await workspace.wait_for(answer, timeout=ANSWER_S)))
    except TimeoutError as error:
        raise DemoFailed(f"no answer came within {ANSWER_S:.0f} s. In the workspace:\n{error}") from error


def is_answer(message: Message) -> bool:
    """Whether this is a verdict: those begin with a header; progress and refusals do not."""
    return bool(message.blocks) and message.blocks[0]["type"] == "header"


async def _until_watched(diagnoser: Diagnoser, training: job.TrainingJob) -> None:
    seen = 0
    try:
        async with asyncio.timeout(START_S):
            while seen < RANKS or not await asyncio.to_thread(training.trains):
                _check_running(training)
                seen = max((info.ranks_seen for info in await diagnoser.jobs() if info.job == JOB), default=0)
                await asyncio.sleep(0.5)
    except TimeoutError as error:
        if seen == RANKS:
            raise DemoFailed(
                f"after {START_S:.0f} s the ranks of {JOB} have not done their first step: this machine is very "
                "busy, or PyTorch does not work here; try it again later"
            ) from error
        raise DemoFailed(
            f"after {START_S:.0f} s {seen} of {RANKS} ranks of {JOB} are watched: sysom doctor says what this "
            "machine lacks, sysom -v up --demo what the agent does"
        ) from error


def _check_running(training: job.TrainingJob) -> None:
    if not training.running():
        raise DemoFailed(
            f"the training job {JOB} has ended:\n{training.last_words()}\n"
            "It needs PyTorch: pip install 'sysom[demo]'"
        )


@contextmanager
def _job(where: Places, folder: Path) -> Iterator[job.TrainingJob]:
    training = job.start(JOB, cpus=where.cpus(), options=OPTIONS, words=folder)
    try:
        yield training
    finally:
        training.stop()


@contextmanager
def _intruder(where: Places) -> Iterator[None]:
    command = [sys.executable, "-m", "bot.demo.hog", "--name", where.intruder, "--cpu", str(where.cpu)]
    process = subprocess.Popen(
        [*command, "--threads", str(HOG_THREADS), "--parent", str(os.getpid())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is for the demo, which ends this; for the session see bot/demo/job.py
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()
