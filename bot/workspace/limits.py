"""Slack's limits on a message: which blocks it takes, and the words in which it refuses the others.

The limits are those of Slack's Block Kit reference (docs.slack.dev/reference/block-kit). The wording of
the errors and their JSON pointers follow answers of the real API. Where Slack's own documents are silent,
the number's comment says where it comes from.
"""

import ipaddress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from bot.workspace import schema
from bot.workspace.schema import Problem, Problems

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


def check_blocks(blocks: list[Any]) -> Problems:
    """All that Slack would refuse about a message's blocks, in reading order; empty when all is well."""
    problems: Problems = []
    if len(blocks) > BLOCKS_PER_MESSAGE:
        problems.append(Problem(f"no more than {BLOCKS_PER_MESSAGE} items allowed", "/blocks"))
    block_ids: set[str] = set()
    tables = 0
    for index, block in enumerate(blocks):
        at = f"/blocks/{index}"
        if not schema.is_object(block, at, problems):
            continue
        check = _BLOCKS.get(str(block.get("type")))
        if check is None:
            problems.append(schema.unsupported(block, at))
            continue
        schema.string(block, "block_id", at, problems, IDENTIFIER)
        block_id = block.get("block_id")
        if isinstance(block_id, str) and block_id:
            if block_id in block_ids:
                message = f"`block_id` already exists for another block (id={block_id})"
                problems.append(Problem(message, f"{at}/block_id"))
            block_ids.add(block_id)
        tables += block["type"] == "table"
        if tables > 1 and block["type"] == "table":
            problems.append(Problem("only_one_table_allowed", at))
        check({key: value for key, value in block.items() if key != "block_id"}, at, problems)
        _unique_actions(block, at, problems)
    return problems


def blocks_size(blocks: list[Any]) -> int:
    """What the limit on all blocks together counts: the characters of their compact JSON."""
    return len(msgspec.json.encode(blocks).decode())


# Blocks


def _section(block: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(block, at, problems, "text", "fields", "accessory", "expand")
    if "text" not in block and "fields" not in block:
        problems.append(Problem("must define either `text` or `fields`", at))
    if "text" in block:
        schema.text(block["text"], f"{at}/text", problems, SECTION_TEXT)
    for place, field in schema.items(block, "fields", at, problems, FIELDS):
        schema.text(field, place, problems, FIELD_TEXT)
    if "accessory" in block:
        _element(block["accessory"], f"{at}/accessory", problems, {**_INTERACTIVE, "image": _image_element})


def _header(block: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(block, at, problems, "text", "level")
    schema.required_plain(block, "text", at, problems, HEADER_TEXT)


def _divider(block: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(block, at, problems)


def _context(block: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(block, at, problems, "elements")
    schema.required(block, "elements", at, problems)
    for place, element in schema.items(block, "elements", at, problems, CONTEXT_ELEMENTS):
        if isinstance(element, dict) and element.get("type") == "image":
            _image_element(element, place, problems)
        else:
            schema.text(element, place, problems, SECTION_TEXT)


def _actions(block: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(block, at, problems, "elements")
    schema.required(block, "elements", at, problems)
    for place, element in schema.items(block, "elements", at, problems, ACTIONS_ELEMENTS):
        _element(element, place, problems, _INTERACTIVE)


def _image(block: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(block, at, problems, "image_url", "slack_file", "alt_text", "title")
    _image_source(block, at, problems)
    if "title" in block:
        schema.text(block["title"], f"{at}/title", problems, ALT_TEXT, plain=True)


def _rich_text(block: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(block, at, problems, "elements")
    schema.required(block, "elements", at, problems)
    for place, element in schema.items(block, "elements", at, problems, None):
        _rich_container(element, place, problems, {*_RICH_LEAVES, "rich_text_list"})


def _table(block: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(block, at, problems, "rows", "column_settings")
    schema.required(block, "rows", at, problems)
    for row_at, row in schema.items(block, "rows", at, problems, TABLE_ROWS):
        if not isinstance(row, list):
            problems.append(Problem("must be an array", row_at))
            continue
        for place, cell in schema.items({"row": row}, "row", row_at, problems, TABLE_CELLS, place=row_at):
            if not schema.is_object(cell, place, problems):
                continue
            if cell.get("type") == "raw_text":
                schema.known(cell, place, problems, "text")
                schema.required(cell, "text", place, problems)
                schema.string(cell, "text", place, problems, None, empty=False)
            elif cell.get("type") == "rich_text":
                _rich_text(cell, place, problems)
            else:
                problems.append(schema.unsupported(cell, place))
    if sum(map(len, schema.strings(block.get("rows")))) > TABLE_TEXT:
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
    if not schema.is_object(element, at, problems):
        return
    check = allowed.get(str(element.get("type")))
    if check is None:
        problems.append(schema.unsupported(element, at))
        return
    schema.string(element, "action_id", at, problems, IDENTIFIER)
    check(element, at, problems)


def _button(element: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(
        element, at, problems, "text", "action_id", "url", "value", "style", "confirm", "accessibility_label"
    )
    schema.required_plain(element, "text", at, problems, BUTTON_TEXT)
    schema.string(element, "value", at, problems, BUTTON_VALUE)
    schema.string(element, "url", at, problems, URL)
    schema.string(element, "accessibility_label", at, problems, BUTTON_TEXT)
    if element.get("style", "primary") not in ("primary", "danger"):
        problems.append(Problem("must be a valid enum value", f"{at}/style"))
    _confirm(element, at, problems)


def _overflow(element: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(element, at, problems, "action_id", "options", "confirm")
    _options(element, at, problems, OVERFLOW_OPTIONS)
    _confirm(element, at, problems)


def _static_select(element: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(element, at, problems, "action_id", "options", "placeholder", "initial_option", "confirm")
    if "placeholder" in element:
        schema.text(element["placeholder"], f"{at}/placeholder", problems, 150, plain=True)
    _options(element, at, problems, SELECT_OPTIONS)
    if "initial_option" in element and element["initial_option"] not in (element.get("options") or []):
        problems.append(Problem("must be one of the options", f"{at}/initial_option"))
    _confirm(element, at, problems)


def _image_element(element: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(element, at, problems, "image_url", "slack_file", "alt_text")
    _image_source(element, at, problems)


_INTERACTIVE: dict[str, Any] = {"button": _button, "overflow": _overflow, "static_select": _static_select}


def _options(element: dict[str, Any], at: str, problems: Problems, limit: int) -> None:
    schema.required(element, "options", at, problems)
    for place, option in schema.items(element, "options", at, problems, limit):
        if not schema.is_object(option, place, problems):
            continue
        schema.known(option, place, problems, "text", "value", "description", "url")
        schema.required(option, "text", place, problems)
        schema.required(option, "value", place, problems)
        if "text" in option:
            schema.text(
                option["text"], f"{place}/text", problems, OPTION_TEXT, plain=element["type"] == "overflow"
            )
        if "description" in option:
            schema.text(option["description"], f"{place}/description", problems, OPTION_TEXT, plain=True)
        schema.string(option, "value", place, problems, OPTION_VALUE)
        schema.string(option, "url", place, problems, URL)


def _confirm(element: dict[str, Any], at: str, problems: Problems) -> None:
    if "confirm" not in element:
        return
    confirm, at = element["confirm"], f"{at}/confirm"
    if not schema.is_object(confirm, at, problems):
        return
    schema.required_plain(confirm, "title", at, problems, 100)
    schema.required(confirm, "text", at, problems)
    if "text" in confirm:
        schema.text(confirm["text"], f"{at}/text", problems, 300)
    for name in ("confirm", "deny"):
        schema.required_plain(confirm, name, at, problems, 30)


def _image_source(node: dict[str, Any], at: str, problems: Problems) -> None:
    """Slack fetches an image itself: an address inside a network, or of this machine, fails there."""
    schema.required(node, "alt_text", at, problems)
    schema.string(node, "alt_text", at, problems, ALT_TEXT)
    schema.string(node, "image_url", at, problems, URL)
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
    if not schema.is_object(element, at, problems):
        return
    if element.get("type") not in allowed:
        problems.append(schema.unsupported(element, at))
        return
    schema.known(element, at, problems, "elements", "style", "indent", "offset", "border")
    schema.required(element, "elements", at, problems)
    if not isinstance(element.get("indent", 0), int):
        problems.append(Problem("must be an integer", f"{at}/indent"))
    if element["type"] == "rich_text_list" and element.get("style") not in ("bullet", "ordered"):
        problems.append(Problem("must be a valid enum value", f"{at}/style"))
    for place, child in schema.items(element, "elements", at, problems, None, empty=True):
        if element["type"] == "rich_text_list":
            _rich_container(child, place, problems, {"rich_text_section"})
        elif schema.is_object(child, place, problems):
            _rich_leaf(child, place, problems)


def _rich_leaf(element: dict[str, Any], at: str, problems: Problems) -> None:
    key = _RICH_ELEMENTS.get(str(element.get("type")))
    if key is None:
        problems.append(schema.unsupported(element, at))
        return
    schema.required(element, key, at, problems)
    if key in element and key != "timestamp":
        schema.string(element, key, at, problems, None, empty=False)
    for extra in {"format", "fallback", "url", "text"} - {key}:
        schema.string(element, extra, at, problems, None)
    if key == "timestamp" and not isinstance(element.get(key, 0), int):
        problems.append(Problem("must be an integer", f"{at}/timestamp"))
    style = element.get("style", {})
    if not isinstance(style, dict) or set(style) - {"bold", "italic", "strike", "code", "underline"}:
        problems.append(Problem("invalid style", f"{at}/style"))


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
