"""The door for Slack's requests by HTTP, with a real server and real requests."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slack_bolt.async_app import AsyncApp
from slack_sdk.web.async_client import AsyncWebClient
from starlette.applications import Starlette

from bot.slack import SlackRefused
from bot.slack import inbound as module
from bot.slack.app import create_app
from bot.slack.desk import Home
from bot.slack.inbound import MAX_BYTES, PATH, Inbound
from bot.slack.signature import SIGNATURE, TIMESTAMP, sign
from bot.web.listening import listening

SECRET = "4fdbc6dcd9a54be2b9f5ba7e63d0a6ce"
HOME = Home(team="lab", team_id="T1", enterprise_id="", bot="sysom", bot_id="B1", user_id="U0")
COMMAND = {"command": "/sysom", "text": "jobs", "team_id": "T1", "channel_id": "C1", "user_id": "U1"}
FORM = "application/x-www-form-urlencoded"


class Taken:
    """A desk that keeps what it is given."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    def take(self, body: Any) -> None:
        self.bodies.append(body)


class Door:
    """A served :class:`Inbound`, and Slack's side of it."""

    def __init__(self, inbound: Inbound, url: str, desk: Taken, app: AsyncApp) -> None:
        self.inbound = inbound
        self.url = url
        self.desk = desk
        self.app = app

    async def send(self, body: bytes, kind: str = FORM, **changes: str) -> httpx.Response:
        """A signed request; ``changes`` to its headers, with _ for -."""
        at = str(int(time.time()))
        headers = {"content-type": kind, TIMESTAMP: at, SIGNATURE: sign(SECRET, at, body)}
        headers |= {name.replace("_", "-"): value for name, value in changes.items()}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        async with httpx.AsyncClient(trust_env=False) as http:
            return await http.post(self.url + PATH, content=body, headers=raw)

    async def event(self, id: str, **changes: str) -> httpx.Response:
        body = {
            "type": "event_callback",
            "event_id": id,
            "team_id": "T1",
            "event": {"type": "app_mention", "text": "why?", "user": "U1", "channel": "C1"},
        }
        return await self.send(json.dumps(body).encode(), "application/json", **changes)


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    inbound, desk = Inbound(SECRET), Taken()
    app = create_app(AsyncWebClient(), HOME, desk)  # type: ignore[arg-type]
    async with listening(Starlette(routes=[inbound.route()]), "127.0.0.1", 0) as url:
        with inbound.open_for(app):
            yield Door(inbound, url, desk, app)


async def test_a_signed_command_is_acknowledged_and_reaches_the_desk(door: Door) -> None:
    answer = await door.send(urlencode(COMMAND).encode())
    assert (answer.status_code, answer.text) == (200, "")
    assert [body["text"] for body in door.desk.bodies] == ["jobs"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({TIMESTAMP: "soon"}, "timestamp"),
        ({TIMESTAMP: "1531420618"}, "stale"),
        ({SIGNATURE: "v0=é"}, "signature"),
        ({SIGNATURE: f"v0={'0' * 64}"}, "signature"),
        ({SIGNATURE: ""}, "unsigned"),
    ],
)
async def test_what_slack_did_not_sign_is_refused_in_words_and_none_of_it_is_logged(
    door: Door, changes: dict[str, str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = await door.send(urlencode(COMMAND | {"text": "a-secret"}).encode(), **changes)
    assert answer.status_code == 401
    assert answer.json()["reason"] == reason
    assert "this request was refused" in answer.json()["error"]
    assert door.desk.bodies == []
    assert door.inbound.refused == {reason: 1}
    ours = [record for record in caplog.records if record.name.startswith(("bot", "slack"))]
    (line,) = ours
    assert line.levelno == logging.WARNING
    assert line.exc_info is None
    assert "a-secret" not in caplog.text
    assert SECRET not in caplog.text


async def test_another_secret_is_said_to_be_the_likely_cause(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    at = str(int(time.time()))
    await door.send(b"x=1", **{TIMESTAMP: at, SIGNATURE: sign("another", at, b"x=1")})
    assert "“Signing Secret” from “Basic Information”" in caplog.text


async def test_a_flood_of_refusals_is_a_line_a_minute(
    door: Door, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(20):
        await door.send(b"", **{SIGNATURE: ""})
    assert len(caplog.records) == 1
    monkeypatch.setattr(module, "SAY_EVERY_S", 0.0)
    await door.send(b"", **{SIGNATURE: ""})
    assert "(19 more since this was last said)" in caplog.records[-1].message


async def test_a_body_that_is_too_large_is_not_read(door: Door) -> None:
    answer = await door.send(b"x" * (MAX_BYTES + 1))
    assert answer.status_code == 413
    assert answer.json()["reason"] == "too_large"


async def test_a_body_without_a_length_is_read_no_further_than_the_limit(door: Door) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 65536
            yield b"x" * 65536

    headers = {TIMESTAMP: str(int(time.time())), SIGNATURE: f"v0={'0' * 64}"}
    async with httpx.AsyncClient(trust_env=False) as http:
        try:
            answer = await http.post(door.url + PATH, content=endless(), headers=headers)
        except httpx.TransportError:
            pass  # the connection was closed while we still sent
        else:
            assert answer.status_code == 413
    assert door.inbound.refused == {"too_large": 1}
    assert sent < 16 * MAX_BYTES  # what buffers of the kernel take besides


async def test_a_body_that_does_not_come_is_given_up(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_S", 0.05)
    where = urlsplit(door.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n{TIMESTAMP}: {int(time.time())}\r\n"
    writer.write(f"{head}{SIGNATURE}: v0={'0' * 64}\r\n\r\nab".encode())
    assert b" 408 " in await reader.readline()
    writer.close()


async def test_only_so_many_bodies_are_read_at_a_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READING", 0)
    answer = await door.send(urlencode(COMMAND).encode())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_slacks_question_whether_the_address_is_ours_is_answered(door: Door) -> None:
    body = json.dumps({"type": "url_verification", "challenge": "3eZbrw1aB"}).encode()
    answer = await door.send(body, "application/json")
    assert (answer.status_code, answer.json()) == (200, {"challenge": "3eZbrw1aB"})
    assert (await door.send(b"ssl_check=1&token=x")).status_code == 200


async def test_an_event_that_is_delivered_again_is_handled_once(door: Door) -> None:
    handled: list[str] = []

    @door.app.event("app_mention")
    async def mention(body: dict[str, Any]) -> None:
        handled.append(body["event_id"])

    answers = [await door.event("Ev1")]
    answers += [
        await door.event("Ev1", x_slack_retry_num=str(n), x_slack_retry_reason="http_timeout") for n in (1, 2)
    ]
    answers += [await door.event("Ev2")]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert handled == ["Ev1", "Ev2"]


async def test_an_event_that_the_bot_has_no_use_for_is_not_asked_for_again(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await door.event("Ev1")).status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_command_that_is_not_ours_is_no_success(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    answer = await door.send(urlencode(COMMAND | {"command": "/other"}).encode())
    assert answer.status_code == 404
    assert "deploy/slack-manifest.yaml" in caplog.text


async def test_headers_that_nobody_signed_do_not_steer_the_bot(door: Door) -> None:
    answer = await door.send(
        urlencode(COMMAND).encode(), x_slack_bolt_lazy_only="1", x_slack_bolt_lazy_function_name="command"
    )
    assert answer.status_code == 200
    assert len(door.desk.bodies) == 1


async def test_while_no_bot_runs_slack_is_told_to_come_back() -> None:
    inbound, desk = Inbound(SECRET), Taken()
    app = create_app(AsyncWebClient(), HOME, desk)  # type: ignore[arg-type]
    async with listening(Starlette(routes=[inbound.route()]), "127.0.0.1", 0) as url:
        answer = await Door(inbound, url, desk, app).send(urlencode(COMMAND).encode())
    assert desk.bodies == []
    assert (answer.status_code, answer.json()["reason"]) == (503, "no_bot")


@pytest.mark.parametrize(
    ("secret", "says"),
    [("", "is empty"), ("  \n", "is empty"), ("xoxb-1-2", "is not"), ("schlüssel", "is not")],
)
def test_a_secret_that_can_be_none_is_refused_at_the_start(secret: str, says: str) -> None:
    with pytest.raises(SlackRefused, match=f"SYSOM_SLACK_SIGNING_SECRET {says}.*Basic Information"):
        Inbound(secret)


KEYS = [
    "payload",
    "type",
    "event",
    "event_id",
    "authorizations",
    "team",
    "enterprise",
    "user",
    "command",
    "ssl_check",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_is_signed_is_answered(body: bytes) -> None:
    """Slack signs no such bodies. Where Bolt itself stumbles over one, it is 500, and the server goes on."""

    async def answered() -> int:
        inbound = Inbound(SECRET)
        app = create_app(AsyncWebClient(), HOME, Taken())  # type: ignore[arg-type]
        at = str(int(time.time()))
        headers = {"content-type": "application/json", TIMESTAMP: at, SIGNATURE: sign(SECRET, at, body)}
        transport = httpx.ASGITransport(Starlette(routes=[inbound.route()]))
        with inbound.open_for(app):
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
                return (await http.post(PATH, content=body, headers=headers)).status_code

    assert asyncio.run(answered()) in (200, 400, 404, 500)
