"""Slack's limits on blocks: which of them a message or a view takes, and in which words it refuses the others.

The limits are those of Slack's Block Kit reference (docs.slack.dev/reference/block-kit). The wording of
the errors and their JSON pointers follow answers of the real API. Where Slack's own documents are silent,
the number's comment says where it comes from. Blocks that Slack has and this workspace does not draw (`file`,
`video`, `markdown` and newer ones) are refused like unknown ones.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from bot.workspace import elements, schema
from bot.workspace.rich_text import check_rich_text
from bot.workspace.schema import Problem, Problems

BLOCKS_PER_MESSAGE = 50
BLOCKS_PER_VIEW = 100
SECTION_TEXT = 3000
FIELDS = 10
FIELD_TEXT = 2000
HEADER_TEXT = 150
CONTEXT_ELEMENTS = 10
ACTIONS_ELEMENTS = 25
INPUT_LABEL = 2000
TABLE_ROWS = 100
TABLE_CELLS = 20
TABLE_TEXT = 10_000
# Not documented. People measured that a single markdown block fails from 13,298 characters on, and that
# rich_text with 11,341 characters of text fails too, so the containers count: we count the compact JSON.
ALL_BLOCKS = 13_200
MESSAGE_TEXT = 40_000
# Not documented either: chat.update fails near 4,000 bytes of text, where chat.postMessage does not.
UPDATE_TEXT_BYTES = 4000

Surface = Literal["message", "modal", "home"]
Shows = Callable[[dict[str, Any]], bool]


def check_blocks(
    blocks: list[Any],
    *,
    surface: Surface = "message",
    at: str = "/blocks",
    shows: Shows = lambda reference: False,
) -> Problems:
    """All that Slack would refuse about blocks, in reading order; empty when all is well.

    `at` is the JSON pointer of the array; `shows` says whether the file that a `slack_file` names can be shown.
    """
    problems: Problems = []
    most = BLOCKS_PER_MESSAGE if surface == "message" else BLOCKS_PER_VIEW
    if len(blocks) > most:
        problems.append(Problem(f"no more than {most} items allowed", at))
    block_ids: set[str] = set()
    tables = 0
    for index, block in enumerate(blocks):
        place = f"{at}/{index}"
        if not schema.is_object(block, place, problems):
            continue
        kind = str(block.get("type"))
        check = _BLOCKS.get(kind)
        if check is None or (kind == "table" and surface != "message"):
            problems.append(schema.unsupported(block, place))
            continue
        schema.string(block, "block_id", place, problems, elements.IDENTIFIER)
        block_id = block.get("block_id")
        if isinstance(block_id, str) and block_id:
            if block_id in block_ids:
                message = f"`block_id` already exists for another block (id={block_id})"
                problems.append(Problem(message, f"{place}/block_id"))
            block_ids.add(block_id)
        tables += kind == "table"
        if tables > 1 and kind == "table":
            problems.append(Problem("only_one_table_allowed", place))
        check({key: value for key, value in block.items() if key != "block_id"}, place, problems)
        _unique_actions(block, place, problems)
        problems += [
            Problem("invalid slack file", f"{where}/slack_file")
            for where, reference in _slack_files(block, place)
            if not shows(reference)
        ]
    return problems


def blocks_size(blocks: list[Any]) -> int:
    """What the limit on all blocks together counts: the characters of their compact JSON."""
    return len(msgspec.json.encode(blocks).decode())


def _section(block: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(block, at, problems, "text", "fields", "accessory", "expand")
    if "text" not in block and "fields" not in block:
        problems.append(Problem("must define either `text` or `fields`", at))
    if "text" in block:
        schema.text(block["text"], f"{at}/text", problems, SECTION_TEXT)
    for place, field in schema.items(block, "fields", at, problems, FIELDS):
        schema.text(field, place, problems, FIELD_TEXT)
    if "accessory" in block:
        elements.check_element(block["accessory"], f"{at}/accessory", problems, elements.IN_SECTION)


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
            elements.check_element(element, place, problems, elements.IN_CONTEXT)
        else:
            schema.text(element, place, problems, SECTION_TEXT)


def _actions(block: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(block, at, problems, "elements")
    schema.required(block, "elements", at, problems)
    for place, element in schema.items(block, "elements", at, problems, ACTIONS_ELEMENTS):
        elements.check_element(element, place, problems, elements.IN_ACTIONS)


def _input(block: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(block, at, problems, "label", "element", "dispatch_action", "hint", "optional")
    schema.required_plain(block, "label", at, problems, INPUT_LABEL)
    schema.flags(block, at, problems, "dispatch_action", "optional")
    if "hint" in block:
        schema.text(block["hint"], f"{at}/hint", problems, INPUT_LABEL, plain=True)
    schema.required(block, "element", at, problems)
    if "element" in block:
        elements.check_element(block["element"], f"{at}/element", problems, elements.IN_INPUT)


def _image(block: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(block, at, problems, "image_url", "slack_file", "alt_text", "title")
    elements.check_picture(block, at, problems)
    if "title" in block:
        schema.text(block["title"], f"{at}/title", problems, elements.ALT_TEXT, plain=True)


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
                check_rich_text(cell, place, problems)
            else:
                problems.append(schema.unsupported(cell, place))
    if sum(map(len, schema.strings(block.get("rows")))) > TABLE_TEXT:
        problems.append(Problem(f"must be less than {TABLE_TEXT + 1} characters", f"{at}/rows"))


_BLOCKS: dict[str, elements.Check] = {
    "section": _section,
    "header": _header,
    "divider": _divider,
    "context": _context,
    "actions": _actions,
    "input": _input,
    "image": _image,
    "rich_text": check_rich_text,
    "table": _table,
}


def _slack_files(block: dict[str, Any], at: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """The files that the pictures of a block name, each with the pointer to its picture."""
    pictures: list[tuple[str, Any]] = [(at, block)] if block["type"] == "image" else []
    if block["type"] == "section":
        pictures.append((f"{at}/accessory", block.get("accessory")))
    parts = block.get("elements") if block["type"] == "context" else None
    pictures += [
        (f"{at}/elements/{n}", part) for n, part in enumerate(parts if isinstance(parts, list) else [])
    ]
    for where, picture in pictures:
        if isinstance(picture, dict) and picture.get("type") == "image":
            file = picture.get("slack_file")
            if isinstance(file, dict) and len({"id", "url"} & file.keys()) == 1:
                yield where, file


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
