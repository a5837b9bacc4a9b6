"""What every check of a block is made of: the words of a problem, and one function per kind of demand."""

from collections.abc import Iterable
from typing import Any

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """One thing Slack would refuse: the words, and the JSON pointer to the place."""

    message: str
    pointer: str

    def __str__(self) -> str:
        return f"{self.message} [json-pointer:{self.pointer}]"


Problems = list[Problem]


def text(node: Any, at: str, problems: Problems, limit: int, *, plain: bool = False) -> None:
    """A text object: `plain_text`, or `mrkdwn` where that is taken too, of 1 to `limit` characters."""
    if not is_object(node, at, problems):
        return
    kinds = ("plain_text",) if plain else ("plain_text", "mrkdwn")
    if node.get("type") not in kinds:
        problems.append(unsupported(node, at))
        return
    extra = "emoji" if node["type"] == "plain_text" else "verbatim"
    known(node, at, problems, "text", extra)
    flags(node, at, problems, extra)
    required(node, "text", at, problems)
    string(node, "text", at, problems, limit, empty=False)


def required_plain(node: dict[str, Any], key: str, at: str, problems: Problems, limit: int) -> None:
    """A `plain_text` object that has to be there."""
    required(node, key, at, problems)
    if key in node:
        text(node[key], f"{at}/{key}", problems, limit, plain=True)


def required(node: dict[str, Any], key: str, at: str, problems: Problems) -> None:
    """A field that has to be there, whatever it holds."""
    if key not in node:
        problems.append(Problem(f"missing required field: {key}", at))


def string(
    node: dict[str, Any], key: str, at: str, problems: Problems, limit: int | None, *, empty: bool = True
) -> None:
    """A string of at most `limit` characters, where it is there."""
    value = node.get(key)
    if key not in node:
        return
    if not isinstance(value, str):
        problems.append(Problem("must be a string", f"{at}/{key}"))
    elif limit is not None and len(value) > limit:
        problems.append(Problem(f"must be less than {limit + 1} characters", f"{at}/{key}"))
    elif not empty and not value:
        problems.append(Problem("must be more than 0 characters", f"{at}/{key}"))


def items(
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


def known(node: dict[str, Any], at: str, problems: Problems, *keys: str) -> None:
    """Nothing but `type` and these keys."""
    allowed = {"type", *keys}
    problems += [Problem(f"invalid additional property: {key}", at) for key in node if key not in allowed]


def is_object(node: Any, at: str, problems: Problems) -> bool:
    """A JSON object; says whether it is one, so that the caller may look inside."""
    if isinstance(node, dict):
        return True
    problems.append(Problem("must be an object", at))
    return False


def unsupported(node: dict[str, Any], at: str) -> Problem:
    """The problem of an object whose type does not belong where it stands, or is missing."""
    if "type" not in node:
        return Problem("missing required field: type", at)
    return Problem(f"unsupported type: {node['type']}", f"{at}/type")


def number(node: dict[str, Any], key: str, at: str, problems: Problems, low: int, high: int) -> None:
    """A whole number from `low` to `high`, where it is there."""
    if key not in node:
        return
    value = node[key]
    if not isinstance(value, int) or isinstance(value, bool):
        problems.append(Problem("must be an integer", f"{at}/{key}"))
    elif value < low:
        problems.append(Problem(f"must be greater than {low - 1}", f"{at}/{key}"))
    elif value > high:
        problems.append(Problem(f"must be less than {high + 1}", f"{at}/{key}"))


def flags(node: dict[str, Any], at: str, problems: Problems, *keys: str) -> None:
    """These are true or false, where they are there."""
    problems += [
        Problem("must be a boolean", f"{at}/{key}")
        for key in keys
        if key in node and not isinstance(node[key], bool)
    ]


def strings(node: Any) -> Iterable[str]:
    """All texts inside a block, at any depth, in no order; what it holds need not be well formed."""
    open_ = [node]
    while open_:
        node = open_.pop()
        if isinstance(node, dict):
            if isinstance(node.get("text"), str):
                yield node["text"]
            open_ += node.values()
        elif isinstance(node, list):
            open_ += node
