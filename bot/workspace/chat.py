"""The methods of the Web API that post and change messages: `chat.*` and `reactions.*`."""

import re
from typing import Any

import msgspec

from bot.workspace.emoji import EMOJI
from bot.workspace.limits import (
    ALL_BLOCKS,
    MESSAGE_TEXT,
    UPDATE_TEXT_BYTES,
    Shows,
    blocks_size,
    check_blocks,
)
from bot.workspace.refusals import RefusedError, refuse_blocks
from bot.workspace.shapes import message_json
from bot.workspace.web_api import Call, Method
from bot.workspace.world import Channel, Json, Message

# What Slack puts into `text` when a message came with blocks alone.
NO_FALLBACK = "This content can't be displayed."
_TS = re.compile(r"[0-9]{1,12}\.[0-9]{6}")


def post_message(call: Call) -> Json:
    channel = _writable(call)
    text, blocks = content(call.arguments, call.files.shows)
    message = call.world.post(
        channel,
        call.world.bot,
        text,
        blocks or (),
        thread_ts=call.text("thread_ts") or None,
        metadata=_metadata(call),
    )
    return {"channel": channel.id, "ts": message.ts, "message": message_json(call.world, message)}


def post_ephemeral(call: Call) -> Json:
    channel = _writable(call)
    user = call.required("user")
    if user not in channel.members:
        raise RefusedError("user_not_in_channel")
    text, blocks = content(call.arguments, call.files.shows)
    thread_ts = call.text("thread_ts") or None
    message = call.world.post(
        channel, call.world.bot, text, blocks or (), thread_ts=thread_ts, ephemeral_to=user
    )
    return {"message_ts": message.ts}


def update(call: Call) -> Json:
    channel, message = _own_message(call, "cant_update_message")
    refuse_closed(channel, "is_inactive")
    if len(call.text("text").encode()) > UPDATE_TEXT_BYTES:
        raise RefusedError("msg_too_long")
    text, blocks = content(call.arguments, call.files.shows)
    if blocks is None:
        # Text without blocks takes the place of the blocks that were there.
        blocks = []
    new = call.world.update(channel, message, text, blocks, _metadata(call))
    shape = message_json(call.world, new)
    return {"channel": channel.id, "ts": new.ts, "text": new.text, "message": shape}


def delete(call: Call) -> Json:
    channel, message = _own_message(call, "cant_delete_message")
    call.world.delete(channel, message)
    return {"channel": channel.id, "ts": message.ts}


def get_permalink(call: Call) -> Json:
    channel = call.channel()
    message = channel.get(call.required("message_ts"))
    if message is None or message.ephemeral_to is not None:
        raise RefusedError("message_not_found")
    return {"channel": channel.id, "permalink": f"{call.here.page_url()}#{channel.id}/{message.ts}"}


def add_reaction(call: Call) -> Json:
    channel, message, name, users = _reaction(call)
    if call.world.bot.id in users:
        raise RefusedError("already_reacted")
    call.world.react(channel, message, name, call.world.bot, added=True)
    return {}


def remove_reaction(call: Call) -> Json:
    channel, message, name, users = _reaction(call)
    if call.world.bot.id not in users:
        raise RefusedError("no_reaction")
    call.world.react(channel, message, name, call.world.bot, added=False)
    return {}


def refuse_closed(channel: Channel, error: str) -> None:
    """Nothing is written in an archived channel. Raises: RefusedError."""
    if channel.archived:
        raise RefusedError(error)


def content(arguments: Json, shows: Shows, *, whole: bool = True) -> tuple[str, list[Any] | None]:
    """The text and the blocks of a message after all of Slack's checks; the blocks are None where not given.

    `shows` says which files pictures may show (see `check_blocks`); `whole` adds the limit on all blocks
    together, which Slack applies to its API but not to a response_url.

    Raises: RefusedError, with `no_text`, `msg_too_long`, `invalid_blocks_format`, `invalid_blocks` or
        `msg_blocks_too_long`.
    """
    text = arguments.get("text")
    text = text if isinstance(text, str) else ""
    blocks = arguments.get("blocks")
    if isinstance(blocks, str):
        try:
            blocks = msgspec.json.decode(blocks) if blocks else None
        except (msgspec.DecodeError, RecursionError):
            raise RefusedError("invalid_blocks_format") from None
    if blocks is not None and not isinstance(blocks, list):
        raise RefusedError("invalid_blocks_format")
    if not blocks and not text.strip():
        raise RefusedError("no_text")
    if len(text) > MESSAGE_TEXT:
        raise RefusedError("msg_too_long")
    if blocks:
        problems = check_blocks(blocks, shows=shows)
        if problems:
            raise refuse_blocks(problems)
        if whole and blocks_size(blocks) > ALL_BLOCKS:
            raise RefusedError("msg_blocks_too_long")
    return text or NO_FALLBACK, blocks


def _writable(call: Call) -> Channel:
    value = call.required("channel")
    user = call.world.users.get(value)
    if user is not None:
        if user.is_bot:
            raise RefusedError("cannot_dm_bot")
        return call.world.direct(user)
    channel = call.channel(by_name=True)
    if call.world.bot.id not in channel.members:
        raise RefusedError("not_in_channel")
    refuse_closed(channel, "is_archived")
    return channel


def _metadata(call: Call) -> Json | None:
    """What an app hangs on its message for itself: an event type and a payload; None where not given."""
    metadata = call.arguments.get("metadata")
    if isinstance(metadata, str) and metadata:
        try:
            metadata = msgspec.json.decode(metadata)
        except (msgspec.DecodeError, RecursionError):
            raise RefusedError("invalid_metadata_format") from None
    if not metadata:
        return {} if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict):
        raise RefusedError("invalid_metadata_format")
    kind, payload = metadata.get("event_type"), metadata.get("event_payload")
    if not isinstance(kind, str) or not kind or not isinstance(payload, dict):
        raise RefusedError("invalid_metadata_schema")
    return {"event_type": kind, "event_payload": payload}


def _own_message(call: Call, refusal: str) -> tuple[Channel, Message]:
    channel = call.channel()
    message = channel.get(call.required("ts"))
    # An ephemeral message is nowhere in the channel's history, so the API cannot find it.
    if message is None or message.ephemeral_to is not None:
        raise RefusedError("message_not_found")
    if message.user != call.world.bot.id:
        raise RefusedError(refusal)
    return channel, message


def _reaction(call: Call) -> tuple[Channel, Message, str, tuple[str, ...]]:
    if not call.text("channel") or not call.text("timestamp"):
        raise RefusedError("no_item_specified")
    channel = call.channel()
    if not _TS.fullmatch(call.text("timestamp")):
        raise RefusedError("bad_timestamp")
    refuse_closed(channel, "is_archived")
    message = channel.get(call.text("timestamp"))
    if message is None or message.ephemeral_to is not None:
        raise RefusedError("message_not_found")
    name = call.required("name").strip(":")
    if name not in EMOJI:
        raise RefusedError("invalid_name")
    return channel, message, name, message.reactions.get(name, ())


METHODS: dict[str, Method] = {
    "chat.postMessage": post_message,
    "chat.postEphemeral": post_ephemeral,
    "chat.update": update,
    "chat.delete": delete,
    "chat.getPermalink": get_permalink,
    "reactions.add": add_reaction,
    "reactions.remove": remove_reaction,
}
