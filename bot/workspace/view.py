"""Messages as the page gets them: all text parsed, all names filled in, nothing left to interpret there.

The page makes text nodes of what it finds here and never markup, so whatever a message says stays text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from bot.workspace import mrkdwn
from bot.workspace.emoji import EMOJI, draw
from bot.workspace.files import File, Files, pictured
from bot.workspace.payloads import initial_values, options_of
from bot.workspace.views import View
from bot.workspace.world import Json, Message, World

# Characters that are the emoji of some name: a page without an emoji font says the name.
_DRAWN = {draw(name): name for name in EMOJI}
_EMOJI = re.compile("|".join(re.escape(drawn) for drawn in sorted(_DRAWN, key=len, reverse=True)))
# Which of an input's own settings the page needs besides its texts and options.
_KEPT = (
    "style",
    "url",
    "accessibility_label",
    "multiline",
    "min_length",
    "max_length",
    "min_value",
    "max_value",
    "is_decimal_allowed",
    "max_selected_items",
    "focus_on_load",
)


def message_view(world: World, files: Files, message: Message, viewer: str) -> Json:
    """A message for one person (a user id), who must be able to see it."""
    author = world.users[message.user]
    draws = Drawing(world, files)
    blocks = draws.blocks(message.blocks)
    if not blocks and message.text:
        blocks = [{"type": "section", "text": draws.rich(mrkdwn.parse(message.text)), "fields": []}]
    shown = [file for id in message.files if (file := files.get(id)) is not None]
    return {
        "channel": message.channel,
        "ts": message.ts,
        "thread_ts": message.thread_ts,
        "author": author.name,
        "bot": author.is_bot,
        "mine": author.id == viewer,
        # Slack shows the mark only on messages without blocks.
        "edited": message.edited is not None and not message.blocks,
        "ephemeral": message.ephemeral_to is not None,
        "blocks": blocks,
        "files": [_file(files, file) for file in shown],
        "reactions": [
            {"emoji": draws.rich(mrkdwn.parse_plain(f":{name}:")), "count": len(users)}
            for name, users in message.reactions.items()
        ],
    }


def modal_view(world: World, files: Files, stack: tuple[View, ...]) -> Json | None:
    """The modal that a person has open, by its visible view; None without one."""
    if not stack:
        return None
    view = stack[-1]
    draws = Drawing(world, files)
    body = view.body
    standing = initial_values(body["blocks"])
    for block_id, entered in view.values.items():
        standing.setdefault(block_id, {}).update(entered)
    return {
        "id": view.id,
        "hash": view.hash,
        "depth": len(stack),
        "title": draws.text(body["title"]),
        "submit": draws.text(body["submit"]) if body.get("submit") else None,
        "close": draws.text(body["close"]) if body.get("close") else None,
        "blocks": draws.blocks(body["blocks"], standing),
        "errors": view.errors,
    }


class Drawing:
    """Makes views of blocks in one workspace."""

    def __init__(self, world: World, files: Files) -> None:
        self._world = world
        self._files = files

    def blocks(
        self, blocks: Iterable[Json], standing: dict[str, dict[str, Json]] | None = None
    ) -> list[Json]:
        """Blocks with their texts parsed; ``standing`` is what inputs stand at, by block_id and action_id."""
        blocks = list(blocks)
        if standing is None:
            standing = initial_values(blocks)
        return [self._block(pictured(block, self._files.page_path), standing) for block in blocks]

    def rich(self, elements: Iterable[Json], *, literal: bool = False) -> list[Any]:
        """Rich text with the names of people and channels beside their ids; ``literal``: as in code."""
        views: list[Any] = []
        for element in elements:
            view = dict(element)
            if "elements" in element:
                code = element["type"] == "rich_text_preformatted"
                view["elements"] = self.rich(element["elements"], literal=code)
            if element["type"] == "emoji":
                view["drawn"] = draw(element["name"])
            if element["type"] == "text" and not literal and not element.get("style", {}).get("code"):
                views += _with_emoji(view)
                continue
            for key in ("user_id", "channel_id"):
                if key in element:
                    view["name"] = self._world.name_of(element[key])
            views.append(view)
        return views

    def text(self, node: Json) -> list[Any]:
        """A text object."""
        parse = mrkdwn.parse if node["type"] == "mrkdwn" else mrkdwn.parse_plain
        return self.rich(parse(node["text"]))

    def _block(self, block: Json, standing: dict[str, dict[str, Json]]) -> Json:
        kind = block["type"]
        view: Json = {"type": kind, "block_id": block["block_id"]}
        state = standing.get(block["block_id"], {})

        def element(part: Json) -> Json:
            return self._element(part, state.get(part.get("action_id", ""))) | {"block_id": block["block_id"]}

        if kind in ("header", "section"):
            if "text" in block:
                view["text"] = self.text(block["text"])
            view["fields"] = [self.text(field) for field in block.get("fields", ())]
            if "accessory" in block:
                view["accessory"] = element(block["accessory"])
        elif kind in ("context", "actions"):
            view["elements"] = [element(part) for part in block["elements"]]
        elif kind == "input":
            view["label"] = self.text(block["label"])
            view["hint"] = self.text(block["hint"]) if "hint" in block else None
            view["optional"] = block.get("optional", False)
            view["dispatch"] = block.get("dispatch_action", False)
            view["element"] = element(block["element"])
        elif kind == "image":
            view |= self._element(block, None)
        elif kind == "rich_text":
            view["elements"] = self.rich(block["elements"])
        elif kind == "table":
            view["rows"] = [[self._cell(cell) for cell in row] for row in block["rows"]]
            view["columns"] = [
                (column or {}).get("align", "left") for column in block.get("column_settings", ())
            ]
        return view

    def _element(self, element: Json, state: Json | None) -> Json:
        kind = element["type"]
        if kind in ("plain_text", "mrkdwn"):
            return {"type": "text", "text": self.text(element)}
        if kind == "image":
            view = {"type": kind, "url": element["image_url"], "alt": element["alt_text"]}
            return view | {"title": self.text(element["title"])} if "title" in element else view
        view = {"type": kind, "action_id": element["action_id"]}
        view |= {key: element[key] for key in _KEPT if key in element}
        for key in ("text", "placeholder"):
            if key in element:
                view[key] = self.text(element[key])
        if kind != "button":
            view["options"] = self._options(element)
            view["chosen"] = _standing(state)
        if "confirm" in element:
            confirm = element["confirm"]
            view["confirm"] = {key: self.text(confirm[key]) for key in ("title", "text", "confirm", "deny")}
        return view

    def _options(self, element: Json) -> list[Json]:
        kind = element["type"]
        people = kind in ("users_select", "conversations_select")
        channels = kind in ("channels_select", "conversations_select")
        if people or channels:
            found = [user for user in self._world.users.values() if people and not user.is_bot]
            places = [place for place in self._world.channels.values() if channels and not place.direct]
            return [_named(f"@{user.name}", user.id) for user in found] + [
                _named(f"#{place.name}", place.id) for place in places
            ]
        return [self._option(option) for option in options_of(element)]

    def _option(self, option: Json) -> Json:
        view: Json = {"value": option["value"], "text": self.text(option["text"])}
        if "description" in option:
            view["description"] = self.text(option["description"])
        if "url" in option:
            view["url"] = option["url"]
        return view

    def _cell(self, cell: Json) -> list[Any]:
        if cell["type"] == "raw_text":
            return self.rich(mrkdwn.parse_plain(cell["text"]))
        return self.rich(cell["elements"])


def _standing(state: Json | None) -> Any:
    """What an element stands at, as the page says it: the value of an option, several in a list, an id, a text."""
    value = next((value for key, value in (state or {}).items() if key != "type"), None)
    if isinstance(value, list):
        return [option["value"] for option in value]
    return value["value"] if isinstance(value, dict) else value


def _with_emoji(leaf: Json) -> list[Json]:
    """A piece of text, with the emoji in it as pieces of their own."""
    text, views, end = leaf["text"], [], 0
    for match in _EMOJI.finditer(text):
        if match.start() > end:
            views.append({**leaf, "text": text[end : match.start()]})
        views.append({"type": "emoji", "name": _DRAWN[match[0]], "drawn": match[0]})
        end = match.end()
    return [*views, {**leaf, "text": text[end:]}] if end < len(text) or not views else views


def _named(name: str, id: str) -> Json:
    return {
        "value": id,
        "text": [{"type": "rich_text_section", "elements": [{"type": "text", "text": name}]}],
    }


def _file(files: Files, file: File) -> Json:
    return {
        "name": file.title or file.name,
        "alt": file.alt_txt or file.title or file.name,
        "size": file.size,
        "url": files.page_path({"id": file.id}) or "",
        "picture": files.shows({"id": file.id}),
    }
