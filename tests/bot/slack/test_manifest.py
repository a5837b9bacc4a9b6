"""The app manifest asks Slack for what the code uses, and for nothing more."""

from __future__ import annotations

import re
from pathlib import Path

from bot.slack import grammar
from bot.slack.app import SCOPES
from bot.slack.inbound import PATH

MANIFEST = Path(__file__).parents[3] / "deploy" / "slack-manifest.yaml"
LINES = [
    line for line in MANIFEST.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")
]


def paths() -> dict[str, str | list[str]]:
    """The manifest as ``{"settings.socket_mode_enabled": "true", …}``: the YAML that it is written in."""
    found: dict[str, str | list[str]] = {}
    above: list[tuple[int, str]] = []
    for line in LINES:
        match = re.fullmatch(r"( *)(- )?(?:(\w+):(?: |$))?(.*)", line)
        assert match, line
        indent, dash, key, value = (
            len(match[1]) + len(match[2] or ""),
            match[2],
            match[3],
            match[4].strip('"'),
        )
        above = [(depth, name) for depth, name in above if depth < indent]
        here = ".".join(name for _, name in above)
        if dash and not key:
            items = found.setdefault(here, [])
            assert isinstance(items, list)
            items.append(value)
        elif value:
            found[f"{here}.{key}".lstrip(".")] = value
        else:
            above.append((indent, key))
    return found


def test_the_command_is_the_one_that_the_bot_answers() -> None:
    manifest = paths()
    assert manifest["features.slash_commands.command"] == grammar.COMMAND
    assert manifest["features.slash_commands.usage_hint"] == grammar.USAGE
    assert all(verb in grammar.USAGE for verb in grammar.VERBS)


def test_the_scopes_are_those_that_the_code_needs() -> None:
    assert set(paths()["oauth_config.scopes.bot"]) == SCOPES
    sources = "\n".join(path.read_text() for path in Path(grammar.__file__).parent.glob("*.py"))
    # https://docs.slack.dev/reference/methods: each of these needs chat:write alone, or no scope.
    methods = set(
        re.findall(r'"((?:chat|conversations|users|files|views|reactions|auth|apps)\.\w+)"', sources)
    )
    assert methods == {"chat.postMessage", "chat.update", "chat.delete"}


def test_the_bot_is_reached_by_socket_mode_alone() -> None:
    manifest = paths()
    assert manifest["settings.socket_mode_enabled"] == "true"
    assert manifest["settings.interactivity.is_enabled"] == "false"
    assert manifest["features.app_home.messages_tab_read_only_enabled"] == "false"
    assert not any("url" in path for path in manifest)


def test_it_says_what_to_change_for_http() -> None:
    text = MANIFEST.read_text()
    assert "socket_mode_enabled: false" in text
    assert f"https://sysom.example.com{PATH} " in text
    assert "SYSOM_SLACK_SIGNING_SECRET" in text
