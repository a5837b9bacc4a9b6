"""Each of Slack's limits holds at its last allowed value and is refused one beyond it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bot.workspace.limits import blocks_size, check_blocks

Json = dict[str, Any]


def plain(text: str) -> Json:
    return {"type": "plain_text", "text": text}


def mrkdwn(text: str) -> Json:
    return {"type": "mrkdwn", "text": text}


def section(text: str = "x", **more: Any) -> Json:
    return {"type": "section", "text": mrkdwn(text), **more}


def button(**more: Any) -> Json:
    return {"type": "button", "text": plain("Go"), "action_id": "go", **more}


def actions(*elements: Json) -> Json:
    return {"type": "actions", "elements": list(elements)}


def options(count: int) -> list[Json]:
    return [{"text": plain("o"), "value": str(n)} for n in range(count)]


def menu(**more: Any) -> Json:
    return {"type": "static_select", "action_id": "m", "options": options(1), **more}


def entry(label: str = "Why?", **more: Any) -> Json:
    return {"type": "input", "label": plain(label), "element": {"type": "plain_text_input"}, **more}


def confirm(text: str) -> Json:
    return {"title": plain("Sure?"), "text": plain(text), "confirm": plain("Yes"), "deny": plain("No")}


def image(**more: Any) -> Json:
    return {"type": "image", "image_url": "https://example.com/a.png", "alt_text": "a", **more}


def table(rows: int, cells: int) -> Json:
    return {"type": "table", "rows": [[{"type": "raw_text", "text": "c"}] * cells] * rows}


@pytest.mark.parametrize(
    ("allowed", "refused", "error"),
    [
        (
            [section()] * 50,
            [section()] * 51,
            "no more than 50 items allowed [json-pointer:/blocks]",
        ),
        (
            [section("x" * 3000)],
            [section("x" * 3001)],
            "must be less than 3001 characters [json-pointer:/blocks/0/text/text]",
        ),
        (
            [{"type": "section", "fields": [mrkdwn("f")] * 10}],
            [{"type": "section", "fields": [mrkdwn("f")] * 11}],
            "no more than 10 items allowed [json-pointer:/blocks/0/fields]",
        ),
        (
            [{"type": "section", "fields": [mrkdwn("f" * 2000)]}],
            [{"type": "section", "fields": [mrkdwn("f" * 2001)]}],
            "must be less than 2001 characters [json-pointer:/blocks/0/fields/0/text]",
        ),
        (
            [{"type": "header", "text": plain("h" * 150)}],
            [{"type": "header", "text": plain("h" * 151)}],
            "must be less than 151 characters [json-pointer:/blocks/0/text/text]",
        ),
        (
            [{"type": "header", "text": plain("h")}],
            [{"type": "header", "text": mrkdwn("h")}],
            "unsupported type: mrkdwn [json-pointer:/blocks/0/text/type]",
        ),
        (
            [actions(button(text=plain("b" * 75)))],
            [actions(button(text=plain("b" * 76)))],
            "must be less than 76 characters [json-pointer:/blocks/0/elements/0/text/text]",
        ),
        (
            [actions(button(text=plain("b")))],
            [actions(button(text=mrkdwn("b")))],
            "unsupported type: mrkdwn [json-pointer:/blocks/0/elements/0/text/type]",
        ),
        (
            [actions(button(value="v" * 2000))],
            [actions(button(value="v" * 2001))],
            "must be less than 2001 characters [json-pointer:/blocks/0/elements/0/value]",
        ),
        (
            [actions(button(action_id="a" * 255))],
            [actions(button(action_id="a" * 256))],
            "must be less than 256 characters [json-pointer:/blocks/0/elements/0/action_id]",
        ),
        (
            [section(block_id="b" * 255)],
            [section(block_id="b" * 256)],
            "must be less than 256 characters [json-pointer:/blocks/0/block_id]",
        ),
        (
            [section(block_id="a"), section(block_id="b")],
            [section(block_id="a"), section(block_id="a")],
            "`block_id` already exists for another block (id=a) [json-pointer:/blocks/1/block_id]",
        ),
        (
            [actions(button(action_id="a")), actions(button(action_id="a"))],
            [actions(button(action_id="a"), button(action_id="a"))],
            "`action_id` a already exists for another action [json-pointer:/blocks/0/elements/1/action_id]",
        ),
        (
            [{"type": "context", "elements": [mrkdwn("c")] * 10}],
            [{"type": "context", "elements": [mrkdwn("c")] * 11}],
            "no more than 10 items allowed [json-pointer:/blocks/0/elements]",
        ),
        (
            [actions(*(button(action_id=str(n)) for n in range(25)))],
            [actions(*(button(action_id=str(n)) for n in range(26)))],
            "no more than 25 items allowed [json-pointer:/blocks/0/elements]",
        ),
        (
            [actions({"type": "overflow", "action_id": "o", "options": options(5)})],
            [actions({"type": "overflow", "action_id": "o", "options": options(6)})],
            "no more than 5 items allowed [json-pointer:/blocks/0/elements/0/options]",
        ),
        (
            [image(alt_text="a" * 2000)],
            [image(alt_text="a" * 2001)],
            "must be less than 2001 characters [json-pointer:/blocks/0/alt_text]",
        ),
        (
            [image()],
            [{"type": "image", "image_url": "https://example.com/a.png"}],
            "missing required field: alt_text [json-pointer:/blocks/0]",
        ),
        (
            [table(100, 20)],
            [table(101, 20)],
            "no more than 100 items allowed [json-pointer:/blocks/0/rows]",
        ),
        (
            [table(1, 20)],
            [table(1, 21)],
            "no more than 20 items allowed [json-pointer:/blocks/0/rows/0]",
        ),
        (
            [actions(menu(placeholder=plain("p" * 150)))],
            [actions(menu(placeholder=plain("p" * 151)))],
            "must be less than 151 characters [json-pointer:/blocks/0/elements/0/placeholder/text]",
        ),
        (
            [actions(menu(options=options(100)))],
            [actions(menu(options=options(101)))],
            "no more than 100 items allowed [json-pointer:/blocks/0/elements/0/options]",
        ),
        (
            [actions(menu(options=[{"text": plain("o" * 75), "value": "v" * 150}]))],
            [actions(menu(options=[{"text": plain("o" * 75), "value": "v" * 151}]))],
            "must be less than 151 characters [json-pointer:/blocks/0/elements/0/options/0/value]",
        ),
        (
            [actions(menu())],
            [actions(menu(option_groups=[]))],
            "must define either `options` or `option_groups` [json-pointer:/blocks/0/elements/0]",
        ),
        (
            [actions(menu(initial_option=options(1)[0]))],
            [actions(menu(initial_option={"text": plain("other"), "value": "9"}))],
            "must be one of the options [json-pointer:/blocks/0/elements/0/initial_option]",
        ),
        (
            [actions({"type": "checkboxes", "action_id": "c", "options": options(10)})],
            [actions({"type": "checkboxes", "action_id": "c", "options": options(11)})],
            "no more than 10 items allowed [json-pointer:/blocks/0/elements/0/options]",
        ),
        (
            [entry("l" * 2000)],
            [entry("l" * 2001)],
            "must be less than 2001 characters [json-pointer:/blocks/0/label/text]",
        ),
        (
            [entry(element={"type": "plain_text_input", "max_length": 3000})],
            [entry(element={"type": "plain_text_input", "max_length": 3001})],
            "must be less than 3001 [json-pointer:/blocks/0/element/max_length]",
        ),
        (
            [entry(element={"type": "datepicker"})],
            [entry(element=button())],
            "unsupported type: button [json-pointer:/blocks/0/element/type]",
        ),
        (
            [section(accessory=button(confirm=confirm("t" * 300)))],
            [section(accessory=button(confirm=confirm("t" * 301)))],
            "must be less than 301 characters [json-pointer:/blocks/0/accessory/confirm/text/text]",
        ),
        ([table(1, 1)], [table(1, 1)] * 2, "only_one_table_allowed [json-pointer:/blocks/1]"),
    ],
)
def test_a_limit_holds_at_its_edge(allowed: list[Json], refused: list[Json], error: str) -> None:
    assert check_blocks(allowed) == []
    assert [str(problem) for problem in check_blocks(refused)] == [error]


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ({"type": "carousel9"}, "unsupported type: carousel9 [json-pointer:/blocks/0/type]"),
        ({"text": plain("x")}, "missing required field: type [json-pointer:/blocks/0]"),
        ("text", "must be an object [json-pointer:/blocks/0]"),
        ({"type": "section"}, "must define either `text` or `fields` [json-pointer:/blocks/0]"),
        (section(""), "must be more than 0 characters [json-pointer:/blocks/0/text/text]"),
        (section(colour="red"), "invalid additional property: colour [json-pointer:/blocks/0]"),
        (
            actions(button(block_id="b")),
            "invalid additional property: block_id [json-pointer:/blocks/0/elements/0]",
        ),
        (actions(), "no less than 1 items allowed [json-pointer:/blocks/0/elements]"),
        (
            actions(button(style="loud")),
            "must be a valid enum value [json-pointer:/blocks/0/elements/0/style]",
        ),
        (actions(mrkdwn("x")), "unsupported type: mrkdwn [json-pointer:/blocks/0/elements/0/type]"),
        (image(slack_file={"id": "F1"}), "invalid slack file [json-pointer:/blocks/0/slack_file]"),
        (
            image(slack_file={"id": "F1", "url": "x"}),
            "must define either `id` or `url` [json-pointer:/blocks/0/slack_file]",
        ),
        (
            {"type": "context", "elements": [{"type": "image", "alt_text": "a", "slack_file": {"id": "F1"}}]},
            "invalid slack file [json-pointer:/blocks/0/elements/0/slack_file]",
        ),
        (
            section(accessory={"type": "image", "alt_text": "a", "slack_file": {"id": "F1"}}),
            "invalid slack file [json-pointer:/blocks/0/accessory/slack_file]",
        ),
        (
            {
                "type": "rich_text",
                "elements": [{"type": "rich_text_section", "elements": [{"type": "blink"}]}],
            },
            "unsupported type: blink [json-pointer:/blocks/0/elements/0/elements/0/type]",
        ),
    ],
)
def test_a_malformed_block_is_refused_with_its_place(block: Any, error: str) -> None:
    assert [str(problem) for problem in check_blocks([block])] == [error]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000/a.png",
        "http://localhost/a.png",
        "http://10.1.2.3/a.png",
        "http://node1.internal/a.png",
        "http://printer.local/a.png",
        "http://[::1/a.png",
        "file:///a.png",
    ],
)
def test_an_image_that_slack_could_not_fetch_is_refused(url: str) -> None:
    problems = check_blocks([image(image_url=url)])
    assert [str(p) for p in problems] == ["downloading image failed [json-pointer:/blocks/0/image_url]"]


def test_all_kinds_of_rich_text_pass() -> None:
    leaves = [
        {"type": "text", "text": "t", "style": {"bold": True}},
        {"type": "link", "url": "https://example.com", "text": "l"},
        {"type": "emoji", "name": "fire"},
        {"type": "user", "user_id": "U1"},
        {"type": "date", "timestamp": 0, "format": "{date}", "fallback": "f"},
    ]
    line = {"type": "rich_text_section", "elements": leaves}
    elements = [
        line,
        {"type": "rich_text_preformatted", "elements": leaves[:1]},
        {"type": "rich_text_quote", "elements": leaves},
        {"type": "rich_text_list", "style": "ordered", "indent": 1, "elements": [line]},
    ]
    assert check_blocks([{"type": "rich_text", "elements": elements}]) == []


def test_the_size_of_all_blocks_counts_the_containers() -> None:
    assert blocks_size([{"type": "divider"}]) == len('[{"type":"divider"}]')
    assert blocks_size([section("é" * 10)]) == blocks_size([section("e" * 10)])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "elements", "fields", "accessory", "rows", "block_id", "options"]
            ),
            inner
            | st.sampled_from(["section", "actions", "rich_text", "button", "table", "mrkdwn", "image"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(_JSON, max_size=4))
def test_no_json_breaks_the_check(blocks: list[Any]) -> None:
    for problem in check_blocks(blocks):
        assert problem.pointer.startswith("/blocks")
