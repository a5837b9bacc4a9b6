"""Slack's limits on rich text: which containers and pieces a `rich_text` block may hold."""

from typing import Any

from bot.workspace import schema
from bot.workspace.schema import Problem, Problems

_CONTAINERS = ("rich_text_section", "rich_text_preformatted", "rich_text_quote", "rich_text_list")
_PIECES = {
    "text": "text",
    "link": "url",
    "emoji": "name",
    "user": "user_id",
    "channel": "channel_id",
    "broadcast": "range",
    "date": "timestamp",
}


INDENT = 8  # levels; not documented, what the composer goes to
YEAR_9999 = 253_402_300_799  # the last second that has a date


def check_rich_text(block: dict[str, Any], at: str, problems: Problems) -> None:
    """A `rich_text` block, in a message or as the cell of a table."""
    schema.known(block, at, problems, "elements")
    schema.required(block, "elements", at, problems)
    for place, element in schema.items(block, "elements", at, problems, None):
        _container(element, place, problems, _CONTAINERS)


def _container(element: Any, at: str, problems: Problems, allowed: tuple[str, ...]) -> None:
    if not schema.is_object(element, at, problems):
        return
    if element.get("type") not in allowed:
        problems.append(schema.unsupported(element, at))
        return
    schema.known(element, at, problems, "elements", "style", "indent", "offset", "border")
    schema.required(element, "elements", at, problems)
    schema.number(element, "indent", at, problems, 0, INDENT)
    schema.number(element, "border", at, problems, 0, 1)
    if element["type"] == "rich_text_list" and element.get("style") not in ("bullet", "ordered"):
        problems.append(Problem("must be a valid enum value", f"{at}/style"))
    for place, child in schema.items(element, "elements", at, problems, None, empty=True):
        if element["type"] == "rich_text_list":
            _container(child, place, problems, ("rich_text_section",))
        elif schema.is_object(child, place, problems):
            _piece(child, place, problems)


def _piece(element: dict[str, Any], at: str, problems: Problems) -> None:
    key = _PIECES.get(str(element.get("type")))
    if key is None:
        problems.append(schema.unsupported(element, at))
        return
    schema.required(element, key, at, problems)
    if key in element and key != "timestamp":
        schema.string(element, key, at, problems, None, empty=False)
    for extra in {"format", "fallback", "url", "text"} - {key}:
        schema.string(element, extra, at, problems, None)
    if key == "timestamp":
        schema.number(element, key, at, problems, 0, YEAR_9999)
    style = element.get("style", {})
    if not isinstance(style, dict) or set(style) - {"bold", "italic", "strike", "code", "underline"}:
        problems.append(Problem("invalid style", f"{at}/style"))
