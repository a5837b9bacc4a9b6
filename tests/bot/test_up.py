"""All on one machine: the pieces of it that need neither root nor a kernel's consent."""

import asyncio
import sys

import pytest

from bot import up
from bot.demo import show
from bot.settings import Settings
from bot.up import AgentFailed
from probes.recording import Recording
from tests.bot.processes import is_gone, until


@pytest.fixture
def said():
    return []


SLACK = {"slack_bot_token": "xoxb-1", "slack_app_token": "xapp-1"}


def test_with_a_slack_there_is_no_demo_and_that_is_said(said):
    assert up._shown(Settings(**SLACK), "", said.append) is None
    assert said == ["A Slack is set: no demo job is started."]


def test_on_a_single_cpu_a_recording_is_shown_and_that_is_said(said, monkeypatch):
    monkeypatch.setattr(show, "places", lambda: None)
    assert isinstance(up._shown(Settings(), "", said.append), Recording)
    assert said[0].startswith("This machine has a single CPU for us")


def test_where_nothing_can_be_watched_a_recording_is_shown_and_why_is_said(said):
    assert isinstance(up._shown(Settings(), "there is no BPF", said.append), Recording)
    assert said == ["Live watching is not possible here: there is no BPF"]


def test_where_all_is_well_a_real_job_is_watched(said, monkeypatch):
    somewhere = show.Places(1, 0, frozenset({1}), "rsync-1")
    monkeypatch.setattr(show, "places", lambda: somewhere)
    assert up._shown(Settings(), "", said.append) == somewhere
    assert said == []


def test_a_demo_writes_to_its_own_folder_unless_a_place_was_set():
    made = up._for_demo(Settings(), "/tmp/x")
    assert (made.state, made.listen) == ("/tmp/x", "127.0.0.1:0")
    kept = up._for_demo(Settings(state="/srv", listen="127.0.0.1:9"), "/tmp/x")
    assert (kept.state, kept.listen) == ("/srv", "127.0.0.1:9")


def test_this_machines_agent_has_a_token_that_the_server_knows():
    made = up._with_token(Settings(node="n", node_tokens={"other": "o"}))
    assert len(made.node_token) >= 32
    assert made.node_tokens == {"other": "o", "n": made.node_token}
    assert up._with_token(Settings(node="n", node_tokens={"n": "t"})).node_token == "t"
    assert up._with_token(Settings(node="n", node_token="t")).node_tokens == {"n": "t"}


def test_the_agent_is_told_what_it_needs_and_no_secret_of_the_servers(tmp_path):
    environ = {"PATH": "/bin", "SLACK_BOT_TOKEN": "hush", "SYSOM_NODE_TOKENS": "a=hush", "SYSOM_CONFIG": "/c"}
    settings = Settings(
        node="n",
        node_token="mine",
        state=str(tmp_path),
        spool_mb=7,
        command_key="ab",
        runtime="/r",
        slack_signing_secret="hush",
        cpu_budget_percent=3,
    )
    told = up._agent_environment(environ, settings, "http://s:1")
    assert told == {
        "PATH": "/bin",
        "SYSOM_CONFIG": "/c",
        "SYSOM_SERVER": "http://s:1",
        "SYSOM_NODE": "n",
        "SYSOM_NODE_TOKEN": "mine",
        "SYSOM_STATE": str(tmp_path),
        "SYSOM_SPOOL_MB": "7",
        "SYSOM_SERVER_CA": "",
        "SYSOM_NODE_TOKEN_FILE": "",
        "SYSOM_COMMAND_KEY": "ab",
        "SYSOM_CPU_BUDGET_PERCENT": "3",
        "SYSOM_MEMORY_BUDGET_MB": "512",
        "SYSOM_EVENTS_BUDGET": "20000",
        "SYSOM_RUNTIME": "/r",
        "SYSOM_METRICS_LISTEN": "",
    }


def test_a_token_in_a_file_is_the_servers_too_and_the_agent_is_told_one_way(tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o600)
    made = up._with_token(Settings(node="n", node_token_file=str(file), state=str(tmp_path)))
    assert made.node_tokens == {"n": "secret"}
    told = up._agent_environment({}, made, "http://s:1")
    assert (told["SYSOM_NODE_TOKEN"], told["SYSOM_NODE_TOKEN_FILE"]) == ("", str(file))


async def an_agent(program: str):
    return await asyncio.create_subprocess_exec(sys.executable, "-c", program)


async def test_an_agent_that_ends_by_itself_ends_all_with_its_status():
    agent = await an_agent("raise SystemExit(2)")
    tasks = [asyncio.create_task(asyncio.Event().wait()), asyncio.create_task(agent.wait())]
    with pytest.raises(AgentFailed, match="ended with status 2"):
        await up._until_stopped(tasks, agent)
    tasks[0].cancel()


async def test_a_demo_that_fails_ends_all_with_its_words():
    agent = await an_agent("import time; time.sleep(600)")

    async def fails():
        raise show.DemoFailed("no ranks")

    tasks = [asyncio.create_task(asyncio.Event().wait()), asyncio.create_task(agent.wait())]
    try:
        with pytest.raises(show.DemoFailed, match="no ranks"):
            await up._until_stopped([*tasks, asyncio.create_task(fails())], agent)
    finally:
        agent.kill()
        await agent.wait()
        tasks[0].cancel()


@pytest.mark.parametrize("deaf", [False, True])
async def test_the_agent_is_told_to_end_and_made_to_when_it_does_not_listen(monkeypatch, tmp_path, deaf):
    mark = tmp_path / "mark"
    listens = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if deaf else ""
    program = f"import pathlib, signal, time; {listens} pathlib.Path({str(mark)!r}).touch(); time.sleep(600)"
    create = asyncio.create_subprocess_exec

    async def stand_in(*command, **named):
        assert command[:4] == (sys.executable, "-m", "bot.cli", "agent")
        return await create(sys.executable, "-c", program, **named)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", stand_in)
    monkeypatch.setattr(up, "AGENT_STOP_S", 0.2 if deaf else 10.0)
    async with up._agent(Settings(state=str(tmp_path)), "http://127.0.0.1:1") as agent:
        await until(mark.exists, "the agent")
    assert is_gone(agent.pid)
    assert agent.returncode == (-9 if deaf else -15)
