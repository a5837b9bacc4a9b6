"""The objects of the workspace in the shape in which Slack's API and events give them."""

from bot.workspace.files import Files
from bot.workspace.world import Channel, Json, Message, User, World


def message_json(world: World, message: Message, files: Files | None = None) -> Json:
    """A message as in `conversations.history`; with `files`, what is shown under it is there too."""
    user = world.users[message.user]
    shape: Json = {
        "type": "message",
        "user": message.user,
        "text": message.text,
        "ts": message.ts,
        "team": user.team or world.team_id,
    }
    if user.team:
        shape |= {"user_team": user.team, "source_team": user.team}
    if user.id == world.bot.id:
        shape |= {"bot_id": world.bot_id, "app_id": world.app_id, "bot_profile": _bot_profile(world)}
    elif user.bot_id:
        shape["bot_id"] = user.bot_id
    if message.files and files is not None:
        shape["files"] = [files.json(file) for id in message.files if (file := files.get(id)) is not None]
    if message.blocks:
        shape["blocks"] = message.blocks
    if message.edited is not None:
        shape["edited"] = message.edited
    if message.ephemeral_to is not None:
        shape["is_ephemeral"] = True
    if message.reactions:
        shape["reactions"] = [
            {"name": name, "users": list(users), "count": len(users)}
            for name, users in message.reactions.items()
        ]
    if message.thread_ts is not None:
        shape |= {"thread_ts": message.thread_ts, **_thread(world, message)}
    return shape


def _thread(world: World, message: Message) -> Json:
    channel = world.channels[message.channel]
    if message.is_reply:
        root = channel.get(message.thread_ts or "")
        return {} if root is None else {"parent_user_id": root.user}
    replies = [reply for reply in channel.thread(message) if reply.ephemeral_to is None]
    if not replies:
        return {}
    users = list(dict.fromkeys(reply.user for reply in replies))
    return {
        "reply_count": len(replies),
        "reply_users_count": len(users),
        "reply_users": users[:5],
        "latest_reply": replies[-1].ts,
        "is_locked": False,
        "subscribed": False,
    }


def _bot_profile(world: World) -> Json:
    return {
        "id": world.bot_id,
        "app_id": world.app_id,
        "user_id": world.bot.id,
        "name": world.bot.name,
        "team_id": world.team_id,
        "deleted": False,
    }


def channel_json(world: World, channel: Channel) -> Json:
    """A channel as in `conversations.info`, seen by the bot."""
    if channel.direct:
        person = next(iter(channel.members - {world.bot.id}))
        return {
            "id": channel.id,
            "created": channel.created,
            "is_im": True,
            "is_archived": channel.archived,
            "is_org_shared": False,
            "user": person,
            "is_open": True,
        }
    return {
        "id": channel.id,
        "name": channel.name,
        "name_normalized": channel.name,
        "created": channel.created,
        "is_channel": not channel.private,
        "is_group": channel.private,
        "is_im": False,
        "is_mpim": False,
        "is_private": channel.private,
        "is_archived": channel.archived,
        "is_general": channel.name == "general",
        "is_shared": channel.shared,
        "is_ext_shared": channel.shared,
        "is_org_shared": False,
        "is_member": world.bot.id in channel.members,
        "context_team_id": world.team_id,
        "topic": {"value": "", "creator": "", "last_set": 0},
        "purpose": {"value": "", "creator": "", "last_set": 0},
        "num_members": len(channel.members),
    }


def user_json(world: World, user: User) -> Json:
    """A user as in `users.info`."""
    return {
        "id": user.id,
        "team_id": user.team or world.team_id,
        "name": user.name,
        "real_name": user.name,
        "deleted": False,
        "tz": "Etc/UTC",
        "tz_label": "Coordinated Universal Time",
        "tz_offset": 0,
        "is_bot": user.is_bot and user.id != world.slackbot.id,
        "is_admin": False,
        "is_restricted": False,
        "is_ultra_restricted": False,
        "is_app_user": False,
        "profile": {
            "real_name": user.name,
            "display_name": user.name,
            "team": user.team or world.team_id,
        },
        **({"is_stranger": True} if user.team else {}),
    }
