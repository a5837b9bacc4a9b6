"""Whatever JSON and text the app or a person sends, the workspace answers in Slack's terms, never with a 500,
and what it took can be read back, drawn for the page and said as text."""

import asyncio
import json
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bot.workspace import Workspace
from bot.workspace.workspace import METHODS

# A hundred examples each, on a workspace that one test shares: what earlier ones left behind is part of it.
fuzz = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

KEYS = [
    *(
        "type",
        "text",
        "elements",
        "element",
        "fields",
        "accessory",
        "rows",
        "block_id",
        "action_id",
        "options",
    ),
    *("option_groups", "initial_option", "initial_options", "label", "value", "style", "indent", "timestamp"),
    *(
        "slack_file",
        "id",
        "image_url",
        "alt_text",
        "title",
        "blocks",
        "confirm",
        "placeholder",
        "border",
        "url",
    ),
    *("submit", "close", "callback_id", "private_metadata", "external_id", "max_length", "name", "range"),
]
TYPES = [
    *("section", "actions", "context", "header", "divider", "image", "input", "rich_text", "table", "modal"),
    *("home", "button", "overflow", "static_select", "multi_static_select", "checkboxes", "datepicker"),
    *(
        "plain_text",
        "mrkdwn",
        "plain_text_input",
        "rich_text_section",
        "rich_text_list",
        "text",
        "link",
        "date",
    ),
    *(
        "bullet",
        "primary",
        "raw_text",
        "<!date^9999999999999^{date}|x>",
        "https://example.com/a.png",
        "1.000001",
    ),
]
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
) | st.sampled_from(TYPES)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=15,
)
# Blocks of the right form with any words in them: these are taken, shown and read back.
WORDS = st.text(min_size=1, max_size=12) | st.sampled_from(
    [
        "<!date^9999999999999^{date}|x>",
        "<@U1> <#C1> <!channel> <|>",
        "```",
        "*_~`",
        ":x:",
        "&lt;&amp;",
        "> q\n>>> r",
    ]
)
SAYS = st.builds(
    lambda kind, text: {"type": kind, "text": text}, st.sampled_from(["plain_text", "mrkdwn"]), WORDS
)
LABEL = st.builds(lambda text: {"type": "plain_text", "text": text}, WORDS)
CHOICES = st.lists(
    st.builds(lambda text, value: {"text": text, "value": value}, LABEL, WORDS), min_size=1, max_size=3
)
LEAF = (
    st.builds(lambda text: {"type": "text", "text": text}, WORDS)
    | st.builds(lambda name: {"type": "emoji", "name": name}, WORDS)
    | st.builds(lambda id: {"type": "user", "user_id": id}, WORDS)
    | st.builds(lambda url, text: {"type": "link", "url": url, "text": text}, WORDS, WORDS)
    | st.builds(
        lambda at, form: {"type": "date", "timestamp": at, "format": form, "fallback": "f"},
        st.integers(0, 253_402_300_799),
        st.sampled_from(["{date_pretty} {time}", "{ago}", "{nope}", "{"]),
    )
)
LINES = st.builds(
    lambda kind, parts: {"type": kind, "elements": parts},
    st.sampled_from(["rich_text_section", "rich_text_quote", "rich_text_preformatted"]),
    st.lists(LEAF, max_size=3),
)
RICH = st.builds(
    lambda lines: {"type": "rich_text", "elements": lines}, st.lists(LINES, min_size=1, max_size=2)
)
USED = (
    st.builds(lambda text: {"type": "button", "text": text}, LABEL)
    | st.builds(
        lambda kind, options: {"type": kind, "options": options},
        st.sampled_from(["overflow", "static_select", "multi_static_select", "checkboxes", "radio_buttons"]),
        CHOICES,
    )
    | st.builds(
        lambda kind: {"type": kind},
        st.sampled_from(["datepicker", "timepicker", "users_select", "channels_select"]),
    )
)
GOOD = (
    st.builds(lambda text, used: {"type": "section", "text": text, "accessory": used}, SAYS, USED)
    | st.builds(lambda fields: {"type": "section", "fields": fields}, st.lists(SAYS, min_size=1, max_size=3))
    | st.builds(lambda text: {"type": "header", "text": text}, LABEL)
    | st.builds(lambda parts: {"type": "context", "elements": parts}, st.lists(SAYS, min_size=1, max_size=2))
    | st.builds(lambda used: {"type": "actions", "elements": [used]}, USED)
    | st.builds(
        lambda label: {"type": "input", "label": label, "element": {"type": "plain_text_input"}}, LABEL
    )
    | st.builds(
        lambda cells: {"type": "table", "rows": [cells]},
        st.lists(
            st.builds(lambda text: {"type": "raw_text", "text": text}, WORDS) | RICH, min_size=1, max_size=2
        ),
    )
    | RICH
)


Ask = tuple[Workspace, httpx.AsyncClient, Callable[[Any], Any]]


@pytest.fixture
def ask() -> Iterator[Ask]:
    """A workspace that lives for all examples of a test, a client that gets its errors as they are (there is no
    socket between them), and a function that runs one coroutine after the other."""
    with asyncio.Runner() as runner:

        async def start() -> tuple[Workspace, httpx.AsyncClient]:
            ws = await Workspace().__aenter__()
            transport = httpx.ASGITransport(ws._application())
            headers = {"Authorization": f"Bearer {ws.bot_token}"}
            return ws, httpx.AsyncClient(transport=transport, headers=headers)

        ws, http = runner.run(start())
        yield ws, http, runner.run
        runner.run(http.aclose())
        runner.run(ws.__aexit__(None, None, None))


async def call(ws: Workspace, http: httpx.AsyncClient, method: str, arguments: Any) -> dict[str, Any]:
    answer = await http.post(
        f"{ws.api_url}{urllib.parse.quote(method, safe='')}",
        content=json.dumps(arguments),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 200, (method, arguments, answer.text)
    said = answer.json()
    assert said["ok"] or said["error"]
    return dict(said)


@fuzz
@given(blocks=st.lists(JSON | GOOD, max_size=3) | JSON)
def test_any_blocks_are_taken_or_refused(ask: Ask, blocks: Any) -> None:
    ws, http, run = ask
    run(call(ws, http, "chat.postMessage", {"channel": "#training", "text": "x", "blocks": blocks}))


@fuzz
@given(blocks=st.lists(GOOD, min_size=1, max_size=3))
def test_blocks_that_were_taken_are_shown_and_read_back(ask: Ask, blocks: list[Any]) -> None:
    ws, http, run = ask
    tables = sum(block["type"] == "table" for block in blocks)
    training = ws.channel("training")
    said = run(call(ws, http, "chat.postMessage", {"channel": training.id, "text": "x", "blocks": blocks}))
    assert said["ok"] == (tables < 2), said
    if said["ok"]:
        read = run(call(ws, http, "conversations.history", {"channel": training.id, "limit": 1}))
        assert [block["type"] for block in read["messages"][0]["blocks"]] == [b["type"] for b in blocks]
        ws.plain(training.messages[-1])
        ws.transcript()


@fuzz
@given(
    view=JSON
    | st.builds(
        lambda kind, blocks, more: {"type": kind, "blocks": blocks, **more},
        st.sampled_from(["modal", "home"]),
        st.lists(GOOD, max_size=2),
        st.just({}) | st.builds(lambda word: {"title": word, "submit": word}, LABEL),
    )
)
def test_any_view_is_taken_or_refused(ask: Ask, view: Any) -> None:
    ws, http, run = ask
    ada = ws.person("ada")
    said = run(call(ws, http, "views.open", {"trigger_id": ws.trigger("ada"), "view": view}))
    if said["ok"]:
        run(call(ws, http, "views.update", {"view_id": said["view"]["id"], "view": view}))
    run(call(ws, http, "views.publish", {"user_id": ada.id, "view": view}))


@fuzz
@given(
    method=st.sampled_from(sorted(METHODS)),
    arguments=st.dictionaries(
        st.sampled_from(
            [
                "channel",
                "text",
                "ts",
                "user",
                "users",
                "timestamp",
                "name",
                "limit",
                "cursor",
                "types",
                "oldest",
                "latest",
                "view",
                "view_id",
                "trigger_id",
                "files",
                "file",
                "metadata",
                "thread_ts",
                "blocks",
                "hash",
            ]
        ),
        JSON,
        max_size=5,
    ),
)
def test_any_arguments_are_taken_or_refused(ask: Ask, method: str, arguments: dict[str, Any]) -> None:
    ws, http, run = ask
    if arguments.get("channel") == "text":
        arguments["channel"] = ws.channel("training").id
    run(call(ws, http, method, arguments))


@fuzz
@given(line=st.text(max_size=60) | st.text(max_size=40).map("/sysom ".__add__))
def test_any_line_that_a_person_types_is_taken(ask: Ask, line: str) -> None:
    ws, _, run = ask

    async def type_it() -> None:
        await ws.person("ada").command(line)
        await ws.person("ada").say(line)

    run(type_it())
    ws.transcript()


@fuzz
@given(
    body=st.binary(max_size=60),
    kind=st.sampled_from(
        [
            "",
            "application/json",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "text/plain",
            "application/json; charset=utf-8",
            "application/json; charset=\xff",
            ";",
            "a/b;c",
        ]
    ),
)
def test_any_body_is_answered(ask: Ask, body: bytes, kind: str) -> None:
    ws, http, run = ask

    async def post() -> httpx.Response:
        headers = {b"Content-Type": kind.encode("latin-1")}
        return await http.post(f"{ws.api_url}chat.postMessage", content=body, headers=headers)

    answer = run(post())
    assert answer.status_code == 200
    assert not answer.json()["ok"]


@fuzz
@given(body=st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_to_a_response_url_is_answered(ask: Ask, body: bytes) -> None:
    ws, http, run = ask
    url = ws._hooks.new(ws.channel("training"), ws.person("ada").user)

    async def post() -> httpx.Response:
        return await http.post(url, content=body)

    assert run(post()).status_code in (200, 400, 404)
