"""The command line: statuses, errors in words, help that shows how."""

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import termios

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from bot import cli, terminal
from diagnosis import service
from diagnosis.store import StoreError
from diagnosis.store.sqlite import SqliteStore
from diagnosis.verdict import Verdict, Window
from tests.bot.processes import wait_until
from tests.diagnosis.store.arrivals import add
from tests.probes.batches import a_batch


def ran(*arguments: str, **environ: str):
    return CliRunner().invoke(cli.main, arguments, env=environ, prog_name="sysom")


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """No setting of the machine's reaches a test; the state folder is an empty one."""
    for name in list(os.environ):
        if name.startswith(("SYSOM_", "SLACK_")):
            monkeypatch.delenv(name)
    config = tmp_path / "sysom.toml"
    config.write_text("")
    monkeypatch.setenv("SYSOM_CONFIG", str(config))
    monkeypatch.setenv("SYSOM_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def store(state):
    store = SqliteStore(state / "sysom.db")
    add(store, *[a_batch(second) for second in range(3)])
    store.close()
    return state / "sysom.db"


# --- help


def test_help_names_the_commands_in_the_order_in_which_one_meets_them():
    lines = ran("--help").output.partition("Commands:")[2].splitlines()
    named = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert named == [command.name for command in cli.COMMANDS]
    assert named[:3] == ["up", "diagnose", "jobs"]


@pytest.mark.parametrize("command", [command.name for command in cli.COMMANDS])
def test_each_commands_help_shows_an_example_and_no_hidden_switch(command):
    help_ = ran(command, "--help")
    assert help_.exit_code == 0
    assert "Example: " in help_.output
    assert f"sysom {command}" in " ".join(help_.output.partition("Example: ")[2].split())
    assert "end-with-parent" not in help_.output


# --- diagnose


@pytest.mark.parametrize(
    ("status", "exit_code"), [("healthy", 0), ("slow", 1), ("hang", 1), ("insufficient", 3)]
)
def test_the_exit_status_says_what_the_verdict_says(monkeypatch, status, exit_code):
    verdict = Verdict(
        job="job-1",
        window=Window(start="2026-01-02T03:04:05.000Z", end="2026-01-02T03:14:05.000Z"),
        status=status,
    )
    monkeypatch.setattr(service, "diagnose_job", lambda *_, **__: verdict)
    assert ran("diagnose", "job-1").exit_code == exit_code
    shown = ran("diagnose", "job-1", "--json")
    assert (shown.exit_code, f'"status": "{status}"' in shown.output) == (exit_code, True)


def test_the_window_is_handed_on(monkeypatch):
    asked = []

    def diagnose(url, job, *, now_ns, last_ns):
        asked.append((job, last_ns))
        raise StoreError("enough")

    monkeypatch.setattr(service, "diagnose_job", diagnose)
    ran("diagnose", "job-1")
    ran("diagnose", "job-1", "--last", "90s")
    assert asked == [("job-1", None), ("job-1", 90 * 10**9)]


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("10m", 600), ("2h", 7200), ("1d", 86_400), ("0090s", 90)]
)
def test_windows(text, seconds):
    assert terminal.window_ns(text) == seconds * 10**9


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "1.5h", "10 m", "10M", "٣m", "9999999h", "10min"])
def test_what_is_no_time_is_refused_with_examples(text):
    with pytest.raises(click.BadParameter, match="as in 30s, 10m, 2h"):
        terminal.window_ns(text)
    assert ran("diagnose", "job-1", "--last", text).exit_code == 2


def test_a_window_that_holds_too_few_steps_is_refused():
    with pytest.raises(click.BadParameter, match="29s is too short: 30s at the least"):
        terminal.window_ns("29s")


def test_a_known_job_without_data_in_the_window_is_not_enough_evidence(store):
    result = ran("diagnose", "job-1", "--last", "10m")
    assert result.exit_code == 3
    assert "othing of job-1 came in the last 10 minutes; its newest data is" in result.output


def test_jobs_lists_what_the_store_knows(store):
    result = ran("jobs")
    assert result.exit_code == 0
    assert "job-1" in result.output


# --- errors


def test_a_store_that_is_not_there_is_said_with_status_2():
    for command in (["diagnose", "job-1"], ["jobs"]):
        result = ran(*command)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("sysom: there is no store at ")


def test_an_unknown_job_names_known_ones(store):
    result = ran("diagnose", "xyz")
    assert (result.exit_code, result.stderr) == (2, "sysom: no job named 'xyz' is known; known jobs: job-1\n")


def test_a_setting_that_cannot_be_used_is_said():
    result = ran("jobs", SYSOM_LISTN="x")
    assert result.exit_code == 2
    assert result.stderr.startswith("sysom: SYSOM_LISTN: no such setting")


def test_damaged_columns_are_said_with_status_2(store):
    with sqlite3.connect(store) as db:
        db.execute("UPDATE tail SET columns = x'93'")
    result = ran("diagnose", "job-1")
    assert result.exit_code == 2
    assert "holds damaged columns" in result.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            PermissionError(13, "Permission denied", "/home/bob/x"),
            "[Errno 13] Permission denied: '/home/bob/x'",
        ),
        (ValueError("no such thing"), "unexpected ValueError: no such thing (sysom -v … shows where)"),
        (AssertionError(), "unexpected AssertionError (sysom -v … shows where)"),
        (TimeoutError(), "unexpected TimeoutError (sysom -v … shows where)"),
        (ModuleNotFoundError("No module named 'scipy'", name="scipy"), "pip install 'sysom[server]'"),
        (StoreError("job \x1b[31mred"), "sysom: job �[31mred\n"),
    ],
)
@pytest.mark.parametrize("command", [["diagnose", "job-1"], ["jobs"]])
def test_whatever_fails_ends_with_words_and_status_2(monkeypatch, error, words, command):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("diagnosis.store.open_store", fail)
    monkeypatch.setattr(service, "open_store", fail)
    result = ran(*command)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_an_interruption_is_not_a_slow_job(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(service, "diagnose_job", interrupted)
    assert ran("diagnose", "job-1").exit_code == 130


def test_tokens_that_are_not_set_are_asked_for():
    assert "SYSOM_NODE_TOKEN is not set" in ran("agent").stderr
    assert "SYSOM_NODE_TOKENS is not set" in ran("serve").stderr


def test_an_address_that_is_taken_is_said(state):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        result = ran("serve", SYSOM_LISTEN=place, SYSOM_NODE_TOKENS="a=b")
    assert result.exit_code == 2
    assert "Address already in use" in result.stderr


# --- the terminal


def logged(message: str, *arguments: object, exc_info: object = None) -> str:
    record = logging.LogRecord("x", logging.WARNING, "", 0, message, arguments, exc_info)  # type: ignore[arg-type]
    return terminal.PrintableFormatter("%(levelname)s %(message)s").format(record)


def test_a_log_line_cannot_act_on_the_terminal_nor_feign_another_line():
    assert logged("process %s", "\x1b]0;own\x07ed\nERROR all is lost\r") == (
        "WARNING process �]0;own�ed�ERROR all is lost�"
    )


def test_a_traceback_keeps_its_lines():
    try:
        raise ValueError("bad \x1b[2J")
    except ValueError as error:
        text = logged("failed", exc_info=(type(error), error, error.__traceback__))
    assert text.startswith("WARNING failed\nTraceback")
    assert text.endswith("ValueError: bad �[2J")


# --- whatever is typed

TIMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8) | st.tuples(
    st.integers(-5, 10**8), st.sampled_from(["s", "m", "h", "d", "", "w"])
).map(lambda pair: f"{pair[0]}{pair[1]}")


@given(TIMES)
def test_any_time_is_read_exactly_or_refused(text):
    try:
        ns, words = terminal.window_ns(text), ""
    except click.BadParameter as error:
        ns, words = 0, str(error)
    if words:
        assert "is not a time" in words or "is too short" in words
    else:
        assert ns == int(text[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[text[-1]] * 10**9
        assert ns >= 30 * 10**9


def typed(command):
    """What may stand after a command: its options, its own commands, values, and what is none of these."""
    options = [text for parameter in command.params for text in parameter.opts]
    fixed = ["--", "-", "on", "off", "", "--json=x", "--last", "1", "10m", "-5", "/none", "\udcff"]
    return st.lists(
        st.sampled_from([*options, *getattr(command, "commands", {}), *fixed]) | TIMES, max_size=5
    )


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
@given(data=st.data())
@settings(max_examples=25)
def test_any_arguments_of_a_command_are_read_or_refused_in_words(command, data):
    """Read, and not run: what follows is each command's own."""
    try:
        command.make_context(command.name, data.draw(typed(command)))
        words, status = "it would run", 2
    except click.exceptions.Exit as help_was_shown:
        words, status = "help", 2 + help_was_shown.exit_code
    except click.ClickException as error:
        words, status = error.format_message() or "help", error.exit_code
    assert words
    assert status == 2


# --- ending


def serving(tmp_path, **popen):
    """``sysom serve`` on a free port, once its store is there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bot.cli", "-v", "serve"],
        env=os.environ | {"SYSOM_LISTEN": "127.0.0.1:0", "SYSOM_NODE_TOKENS": "a=b"},
        stderr=(tmp_path / "said").open("wb"),
        start_new_session=True,
        **popen,
    )
    wait_until(lambda: "listens on" in (tmp_path / "said").read_text(), "the server")
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_ends_in_order_when_told_to_as_a_terminal_tells_its_group(tmp_path, number):
    process = serving(tmp_path)
    os.killpg(process.pid, number)
    assert process.wait(20) == 0
    assert "Traceback" not in (tmp_path / "said").read_text()


def test_the_server_ends_in_order_with_its_terminal(tmp_path):
    ours, its = os.openpty()
    process = serving(tmp_path, preexec_fn=lambda: fcntl.ioctl(its, termios.TIOCSCTTY, 0))
    os.close(its)
    os.close(ours)  # the window is closed
    assert process.wait(20) == 0
    assert "Traceback" not in (tmp_path / "said").read_text()


def test_a_hangup_that_was_to_be_ignored_is(tmp_path):
    process = serving(tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    os.killpg(process.pid, signal.SIGHUP)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(20) == 0


def test_a_second_signal_cuts_the_ending_short_and_still_cleans_up():
    cleaned = []

    async def slow_to_end(stop):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    with pytest.raises(SystemExit) as ended:
        terminal.run_until_stopped(slow_to_end)
    assert (ended.value.code, cleaned) == (130, [True])
