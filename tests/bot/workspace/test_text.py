"""Slack's text format, dates and blocks, as a person reads them."""

import time
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slack_sdk.web.async_client import AsyncWebClient

from bot.workspace import Message, Workspace, plain
from bot.workspace.dates import say_date
from bot.workspace.mrkdwn import escape, parse, unescape


def leaves(text: str) -> list[Any]:
    (section,) = parse(text)
    return list(section["elements"])


def text(said: str, **style: bool) -> dict[str, Any]:
    return {"type": "text", "text": said, "style": style} if style else {"type": "text", "text": said}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            "*b* _i_ ~s~",
            [text("b", bold=True), text(" "), text("i", italic=True), text(" "), text("s", strike=True)],
        ),
        ("*_both_*", [text("both", bold=True, italic=True)]),
        ("`a *b* &lt;c`", [text("a *b* <c", code=True)]),
        ("snake_case_name 2*3*4", [text("snake_case_name 2*3*4")]),
        ("* not bold *", [text("* not bold *")]),
        ("10:30:45", [text("10:30:45")]),
        ("a &amp;lt; b", [text("a &lt; b")]),
        (
            "<@U1> in <#C1|x>",
            [{"type": "user", "user_id": "U1"}, text(" in "), {"type": "channel", "channel_id": "C1"}],
        ),
        ("<!channel>", [{"type": "broadcast", "range": "channel"}]),
        ("&lt;!channel&gt;", [text("<!channel>")]),
        (
            "<https://e.com/?a=1&amp;b|see &lt;it&gt;>",
            [{"type": "link", "url": "https://e.com/?a=1&b", "text": "see <it>"}],
        ),
        ("<javascript:alert(1)|x>", [text("<javascript:alert(1)|x>")]),
        (
            "<!date^60^{date} {time}|then>",
            [{"type": "date", "timestamp": 60, "format": "{date} {time}", "fallback": "then"}],
        ),
        (":fire:", [{"type": "emoji", "name": "fire", "unicode": "1f525"}]),
        (":no_such:", [text(":no_such:")]),
    ],
)
def test_marks_and_entities(written: str, read: list[Any]) -> None:
    assert leaves(written) == read


def test_fences_and_quotes_are_parts_of_their_own() -> None:
    parts = parse("before\n```\nx = *1*\n  y\n```\n&gt; said\n> this\nafter")
    assert [part["type"] for part in parts] == [
        "rich_text_section",
        "rich_text_preformatted",
        "rich_text_quote",
        "rich_text_section",
    ]
    assert parts[1]["elements"] == [text("x = *1*\n  y")]
    assert parts[2]["elements"] == [text("said\nthis")]


@given(st.text(max_size=200))
def test_escaped_text_comes_back_whatever_it_holds(data: str) -> None:
    assert unescape(escape(data)) == data
    assert not set(escape(data)) & {"<", ">"}
    kinds = {leaf["type"] for part in parse(escape(data)) for leaf in part["elements"]}
    assert kinds <= {"text", "emoji"}


def test_dates_are_said_in_slacks_words() -> None:
    moment = datetime(2014, 2, 18, 18, 39, 42).astimezone()
    at = int(moment.timestamp())
    later = at + 400 * 86_400
    said = {
        "{date_num}": "2014-02-18",
        "{date}": "February 18th, 2014",
        "{date_short}": "Feb 18, 2014",
        "{date_long}": "Tuesday, February 18th, 2014",
        "{date_short_pretty} at {time}": "Feb 18, 2014 at 6:39 PM",
        "{time_secs}": "6:39:42 PM",
        "{ago}": "400 days ago",
        "{nonsense}": "fallback",
    }
    assert {pattern: say_date(at, pattern, "fallback", later) for pattern in said} == said
    assert say_date(at, "{date_pretty}", "", at + 86_400) == "yesterday"
    assert say_date(at, "{date_pretty}", "", at) == "today"
    assert say_date(10**18, "{date}", "too far", at) == "too far"


async def test_a_message_as_text(ws: Workspace, slack: AsyncWebClient) -> None:
    def mrkdwn(said: str) -> dict[str, str]:
        return {"type": "mrkdwn", "text": said}

    def button(said: str) -> dict[str, Any]:
        return {"type": "button", "action_id": said, "text": {"type": "plain_text", "text": said}}

    blocks = [
        {"type": "header", "text": {"type": "plain_text", "text": "job-123 *is* slow"}},
        {
            "type": "section",
            "text": mrkdwn(f"*Why:* <@{ws.person('ada').id}> ran `hog` &amp; <https://e.com|more>"),
        },
        {
            "type": "section",
            "fields": [mrkdwn("*Rank*\n2"), mrkdwn("*Cost*\n194 ms"), mrkdwn("*Owner*\nnode")],
        },
        {"type": "divider"},
        {
            "type": "rich_text",
            "elements": [
                {"type": "rich_text_preformatted", "elements": [text("a\nb")]},
                {
                    "type": "rich_text_list",
                    "style": "ordered",
                    "elements": [{"type": "rich_text_section", "elements": [text(item)]} for item in "xy"],
                },
            ],
        },
        {"type": "actions", "elements": [button("Evidence"), button("Rerun")]},
        {"type": "context", "elements": [mrkdwn("4 ranks"), mrkdwn("600 steps")]},
    ]
    await slack.chat_postMessage(channel="#training", text="x", blocks=blocks)
    assert ws.plain(ws.channel("training").messages[0]).splitlines() == [
        "job-123 *is* slow",
        "Why: @ada ran hog & more (https://e.com)",
        "Rank   Cost",
        "2      194 ms",
        "Owner",
        "node",
        "─" * 40,
        "    a",
        "    b",
        "1. x",
        "2. y",
        "[ Evidence ] [ Rerun ]",
        "4 ranks  600 steps",
    ]


def test_a_message_without_blocks_is_its_text() -> None:
    now = int(time.time())
    message = Message(
        ts="1.000001", channel="C1", user="U1", text=f"<!date^{now}^since {{date_pretty}}|x> _ok_ &lt;"
    )
    assert plain(message) == "since today ok <"
