"""Names from outside in Slack's format: they neither ping, nor format, nor break a line."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bot.slack import mrkdwn
from bot.workspace import mrkdwn as slack
from diagnosis.verdict import Window
from tests.bot.verdicts import EVIL


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ("<!channel>", "&lt;!channel&gt;"),
        ("a & b", "a &amp; b"),
        ("&lt;", "&amp;lt;"),
        ("*bold*", "∗bold∗"),
        ("`code`", "ˋcodeˋ"),
        ("~gone~", "∼gone∼"),
        ("_slanted_", "ˍslantedˍ"),
        ("train_gpt_7b", "train_gpt_7b"),
        (":fire:", "꞉fire:"),
        ("14:05:12", "14:05:12"),
        ("> quote", "› quote"),
        ("two\nlines\tand\r\nmore", "two lines and more"),
        ("a\u202eb\u200bc\x1bd\ud800", "a�b�c�d�"),
    ],
)
def test_running_text_loses_its_meaning_and_keeps_its_look(data: str, shown: str) -> None:
    assert mrkdwn.escape(data) == shown


def test_a_name_in_a_code_span_can_be_copied() -> None:
    assert mrkdwn.name("_a_*b*~c~:d:") == "`_a_*b*~c~:d:`"
    assert mrkdwn.name("a`b") == "`aˋb`"
    assert mrkdwn.name("<@U1>") == "`&lt;@U1&gt;`"
    assert mrkdwn.name("") == "(no name)"


def test_a_long_name_is_cut_and_says_by_how_much() -> None:
    shown = mrkdwn.name("x" * 1000)
    kept, left = re.fullmatch(r"`(x+)… \(\+(\d+)\)`", shown).groups()  # type: ignore[union-attr]
    assert len(shown) <= 122
    assert len(kept) + int(left) == 1000


@given(st.text(alphabet=st.sampled_from("*_~`:<>&!@#|a b1\n•-\u200b"), max_size=40))
def test_what_slack_reads_in_escaped_text_is_plain_text(data: str) -> None:
    """The workspace's own parser of Slack's format finds one paragraph of unformatted text."""
    found = slack.parse(f"before {mrkdwn.escape(data)} after")
    assert [container["type"] for container in found] == ["rich_text_section"]
    assert all(leaf["type"] == "text" and not leaf.get("style") for leaf in found[0]["elements"])


@given(st.text(alphabet=st.sampled_from("*_~`:<>&!@#|a b1\n•-\u200b"), max_size=40))
def test_what_slack_reads_in_a_name_is_one_code_span(data: str) -> None:
    shown = mrkdwn.name(data)
    if shown == "(no name)":
        return
    leaves = slack.parse(f"before {shown} after")[0]["elements"]
    assert [leaf.get("style", {}) for leaf in leaves] == [{}, {"code": True}, {}]


def test_an_instant_is_shown_in_the_readers_time_zone() -> None:
    # 2026-01-02T14:05:12Z: date -u -d @1767362712
    assert mrkdwn.when("2026-01-02T14:05:12Z") == (
        "<!date^1767362712^{date_short_pretty} {time_secs}|2026-01-02 14:05:12 UTC>"
    )
    assert mrkdwn.when("2026-01-02T15:05:12+01:00").startswith("<!date^1767362712^")
    assert mrkdwn.when("<!here>") == "&lt;!here&gt;"


@pytest.mark.parametrize(
    ("after", "shown"),
    [(": a slowdown", ": a slowdown"), (" and :more: of", " and ꞉more: of"), (" <!here>", " &lt;!here&gt;")],
)
def test_an_instant_in_a_sentence_is_shown_so_whatever_stands_beside_it(after: str, shown: str) -> None:
    said = mrkdwn.escape(f"began at 2026-01-02T14:05:12Z{after}")
    assert said.startswith("began at <!date^1767362712^")
    assert said.endswith(f">{shown}")


def test_a_span_within_a_day_names_the_day_once() -> None:
    short = mrkdwn.span(Window(start="2026-01-02T14:00:00Z", end="2026-01-02T14:10:00Z"))
    assert short.count("date_short_pretty") == 1
    long = mrkdwn.span(Window(start="2026-01-02T14:00:00Z", end="2026-01-04T14:10:00Z"))
    assert long.count("date_short_pretty") == 2


def test_only_web_addresses_become_links() -> None:
    assert mrkdwn.link("https://x.example/a?b=c&d=e", "page") == "<https://x.example/a?b=c&amp;d=e|page>"
    assert mrkdwn.link("javascript:alert(1)", "page") == "page"
    assert mrkdwn.link("https:///nowhere", "page") == "page"
    assert mrkdwn.link("http://[::1]:8080/", "page") == "<http://[::1]:8080/|page>"
    hostile = mrkdwn.link(f"https://x.example/{EVIL}|x>", EVIL)
    assert hostile.count("<") == hostile.count(">") == hostile.count("|") == 1


def test_only_user_ids_become_mentions() -> None:
    assert mrkdwn.person("U123ABC") == "<@U123ABC>"
    assert mrkdwn.person("U1> <!channel") == "`U1&gt; &lt;!channel`"
    assert mrkdwn.person("") == "`someone`"
