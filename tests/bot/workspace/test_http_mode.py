"""HTTP mode as Bolt meets it: signatures it accepts, the challenge, retries, deadlines, and bad requests."""

import asyncio
import json
import re
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest
from slack_sdk.signature import SignatureVerifier
from slack_sdk.web.async_client import AsyncWebClient
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from websockets.asyncio.client import connect

from bot.workspace import RequestUrlError, Workspace
from tests.bot.workspace.bolt import app_in, serving


async def test_bolt_takes_a_command_an_event_and_a_click(ws: Workspace) -> None:
    app = app_in(ws)
    heard: list[str] = []

    @app.command("/sysom")
    async def command(ack: Any, command: dict[str, Any], say: Any) -> None:
        await ack()
        button = {"type": "button", "action_id": "go", "text": {"type": "plain_text", "text": "Go"}}
        await say(text=command["text"], blocks=[{"type": "actions", "elements": [button]}])

    @app.action("go")
    async def click(ack: Any, body: dict[str, Any], respond: Any) -> None:
        await ack()
        await respond(f"thanks, {body['user']['username']}")

    @app.event("app_mention")
    async def mention(event: dict[str, Any]) -> None:
        heard.append(event["text"])

    training = ws.channel("training")
    async with serving(ws, app):
        assert (await ws.person("ada").command("/sysom é & <b>")).acknowledged
        root = await ws.wait_for(lambda: next(iter(training.roots), None))
        assert root.text == "é &amp; &lt;b&gt;"
        assert (await ws.person("ada").click(root, "go")).acknowledged
        await ws.wait_for(lambda: len(training.messages) == 2)
        await ws.person("ada").mention("look")
        await ws.wait_for(lambda: not ws.pending)
    assert training.messages[1].text == "thanks, ada"
    assert heard == [f"<@{ws.world.bot.id}> look"]


async def test_what_is_sent_has_the_forms_and_the_signature_of_slack(ws: Workspace) -> None:
    requests: list[tuple[dict[str, str], bytes]] = []

    def seen(request: Request, body: bytes) -> Response | None:
        requests.append((dict(request.headers), body))
        return None if b"url_verification" in body else Response()

    async with serving(ws, app_in(ws), seen):
        await ws.person("ada").command("/sysom jobs")
        await ws.person("ada").shortcut("anywhere")
        await ws.person("ada").say("hello")
        await ws.wait_for(lambda: not ws.pending)
    verifier = SignatureVerifier(ws.signing_secret)
    assert all(verifier.is_valid_request(body, headers) for headers, body in requests)
    challenge, command, shortcut, event = requests
    assert json.loads(challenge[1])["type"] == "url_verification"
    assert command[0]["content-type"] == "application/x-www-form-urlencoded"
    assert parse_qs(command[1].decode())["command"] == ["/sysom"]
    assert json.loads(parse_qs(shortcut[1].decode())["payload"][0])["callback_id"] == "anywhere"
    assert event[0]["content-type"] == "application/json"
    assert json.loads(event[1])["event"]["text"] == "hello"
    assert "x-slack-retry-num" not in event[0]


async def test_a_url_that_does_not_answer_the_challenge_is_not_used(ws: Workspace) -> None:
    def seen(request: Request, body: bytes) -> Response:
        return PlainTextResponse(json.loads(body)["challenge"] + "!")

    with pytest.raises(
        RequestUrlError, match=r"did not give back the value of the challenge parameter: HTTP 200"
    ):
        async with serving(ws, app_in(ws), seen):
            pass
    assert not ws.reachable


async def test_a_url_where_nothing_listens_is_not_used(ws: Workspace) -> None:
    async with Workspace() as gone:
        address = gone.url
    with pytest.raises(RequestUrlError, match="ConnectError"):
        await ws.use_request_url(address)


async def test_an_event_that_fails_comes_again_with_its_number_and_reason(ws: Workspace) -> None:
    tries: list[tuple[str | None, str | None, str]] = []

    def seen(request: Request, body: bytes) -> Response | None:
        if b"url_verification" in body:
            return None
        number, reason = (request.headers.get(f"x-slack-retry-{name}") for name in ("num", "reason"))
        tries.append((number, reason, json.loads(body)["event_id"]))
        return Response(status_code=500)

    async with serving(ws, app_in(ws), seen):
        await ws.person("ada").say("hello")
        await ws.wait_for(lambda: len(tries) == 2 and not ws.pending)
        ws.clock.advance(60)
        await ws.wait_for(lambda: len(tries) == 3 and not ws.pending)
        ws.clock.advance(300)
        await ws.wait_for(lambda: len(tries) == 4 and not ws.pending)
        ws.clock.advance(3600)
        await ws.person("ada").command("/sysom jobs", channel="random")
    id = tries[0][2]
    assert tries[:4] == [
        (None, None, id),
        ("1", "http_error", id),
        ("2", "http_error", id),
        ("3", "http_error", id),
    ]


async def test_an_app_may_ask_not_to_get_an_event_again(ws: Workspace) -> None:
    seen_events = 0

    def seen(request: Request, body: bytes) -> Response | None:
        nonlocal seen_events
        if b"url_verification" in body:
            return None
        seen_events += 1
        return Response(status_code=500, headers={"X-Slack-No-Retry": "1"})

    async with serving(ws, app_in(ws), seen):
        await ws.person("ada").say("hello")
        await ws.wait_for(lambda: seen_events and not ws.pending)
        ws.clock.advance(3600)
        await ws.person("ada").say("next")
        await ws.wait_for(lambda: seen_events == 2 and not ws.pending)


async def test_who_does_not_answer_within_3_s_is_reported_to_the_person(ws: Workspace) -> None:
    app = app_in(ws)
    reached, never = asyncio.Event(), asyncio.Event()

    @app.command("/sysom")
    async def stall(ack: Any) -> None:
        reached.set()
        await never.wait()

    async with serving(ws, app):
        command = asyncio.create_task(ws.person("ada").command("/sysom jobs"))
        await reached.wait()
        ws.clock.advance(3)
        delivery = await command
        never.set()
    assert (delivery.error, delivery.reason) == ("operation_timeout", "http_timeout")
    assert "did not respond" in ws.channel("training").messages[0].text


async def test_an_app_that_is_away_is_a_failed_dispatch(ws: Workspace) -> None:
    async with serving(ws, app_in(ws)):
        pass
    delivery = await ws.person("ada").command("/sysom jobs")
    assert (delivery.error, delivery.reason) == ("dispatch_failed", "connection_failed")


async def test_the_answer_to_a_command_is_shown(ws: Workspace) -> None:
    app = app_in(ws)

    @app.command("/sysom")
    async def command(ack: Any, command: dict[str, Any]) -> None:
        if command["text"] == "plain":
            await ack("only you")
        else:
            await ack(text="all of you", response_type="in_channel")

    async with serving(ws, app):
        await ws.person("ada").command("/sysom plain")
        await ws.person("ada").command("/sysom json")
    first, echo, second = ws.channel("training").messages
    assert (first.text, first.ephemeral_to) == ("only you", ws.person("ada").id)
    assert (echo.text, second.text, second.ephemeral_to) == ("/sysom json", "all of you", None)


@pytest.mark.parametrize("bad", ["wrong", "stale", "missing"])
async def test_bolt_refuses_a_bad_signature(ws: Workspace, bad: Any) -> None:
    async with serving(ws, app_in(ws)):
        ws.faults.signature(bad)
        delivery = await ws.person("ada").command("/sysom jobs")
    assert (delivery.error, delivery.reason) == ("dispatch_failed", "http_error")


@pytest.mark.parametrize(
    ("bad", "timestamp", "signature"),
    [("no_number", "yesterday", "v0=[0-9a-f]{64}"), ("not_ascii", None, "v0=ü")],
)
async def test_headers_that_bolt_breaks_on_arrive_as_they_are(
    ws: Workspace, bad: Any, timestamp: str | None, signature: str
) -> None:
    headers: list[dict[str, str]] = []

    def seen(request: Request, body: bytes) -> Response | None:
        headers.append(dict(request.headers))
        return None if b"url_verification" in body else Response()

    async with serving(ws, app_in(ws), seen):
        ws.faults.signature(bad)
        await ws.person("ada").command("/sysom jobs")
    sent = headers[-1]
    assert timestamp is None or sent["x-slack-request-timestamp"] == timestamp
    assert re.fullmatch(signature, sent["x-slack-signature"])


async def test_a_request_sent_twice_is_acknowledged_once(ws: Workspace) -> None:
    bodies: list[bytes] = []

    def seen(request: Request, body: bytes) -> Response | None:
        if b"url_verification" in body:
            return None
        bodies.append(body)
        return Response()

    async with serving(ws, app_in(ws), seen):
        ws.send_twice()
        assert (await ws.person("ada").command("/sysom jobs")).acknowledged
        await ws.wait_for(lambda: len(bodies) == 2)
    assert bodies[0] == bodies[1]


async def test_socket_mode_is_off_in_http_mode(ws: Workspace) -> None:
    async with serving(ws, app_in(ws)):
        url = (await AsyncWebClient(base_url=ws.api_url).apps_connections_open(app_token=ws.app_token))["url"]
        async with connect(url, proxy=None) as socket:
            assert json.loads(await socket.recv())["reason"] == "link_disabled"


async def test_a_workspace_can_start_in_http_mode() -> None:
    async with Workspace(request_url="http://127.0.0.1:9/", signing_secret="s3cret") as ws:
        assert ws.reachable
        assert ws.signing_secret == "s3cret"
        async with httpx.AsyncClient() as http:
            assert (await http.get(ws.url)).status_code == 200
