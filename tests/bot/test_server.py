"""The server as a whole: agents in, questions out, and an end that waits for nobody for long."""

import asyncio
import os
import signal
import time

import httpx
import pytest

from bot import server
from bot.server import running_server
from bot.settings import Settings
from bot.worker import WorkerDied
from diagnosis.store import UnknownJob
from probes import records
from tests.bot import errands
from tests.bot.processes import is_gone, until
from tests.probes.batches import a_batch


@pytest.fixture
def settings(tmp_path):
    return Settings(state=str(tmp_path), listen="127.0.0.1:0", node_tokens={"node-a": "token"})


@pytest.fixture
async def running(settings):
    async with running_server(settings) as running:
        yield running


async def send(running, *seconds):
    async with httpx.AsyncClient(trust_env=False, headers={"Authorization": "Bearer token"}) as client:
        for second in seconds:
            said = await client.post(f"{running.url}/api/v1/batches", content=records.encode(a_batch(second)))
            assert said.status_code == 200, said.text


async def test_what_agents_send_is_answered_from(running):
    await send(running, 0, 1, 2)
    (info,) = await running.diagnoses.jobs()
    assert (info.job, info.ranks_seen) == ("job-1", 1)
    verdict = await running.diagnoses.diagnose("job-1")
    assert (verdict.status, verdict.ranks_seen) == ("insufficient", 1)


async def test_two_questions_at_once_are_both_answered(running):
    await send(running, 0)
    good, unknown = await asyncio.gather(
        running.diagnoses.diagnose("job-1"), running.diagnoses.diagnose("job-2"), return_exceptions=True
    )
    assert good.job == "job-1"
    assert isinstance(unknown, UnknownJob)
    assert unknown.nearest == ["job-1"]


async def test_after_its_process_was_killed_the_next_question_is_answered(running):
    await send(running, 0)
    os.kill(running.diagnoses._workers.pids[0], signal.SIGKILL)
    assert (await running.diagnoses.diagnose("job-1")).job == "job-1"


async def test_closing_while_a_diagnosis_hangs(settings, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    monkeypatch.setattr(server, "diagnose_job", errands.hang_diagnosing)
    async with running_server(settings) as running:
        question = asyncio.create_task(running.diagnoses.diagnose(str(mark)))
        pid = int(await until(lambda: mark.exists() and mark.read_text(), "the diagnosis that hangs"))
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert is_gone(pid)
    with pytest.raises(WorkerDied, match="the server is stopping"):
        await question


async def test_an_address_that_is_taken_leaves_nothing_behind(running, settings, tmp_path):
    taken = running.url.removeprefix("http://")
    other = Settings(state=str(tmp_path / "other"), listen=taken)
    with pytest.raises(OSError, match="in use"):
        async with running_server(other):
            raise AssertionError("two servers at one address")


async def test_serving_without_a_slack_runs_until_told_and_says_that_there_is_none(settings, caplog):
    stop = asyncio.Event()
    stop.set()
    await server.serve(settings, stop)
    assert "no Slack" in caplog.text
