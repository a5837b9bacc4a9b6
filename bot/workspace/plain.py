"""A message as text, the way a person reads it in Slack: for terminals, logs and tests."""

import time
from collections.abc import Callable, Iterable

from bot.workspace import mrkdwn
from bot.workspace.dates import say_date
from bot.workspace.emoji import draw
from bot.workspace.world import Json, Message

Names = Callable[[str], str]
_RULE = "─" * 40


def plain(message: Message, name: Names = lambda id: id) -> str:
    """The text of a message's blocks (or of its `text`, where it has none); `name` gives names for ids."""
    if not message.blocks:
        return _rich(mrkdwn.parse(message.text), name)
    return "\n".join(_block(block, name) for block in message.blocks)


def _block(block: Json, name: Names) -> str:
    kind = block["type"]
    if kind == "header":
        return _text(block["text"], name)
    if kind == "section":
        lines = [_text(block["text"], name)] if "text" in block else []
        lines += _columns([_text(field, name) for field in block.get("fields", ())])
        if "accessory" in block:
            lines.append(_element(block["accessory"], name))
        return "\n".join(lines)
    if kind == "context":
        return "  ".join(_element(element, name) for element in block["elements"])
    if kind == "actions":
        return " ".join(_element(element, name) for element in block["elements"])
    if kind == "image":
        return _element(block, name)
    if kind == "input":
        return f"{_text(block['label'], name)}  {_element(block['element'], name)}"
    if kind == "rich_text":
        return _rich(block["elements"], name)
    if kind == "table":
        return "\n".join(" | ".join(_cell(cell, name) for cell in row) for row in block["rows"])
    return _RULE


def _element(element: Json, name: Names) -> str:
    kind = element["type"]
    if kind == "button":
        return f"[ {_text(element['text'], name)} ]"
    if kind.endswith("_select"):
        return f"[ {_text(element['placeholder'], name) if 'placeholder' in element else 'Choose'} ▾ ]"
    if kind == "overflow":
        return "[ ⋯ ]"
    if kind == "image":
        return f"(image: {element['alt_text']})"
    if kind not in ("plain_text", "mrkdwn"):
        return f"[ {kind.replace('_', ' ')} ]"
    return _text(element, name)


def _cell(cell: Json, name: Names) -> str:
    return str(cell["text"]) if cell["type"] == "raw_text" else _rich(cell["elements"], name)


def _text(node: Json, name: Names) -> str:
    parse = mrkdwn.parse if node["type"] == "mrkdwn" else mrkdwn.parse_plain
    return _rich(parse(node["text"]), name)


def _columns(fields: list[str]) -> list[str]:
    """Fields stand two in a row, as on a wide screen."""
    lines: list[str] = []
    for start in range(0, len(fields), 2):
        cells = [field.split("\n") for field in fields[start : start + 2]]
        width = max(map(len, cells[0]))
        for row in range(max(map(len, cells))):
            texts = [cell[row] if row < len(cell) else "" for cell in cells]
            lines.append("   ".join([texts[0].ljust(width), *texts[1:]]).rstrip())
    return lines


def _rich(elements: Iterable[Json], name: Names) -> str:
    return "\n".join(_container(element, name) for element in elements)


def _container(element: Json, name: Names) -> str:
    kind = element["type"]
    if kind == "rich_text_list":
        marks = (
            f"{n}. " if element["style"] == "ordered" else "• "
            for n in range(1, len(element["elements"]) + 1)
        )
        pad = "  " * element.get("indent", 0)
        items = (_container(item, name) for item in element["elements"])
        return "\n".join(f"{pad}{mark}{item}" for mark, item in zip(marks, items, strict=True))
    text = "".join(_leaf(leaf, name) for leaf in element["elements"])
    if kind == "rich_text_preformatted":
        return "\n".join(f"    {line}" for line in text.split("\n"))
    if kind == "rich_text_quote":
        return "\n".join(f"│ {line}" for line in text.split("\n"))
    return text


def _leaf(leaf: Json, name: Names) -> str:
    kind = leaf["type"]
    if kind == "link":
        label = leaf.get("text")
        return f"{label} ({leaf['url']})" if label and label != leaf["url"] else str(leaf["url"])
    if kind == "emoji":
        return draw(leaf["name"]) or f":{leaf['name']}:"
    if kind == "user":
        return f"@{name(leaf['user_id'])}"
    if kind == "channel":
        return f"#{name(leaf['channel_id'])}"
    if kind == "broadcast":
        return f"@{leaf['range']}"
    if kind == "date":
        return say_date(
            leaf["timestamp"], leaf.get("format", "{date} {time}"), leaf.get("fallback", ""), time.time()
        )
    return str(leaf["text"])
