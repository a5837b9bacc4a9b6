"""The Web API as Slack's SDK meets it: answers, refusals, tokens, bodies, paging."""

from typing import Any

import httpx
import pytest
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot.workspace import Workspace

DIVIDER = {"type": "divider"}


async def refusal(call: Any) -> dict[str, Any]:
    with pytest.raises(SlackApiError) as caught:
        await call
    data = caught.value.response.data
    assert isinstance(data, dict)
    return data


async def test_the_bot_learns_who_it_is(ws: Workspace, slack: AsyncWebClient) -> None:
    answer = await slack.auth_test()
    assert (answer["user"], answer["user_id"]) == ("sysom", ws.world.bot.id)
    assert "chat:write" in answer.headers["x-oauth-scopes"]


@pytest.mark.parametrize(
    ("token", "error"),
    [("", "not_authed"), ("xoxb-wrong", "invalid_auth"), ("APP", "not_allowed_token_type")],
)
async def test_a_wrong_token_is_refused(ws: Workspace, token: str, error: str) -> None:
    token = ws.app_token if token == "APP" else token
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{ws.api_url}auth.test", data={"token": token})
    assert answer.json() == {"ok": False, "error": error}


async def test_a_bot_token_opens_no_socket(ws: Workspace) -> None:
    slack = AsyncWebClient(base_url=ws.api_url)
    data = await refusal(slack.apps_connections_open(app_token=ws.bot_token))
    assert data["error"] == "not_allowed_token_type"


async def test_the_tokens_of_two_workspaces_differ(ws: Workspace) -> None:
    async with Workspace() as other:
        assert {ws.bot_token, ws.app_token}.isdisjoint({other.bot_token, other.app_token})
        assert (await refusal(AsyncWebClient(ws.bot_token, base_url=other.api_url).auth_test()))["error"] == (
            "invalid_auth"
        )


async def test_an_unknown_method_is_named(slack: AsyncWebClient) -> None:
    data = await refusal(slack.api_call("chat.shout"))
    assert data == {"ok": False, "error": "unknown_method", "req_method": "chat.shout"}


async def test_forms_with_blocks_as_text_and_json_say_the_same(ws: Workspace) -> None:
    headers = {"Authorization": f"Bearer {ws.bot_token}"}
    async with httpx.AsyncClient(headers=headers) as http:
        url = f"{ws.api_url}chat.postMessage"
        form = {"channel": "#training", "text": "a", "blocks": '[{"type":"divider"}]'}
        first = (await http.post(url, data=form)).json()
        second = (await http.post(url, json=form | {"blocks": [DIVIDER]})).json()
    assert first["ok"]
    assert second["ok"]
    assert [[b["type"] for b in m.blocks] for m in ws.channel("training").messages] == [["divider"]] * 2


@pytest.mark.parametrize(
    ("body", "kind", "error"),
    [
        (b"{", "application/json", "invalid_json"),
        (b"[1]", "application/json", "json_not_object"),
        (b"[" * 5000, "application/json", "invalid_json"),
        (b"text", "text/xml", "invalid_post_type"),
        (b"text", "", "missing_post_type"),
        (b"{}", "application/json; charset=klingon", "invalid_charset"),
        (b'{"channel": "#training", "blocks": "[{"}', "application/json", "invalid_blocks_format"),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(
    ws: Workspace, body: bytes, kind: str, error: str
) -> None:
    headers = {"Authorization": f"Bearer {ws.bot_token}", "Content-Type": kind}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{ws.api_url}chat.postMessage", content=body, headers=headers)
    assert answer.json()["error"] == error


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"channel": "#training"}, "no_text"),
        ({"channel": "#training", "text": "  "}, "no_text"),
        ({"channel": "#nowhere", "text": "x"}, "channel_not_found"),
        ({"channel": "#random", "text": "x"}, "not_in_channel"),
        ({"channel": "#training", "text": "x" * 40_001}, "msg_too_long"),
        ({"channel": "#training", "text": "x", "blocks": [{"type": "nope"}]}, "invalid_blocks"),
    ],
)
async def test_a_message_that_slack_would_not_take(slack: AsyncWebClient, arguments: Any, error: str) -> None:
    assert (await refusal(slack.chat_postMessage(**arguments)))["error"] == error


async def test_bad_blocks_are_pointed_at(slack: AsyncWebClient) -> None:
    blocks = [DIVIDER, {"type": "section", "text": {"type": "mrkdwn", "text": "x" * 3001}}]
    data = await refusal(slack.chat_postMessage(channel="#training", text="x", blocks=blocks))
    assert data == {
        "ok": False,
        "error": "invalid_blocks",
        "errors": ["must be less than 3001 characters [json-pointer:/blocks/1/text/text]"],
        "response_metadata": {
            "messages": ["[ERROR] must be less than 3001 characters [json-pointer:/blocks/1/text/text]"]
        },
    }


async def test_blocks_that_are_too_long_together(slack: AsyncWebClient) -> None:
    def sections(length: int) -> list[dict[str, Any]]:
        return [{"type": "section", "text": {"type": "mrkdwn", "text": "x" * length}}] * 5

    await slack.chat_postMessage(channel="#training", text="x", blocks=sections(2500))
    data = await refusal(slack.chat_postMessage(channel="#training", text="x", blocks=sections(2640)))
    assert data["error"] == "msg_blocks_too_long"


async def test_an_update_keeps_the_ts_and_text_alone_takes_the_blocks_place(
    ws: Workspace, slack: AsyncWebClient
) -> None:
    sent = await slack.chat_postMessage(channel="#training", text="a", blocks=[DIVIDER])
    answer = await slack.chat_update(channel=sent["channel"], ts=sent["ts"], text="b")
    (message,) = ws.channel("training").messages
    assert (message.ts, message.text, message.blocks) == (sent["ts"], "b", [])
    assert answer["ts"] == sent["ts"]
    assert message.edited is not None


async def test_what_cannot_be_updated(ws: Workspace, slack: AsyncWebClient) -> None:
    channel = ws.channel("training").id
    hers = await ws.person("ada").say("mine")
    sent = await slack.chat_postMessage(channel=channel, text="a")
    only = await slack.chat_postEphemeral(channel=channel, user=ws.person("ada").id, text="psst")

    async def error(ts: str, text: str = "x") -> str:
        return str((await refusal(slack.chat_update(channel=channel, ts=ts, text=text)))["error"])

    assert await error(hers.ts) == "cant_update_message"
    assert await error("1.000001") == "message_not_found"
    assert await error(only["message_ts"]) == "message_not_found"
    assert await error(sent["ts"], "é" * 2001) == "msg_too_long"
    assert (await refusal(slack.chat_delete(channel=channel, ts=hers.ts)))["error"] == "cant_delete_message"


async def test_a_reply_to_a_missing_parent_lands_in_the_channel(ws: Workspace, slack: AsyncWebClient) -> None:
    answer = await slack.chat_postMessage(channel="#training", text="x", thread_ts="1.000001")
    assert "thread_ts" not in answer["message"]
    assert [m.text for m in ws.channel("training").roots] == ["x"]


async def test_a_thread_is_read_back(ws: Workspace, slack: AsyncWebClient) -> None:
    root = await slack.chat_postMessage(channel="#training", text="root")
    channel = root["channel"]
    for n in range(3):
        await slack.chat_postMessage(channel=channel, text=str(n), thread_ts=root["ts"])
    history = await slack.conversations_history(channel=channel)
    assert [(m["text"], m["reply_count"]) for m in history["messages"]] == [("root", 3)]
    texts: list[str] = []
    cursor = ""
    while True:
        page = await slack.conversations_replies(channel=channel, ts=root["ts"], limit=2, cursor=cursor)
        texts += [m["text"] for m in page["messages"]]
        cursor = page["response_metadata"]["next_cursor"]
        if not cursor:
            break
    assert texts == ["root", "0", "1", "2"]


async def test_history_leaves_out_what_only_one_person_sees(ws: Workspace, slack: AsyncWebClient) -> None:
    channel = ws.channel("training").id
    await slack.chat_postEphemeral(channel=channel, user=ws.person("ada").id, text="psst")
    assert (await slack.conversations_history(channel=channel))["messages"] == []
    (message,) = ws.channel("training").messages
    assert ws.person("ada").sees(message)
    assert not ws.person("grace").sees(message)


async def test_a_message_to_a_person_opens_a_direct_message(ws: Workspace, slack: AsyncWebClient) -> None:
    ada = ws.person("ada")
    opened = await slack.conversations_open(users=ada.id)
    sent = await slack.chat_postMessage(channel=ada.id, text="hello")
    assert sent["channel"] == opened["channel"]["id"] == ada.direct.id


async def test_channels_and_people_are_listed(ws: Workspace, slack: AsyncWebClient) -> None:
    listed = await slack.conversations_list(types="public_channel")
    assert {c["name"]: c["is_member"] for c in listed["channels"]} == {
        "training": True,
        "general": True,
        "random": False,
    }
    random = ws.channel("random").id
    await slack.conversations_join(channel=random)
    assert ws.world.bot.id in (await slack.conversations_members(channel=random))["members"]
    assert (await slack.users_info(user=ws.person("ada").id))["user"]["name"] == "ada"
    assert (await refusal(slack.users_info(user="U404")))["error"] == "user_not_found"


async def test_a_bad_cursor_is_refused(slack: AsyncWebClient) -> None:
    assert (await refusal(slack.users_list(cursor="$$")))["error"] == "invalid_cursor"
    assert (await refusal(slack.users_list(limit=0)))["error"] == "invalid_limit"


async def test_a_rate_limit_on_demand_is_a_429_and_passes(ws: Workspace, slack: AsyncWebClient) -> None:
    ws.rate_limit("chat.postMessage", times=1, retry_after=7)
    with pytest.raises(SlackApiError) as caught:
        await slack.chat_postMessage(channel="#training", text="x")
    assert (caught.value.response.status_code, caught.value.response.headers["Retry-After"]) == (429, "7")
    assert caught.value.response["error"] == "ratelimited"
    assert (await slack.chat_postMessage(channel="#training", text="x"))["ok"]


async def test_reactions_come_and_go(ws: Workspace, slack: AsyncWebClient) -> None:
    sent = await slack.chat_postMessage(channel="#training", text="x")
    where = {"channel": sent["channel"], "timestamp": sent["ts"], "name": "eyes"}
    await slack.reactions_add(**where)
    assert ws.channel("training").messages[0].reactions == {"eyes": (ws.world.bot.id,)}
    assert (await refusal(slack.reactions_add(**where)))["error"] == "already_reacted"
    await slack.reactions_remove(**where)
    assert ws.channel("training").messages[0].reactions == {}


@pytest.mark.parametrize(
    ("kind", "warning"),
    [
        ("application/json", "missing_charset"),
        ("application/json; charset=utf-8", None),
        ("application/x-www-form-urlencoded", None),
        ("application/x-www-form-urlencoded; charset=utf-8", "superfluous_charset"),
        ("text/plain", "missing_charset"),
    ],
)
async def test_the_charset_is_warned_of_as_slack_does(ws: Workspace, kind: str, warning: str | None) -> None:
    headers = {"Authorization": f"Bearer {ws.bot_token}", "Content-Type": kind}
    async with httpx.AsyncClient() as http:
        answer = (await http.post(f"{ws.api_url}auth.test", content=b"{}", headers=headers)).json()
    assert answer["ok"]
    assert answer.get("warning") == warning
    assert answer.get("response_metadata") == (warning and {"warnings": [warning]})


async def test_the_sdk_causes_no_warning(ws: Workspace, slack: AsyncWebClient) -> None:
    sent = await slack.chat_postMessage(channel="#training", text="x")
    for answer in (sent, await slack.conversations_list(), await slack.auth_test()):
        assert "warning" not in answer.data


async def test_a_warning_stands_beside_others(ws: Workspace) -> None:
    headers = {"Authorization": f"Bearer {ws.bot_token}"}
    async with httpx.AsyncClient(headers=headers) as http:
        body = {"channel": ws.channel("training").id}
        answer = (await http.post(f"{ws.api_url}conversations.join", json=body)).json()
        bad = (await http.post(f"{ws.api_url}chat.postMessage", json={})).json()
    assert answer["warning"] == "already_in_channel,missing_charset"
    assert answer["response_metadata"] == {"warnings": ["already_in_channel", "missing_charset"]}
    assert bad["response_metadata"] == {
        "messages": ["[ERROR] missing required field: channel"],
        "warnings": ["missing_charset"],
    }


@pytest.mark.parametrize(
    ("method", "arguments", "needed"),
    [
        ("chat.postMessage", {"channel": "TRAINING", "text": "x"}, "chat:write"),
        ("conversations.history", {"channel": "TRAINING"}, "channels:history"),
        ("conversations.history", {"channel": "DIRECT"}, "im:history"),
        ("conversations.list", {"types": "public_channel,im"}, "channels:read,im:read"),
        ("files.getUploadURLExternal", {"filename": "a", "length": 1}, "files:write"),
        ("reactions.add", {"channel": "TRAINING", "name": "eyes"}, "reactions:write"),
        ("users.info", {"user": "U1"}, "users:read"),
    ],
)
async def test_a_scope_that_is_missing_is_named(method: str, arguments: dict[str, Any], needed: str) -> None:
    async with Workspace(scopes=frozenset({"commands", "channels:join"})) as ws:
        places = {"TRAINING": ws.channel("training").id, "DIRECT": ws.person("ada").direct.id}
        slack = AsyncWebClient(ws.bot_token, base_url=ws.api_url)
        arguments = {key: places.get(value, value) for key, value in arguments.items()}
        with pytest.raises(SlackApiError) as caught:
            await slack.api_call(method, params=arguments)
        assert caught.value.response.data == {
            "ok": False,
            "error": "missing_scope",
            "needed": needed,
            "provided": "channels:join,commands",
        }
        assert caught.value.response.headers["x-accepted-oauth-scopes"] == needed
        assert (await slack.conversations_join(channel=ws.channel("random").id))["ok"]


async def test_the_app_token_is_taken_from_the_header_alone(ws: Workspace) -> None:
    async with httpx.AsyncClient() as http:
        url = f"{ws.api_url}apps.connections.open"
        by_form = (await http.post(url, data={"token": ws.app_token})).json()
        by_header = (await http.post(url, headers={"Authorization": f"Bearer {ws.app_token}"})).json()
    assert by_form == {"ok": False, "error": "not_authed"}
    assert by_header["ok"]


async def test_what_an_app_hangs_on_a_message_finds_it_again(ws: Workspace, slack: AsyncWebClient) -> None:
    metadata = {"event_type": "verdict", "event_payload": {"id": "v-1"}}
    sent = await slack.chat_postMessage(channel="#training", text="x", metadata=metadata)
    channel = sent["channel"]
    await slack.chat_update(channel=channel, ts=sent["ts"], text="y")
    (shown,) = (await slack.conversations_history(channel=channel, include_all_metadata=True))["messages"]
    assert shown["metadata"] == metadata
    assert "metadata" not in (await slack.conversations_history(channel=channel))["messages"][0]
    for bad, error in (
        ("{", "invalid_metadata_format"),
        ("[1]", "invalid_metadata_format"),
        ('{"event_type": ""}', "invalid_metadata_schema"),
    ):
        data = await refusal(slack.chat_postMessage(channel=channel, text="x", metadata=bad))  # type: ignore[arg-type]
        assert data["error"] == error


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"timestamp": "TS", "name": "no_such_emoji"}, "invalid_name"),
        ({"timestamp": "soon", "name": "eyes"}, "bad_timestamp"),
        ({"name": "eyes"}, "no_item_specified"),
        ({"timestamp": "1.000001", "name": "eyes"}, "message_not_found"),
    ],
)
async def test_a_reaction_that_slack_would_not_take(
    ws: Workspace, slack: AsyncWebClient, more: dict[str, str], error: str
) -> None:
    sent = await slack.chat_postMessage(channel="#training", text="x")
    arguments = {"channel": sent["channel"]} | {k: sent["ts"] if v == "TS" else v for k, v in more.items()}
    assert (await refusal(slack.api_call("reactions.add", params=arguments)))["error"] == error
    assert (await refusal(slack.api_call("reactions.remove", params=arguments)))["error"] == error


async def test_a_permalink_leads_to_the_page(ws: Workspace, slack: AsyncWebClient) -> None:
    sent = await slack.chat_postMessage(channel="#training", text="x")
    link = (await slack.chat_getPermalink(channel=sent["channel"], message_ts=sent["ts"]))["permalink"]
    assert link.startswith(ws.url)
    data = await refusal(slack.chat_getPermalink(channel=sent["channel"], message_ts="1.000001"))
    assert data["error"] == "message_not_found"
