"""Slack's limits on views: modals and home tabs (docs.slack.dev/reference/views)."""

from typing import Any

from bot.workspace import schema
from bot.workspace.limits import Shows, check_blocks
from bot.workspace.schema import Problem, Problems

TITLE = 24
METADATA = 3000
CALLBACK_ID = 255
# "greater than 250kb", and no page says whether that is 250,000 or 256,000: the smaller is the safe side.
VIEW_BYTES = 250_000
_COMMON = ("blocks", "private_metadata", "callback_id", "external_id")
_MODAL = ("title", "close", "submit", "clear_on_close", "notify_on_close")


def check_view(view: dict[str, Any], *, home: bool, shows: Shows) -> Problems:
    """All that Slack would refuse about a modal, or a home tab; empty when all is well."""
    problems: Problems = []
    at = "/view"
    if view.get("type") != ("home" if home else "modal"):
        problems.append(schema.unsupported(view, at))
        return problems
    schema.known(view, at, problems, *_COMMON, *(() if home else _MODAL))
    schema.string(view, "private_metadata", at, problems, METADATA)
    for key in ("callback_id", "external_id"):
        schema.string(view, key, at, problems, CALLBACK_ID)
    if not home:
        schema.required_plain(view, "title", at, problems, TITLE)
        for key in ("close", "submit"):
            if view.get(key) is not None:
                schema.text(view[key], f"{at}/{key}", problems, TITLE, plain=True)
        schema.flags(view, at, problems, "clear_on_close", "notify_on_close")
    blocks = view.get("blocks")
    if not isinstance(blocks, list):
        missing = "blocks" not in view
        problems.append(
            Problem("missing required field: blocks", at)
            if missing
            else Problem("must be an array", f"{at}/blocks")
        )
        return problems
    problems += check_blocks(blocks, surface="home" if home else "modal", at=f"{at}/blocks", shows=shows)
    if not home and view.get("submit") is None:
        problems += [
            Problem("must define `submit` to use `input` block", f"{at}/blocks/{index}/input")
            for index, block in enumerate(blocks)
            if isinstance(block, dict) and block.get("type") == "input"
        ]
    return problems
