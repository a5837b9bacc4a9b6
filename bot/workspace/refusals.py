"""How Slack says no: `{"ok": false, "error": …}`, and what stands beside the code."""

from collections.abc import Sequence
from typing import Any

from bot.workspace.schema import Problem
from bot.workspace.world import Json


class RefusedError(Exception):
    """A call that Slack answers with `ok: false`: its error code, and what stands beside it."""

    def __init__(self, error: str, **more: Any) -> None:
        super().__init__(error)
        self.error = error
        self.answer: Json = {"ok": False, "error": error, **more}


def refuse_arguments(*messages: str) -> RefusedError:
    """Arguments that are missing or malformed."""
    return RefusedError(
        "invalid_arguments", response_metadata={"messages": [f"[ERROR] {m}" for m in messages]}
    )


def refuse_blocks(problems: Sequence[Problem]) -> RefusedError:
    """Blocks that break Slack's rules, in Slack's shape."""
    errors = [str(problem) for problem in problems]
    messages = [f"[ERROR] {error}" for error in errors]
    return RefusedError("invalid_blocks", errors=errors, response_metadata={"messages": messages})


def refuse_view(problems: Sequence[Problem]) -> RefusedError:
    """A view that breaks Slack's rules, in Slack's shape."""
    return refuse_arguments(
        "failed to match all allowed schemas [json-pointer:/view]", *(str(problem) for problem in problems)
    )
