"""Our own check of a message against Slack's limits, and the cutting that keeps within them."""

from __future__ import annotations

from typing import Any

import pytest

from bot.slack import limits
from bot.slack.blocks import context, cut_bytes, cut_lines, header, message, preformatted, section


def mrkdwn(text: str) -> dict[str, Any]:
    return {"type": "mrkdwn", "text": text}


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (
            {"type": "header", "text": {"type": "plain_text", "text": "x" * 151}},
            "/text: 151 characters, at most 150",
        ),
        ({"type": "header", "text": mrkdwn("x")}, "/text: must be plain_text"),
        ({"type": "section", "text": mrkdwn("x" * 3001)}, "/text: 3001 characters"),
        ({"type": "section", "text": mrkdwn(" ")}, "/text: empty"),
        ({"type": "section"}, "neither text nor fields"),
        ({"type": "section", "fields": [mrkdwn("x")] * 11}, "/fields: 11, at most 10"),
        ({"type": "section", "fields": [mrkdwn("x" * 2001)]}, "/fields/0: 2001 characters"),
        ({"type": "context", "elements": []}, "/elements: 0, 1 to 10"),
        ({"type": "context", "elements": [mrkdwn("x")] * 11}, "/elements: 11, 1 to 10"),
        ({"type": "rich_text", "elements": []}, "/elements: none"),
        ({"type": "divider", "block_id": "x" * 256}, "/block_id: too long"),
        ({"type": "carousel"}, "is not a block that this bot writes"),
    ],
)
def test_each_limit_is_found_with_its_place(block: dict[str, Any], says: str) -> None:
    (found,) = limits.problems("text", [block])
    assert found.startswith("/blocks/0")
    assert says in found


def test_limits_of_the_whole_message() -> None:
    assert limits.problems(" ", []) == ["text: empty"]
    assert limits.problems("é" * 2001, []) == ["text: over 4000 bytes"]
    assert limits.problems("a\ud800", []) == ["text: half a character"]
    assert limits.problems("x", [{"type": "divider"}] * 51) == ["blocks: 51, at most 50"]
    assert limits.problems("x", [section("x" * 3000)] * 3 + [section("y")]) == [
        "blocks: 9001 characters together, at most 9000"
    ]
    assert limits.problems("x", [{"type": "divider", "block_id": "a"}] * 2) == ["blocks: a block_id twice"]
    assert limits.problems("x", [header("a"), section("b"), context("c"), preformatted("d")]) == []


def test_lines_are_cut_whole_and_the_rest_is_counted() -> None:
    text = "\n".join(f"line {n:03d}" for n in range(100))  # 9 characters each, with its break
    cut = cut_lines(text, 200)
    assert len(cut) <= 200
    assert cut.split("\n")[-2:] == ["line 016", "… 83 more lines left out"]
    assert cut_lines("short", 200) == "short"


def test_a_fallback_text_is_cut_between_words_and_bytes() -> None:
    cut = cut_bytes("größe " * 1000, 4000)
    assert len(cut.encode()) <= 4000
    assert cut.endswith("größe …")
    assert cut_bytes("since <!date^1^{date} {time}|then and there> and more words", 40) == "since …"


def test_the_last_blocks_give_way_when_a_message_is_too_large() -> None:
    made = message("text", *[section("x" * 2900) for _ in range(5)])
    assert len(made.blocks) == 4
    assert made.blocks[-1]["elements"][0]["text"] == "… 2 parts left out: no room"
    assert limits.problems(made.text, made.blocks) == []


def test_a_header_holds_no_markup() -> None:
    assert header("<!channel> a\nb")["text"] == {
        "type": "plain_text",
        "text": "‹!channel› a b",
        "emoji": False,
    }


def test_slack_makes_no_links_and_mentions_of_its_own() -> None:
    assert section("see #general")["text"]["verbatim"] is True
    assert context("see @ada")["elements"][0]["verbatim"] is True
