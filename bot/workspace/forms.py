"""Filling in a modal as a person does, with the checks that Slack's own form makes before it lets it go."""

from typing import Any

from bot.workspace.payloads import WrongChoiceError, chosen, initial_values
from bot.workspace.views import Values, View
from bot.workspace.world import Json


class IncompleteError(ValueError):
    """A form that Slack does not let go: an input is empty that must not be, too short, or too long."""


def fill_in(view: View, values: dict[str, Any]) -> Values:
    """What all elements of a view stand at once `values` (by block_id or action_id) are entered.

    Raises: LookupError, when the view has no such input or option; IncompleteError.
    """
    state = initial_values(view.body["blocks"])
    for block_id, entered in view.values.items():
        state.setdefault(block_id, {}).update(entered)
    inputs = [block for block in view.body["blocks"] if block["type"] == "input"]
    known = {name for block in inputs for name in (block["block_id"], block["element"]["action_id"])}
    for name in values.keys() - known:
        raise LookupError(
            f"the view has no input {name!r}; it has {[block['block_id'] for block in inputs] or 'none'}"
        )
    for block in inputs:
        element = block["element"]
        for name in (block["block_id"], element["action_id"]):
            if name in values:
                state[block["block_id"]][element["action_id"]] = _entered(element, values[name])
        _check(block, state[block["block_id"]][element["action_id"]])
    return state


def _entered(element: Json, value: Any) -> Json:
    try:
        return chosen(element, value)
    except WrongChoiceError as error:
        raise LookupError(str(error)) from None


def _check(block: Json, state: Json) -> None:
    name = block["label"]["text"]
    value = next((value for key, value in state.items() if key != "type"), None)
    if not value:
        if not block.get("optional", False):
            raise IncompleteError(f"{name!r} is empty: complete this required field")
        return
    if isinstance(value, str):
        least, most = block["element"].get("min_length", 0), block["element"].get("max_length", 3000)
        if not least <= len(value) <= most:
            raise IncompleteError(f"{name!r} has {len(value)} characters: it takes {least} to {most}")
