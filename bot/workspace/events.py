"""Which changes in the workspace the app is told of, and in what words (docs.slack.dev/reference/events)."""

import secrets

from bot.workspace.files import Files
from bot.workspace.shapes import message_json
from bot.workspace.world import Change, Channel, Json, Message, User, World, new_id

# What a manifest lists under `bot_events`.
SUBSCRIPTIONS = frozenset({"app_mention", "message.channels", "message.im"})


def events_of(world: World, change: Change, subscriptions: frozenset[str], files: Files) -> list[Json]:
    """The events that a change makes for the app: from channels it is in, never of ephemeral messages."""
    channel, message = change.channel, change.message
    if channel is None or world.bot.id not in channel.members:
        return []
    if change.kind == "joined" and "member_joined_channel" in subscriptions:
        return [_joined(world, channel, change.actor)]
    if message is None or message.ephemeral_to is not None:
        return []
    if change.kind in ("reacted", "unreacted"):
        name = "reaction_added" if change.kind == "reacted" else "reaction_removed"
        return [_reaction(world, channel, message, name, change)] if name in subscriptions else []
    events: list[Json] = []
    kind = "im" if channel.direct else "groups" if channel.private else "channels"
    if f"message.{kind}" in subscriptions:
        event = _message_event(world, channel, change, message, files)
        if event is not None:
            events.append(event)
    mentions = f"<@{world.bot.id}" in message.text and message.user != world.bot.id
    if change.kind == "posted" and mentions and not channel.direct and "app_mention" in subscriptions:
        shape = message_json(world, message, files)
        events.append({**shape, "type": "app_mention", "channel": channel.id, "event_ts": message.ts})
    return events


def home_opened(world: World, user: User, channel: Channel, view: Json | None) -> Json:
    """The event of a person who looks at the app's home tab."""
    event = {
        "type": "app_home_opened",
        "user": user.id,
        "channel": channel.id,
        "tab": "home",
        "event_ts": world.next_ts(),
    }
    return event if view is None else {**event, "view": view}


def _joined(world: World, channel: Channel, user: str) -> Json:
    return {
        "type": "member_joined_channel",
        "user": user,
        "channel": channel.id,
        "channel_type": channel.id[0],
        "team": world.team_id,
        "event_ts": world.next_ts(),
    }


def _reaction(world: World, channel: Channel, message: Message, name: str, change: Change) -> Json:
    return {
        "type": name,
        "user": change.actor,
        "reaction": change.emoji,
        "item_user": message.user,
        "item": {"type": "message", "channel": channel.id, "ts": message.ts},
        "event_ts": world.next_ts(),
    }


def _message_event(
    world: World, channel: Channel, change: Change, message: Message, files: Files
) -> Json | None:
    kind = "im" if channel.direct else "group" if channel.private else "channel"
    where = {"channel": channel.id, "channel_type": kind}
    shape = message_json(world, message, files)
    if change.kind == "posted":
        more = {"subtype": "file_share"} if message.files else {}
        return {**shape, **where, **more, "event_ts": message.ts}
    if change.previous is None:
        return None  # a root that got its first reply
    ts = world.next_ts()
    previous = message_json(world, change.previous, files)
    hidden = {"type": "message", "hidden": True, "ts": ts, "event_ts": ts, **where}
    if change.kind == "updated":
        return {**hidden, "subtype": "message_changed", "message": shape, "previous_message": previous}
    return {**hidden, "subtype": "message_deleted", "deleted_ts": message.ts, "previous_message": previous}


def callback(world: World, event: Json) -> Json:
    """The `event_callback` around an event."""
    channel = world.channels.get(str(event.get("channel")))
    return {
        "token": secrets.token_hex(12),
        "team_id": world.team_id,
        "context_team_id": world.team_id,
        "api_app_id": world.app_id,
        "event": event,
        "type": "event_callback",
        "event_id": new_id("Ev"),
        "event_time": int(float(event["event_ts"])),
        "authorizations": [
            {
                "enterprise_id": None,
                "team_id": world.team_id,
                "user_id": world.bot.id,
                "is_bot": True,
                "is_enterprise_install": False,
            }
        ],
        "is_ext_shared_channel": channel is not None and channel.shared,
        "event_context": secrets.token_hex(12),
    }
