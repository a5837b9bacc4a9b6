"""The methods of the Web API for files: `files.*`."""

from typing import Any

import msgspec

from bot.workspace.chat import content, refuse_closed
from bot.workspace.files import FILE_BYTES, File
from bot.workspace.refusals import RefusedError, refuse_arguments
from bot.workspace.web_api import Call, Method
from bot.workspace.world import Channel, Json

ALT_TEXT = 1000


def upload_url(call: Call) -> Json:
    if call.json:
        # Slack's page says that it takes JSON, and the real API then finds neither argument.
        raise refuse_arguments("missing required field: filename", "missing required field: length")
    name, length = call.required("filename"), call.required("length")
    if not length.isascii() or not length.isdecimal():
        raise refuse_arguments("must be an integer [json-pointer:/length]")
    if int(length) == 0:
        raise RefusedError("missing_argument")
    if int(length) > FILE_BYTES:
        raise RefusedError("file_upload_size_restricted")
    if len(call.text("alt_txt")) > ALT_TEXT:
        raise RefusedError("alt_txt_too_large")
    url, file = call.files.ticket(name, int(length), call.text("alt_txt"))
    return {"upload_url": url, "file_id": file.id}


def complete_upload(call: Call) -> Json:
    wanted = _wanted(call.arguments.get("files"))
    channels = [_shared_with(call, id) for id in _channels(call)]
    words: Json = {"text": call.text("initial_comment")} if call.text("initial_comment") else call.arguments
    text, blocks = "", None
    if words.get("text") or words.get("blocks"):
        text, blocks = content(words, call.files.shows)
    known = [call.files.get(id) for id, _ in wanted]
    if any(file is None or file.content is None for file in known):
        raise RefusedError("file_not_found")
    done: list[File] = [file for id, title in wanted if (file := call.files.complete(id, title))]

    def share() -> None:
        for channel in channels:
            if call.world.bot.id in channel.members:
                call.world.post(
                    channel,
                    call.world.bot,
                    text,
                    blocks or (),
                    thread_ts=call.text("thread_ts") or None,
                    files=tuple(file.id for file in done),
                )

    if channels:
        call.files.when_ready(share)  # Slack answers before the message is there
    return {"files": [call.files.json(file) for file in done]}


def file_info(call: Call) -> Json:
    file = call.files.get(call.required("file"))
    if file is None or file.ready is None:
        raise RefusedError("file_not_found")
    return {"file": call.files.json(file), "comments": [], "response_metadata": {"next_cursor": ""}}


def _wanted(files: Any) -> list[tuple[str, str]]:
    if isinstance(files, str):
        try:
            files = msgspec.json.decode(files)
        except (msgspec.DecodeError, RecursionError):
            files = None
    if not isinstance(files, list) or not files:
        raise refuse_arguments("missing required field: files")
    if not all(isinstance(file, dict) and isinstance(file.get("id"), str) for file in files):
        raise refuse_arguments("missing required field: id [json-pointer:/files/0]")
    return [(file["id"], str(file.get("title") or "")) for file in files]


def _channels(call: Call) -> list[str]:
    named = [call.text("channel_id")] if call.text("channel_id") else call.text("channels").split(",")
    return [name.strip() for name in named if name.strip()]


def _shared_with(call: Call, id: str) -> Channel:
    channel = call.world.channels.get(id)
    if channel is None:
        raise RefusedError("invalid_channel")
    if call.world.bot.id not in channel.members:
        raise RefusedError("not_in_channel")
    refuse_closed(channel, "is_archived")
    return channel


METHODS: dict[str, Method] = {
    "files.getUploadURLExternal": upload_url,
    "files.completeUploadExternal": complete_upload,
    "files.info": file_info,
}
