"""What people can do beyond typing: menus, shortcuts, reactions; and people and bots from elsewhere."""

import asyncio
from typing import Any

import pytest
from slack_sdk.web.async_client import AsyncWebClient
from websockets.asyncio.client import ClientConnection

from bot.workspace import Delivery, NotThereError, Workspace, world
from tests.bot.workspace.test_socket_mode import acknowledge, connection, receive
from tests.bot.workspace.test_web_api import refusal

Json = dict[str, Any]


def plain(text: str) -> Json:
    return {"type": "plain_text", "text": text}


OPTIONS = [{"text": plain(f"Rank {n}"), "value": f"r{n}"} for n in range(3)]
GROUPS = [
    {"label": plain("Node A"), "options": OPTIONS[:2]},
    {"label": plain("Node B"), "options": OPTIONS[2:]},
]
MENUS = [
    {"type": "overflow", "action_id": "more", "options": OPTIONS},
    {"type": "static_select", "action_id": "one", "options": OPTIONS, "initial_option": OPTIONS[0]},
    {"type": "static_select", "action_id": "grouped", "option_groups": GROUPS},
    {"type": "multi_static_select", "action_id": "many", "options": OPTIONS},
    {"type": "checkboxes", "action_id": "boxes", "options": OPTIONS},
    {"type": "radio_buttons", "action_id": "radio", "options": OPTIONS},
    {"type": "users_select", "action_id": "who"},
    {"type": "conversations_select", "action_id": "where"},
    {"type": "datepicker", "action_id": "day"},
    {"type": "timepicker", "action_id": "time"},
]


async def sent(socket: ClientConnection, doing: Any) -> Json:
    """What the app gets when somebody does something, which it acknowledges."""
    task: asyncio.Task[Delivery] = asyncio.create_task(doing)
    envelope = await receive(socket)
    await acknowledge(socket, envelope)
    assert (await task).acknowledged
    payload = envelope["payload"]
    assert isinstance(payload, dict)
    return payload


@pytest.mark.parametrize(
    ("action_id", "choice", "state"),
    [
        ("more", "r1", {"selected_option": OPTIONS[1]}),
        ("one", "r2", {"selected_option": OPTIONS[2]}),
        ("grouped", "r2", {"selected_option": OPTIONS[2]}),
        ("many", ["r0", "r2"], {"selected_options": [OPTIONS[0], OPTIONS[2]]}),
        ("boxes", [], {"selected_options": []}),
        ("radio", "r0", {"selected_option": OPTIONS[0]}),
        ("who", "U1", {"selected_user": "U1"}),
        ("where", "C1", {"selected_conversation": "C1"}),
        ("day", "2026-11-30", {"selected_date": "2026-11-30"}),
        ("time", "10:42", {"selected_time": "10:42"}),
    ],
)
async def test_every_menu_says_what_was_chosen(
    ws: Workspace, slack: AsyncWebClient, action_id: str, choice: Any, state: Json
) -> None:
    blocks = [{"type": "actions", "block_id": "menus", "elements": MENUS}]
    await slack.chat_postMessage(channel="#training", text="x", blocks=blocks)
    (message,) = ws.channel("training").messages
    async with await connection(ws) as socket:
        payload = await sent(socket, ws.person("ada").click(message, action_id, choice))
    (action,) = payload["actions"]
    assert {key: action[key] for key in state} == state
    values = payload["state"]["values"]["menus"]
    if action_id == "more":
        assert "more" not in values
    else:
        assert {key: values[action_id][key] for key in state} == state
    if action_id != "one":
        assert values["one"]["selected_option"] == OPTIONS[0]


async def test_only_what_a_menu_offers_can_be_chosen(ws: Workspace, slack: AsyncWebClient) -> None:
    await slack.chat_postMessage(
        channel="#training", text="x", blocks=[{"type": "actions", "elements": MENUS}]
    )
    (message,) = ws.channel("training").messages
    with pytest.raises(NotThereError, match=r"'one' has no option 'r9'; it has \['r0', 'r1', 'r2'\]"):
        await ws.person("ada").click(message, "one", "r9")
    with pytest.raises(NotThereError, match="'more' is a menu: choose one of"):
        await ws.person("ada").click(message, "more")


async def test_shortcuts_have_their_messages(ws: Workspace) -> None:
    message = await ws.person("ada").say("step took 4 s", channel="random")
    async with await connection(ws) as socket:
        payload = await sent(socket, ws.person("ada").shortcut("explain", message))
        assert (payload["type"], payload["callback_id"]) == ("message_action", "explain")
        assert payload["message"]["text"] == "step took 4 s"
        payload = await sent(socket, ws.person("ada").shortcut("new"))
    assert payload["type"] == "shortcut"
    assert "channel" not in payload
    assert "response_url" not in payload


async def test_reactions_and_newcomers_are_events_for_who_wants_them() -> None:
    wanted = frozenset({"reaction_added", "reaction_removed", "member_joined_channel"})
    async with Workspace(events=wanted) as ws, await connection(ws) as socket:
        ada = ws.person("ada")
        message = await ada.say("done")
        await ada.react(message, "eyes")
        await ada.react(message, ":eyes:", added=False)
        ada.invite_bot("random")
        events = [(await receive(socket))["payload"]["event"] for _ in range(3)]
    assert [event["type"] for event in events] == [
        "reaction_added",
        "reaction_removed",
        "member_joined_channel",
    ]
    assert events[0]["item"] == {"type": "message", "channel": message.channel, "ts": message.ts}
    assert (events[0]["user"], events[0]["reaction"]) == (ada.id, "eyes")
    assert events[2]["user"] == ws.world.bot.id


async def test_strangers_are_in_shared_channels_alone_and_have_no_commands(
    ws: Workspace, slack: AsyncWebClient
) -> None:
    with pytest.raises(ValueError, match="#training is not shared"):
        ws.stranger("eve", "training")
    shared = ws.add_channel("vendor", shared=True)
    eve = ws.stranger("eve", shared)
    async with await connection(ws) as socket:
        await eve.mention("look", channel="vendor")
        payloads = [(await receive(socket))["payload"] for _ in range(2)]
        delivery = await eve.command("/sysom jobs", channel="vendor")
    assert not delivery.acknowledged
    assert "is not a valid command" in shared.messages[-1].text
    assert all(payload["is_ext_shared_channel"] for payload in payloads)
    assert payloads[0]["event"]["user_team"] == eve.user.team != ws.world.team_id
    with pytest.raises(NotThereError):
        await eve.say("hello", channel="training")
    info = (await slack.conversations_info(channel=shared.id))["channel"]
    assert (info["is_ext_shared"], info["is_shared"]) == (True, True)
    user = (await slack.users_info(user=eve.id))["user"]
    assert (user["team_id"], user["is_stranger"]) == (eve.user.team, True)
    assert "eve" not in [member["name"] for member in (await slack.users_list())["members"]]


async def test_another_bot_is_told_from_people(ws: Workspace) -> None:
    async with await connection(ws) as socket:
        await ws.other_bot("deploys", "training").say("rolled out")
        event = (await receive(socket))["payload"]["event"]
    assert event["bot_id"].startswith("B")
    assert event["bot_id"] != ws.world.bot_id


async def test_nothing_is_written_in_an_archived_channel(ws: Workspace, slack: AsyncWebClient) -> None:
    sent_ = await slack.chat_postMessage(channel="#training", text="x")
    channel, ts = sent_["channel"], sent_["ts"]
    ws.archive("training")
    person = ws.person("ada").id
    calls = {
        "is_archived": [
            slack.chat_postMessage(channel=channel, text="y"),
            slack.chat_postEphemeral(channel=channel, user=person, text="y"),
            slack.reactions_add(channel=channel, timestamp=ts, name="eyes"),
            slack.conversations_join(channel=channel),
        ],
        "is_inactive": [slack.chat_update(channel=channel, ts=ts, text="y")],
    }
    for error, refused in calls.items():
        assert [(await refusal(call))["error"] for call in refused] == [error] * len(refused)
    with pytest.raises(NotThereError, match="#training is archived"):
        await ws.person("ada").say("hello")
    with pytest.raises(NotThereError, match="#training is archived"):
        await ws.person("ada").command("/sysom jobs")
    listed = await slack.conversations_list(exclude_archived=True)
    assert [c["name"] for c in listed["channels"]] == ["general", "random"]
    ws.archive("training", archived=False)
    assert (await slack.chat_postMessage(channel=channel, text="y"))["ok"]


async def test_a_private_channel_is_hidden_from_those_outside() -> None:
    async with Workspace(events=frozenset({"message.groups"})) as ws:
        slack = AsyncWebClient(ws.bot_token, base_url=ws.api_url)
        secret = ws.add_channel("secret", with_bot=False, private=True)
        kinds = "public_channel,private_channel"
        assert "secret" not in [c["name"] for c in (await slack.conversations_list(types=kinds))["channels"]]
        data = await refusal(slack.chat_postMessage(channel=secret.id, text="x"))
        assert data["error"] == "channel_not_found"
        ws.person("ada").invite_bot("secret")
        assert "secret" in [c["name"] for c in (await slack.conversations_list(types=kinds))["channels"]]
        async with await connection(ws) as socket:
            await ws.person("ada").say("hello", channel="secret")
            assert (await receive(socket))["payload"]["event"]["channel_type"] == "group"


async def test_a_channel_forgets_its_oldest_messages(ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "MESSAGES", 5)
    for n in range(8):
        await ws.person("ada").say(str(n))
    assert [message.text for message in ws.channel("training").messages] == ["3", "4", "5", "6", "7"]
