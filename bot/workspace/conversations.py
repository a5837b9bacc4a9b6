"""The methods of the Web API that look around: `conversations.*`, `users.*`, `auth.*`, `api.*`, `apps.*`."""

from bot.workspace.chat import refuse_closed
from bot.workspace.refusals import RefusedError, refuse_arguments
from bot.workspace.shapes import channel_json, message_json, user_json
from bot.workspace.web_api import Call, Method, page_of
from bot.workspace.world import Channel, Json, Message


def api_test(call: Call) -> Json:
    if call.text("error"):
        raise RefusedError(call.text("error"), args=call.arguments)
    return {"args": call.arguments}


def auth_test(call: Call) -> Json:
    world = call.world
    return {
        "url": call.here.page_url(),
        "team": world.team_name,
        "team_id": world.team_id,
        "user": world.bot.name,
        "user_id": world.bot.id,
        "bot_id": world.bot_id,
        "app_id": world.app_id,
        "is_enterprise_install": False,
    }


def open_connection(call: Call) -> Json:
    return {"url": call.here.sockets.open_url()}


def list_channels(call: Call) -> Json:
    kinds = set((call.text("types") or "public_channel").replace(" ", "").split(","))
    if kinds - {"public_channel", "private_channel", "mpim", "im"}:
        raise RefusedError("invalid_types")
    found = [
        channel
        for channel in call.world.channels.values()
        if call.find(channel.id) is not None
        and _kind(channel) in kinds
        and not (channel.archived and call.flag("exclude_archived", default=False))
    ]
    page, metadata = page_of(call, found)
    shapes = [channel_json(call.world, channel) for channel in page]
    return {"channels": shapes, "response_metadata": metadata}


def channel_info(call: Call) -> Json:
    shape = channel_json(call.world, call.channel())
    if not call.flag("include_num_members", default=False):
        shape.pop("num_members", None)
    return {"channel": shape}


def channel_members(call: Call) -> Json:
    page, metadata = page_of(call, sorted(call.channel().members))
    return {"members": page, "response_metadata": metadata}


def join_channel(call: Call) -> Json:
    channel = call.channel()
    if channel.direct:
        raise RefusedError("method_not_supported_for_channel_type")
    refuse_closed(channel, "is_archived")
    already = call.world.bot.id in channel.members
    call.world.join(channel, call.world.bot)
    more: Json = {}
    if already:
        more = {"warning": "already_in_channel", "response_metadata": {"warnings": ["already_in_channel"]}}
    return {"channel": channel_json(call.world, channel), **more}


def open_direct(call: Call) -> Json:
    names = [name for name in call.text("users").replace(" ", "").split(",") if name]
    if not names:
        raise refuse_arguments("missing required field: users")
    if len(names) > 1:
        raise RefusedError("method_not_supported_for_channel_type")  # group messages do not exist here
    user = call.world.users.get(names[0])
    if user is None:
        raise RefusedError("user_not_found")
    if user.is_bot:
        raise RefusedError("cannot_dm_bot")
    channel = call.world.direct(user)
    shape = channel_json(call.world, channel) if call.flag("return_im", default=False) else {"id": channel.id}
    return {"channel": shape}


def history(call: Call) -> Json:
    channel = call.channel()
    if call.world.bot.id not in channel.members:
        raise RefusedError("not_in_channel")
    shown = [m for m in reversed(channel.roots) if m.ephemeral_to is None and _in_range(call, m)]
    page, metadata = page_of(call, shown, most=999)
    messages = [_shown(call, message) for message in page]
    return {"messages": messages, "has_more": bool(metadata["next_cursor"]), "response_metadata": metadata}


def replies(call: Call) -> Json:
    channel = call.channel()
    if call.world.bot.id not in channel.members:
        raise RefusedError("not_in_channel")
    asked = channel.get(call.required("ts"))
    if asked is None or asked.ephemeral_to is not None:
        raise RefusedError("thread_not_found")
    root = channel.get(asked.thread_ts or asked.ts)
    thread = [] if root is None else [root, *channel.thread(root)]
    shown = [m for m in thread if m.ephemeral_to is None and (m is root or _in_range(call, m))]
    page, metadata = page_of(call, shown, default=1000)
    messages = [_shown(call, message) for message in page]
    return {"messages": messages, "has_more": bool(metadata["next_cursor"]), "response_metadata": metadata}


def user_info(call: Call) -> Json:
    user = call.world.users.get(call.required("user"))
    if user is None:
        raise RefusedError("user_not_found")
    return {"user": user_json(call.world, user)}


def list_users(call: Call) -> Json:
    here = [user for user in call.world.users.values() if not user.team]
    page, metadata = page_of(call, here)
    return {"members": [user_json(call.world, user) for user in page], "response_metadata": metadata}


def _kind(channel: Channel) -> str:
    return "im" if channel.direct else "private_channel" if channel.private else "public_channel"


def _shown(call: Call, message: Message) -> Json:
    shape = message_json(call.world, message, call.files)
    if call.flag("include_all_metadata", default=False) and message.metadata:
        shape["metadata"] = message.metadata
    return shape


def _in_range(call: Call, message: Message) -> bool:
    """Whether a message lies between `oldest` and `latest`, bounds included only with `inclusive`."""
    oldest, latest = _bound(call, "oldest", "0"), _bound(call, "latest", "inf")
    at = float(message.ts)
    if call.flag("inclusive", default=False):
        return oldest <= at <= latest
    return oldest < at < latest


def _bound(call: Call, name: str, default: str) -> float:
    try:
        return float(call.text(name) or default)
    except ValueError:
        raise RefusedError(f"invalid_ts_{name}") from None


METHODS: dict[str, Method] = {
    "api.test": api_test,
    "auth.test": auth_test,
    "apps.connections.open": open_connection,
    "conversations.list": list_channels,
    "conversations.info": channel_info,
    "conversations.members": channel_members,
    "conversations.join": join_channel,
    "conversations.open": open_direct,
    "conversations.history": history,
    "conversations.replies": replies,
    "users.info": user_info,
    "users.list": list_users,
}
