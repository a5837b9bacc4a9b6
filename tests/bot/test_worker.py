"""The worker: answers, survives what kills it, ends what nobody waits for, and never outlives its program."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time

import pytest

from bot import worker as room
from bot.worker import NICE, Worker, WorkerDied, Workers
from diagnosis.store import StoreError, UnknownJob
from tests.bot import errands
from tests.bot.processes import is_gone, until, wait_until

light = functools.partial(Worker, "tests.bot.errands")
"""A worker that imports next to nothing: the start of others is spent on SciPy."""


@pytest.fixture(autouse=True)
def all_light(monkeypatch):
    monkeypatch.setattr(room, "Worker", light)


@pytest.fixture
async def worker():
    worker = light()
    yield worker
    await worker.close()


async def test_it_works_in_a_process_of_its_own_and_keeps_it(worker):
    await worker.start()
    first = await worker.call(errands.pid)
    assert first != os.getpid()
    assert first == worker.pid == await worker.call(errands.pid)


async def test_calls_at_once_take_turns(worker):
    assert await asyncio.gather(*(worker.call(abs, -number) for number in range(5))) == [0, 1, 2, 3, 4]


async def test_what_a_library_prints_is_no_answer_and_answers_may_be_large(worker):
    assert len(await worker.call(errands.chatter, 5_000_000)) == 5_000_000


async def test_errors_come_back_as_they_are_with_the_place_where_they_arose(worker):
    with pytest.raises(UnknownJob, match="did you mean job-1") as caught:
        await worker.call(errands.fail, UnknownJob("job", ["job-1"]))
    assert caught.value.nearest == ["job-1"]
    with pytest.raises(StoreError, match="full") as refused:
        await worker.call(errands.fail, StoreError("the disk is full"))
    assert "errands.py" in refused.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Unsendable: 7: no way back"):
        await worker.call(errands.fail_unsendably)
    assert await worker.call(abs, -1) == 1


async def test_secrets_are_not_handed_on(worker, monkeypatch):
    monkeypatch.setenv("SYSOM_NODE_TOKENS", "node-1=hush")
    monkeypatch.setenv("SLACK_BOT_TOKEN", "xoxb-hush")
    assert "hush" not in str(await worker.call(errands.environment))


async def test_a_worker_that_was_killed_while_idle_is_made_anew(worker):
    killed = await worker.call(errands.pid)
    os.kill(killed, signal.SIGKILL)
    assert await worker.call(errands.pid) != killed


async def test_a_call_that_lost_its_worker_is_tried_once_more(worker, tmp_path):
    assert await worker.call(errands.die_the_first_time, tmp_path / "mark") == "alive"


async def test_a_call_that_kills_two_workers_is_given_up_and_the_next_one_is_answered(worker, tmp_path):
    with pytest.raises(WorkerDied, match=r"ended 2 times .* with status 9\): was it killed because memory"):
        await worker.call(errands.die, tmp_path / "mark")
    assert (tmp_path / "mark").read_text() == "xx"
    assert await worker.call(abs, -1) == 1


async def test_a_call_that_is_cancelled_ends_its_worker_and_the_next_one_is_answered(worker, tmp_path):
    mark = tmp_path / "mark"
    hanging = asyncio.create_task(worker.call(errands.hang, mark))
    waiting = asyncio.create_task(worker.call(errands.pid))
    pid = int(await until(lambda: mark.exists() and mark.read_text(), "the call that hangs"))
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await waiting != pid
    await until(lambda: is_gone(pid), "the end of the worker that hung")


async def test_closing_ends_a_call_that_hangs(worker, tmp_path):
    mark = tmp_path / "mark"
    hanging = asyncio.create_task(worker.call(errands.hang, mark))
    pid = int(await until(lambda: mark.exists() and mark.read_text(), "the call that hangs"))
    async with asyncio.timeout(10):
        await worker.close()
    with pytest.raises(WorkerDied, match="the server is stopping"):
        await hanging
    assert is_gone(pid)


async def test_closing_with_patience_lets_it_finish_and_takes_no_more(worker, tmp_path):
    mark = tmp_path / "mark"
    await worker.start()
    calls = [asyncio.create_task(worker.call(errands.note, mark, word)) for word in ("a", "b")]
    await until(mark.exists, "the first call")
    pid = worker.pid
    await worker.close(20.0)
    assert await asyncio.gather(*calls) == [None, None]
    assert (mark.read_text(), is_gone(pid)) == ("ab", True)
    with pytest.raises(WorkerDied, match="the server is stopping"):
        await worker.call(abs, -1)


async def test_closing_with_too_little_patience_ends_it_all_the_same(worker, tmp_path):
    mark = tmp_path / "mark"
    hanging = asyncio.create_task(worker.call(errands.hang, mark))
    pid = int(await until(lambda: mark.exists() and mark.read_text(), "the call that hangs"))
    async with asyncio.timeout(10):
        await worker.close(0.1)
    with pytest.raises(WorkerDied):
        await hanging
    assert is_gone(pid)


async def test_it_steps_aside_for_the_event_loop(worker):
    assert await worker.call(os.nice, 0) == os.nice(0) + NICE


async def test_it_is_busy_while_a_call_runs(worker, tmp_path):
    mark = tmp_path / "mark"
    assert worker.busy_since is None
    hanging = asyncio.create_task(worker.call(errands.hang, mark))
    await until(mark.exists, "the call that hangs")
    assert 0 <= time.monotonic() - worker.busy_since < 60
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    assert worker.busy_since is None


async def test_several_work_at_a_time_and_the_others_wait(tmp_path):
    workers = Workers(2)
    marks = [tmp_path / str(number) for number in range(3)]

    async def work(mark):
        async with workers.turn() as worker:
            await worker.call(errands.hang, mark)

    tasks = [asyncio.create_task(work(mark)) for mark in marks]
    try:
        await until(lambda: sum(mark.exists() for mark in marks) == 2, "two that work")
        assert (workers.running, workers.waiting, len(set(workers.pids))) == (2, 1, 2)
        tasks[0].cancel()
        await until(marks[2].exists, "the turn of the third")
        assert (workers.running, workers.waiting) == (2, 0)
    finally:
        await workers.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert workers.running == 0


async def test_one_after_the_other_is_done_by_one_that_is_warm():
    workers = Workers(4)
    try:
        for _ in range(3):
            async with workers.turn() as worker:
                await worker.call(abs, -1)
        assert len(workers.pids) == 1
    finally:
        await workers.close()


PROGRAM = """
import asyncio, sys
from pathlib import Path
from bot.worker import Worker
from tests.bot import errands

async def main():
    await Worker("tests.bot.errands").call(errands.hang, Path(sys.argv[1]))

asyncio.run(main())
"""


def test_a_worker_that_is_busy_ends_with_its_program_when_that_is_killed(tmp_path):
    mark = tmp_path / "mark"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, mark]) as program:
        pid = int(wait_until(lambda: mark.exists() and mark.read_text(), "the call that hangs"))
        program.kill()
    wait_until(lambda: is_gone(pid), "the worker's end")
