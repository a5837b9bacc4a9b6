"""The server as a whole: agents in, questions out, and an end that waits for nobody for long."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from bot import server
from bot.server import running_server, slack_bot
from bot.settings import Settings
from bot.slack import SlackAway, SlackRefused, running_bot
from bot.worker import WorkerDied
from bot.workspace import Workspace
from diagnosis.orders import signer
from diagnosis.store import UnknownJob, open_store
from probes import codec
from probes.records import ORDERS_CONTEXT, Command, CommandKind, Event, Orders
from tests.bot import errands
from tests.bot.processes import is_gone, until
from tests.bot.slack.modes import found
from tests.probes.batches import a_batch


@pytest.fixture
def settings(tmp_path):
    return Settings(state=str(tmp_path), listen="127.0.0.1:0", node_tokens={"node-a": "token"})


@pytest.fixture
async def running(settings):
    async with running_server(settings) as running:
        yield running


async def send(running, *seconds, **changes):
    """The replies."""
    said = []
    headers = {"Authorization": "Bearer token"}
    async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as client:
        for second in seconds:
            wire = codec.encode(a_batch(second, **changes))
            answer = await client.post(f"{running.url}/api/v1/batches", content=wire)
            assert answer.status_code == 200, answer.text
            said.append(answer.json())
    return said


def children(word, parent=None):
    """Processes that this one (or ``parent``) started, with a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            started_by = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if started_by == (parent or os.getpid()) and word in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


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


async def test_after_the_writer_was_killed_batches_are_stored_as_before_and_none_twice(running, caplog):
    await send(running, 0)
    (writer,) = await asyncio.to_thread(children, "diagnosis.writer")
    os.kill(writer, signal.SIGKILL)
    await send(running, 0, 1)
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        health = (await client.get(f"{running.url}/healthz")).json()
    assert health["counts"] == {"duplicate": 1, "stored": 2}


async def test_what_runs_is_measured(running):
    await send(running, 0)
    await running.diagnoses.diagnose("job-1")
    with pytest.raises(UnknownJob):
        await running.diagnoses.diagnose("job-2")
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:

        async def text():
            return (await client.get(f"{running.url}/metrics")).text

        while "sysom_store_size_bytes" not in await text():  # noqa: ASYNC110 - it is looked at some time
            await asyncio.sleep(0.01)
        lines = (await text()).splitlines()
    for line in (
        'sysom_diagnoses_total{result="finished"} 1.0',
        'sysom_diagnoses_total{result="unknown_job"} 1.0',
        'sysom_diagnoses_total{result="failed"} 0.0',
        "sysom_diagnoses_running 0.0",
        "sysom_diagnosis_seconds_count 2.0",
        'sysom_batches_total{outcome="stored",reason=""} 1.0',
    ):
        assert line in lines


async def test_slacks_queue_and_acknowledgements_are_measured(running):
    async with (
        Workspace() as ws,
        running_bot(
            ws.bot_token, ws.app_token, running.diagnoses, base_url=ws.api_url, meter=running.metrics
        ),
    ):
        assert acknowledgements(running) == 0.0
        assert (await ws.person("ada").command("/sysom diagnose job-9")).acknowledged
        # Three requests of Slack: the command, the bot's own message and that it was changed.
        await until(lambda: acknowledgements(running) == 3.0, "all acknowledgements' being counted")
        await until(lambda: running.metrics.slack_queue() <= 1, "a queue that is worked off")


def acknowledgements(running) -> float:
    name = "sysom_slack_acknowledgement_seconds_count "
    lines = running.metrics.text().decode().splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


async def test_slacks_requests_reach_the_bot_at_the_server_that_takes_batches(settings):
    """HTTP mode as `sysom serve` runs it: one address, agents and a Slack that signs."""
    secret = "8f742231b10e8888abcd99yyyzzz85a5"
    settings = msgspec.structs.replace(settings, slack_signing_secret=secret)
    async with running_server(settings) as running:
        address = f"{running.url}/slack/events"
        async with Workspace(request_url=address, signing_secret=secret) as ws:
            ada = ws.person("ada")
            assert not (await ada.command("/sysom diagnose job-1")).acknowledged  # no bot yet
            home = msgspec.structs.replace(settings, slack_bot_token=ws.bot_token)
            async with slack_bot(home, running, base_url=ws.api_url):
                await send(running, 0, 1, 2)
                assert (await ada.command("/sysom diagnose job-1")).acknowledged
                await ws.wait_for(lambda: found(ws, "training", "1 of 4 ranks seen"))
                assert (await ada.command("/sysom diagnose jab-1")).acknowledged
                await ws.wait_for(lambda: found(ws, "training", "Did you mean job-1?"))
                ws.faults.signature("wrong")
                assert not (await ada.command("/sysom jobs")).acknowledged
            assert not (await ada.command("/sysom jobs")).acknowledged  # the bot is gone, the server is not
            await send(running, 3)
    assert running.inbound.refused == {"no_bot": 2, "signature": 1}


async def test_a_command_goes_out_signed_and_its_outcome_comes_back(running, settings):
    now = time.time_ns()
    store = await asyncio.to_thread(open_store, settings.store_url())
    try:
        command = Command(id="c1", kind=CommandKind.CAPTURE_START, job="job-1", seconds=30)
        store.add_command("node-a", command, now, now + 10**12)
        (reply,) = await send(running, 0)
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer(settings.command_key_file()).public))
        public.verify(bytes.fromhex(reply["signature"]), ORDERS_CONTEXT + reply["orders"].encode())
        assert msgspec.json.decode(reply["orders"], type=Orders).commands == [command]
        done = Event(kind="command-done", at_ns=0, detail="c1 until 12:00")
        (reply,) = await send(running, 1, events=[done])
        assert reply["orders"] == ""
        (asked,) = store.commands(10)
        assert (asked.outcome, asked.words) == ("done", "until 12:00")
    finally:
        await asyncio.to_thread(store.close)


async def test_a_token_is_replaced_while_batches_flow_and_none_is_refused(tmp_path):
    server_file, agent_file = tmp_path / "tokens.toml", tmp_path / "token"

    def give(path, text):
        beside = path.with_suffix(".new")
        beside.write_text(text)
        beside.chmod(0o600)
        beside.replace(path)

    give(server_file, 'node-a = "old"')
    give(agent_file, "old")
    settings = Settings(
        state=str(tmp_path / "state"), listen="127.0.0.1:0", node_tokens_file=str(server_file)
    )
    async with running_server(settings) as running, httpx.AsyncClient(trust_env=False, timeout=60) as client:
        said = []

        async def post(token, second):
            return await client.post(
                f"{running.url}/api/v1/batches",
                content=codec.encode(a_batch(second)),
                headers={"Authorization": f"Bearer {token}"},
            )

        async def flow():
            while True:
                said.append((await post(agent_file.read_text(), len(said))).status_code)

        async def some_more():
            count = len(said)
            await until(lambda: len(said) > count + 5 or flowing.done(), "more batches")

        flowing = asyncio.create_task(flow())
        await some_more()
        give(server_file, 'node-a = ["new", "old"]')  # first the server knows both,
        await some_more()
        give(agent_file, "new")  # then the agent takes the new one,
        await some_more()
        give(server_file, 'node-a = "new"')  # then the old one goes
        async with asyncio.timeout(20):
            while (await post("old", 0)).status_code != 401:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await some_more()
        flowing.cancel()
    assert set(said) == {200}


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


async def test_while_slack_is_away_batches_are_taken_and_the_bot_comes_when_it_is_back(caplog):
    tries = []

    @contextlib.asynccontextmanager
    async def bot():
        tries.append(None)
        if len(tries) < 3:
            raise SlackAway("https://slack.com/api/ is not reached")
        yield None

    stopped = asyncio.create_task(asyncio.Event().wait())
    async with contextlib.AsyncExitStack() as stack:
        await server.when_there(bot, stack, stopped, first_wait_s=0.001)
    stopped.cancel()
    assert len(tries) == 3
    assert [r.message.count("is not reached") for r in caplog.records if "no Slack yet" in r.message] == [1]


async def test_the_server_ends_though_slack_does_not_answer_just_then():
    left = []

    @contextlib.asynccontextmanager
    async def bot():
        stopped.cancel()
        try:
            await asyncio.Event().wait()
        finally:
            left.append("cleanly")
        yield None

    stopped = asyncio.create_task(asyncio.Event().wait())
    async with asyncio.timeout(10), contextlib.AsyncExitStack() as stack:
        await server.when_there(bot, stack, stopped)
    assert left == ["cleanly"]


async def test_what_is_wrong_with_the_tokens_ends_the_server():
    @contextlib.asynccontextmanager
    async def bot():
        raise SlackRefused("SLACK_BOT_TOKEN: Slack says invalid_auth")
        yield

    stopped = asyncio.create_task(asyncio.Event().wait())
    with pytest.raises(SlackRefused):
        await server.when_there(bot, contextlib.AsyncExitStack(), stopped)
    stopped.cancel()
