"""Slack's limits on a message: which blocks it takes, and the words in which it refuses the others.

The limits are those of Slack's Block Kit reference (docs.slack.dev/reference/block-kit). The wording of
the errors and their JSON pointers follow answers of the real API. Where Slack's own documents are silent,
the number's comment says where it comes from.
"""

import ipaddress
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import msgspec

BLOCKS_PER_MESSAGE = 50
SECTION_TEXT = 3000
FIELDS = 10
FIELD_TEXT = 2000
HEADER_TEXT = 150
CONTEXT_ELEMENTS = 10
ACTIONS_ELEMENTS = 25
BUTTON_TEXT = 75
BUTTON_VALUE = 2000
OVERFLOW_OPTIONS = 5
SELECT_OPTIONS = 100
OPTION_TEXT = 75
OPTION_VALUE = 150
IDENTIFIER = 255
URL = 3000
ALT_TEXT = 2000
TABLE_ROWS = 100
TABLE_CELLS = 20
TABLE_TEXT = 10_000
# Not documented. People measured that a single markdown block fails from 13,298 characters on, and that
# rich_text with 11,341 characters of text fails too, so the containers count: we count the compact JSON.
ALL_BLOCKS = 13_200
MESSAGE_TEXT = 40_000
# Not documented either: chat.update fails near 4,000 bytes of text, where chat.postMessage does not.
UPDATE_TEXT_BYTES = 4000


class Problem(msgspec.Struct, frozen=True):
    """One thing Slack would refuse: the words, and the JSON pointer to the place."""

    message: str
    pointer: str

    def __str__(self) -> str:
        return f"{self.message} [json-pointer:{self.pointer}]"


Problems = list[Problem]


def check_blocks(blocks: list[Any]) -> Problems:
    """All that Slack would refuse about a message's blocks, in reading order; empty when all is well."""
    problems: Problems = []
    if len(blocks) > BLOCKS_PER_MESSAGE:
        problems.append(Problem(f"no more than {BLOCKS_PER_MESSAGE} items allowed", "/blocks"))
    block_ids: set[str] = set()
    tables = 0
    for index, block in enumerate(blocks):
        at = f"/blocks/{index}"
        if not _is_object(block, at, problems):
            continue
        check = _BLOCKS.get(str(block.get("type")))
        if check is None:
            problems.append(_unsupported(block, at))
            continue
        _string(block, "block_id", at, problems, IDENTIFIER)
        block_id = block.get("block_id")
        if isinstance(block_id, str) and block_id:
            if block_id in block_ids:
                message = f"`block_id` already exists for another block (id={block_id})"
                problems.append(Problem(message, f"{at}/block_id"))
            block_ids.add(block_id)
        tables += block["type"] == "table"
        if tables > 1 and block["type"] == "table":
            problems.append(Problem("only_one_table_allowed", at))
        check(block, at, problems)
        _unique_actions(block, at, problems)
    return problems


def blocks_size(blocks: list[Any]) -> int:
    """What the limit on all blocks together counts: the characters of their compact JSON."""
    return len(msgspec.json.encode(blocks).decode())


# Blocks


def _section(block: dict[str, Any], at: str, problems: Problems) -> None:
    _known(block, at, problems, "text", "fields", "accessory", "expand")
    if "text" not in block and "fields" not in block:
        problems.append(Problem("must define either `text` or `fields`", at))
    if "text" in block:
        _text(block["text"], f"{at}/text", problems, SECTION_TEXT)
    for place, field in _items(block, "fields", at, problems, FIELDS):
        _text(field, place, problems, FIELD_TEXT)
    if "accessory" in block:
        _element(block["accessory"], f"{at}/accessory", problems, {**_INTERACTIVE, "image": _image_element})


def _header(block: dict[str, Any], at: str, problems: Problems) -> None:
    _known(block, at, problems, "text", "level")
    _required_plain(block, "text", at, problems, HEADER_TEXT)


def _divider(block: dict[str, Any], at: str, problems: Problems) -> None:
    _known(block, at, problems)


def _context(block: dict[str, Any], at: str, problems: Problems) -> None:
    _known(block, at, problems, "elements")
    _required(block, "elements", at, problems)
    for place, element in _items(block, "elements", at, problems, CONTEXT_ELEMENTS):
        if isinstance(element, dict) and element.get("type") == "image":
            _image_element(element, place, problems)
        else:
            _text(element, place, problems, SECTION_TEXT)


def _actions(block: dict[str, Any], at: str, problems: Problems) -> None:
    _known(block, at, problems, "elements")
    _required(block, "elements", at, problems)
    for place, element in _items(block, "elements", at, problems, ACTIONS_ELEMENTS):
        _element(element, place, problems, _INTERACTIVE)


def _image(block: dict[str, Any], at: str, problems: Problems) -> None:
    _known(block, at, problems, "image_url", "slack_file", "alt_text", "title")
    _image_source(block, at, problems)
    if "title" in block:
        _text(block["title"], f"{at}/title", problems, ALT_TEXT, plain=True)


def _rich_text(block: dict[str, Any], at: str, problems: Problems) -> None:
    _known(block, at, problems, "elements")
    _required(block, "elements", at, problems)
    for place, element in _items(block, "elements", at, problems, None):
        _rich_container(element, place, problems, {*_RICH_LEAVES, "rich_text_list"})


def _table(block: dict[str, Any], at: str, problems: Problems) -> None:
    _known(block, at, problems, "rows", "column_settings")
    _required(block, "rows", at, problems)
    for row_at, row in _items(block, "rows", at, problems, TABLE_ROWS):
        if not isinstance(row, list):
            problems.append(Problem("must be an array", row_at))
            continue
        for place, cell in _items({"row": row}, "row", row_at, problems, TABLE_CELLS, place=row_at):
            if not _is_object(cell, place, problems):
                continue
            if cell.get("type") == "raw_text":
                _known(cell, place, problems, "text", identified=False)
                _required(cell, "text", place, problems)
                _string(cell, "text", place, problems, None, empty=False)
            elif cell.get("type") == "rich_text":
                _rich_text(cell, place, problems)
            else:
                problems.append(_unsupported(cell, place))
    if sum(map(len, _strings(block.get("rows")))) > TABLE_TEXT:
        problems.append(Problem(f"must be less than {TABLE_TEXT + 1} characters", f"{at}/rows"))


_BLOCKS = {
    "section": _section,
    "header": _header,
    "divider": _divider,
    "context": _context,
    "actions": _actions,
    "image": _image,
    "rich_text": _rich_text,
    "table": _table,
}


# Elements


def _element(element: Any, at: str, problems: Problems, allowed: dict[str, Any]) -> None:
    if not _is_object(element, at, problems):
        return
    check = allowed.get(str(element.get("type")))
    if check is None:
        problems.append(_unsupported(element, at))
        return
    _string(element, "action_id", at, problems, IDENTIFIER)
    check(element, at, problems)


def _button(element: dict[str, Any], at: str, problems: Problems) -> None:
    _known(
        element, at, problems, "text", "action_id", "url", "value", "style", "confirm", "accessibility_label"
    )
    _required_plain(element, "text", at, problems, BUTTON_TEXT)
    _string(element, "value", at, problems, BUTTON_VALUE)
    _string(element, "url", at, problems, URL)
    _string(element, "accessibility_label", at, problems, BUTTON_TEXT)
    if element.get("style", "primary") not in ("primary", "danger"):
        problems.append(Problem("must be a valid enum value", f"{at}/style"))
    _confirm(element, at, problems)


def _overflow(element: dict[str, Any], at: str, problems: Problems) -> None:
    _known(element, at, problems, "action_id", "options", "confirm")
    _options(element, at, problems, OVERFLOW_OPTIONS)
    _confirm(element, at, problems)


def _static_select(element: dict[str, Any], at: str, problems: Problems) -> None:
    _known(element, at, problems, "action_id", "options", "placeholder", "initial_option", "confirm")
    if "placeholder" in element:
        _text(element["placeholder"], f"{at}/placeholder", problems, 150, plain=True)
    _options(element, at, problems, SELECT_OPTIONS)
    if "initial_option" in element and element["initial_option"] not in (element.get("options") or []):
        problems.append(Problem("must be one of the options", f"{at}/initial_option"))
    _confirm(element, at, problems)


def _image_element(element: dict[str, Any], at: str, problems: Problems) -> None:
    _known(element, at, problems, "image_url", "slack_file", "alt_text")
    _image_source(element, at, problems)


_INTERACTIVE: dict[str, Any] = {"button": _button, "overflow": _overflow, "static_select": _static_select}


def _options(element: dict[str, Any], at: str, problems: Problems, limit: int) -> None:
    _required(element, "options", at, problems)
    for place, option in _items(element, "options", at, problems, limit):
        if not _is_object(option, place, problems):
            continue
        _known(option, place, problems, "text", "value", "description", "url", identified=False)
        _required(option, "text", place, problems)
        _required(option, "value", place, problems)
        if "text" in option:
            _text(option["text"], f"{place}/text", problems, OPTION_TEXT, plain=element["type"] == "overflow")
        if "description" in option:
            _text(option["description"], f"{place}/description", problems, OPTION_TEXT, plain=True)
        _string(option, "value", place, problems, OPTION_VALUE)
        _string(option, "url", place, problems, URL)


def _confirm(element: dict[str, Any], at: str, problems: Problems) -> None:
    if "confirm" not in element:
        return
    confirm, at = element["confirm"], f"{at}/confirm"
    if not _is_object(confirm, at, problems):
        return
    _required_plain(confirm, "title", at, problems, 100)
    _required(confirm, "text", at, problems)
    if "text" in confirm:
        _text(confirm["text"], f"{at}/text", problems, 300)
    for name in ("confirm", "deny"):
        _required_plain(confirm, name, at, problems, 30)


def _image_source(node: dict[str, Any], at: str, problems: Problems) -> None:
    """Slack fetches an image itself: an address inside a network, or of this machine, fails there."""
    _required(node, "alt_text", at, problems)
    _string(node, "alt_text", at, problems, ALT_TEXT)
    _string(node, "image_url", at, problems, URL)
    if "slack_file" in node:
        # The workspace holds no files, so no file that a message names can exist.
        problems.append(Problem("invalid slack file", f"{at}/slack_file"))
    elif "image_url" not in node:
        problems.append(Problem("must define either `image_url` or `slack_file`", at))
    elif isinstance(node["image_url"], str) and not _is_public(node["image_url"]):
        problems.append(Problem("downloading image failed", f"{at}/image_url"))


def _is_public(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or "." not in host or host.endswith((".local", ".internal")):
        return False
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return True


# Rich text

_RICH_LEAVES = {"rich_text_section", "rich_text_preformatted", "rich_text_quote"}
_RICH_ELEMENTS = {
    "text": "text",
    "link": "url",
    "emoji": "name",
    "user": "user_id",
    "channel": "channel_id",
    "broadcast": "range",
    "date": "timestamp",
}


def _rich_container(element: Any, at: str, problems: Problems, allowed: set[str]) -> None:
    if not _is_object(element, at, problems):
        return
    if element.get("type") not in allowed:
        problems.append(_unsupported(element, at))
        return
    _known(element, at, problems, "elements", "style", "indent", "offset", "border", identified=False)
    _required(element, "elements", at, problems)
    if element["type"] == "rich_text_list" and element.get("style") not in ("bullet", "ordered"):
        problems.append(Problem("must be a valid enum value", f"{at}/style"))
    for place, child in _items(element, "elements", at, problems, None, empty=True):
        if element["type"] == "rich_text_list":
            _rich_container(child, place, problems, {"rich_text_section"})
        elif _is_object(child, place, problems):
            _rich_leaf(child, place, problems)


def _rich_leaf(element: dict[str, Any], at: str, problems: Problems) -> None:
    key = _RICH_ELEMENTS.get(str(element.get("type")))
    if key is None:
        problems.append(_unsupported(element, at))
        return
    _required(element, key, at, problems)
    if key in element and key != "timestamp":
        _string(element, key, at, problems, None, empty=False)
    if key == "timestamp" and not isinstance(element.get(key, 0), int):
        problems.append(Problem("must be an integer", f"{at}/timestamp"))
    style = element.get("style", {})
    if not isinstance(style, dict) or set(style) - {"bold", "italic", "strike", "code", "underline"}:
        problems.append(Problem("invalid style", f"{at}/style"))


# Parts that many of them share


def _text(node: Any, at: str, problems: Problems, limit: int, *, plain: bool = False) -> None:
    if not _is_object(node, at, problems):
        return
    kinds = ("plain_text",) if plain else ("plain_text", "mrkdwn")
    if node.get("type") not in kinds:
        problems.append(_unsupported(node, at))
        return
    _known(
        node, at, problems, "text", "emoji" if node["type"] == "plain_text" else "verbatim", identified=False
    )
    _required(node, "text", at, problems)
    _string(node, "text", at, problems, limit, empty=False)


def _required_plain(node: dict[str, Any], key: str, at: str, problems: Problems, limit: int) -> None:
    _required(node, key, at, problems)
    if key in node:
        _text(node[key], f"{at}/{key}", problems, limit, plain=True)


def _required(node: dict[str, Any], key: str, at: str, problems: Problems) -> None:
    if key not in node:
        problems.append(Problem(f"missing required field: {key}", at))


def _string(
    node: dict[str, Any], key: str, at: str, problems: Problems, limit: int | None, *, empty: bool = True
) -> None:
    value = node.get(key)
    if key not in node:
        return
    if not isinstance(value, str):
        problems.append(Problem("must be a string", f"{at}/{key}"))
    elif limit is not None and len(value) > limit:
        problems.append(Problem(f"must be less than {limit + 1} characters", f"{at}/{key}"))
    elif not empty and not value:
        problems.append(Problem("must be more than 0 characters", f"{at}/{key}"))


def _items(
    node: dict[str, Any],
    key: str,
    at: str,
    problems: Problems,
    limit: int | None,
    *,
    empty: bool = False,
    place: str | None = None,
) -> Iterable[tuple[str, Any]]:
    """The members of an array with their pointers, after checking how many there are."""
    if key not in node:
        return ()
    place = f"{at}/{key}" if place is None else place
    items = node[key]
    if not isinstance(items, list):
        problems.append(Problem("must be an array", place))
        return ()
    if not items and not empty:
        problems.append(Problem("no less than 1 items allowed", place))
    if limit is not None and len(items) > limit:
        problems.append(Problem(f"no more than {limit} items allowed", place))
    return ((f"{place}/{index}", item) for index, item in enumerate(items))


def _known(node: dict[str, Any], at: str, problems: Problems, *keys: str, identified: bool = True) -> None:
    allowed = {"type", *keys, *(("block_id",) if identified else ())}
    problems += [Problem(f"invalid additional property: {key}", at) for key in node if key not in allowed]


def _is_object(node: Any, at: str, problems: Problems) -> bool:
    if isinstance(node, dict):
        return True
    problems.append(Problem("must be an object", at))
    return False


def _unsupported(node: dict[str, Any], at: str) -> Problem:
    if "type" not in node:
        return Problem("missing required field: type", at)
    return Problem(f"unsupported type: {node['type']}", f"{at}/type")


def _unique_actions(block: dict[str, Any], at: str, problems: Problems) -> None:
    seen: set[str] = set()
    elements = block.get("elements") if block["type"] == "actions" else None
    for index, element in enumerate(elements if isinstance(elements, list) else []):
        action_id = element.get("action_id") if isinstance(element, dict) else None
        if not isinstance(action_id, str):
            continue
        if action_id in seen:
            message = f"`action_id` {action_id} already exists for another action"
            problems.append(Problem(message, f"{at}/elements/{index}/action_id"))
        seen.add(action_id)


def _strings(node: Any) -> Iterable[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "text" and isinstance(value, str):
                yield value
            else:
                yield from _strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value)
