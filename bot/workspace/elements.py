"""Slack's limits on the elements inside blocks: buttons, menus, pickers, inputs and pictures."""

import ipaddress
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from bot.workspace import schema
from bot.workspace.schema import Problem, Problems

BUTTON_TEXT = 75
BUTTON_VALUE = 2000
OVERFLOW_OPTIONS = 5
CHOICES = 10  # of checkboxes and radio buttons
SELECT_OPTIONS = 100
OPTION_TEXT = 75
OPTION_VALUE = 150
PLACEHOLDER = 150
INPUT_TEXT = 3000
IDENTIFIER = 255
URL = 3000
ALT_TEXT = 2000

Check = Callable[[dict[str, Any], str, Problems], None]


def check_element(element: Any, at: str, problems: Problems, allowed: Mapping[str, Check]) -> None:
    """One element, of a kind that is allowed where it stands."""
    if not schema.is_object(element, at, problems):
        return
    check = allowed.get(str(element.get("type")))
    if check is None:
        problems.append(schema.unsupported(element, at))
        return
    schema.string(element, "action_id", at, problems, IDENTIFIER)
    check(element, at, problems)


def check_picture(node: dict[str, Any], at: str, problems: Problems) -> None:
    """What an image element and an image block have in common: a picture's address, or a file, and its text.

    Slack fetches an address itself: one inside a network, or of this machine, fails there.
    """
    schema.required(node, "alt_text", at, problems)
    schema.string(node, "alt_text", at, problems, ALT_TEXT)
    schema.string(node, "image_url", at, problems, URL)
    if "slack_file" in node:
        file = node["slack_file"]
        if not schema.is_object(file, f"{at}/slack_file", problems):
            return
        if len({"id", "url"} & file.keys()) != 1 or not all(isinstance(v, str) for v in file.values()):
            problems.append(Problem("must define either `id` or `url`", f"{at}/slack_file"))
    elif "image_url" not in node:
        problems.append(Problem("must define either `image_url` or `slack_file`", at))
    elif isinstance(node["image_url"], str) and not _is_public(node["image_url"]):
        problems.append(Problem("downloading image failed", f"{at}/image_url"))


# Buttons and menus


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


def _choices(element: dict[str, Any], at: str, problems: Problems) -> None:
    initial = "initial_option" if element["type"] == "radio_buttons" else "initial_options"
    schema.known(element, at, problems, "action_id", "options", initial, "confirm", "focus_on_load")
    _options(element, at, problems, CHOICES)
    _initial(element, initial, at, problems, element.get("options"))
    _confirm(element, at, problems)


def _static_select(element: dict[str, Any], at: str, problems: Problems) -> None:
    many = element["type"].startswith("multi_")
    initial = "initial_options" if many else "initial_option"
    keys = ["action_id", "options", "option_groups", "placeholder", initial, "confirm", "focus_on_load"]
    schema.known(element, at, problems, *keys, *(["max_selected_items"] if many else []))
    _placeholder(element, at, problems)
    if ("options" in element) == ("option_groups" in element):
        problems.append(Problem("must define either `options` or `option_groups`", at))
        return
    offered = element.get("options")
    if offered is not None:
        _options(element, at, problems, SELECT_OPTIONS)
    else:
        offered = []
        for place, group in schema.items(element, "option_groups", at, problems, SELECT_OPTIONS):
            if schema.is_object(group, place, problems):
                schema.required_plain(group, "label", place, problems, OPTION_TEXT)
                _options({**group, "type": element["type"]}, place, problems, SELECT_OPTIONS)
                options = group.get("options")
                offered += options if isinstance(options, list) else []
    _initial(element, initial, at, problems, offered)
    schema.number(element, "max_selected_items", at, problems, 1, SELECT_OPTIONS)
    _confirm(element, at, problems)


def _people_select(element: dict[str, Any], at: str, problems: Problems) -> None:
    what = element["type"].removesuffix("s_select")
    keys = ["action_id", "placeholder", f"initial_{what}", "confirm", "focus_on_load"]
    if what != "user":
        keys.append("response_url_enabled")
    schema.known(element, at, problems, *keys)
    _placeholder(element, at, problems)
    schema.string(element, f"initial_{what}", at, problems, None)
    _confirm(element, at, problems)


def _picker(element: dict[str, Any], at: str, problems: Problems) -> None:
    initial = "initial_date" if element["type"] == "datepicker" else "initial_time"
    keys = ["action_id", "placeholder", initial, "confirm", "focus_on_load"]
    schema.known(element, at, problems, *keys, *(["timezone"] if initial == "initial_time" else []))
    _placeholder(element, at, problems)
    schema.string(element, initial, at, problems, None)
    _confirm(element, at, problems)


def _text_input(element: dict[str, Any], at: str, problems: Problems) -> None:
    keys = ("action_id", "initial_value", "multiline", "min_length", "max_length", "placeholder")
    schema.known(element, at, problems, *keys, "focus_on_load", "dispatch_action_config")
    _placeholder(element, at, problems)
    schema.string(element, "initial_value", at, problems, None)
    schema.flags(element, at, problems, "multiline", "focus_on_load")
    schema.number(element, "min_length", at, problems, 0, INPUT_TEXT)
    schema.number(element, "max_length", at, problems, 1, INPUT_TEXT)


def _number_input(element: dict[str, Any], at: str, problems: Problems) -> None:
    keys = ("action_id", "is_decimal_allowed", "initial_value", "min_value", "max_value", "placeholder")
    schema.known(element, at, problems, *keys, "focus_on_load", "dispatch_action_config")
    schema.required(element, "is_decimal_allowed", at, problems)
    schema.flags(element, at, problems, "is_decimal_allowed", "focus_on_load")
    _placeholder(element, at, problems)
    for key in ("initial_value", "min_value", "max_value"):
        schema.string(element, key, at, problems, None)


def _image(element: dict[str, Any], at: str, problems: Problems) -> None:
    schema.known(element, at, problems, "image_url", "slack_file", "alt_text")
    check_picture(element, at, problems)


_MENUS: dict[str, Check] = {
    "static_select": _static_select,
    "multi_static_select": _static_select,
    "users_select": _people_select,
    "channels_select": _people_select,
    "conversations_select": _people_select,
    "datepicker": _picker,
    "timepicker": _picker,
    "checkboxes": _choices,
    "radio_buttons": _choices,
}
# What may stand where (the table in docs.slack.dev/reference/block-kit/block-elements).
IN_ACTIONS: dict[str, Check] = {"button": _button, "overflow": _overflow, **_MENUS}
IN_SECTION: dict[str, Check] = {**IN_ACTIONS, "image": _image}
IN_CONTEXT: dict[str, Check] = {"image": _image}
IN_INPUT: dict[str, Check] = {**_MENUS, "plain_text_input": _text_input, "number_input": _number_input}


# Parts of them


def _placeholder(element: dict[str, Any], at: str, problems: Problems) -> None:
    if "placeholder" in element:
        schema.text(element["placeholder"], f"{at}/placeholder", problems, PLACEHOLDER, plain=True)


def _options(element: dict[str, Any], at: str, problems: Problems, limit: int) -> None:
    plain = element["type"] not in ("checkboxes", "radio_buttons")
    schema.required(element, "options", at, problems)
    for place, option in schema.items(element, "options", at, problems, limit):
        if not schema.is_object(option, place, problems):
            continue
        keys = ["text", "value", "description", *(["url"] if element["type"] == "overflow" else [])]
        schema.known(option, place, problems, *keys)
        schema.required(option, "text", place, problems)
        schema.required(option, "value", place, problems)
        for key in ("text", "description"):
            if key in option:
                schema.text(option[key], f"{place}/{key}", problems, OPTION_TEXT, plain=plain)
        schema.string(option, "value", place, problems, OPTION_VALUE)
        schema.string(option, "url", place, problems, URL)


def _initial(element: dict[str, Any], key: str, at: str, problems: Problems, offered: Any) -> None:
    if key not in element:
        return
    chosen = element[key] if key == "initial_options" else [element[key]]
    if not isinstance(chosen, list):
        problems.append(Problem("must be an array", f"{at}/{key}"))
    elif not isinstance(offered, list) or any(option not in offered for option in chosen):
        problems.append(Problem("must be one of the options", f"{at}/{key}"))


def _confirm(element: dict[str, Any], at: str, problems: Problems) -> None:
    if "confirm" not in element:
        return
    confirm, at = element["confirm"], f"{at}/confirm"
    if not schema.is_object(confirm, at, problems):
        return
    schema.known(confirm, at, problems, "title", "text", "confirm", "deny", "style")
    schema.required_plain(confirm, "title", at, problems, 100)
    schema.required(confirm, "text", at, problems)
    if "text" in confirm:
        schema.text(confirm["text"], f"{at}/text", problems, 300)
    for name in ("confirm", "deny"):
        schema.required_plain(confirm, name, at, problems, 30)


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
