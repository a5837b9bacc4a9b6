"""Which changes in the workspace the app is told of, and in what words (docs.slack.dev/reference/events)."""

import secrets

from bot.workspace.shapes import message_json
from bot.workspace.world import Change, Channel, Json, Message, World, new_id

# What a manifest lists under `bot_events`.
SUBSCRIPTIONS = frozenset({"app_mention", "message.channels", "message.im"})


def events_of(world: World, change: Change, subscriptions: frozenset[str]) -> list[Json]:
    """The events that a change makes for the app: from channels it is in, never of ephemeral messages."""
    channel, message = change.channel, change.message
    if channel is None or message is None or message.ephemeral_to is not None:
        return []
    if world.bot.id not in channel.members:
        return []
    events: list[Json] = []
    if ("message.im" if channel.direct else "message.channels") in subscriptions:
        event = _message_event(world, channel, change, message)
        if event is not None:
            events.append(event)
    mentions = f"<@{world.bot.id}" in message.text and message.user != world.bot.id
    if change.kind == "posted" and mentions and not channel.direct and "app_mention" in subscriptions:
        shape = message_json(world, message)
        events.append({**shape, "type": "app_mention", "channel": channel.id, "event_ts": message.ts})
    return events


def _message_event(world: World, channel: Channel, change: Change, message: Message) -> Json | None:
    kind = "im" if channel.direct else "channel"
    where = {"channel": channel.id, "channel_type": kind}
    shape = message_json(world, message)
    if change.kind == "posted":
        return {**shape, **where, "event_ts": message.ts}
    if change.previous is None:
        return None  # a root that got its first reply, or a reaction
    ts = world.next_ts()
    previous = message_json(world, change.previous)
    hidden = {"type": "message", "hidden": True, "ts": ts, "event_ts": ts, **where}
    if change.kind == "updated":
        return {**hidden, "subtype": "message_changed", "message": shape, "previous_message": previous}
    return {**hidden, "subtype": "message_deleted", "deleted_ts": message.ts, "previous_message": previous}


def callback(world: World, event: Json) -> Json:
    """The `event_callback` around an event."""
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
        "is_ext_shared_channel": False,
        "event_context": secrets.token_hex(12),
    }
