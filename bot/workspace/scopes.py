"""Which scope each method asks for (the reference page of each method under docs.slack.dev/reference/methods)."""

from bot.workspace.world import Json

# What the app has unless it is told otherwise: everything that the methods here ask for.
SCOPES = frozenset(
    {
        "app_mentions:read",
        "channels:history",
        "channels:join",
        "channels:read",
        "chat:write",
        "commands",
        "files:read",
        "files:write",
        "groups:history",
        "groups:read",
        "im:history",
        "im:read",
        "im:write",
        "reactions:read",
        "reactions:write",
        "users:read",
    }
)
_OF_METHOD = {
    "chat.postMessage": "chat:write",
    "chat.postEphemeral": "chat:write",
    "chat.update": "chat:write",
    "chat.delete": "chat:write",
    "conversations.join": "channels:join",
    "conversations.open": "im:write",
    "reactions.add": "reactions:write",
    "reactions.remove": "reactions:write",
    "files.getUploadURLExternal": "files:write",
    "files.completeUploadExternal": "files:write",
    "files.info": "files:read",
    "users.info": "users:read",
    "users.list": "users:read",
}
# These ask for `channels:…`, `groups:…` or `im:…`, by what kind of conversation is meant.
_OF_KIND = {
    "conversations.info": "read",
    "conversations.members": "read",
    "conversations.history": "history",
    "conversations.replies": "history",
}
_KINDS = {"public_channel": "channels", "private_channel": "groups", "im": "im", "mpim": "mpim"}


def needed(method: str, arguments: Json, kind: str) -> tuple[str, ...]:
    """The scopes that a call needs, all of them; `kind` is what its `channel` argument names:
    `public_channel`, `private_channel` or `im`."""
    if method in _OF_METHOD:
        return (_OF_METHOD[method],)
    if method in _OF_KIND:
        return (f"{_KINDS[kind]}:{_OF_KIND[method]}",)
    if method == "conversations.list":
        asked = str(arguments.get("types") or "public_channel").replace(" ", "").split(",")
        return tuple(f"{_KINDS[name]}:read" for name in asked if name in _KINDS)
    return ()
