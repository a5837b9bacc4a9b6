"""Messages as the page gets them: all text parsed, all names filled in, nothing left to interpret there.

The page makes text nodes of what it finds here and never markup, so whatever a message says stays text.
"""

from collections.abc import Iterable
from typing import Any

from bot.workspace import mrkdwn
from bot.workspace.emoji import draw
from bot.workspace.plain import Names
from bot.workspace.world import Json, Message, World


def message_view(world: World, message: Message, viewer: str) -> Json:
    """A message for one person (a user id), who must be able to see it."""
    author = world.users[message.user]
    blocks = [block_view(block, world.name_of) for block in message.blocks]
    if not blocks:
        blocks = [{"type": "section", "text": rich_view(mrkdwn.parse(message.text), world.name_of)}]
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
        "reactions": [
            {"emoji": mrkdwn.parse_plain(f":{name}:"), "count": len(users)}
            for name, users in message.reactions.items()
        ],
    }


def block_view(block: Json, name: Names) -> Json:
    """One block with its texts parsed."""
    kind = block["type"]
    view: Json = {"type": kind}
    if kind in ("header", "section"):
        if "text" in block:
            view["text"] = _text(block["text"], name)
        view["fields"] = [_text(field, name) for field in block.get("fields", ())]
        if "accessory" in block:
            view["accessory"] = _element(block["accessory"], name)
    elif kind in ("context", "actions"):
        view["elements"] = [_element(element, name) for element in block["elements"]]
    elif kind == "image":
        view = _element(block, name)
    elif kind == "rich_text":
        view["elements"] = rich_view(block["elements"], name)
    elif kind == "table":
        view["rows"] = [[_cell(cell, name) for cell in row] for row in block["rows"]]
    return view


def rich_view(elements: Iterable[Json], name: Names) -> list[Any]:
    """Rich text with the names of people and channels beside their ids."""
    views: list[Any] = []
    for element in elements:
        view = dict(element)
        if "elements" in element:
            view["elements"] = rich_view(element["elements"], name)
        if element["type"] == "emoji":
            view["drawn"] = draw(element["name"])
        for key in ("user_id", "channel_id"):
            if key in element:
                view["name"] = name(element[key])
        views.append(view)
    return views


def _element(element: Json, name: Names) -> Json:
    kind = element["type"]
    if kind in ("plain_text", "mrkdwn"):
        return {"type": "text", "text": _text(element, name)}
    if kind == "image":
        view = {"type": kind, "url": element["image_url"], "alt": element["alt_text"]}
        return view | {"title": _text(element["title"], name)} if "title" in element else view
    view = {"type": kind, "action_id": element["action_id"]}
    for key in ("style", "url", "accessibility_label"):
        if key in element:
            view[key] = element[key]
    for key in ("text", "placeholder"):
        if key in element:
            view[key] = _text(element[key], name)
    if "options" in element:
        view["options"] = [_option(option, name) for option in element["options"]]
    if "initial_option" in element:
        view["chosen"] = element["initial_option"]["value"]
    if "confirm" in element:
        view["confirm"] = {
            key: _text(element["confirm"][key], name) for key in ("title", "text", "confirm", "deny")
        }
    return view


def _option(option: Json, name: Names) -> Json:
    view: Json = {"value": option["value"], "text": _text(option["text"], name)}
    if "description" in option:
        view["description"] = _text(option["description"], name)
    if "url" in option:
        view["url"] = option["url"]
    return view


def _cell(cell: Json, name: Names) -> list[Any]:
    if cell["type"] == "raw_text":
        return rich_view(mrkdwn.parse_plain(cell["text"]), name)
    return rich_view(cell["elements"], name)


def _text(node: Json, name: Names) -> list[Any]:
    parse = mrkdwn.parse if node["type"] == "mrkdwn" else mrkdwn.parse_plain
    return rich_view(parse(node["text"]), name)
