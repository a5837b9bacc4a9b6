"""`sysom agent` and `sysom doctor` at the command line: settings that cannot be used are refused in words, and the
kill switch works whatever the settings are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bot import cli
from bot.settings import SettingsError
from probes import agent, doctor, kill_switch
from probes.agent import AgentConfig
from probes.doctor import Finding

KEY = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
"""A public key of RFC 8032, 7.1."""


@pytest.fixture(autouse=True)
def _settings_of_the_test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SYSOM_", "SLACK_")):
            monkeypatch.delenv(name)
    config = tmp_path / "sysom.toml"
    config.write_text("")
    monkeypatch.setenv("SYSOM_CONFIG", str(config))
    monkeypatch.setenv("SYSOM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("SYSOM_RUNTIME", str(tmp_path / "run"))


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[AgentConfig]:
    """What agents were started with."""
    seen: list[AgentConfig] = []
    monkeypatch.setattr(agent, "run", lambda config, stop: seen.append(config))
    monkeypatch.setattr("bot.commands.agent.ending_signals", list)
    return seen


def ran(*words: str, **environ: str) -> Result:
    return CliRunner().invoke(cli.main, words, env=environ, prog_name="sysom")


def test_settings_become_the_agents(configs: list[AgentConfig], tmp_path: Path) -> None:
    result = ran(
        "agent",
        SYSOM_SERVER="https://server:8750",
        SYSOM_SERVER_CA="/ca.pem",
        SYSOM_NODE="node-a",
        SYSOM_NODE_TOKEN_FILE="/token",
        SYSOM_COMMAND_KEY=KEY,
        SYSOM_CPU_BUDGET_PERCENT="0.8",
        SYSOM_MEMORY_BUDGET_MB="300",
        SYSOM_EVENTS_BUDGET="5000",
        SYSOM_METRICS_LISTEN="127.0.0.1:8752",
        SYSOM_SPOOL_MB="2",
    )
    assert result.exit_code == 0, result.output
    (config,) = configs
    assert (config.server, config.ca, config.node) == ("https://server:8750", Path("/ca.pem"), "node-a")
    assert (config.token, config.token_file) == ("", Path("/token"))
    assert config.command_key is not None
    assert config.command_key.public_bytes_raw().hex() == KEY
    assert (config.limits.cpu_share, config.limits.memory_bytes) == (0.008, 300_000_000)
    assert config.limits.events_per_s == 5000
    assert config.metrics == ("127.0.0.1", 8752)
    assert config.spool_bytes == 2 << 20
    assert (config.state, config.runtime) == (tmp_path / "state", tmp_path / "run")


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("SYSOM_CPU_BUDGET_PERCENT", "0", "must be above 0"),
        ("SYSOM_CPU_BUDGET_PERCENT", "-1", "must be above 0"),
        ("SYSOM_CPU_BUDGET_PERCENT", "nan", "must be above 0"),
        ("SYSOM_CPU_BUDGET_PERCENT", "101", "100 at most"),
        ("SYSOM_MEMORY_BUDGET_MB", "10", "64 are the least"),
        ("SYSOM_EVENTS_BUDGET", "0", "1 or more"),
        ("SYSOM_COMMAND_KEY", "deadbeef", "sysom key"),
        ("SYSOM_METRICS_LISTEN", "8752", "SYSOM_METRICS_LISTEN"),
        ("SYSOM_NODE_TOKEN_FILE", "/token", "unset one of them"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_in_words(
    configs: list[AgentConfig], setting: str, value: str, words: str
) -> None:
    result = ran("agent", SYSOM_NODE_TOKEN="secret", **{setting: value})
    assert (result.exit_code, configs) == (2, [])
    assert setting in result.stderr
    assert words in result.stderr
    assert "secret" not in result.stderr


def test_a_token_is_asked_for(configs: list[AgentConfig]) -> None:
    result = ran("agent")
    assert (result.exit_code, configs) == (2, [])
    assert "SYSOM_NODE_TOKEN_FILE" in result.stderr


@pytest.fixture
def pressed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of the kill switch."""
    seen: list[tuple[Any, ...]] = []

    def detach_all(folder: Path, why: str, say: Callable[[str], None]) -> bool:
        seen.append(("off", folder, why))
        say(f"done: {why}")
        return why != "in vain"

    monkeypatch.setattr(kill_switch, "detach_all", detach_all)
    monkeypatch.setattr(kill_switch, "attach", lambda folder, say: seen.append(("on", folder)))
    return seen


def test_the_kill_switch_ends_with_0_only_when_nothing_is_left(
    pressed: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    assert ran("agent", "--detach-all").exit_code == 0
    assert ran("agent", "--detach-all", "--why", "in vain").exit_code == 1
    assert ran("agent", "--attach").exit_code == 0
    run = tmp_path / "run"
    assert pressed == [("off", run, ""), ("off", run, "in vain"), ("on", run)]


def test_the_kill_switch_works_though_the_settings_cannot_be_read(
    pressed: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise SettingsError("/etc/sysom.toml is not TOML")

    monkeypatch.setattr("bot.commands.agent.load", broken)
    result = ran("agent", "--detach-all")
    assert result.exit_code == 0
    assert "not TOML" in result.output
    assert pressed == [("off", Path("/run/sysom"), "")]


def test_a_reason_cannot_act_on_the_terminal(pressed: list[tuple[Any, ...]]) -> None:
    assert "\x1b" not in ran("agent", "--detach-all", "--why", "a\x1b[2J").output


@pytest.mark.parametrize("words", [("--detach-all", "--attach"), ("--why", "x"), ("--attach", "--why", "x")])
def test_options_that_do_not_go_together_are_refused(
    pressed: list[tuple[Any, ...]], configs: list[AgentConfig], words: tuple[str, ...]
) -> None:
    assert ran("agent", *words).exit_code == 2
    assert (pressed, configs) == ([], [])


@pytest.fixture
def _a_node_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Finding("BCC", False, "BCC is not installed: apt-get install python3-bpfcc \x1b[2J")
    monkeypatch.setattr(doctor, "_bcc", lambda: bad)
    monkeypatch.setattr(doctor, "_elsewhere", lambda agents: [])


@pytest.mark.usefixtures("_a_node_without_an_agent")
def test_the_doctor_says_what_is_missing_and_ends_with_1() -> None:
    result = ran("doctor")
    assert result.exit_code == 1
    assert "cannot be watched" in result.output
    assert "apt-get install python3-bpfcc" in result.output
    assert "\x1b" not in result.output


@pytest.mark.usefixtures("_a_node_without_an_agent")
def test_the_doctor_s_json_says_the_same() -> None:
    result = ran("doctor", "--json")
    assert result.exit_code == 1
    told = json.loads(result.output)
    assert told["ok"] is False
    assert told["agents"] == []
    (missing,) = [finding for finding in told["findings"] if finding["name"] == "BCC"]
    assert (missing["ok"], missing["needed"]) == (False, True)
