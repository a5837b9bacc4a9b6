"""The demo's course: where it puts things, and what it says when it cannot be shown."""

import asyncio
import os
from pathlib import Path

import pytest

from bot.demo import job, show
from bot.demo.show import DemoFailed, Places
from bot.demo.train import FIRST_STEP
from bot.workspace import Workspace
from diagnosis.store import JobInfo

WHERE = Places(rank=2, cpu=1, others=frozenset({0, 3}), intruder="backup-1f")


class Jobs:
    """Knows so many ranks of the demo's job."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    async def jobs(self) -> list[JobInfo]:
        return [JobInfo("other", 4, 4, 1, 0, 0), JobInfo(show.JOB, 4, self.ranks, 1, 0, 0)]

    async def diagnose(self, name: str) -> None:
        raise AssertionError(name)


def test_the_slow_rank_has_its_cpu_for_itself_and_the_fault():
    assert WHERE.cpus() == [0, 3, 1, 3]


def test_places_are_drawn_among_the_cpus_that_we_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6})
    drawn = [show.places() for _ in range(50)]
    assert {place.cpu for place in drawn} == {3, 5, 6}
    assert all(place.others == {3, 5, 6} - {place.cpu} and 0 <= place.rank < show.RANKS for place in drawn)


def test_a_single_cpu_has_no_place_for_a_demo(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert show.places() is None


async def test_a_job_that_ends_while_it_starts_is_said_with_its_last_words(monkeypatch, tmp_path):
    monkeypatch.setattr(job, "TRAIN", "tests.bot.demo.rank")
    async with Workspace() as ws:
        with pytest.raises(DemoFailed, match="rank 1 ended with status 3") as failed:
            await show.demo(ws, Jobs(2), WHERE, tmp_path, lambda _: None)
    assert "ModuleNotFoundError: torch" in str(failed.value)
    assert "pip install 'sysom[demo]'" in str(failed.value)


async def test_ranks_that_nobody_watches_are_said_with_their_number(monkeypatch, tmp_path):
    monkeypatch.setattr(job, "TRAIN", "tests.bot.demo.rank")
    monkeypatch.setattr(show, "START_S", 0.05)
    monkeypatch.setattr(job.TrainingJob, "running", lambda _: True)
    async with Workspace() as ws:
        with pytest.raises(DemoFailed, match=r"after 0 s 3 of 4 ranks of job-123 are watched: sysom doctor"):
            await show.demo(ws, Jobs(3), WHERE, tmp_path, lambda _: None)


async def test_ranks_that_are_watched_and_do_not_train_yet_are_waited_for(monkeypatch, tmp_path):
    """On a busy machine importing PyTorch takes longer than all that the demo shows."""
    monkeypatch.setattr(job, "TRAIN", "tests.bot.demo.rank")
    monkeypatch.setattr(show, "START_S", 0.05)
    monkeypatch.setattr(job.TrainingJob, "running", lambda _: True)
    async with Workspace() as ws:
        with pytest.raises(DemoFailed, match="the ranks of job-123 have not done their first step"):
            await show.demo(ws, Jobs(4), WHERE, tmp_path, lambda _: None)


def test_a_job_trains_when_all_its_ranks_have_done_a_step(tmp_path):
    training = job.TrainingJob("job-1", ranks=[None, None], words=tmp_path)
    for said, trains in (("", False), (f"hello\n{FIRST_STEP}\n", True)):
        (tmp_path / "rank-0.log").write_text(f"{FIRST_STEP}\n")
        (tmp_path / "rank-1.log").write_text(said)
        assert training.trains() is trains


async def test_an_answer_that_does_not_come_is_said(monkeypatch):
    monkeypatch.setattr(show, "ANSWER_S", 0.05)
    async with Workspace() as ws, asyncio.timeout(10):
        with pytest.raises(DemoFailed, match=r"no answer came within 0 s\. In the workspace:"):
            await show._ask(ws, lambda _: None)


def test_what_ranks_say_stays_in_the_demos_folder(tmp_path: Path):
    assert job.TrainingJob("job-1", words=tmp_path).log(3) == tmp_path / "rank-3.log"
    assert job.TrainingJob("job-1").log(3) == Path(os.devnull)
