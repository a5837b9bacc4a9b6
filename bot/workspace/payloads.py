"""What a command, a click, a shortcut or a submission says to the app.

docs.slack.dev/interactivity/implementing-slash-commands and docs.slack.dev/reference/interaction-payloads.
"""

import secrets
from typing import Any

from bot.workspace import mrkdwn
from bot.workspace.files import Files
from bot.workspace.response_urls import ResponseUrls
from bot.workspace.shapes import message_json
from bot.workspace.views import Values, View, Views
from bot.workspace.world import Channel, Json, Message, User, World


class Payloads:
    """Makes what one person's doings say; each takes a fresh trigger_id, and where one is due a response_url."""

    def __init__(self, world: World, files: Files, views: Views, hooks: ResponseUrls, user: User) -> None:
        self._world = world
        self._files = files
        self._views = views
        self._hooks = hooks
        self._user = user

    def command(self, channel: Channel, name: str, text: str) -> Json:
        """A slash command."""
        return {
            "token": secrets.token_hex(12),
            "team_id": self._world.team_id,
            "team_domain": self._world.team_name,
            "channel_id": channel.id,
            "channel_name": _name(channel),
            "user_id": self._user.id,
            "user_name": self._user.name,
            "command": name,
            "text": mrkdwn.escape(text),
            "api_app_id": self._world.app_id,
            "is_enterprise_install": "false",
            "response_url": self._hooks.new(channel, self._user),
            "trigger_id": self._views.trigger(self._user),
        }

    def click(self, message: Message, action: Json, values: Values) -> Json:
        """An action in a message; `values` is what its menus stand at."""
        channel = self._world.channels[message.channel]
        container: Json = {
            "type": "message",
            "message_ts": message.ts,
            "channel_id": channel.id,
            "is_ephemeral": message.ephemeral_to is not None,
        }
        if message.thread_ts is not None:
            container["thread_ts"] = message.thread_ts
        payload = {
            **self._common("block_actions"),
            "trigger_id": self._views.trigger(self._user),
            "container": container,
            "channel": {"id": channel.id, "name": _name(channel)},
            "state": {"values": values},
            "response_url": self._hooks.new(channel, self._user, message.ts),
            "actions": [action],
        }
        if message.ephemeral_to is None:  # Slack sends no copy of an ephemeral message
            payload["message"] = message_json(self._world, message, self._files)
        return payload

    def click_in_view(self, view: View, action: Json) -> Json:
        """An action in a view."""
        return {
            **self._common("block_actions"),
            "trigger_id": self._views.trigger(self._user, view),
            "container": {"type": "view", "view_id": view.id},
            "view": self._views.json(view),
            "actions": [action],
        }

    def message_shortcut(self, message: Message, callback_id: str) -> Json:
        """A shortcut from a message's menu."""
        channel = self._world.channels[message.channel]
        return {
            **self._common("message_action"),
            "action_ts": self._world.next_ts(),
            "callback_id": callback_id,
            "trigger_id": self._views.trigger(self._user),
            "response_url": self._hooks.new(channel, self._user, message.ts),
            "message_ts": message.ts,
            "channel": {"id": channel.id, "name": _name(channel)},
            "message": message_json(self._world, message, self._files),
        }

    def global_shortcut(self, callback_id: str) -> Json:
        """A shortcut from anywhere: it has no channel, and so no response_url."""
        return {
            **self._common("shortcut"),
            "action_ts": self._world.next_ts(),
            "callback_id": callback_id,
            "trigger_id": self._views.trigger(self._user),
        }

    def submission(self, view: View) -> Json:
        """A modal that was submitted."""
        return {
            **self._common("view_submission"),
            "trigger_id": self._views.trigger(self._user, view),
            "view": self._views.json(view),
            "response_urls": [],
        }

    def closing(self, view: View, *, cleared: bool) -> Json:
        """A modal that was closed; `cleared`: with all of its views."""
        return {**self._common("view_closed"), "view": self._views.json(view), "is_cleared": cleared}

    def _common(self, kind: str) -> Json:
        world, user = self._world, self._user
        return {
            "type": kind,
            "user": {
                "id": user.id,
                "username": user.name,
                "name": user.name,
                "team_id": user.team or world.team_id,
            },
            "api_app_id": world.app_id,
            "token": secrets.token_hex(12),
            "team": {"id": world.team_id, "domain": world.team_name},
            "enterprise": None,
            "is_enterprise_install": False,
        }


def elements_of(block: Json) -> tuple[Json, ...]:
    """The elements of a block that can be used."""
    parts: tuple[Any, ...] = (*block.get("elements", ()), block.get("accessory"), block.get("element"))
    return tuple(part for part in parts if isinstance(part, dict) and "action_id" in part)


def options_of(element: Json) -> list[Json]:
    """The options of a menu, those in groups too."""
    groups = element.get("option_groups", ())
    return [*element.get("options", ()), *(option for group in groups for option in group["options"])]


def initial_values(blocks: list[Json]) -> Values:
    """What the menus and inputs of blocks stand at before anybody touches them."""
    values: Values = {}
    for block in blocks:
        for element in elements_of(block):
            initial = {
                key.replace("initial_", "selected_" if key != "initial_value" else "", 1): element[key]
                for key in element
                if key.startswith("initial_")
            }
            if element["type"] not in ("button", "overflow"):
                state = {"type": element["type"], **(initial or _empty(element))}
                values.setdefault(block["block_id"], {})[element["action_id"]] = state
    return values


def _empty(element: Json) -> Json:
    kind = element["type"]
    if kind in ("checkboxes", "multi_static_select"):
        return {"selected_options": []}
    return {_FIELD.get(kind, "selected_option"): None}


_FIELD = {
    "plain_text_input": "value",
    "number_input": "value",
    "users_select": "selected_user",
    "channels_select": "selected_channel",
    "conversations_select": "selected_conversation",
    "datepicker": "selected_date",
    "timepicker": "selected_time",
}


class WrongChoiceError(ValueError):
    """A menu does not offer what somebody wants to choose."""


def chosen(element: Json, choice: Any) -> Json:
    """The state of an element at which somebody chose or typed `choice`: the value of an option (several in a
    list, for menus that take several), an id, a date, a time or a text.

    Raises: WrongChoiceError.
    """
    kind = element["type"]
    if kind in _FIELD:
        return {"type": kind, _FIELD[kind]: None if choice is None else str(choice)}
    options = {option["value"]: option for option in options_of(element)}
    many = kind in ("checkboxes", "multi_static_select")
    wanted = list(choice or ()) if many and not isinstance(choice, str) else [choice]
    for value in wanted:
        if value not in options and not (value is None and not many):
            raise WrongChoiceError(
                f"{element['action_id']!r} has no option {value!r}; it has {list(options)}"
            )
    if many:
        return {"type": kind, "selected_options": [options[value] for value in wanted]}
    return {"type": kind, "selected_option": options.get(choice)}


def action_of(world: World, block: Json, element: Json, choice: Any) -> Json:
    """The action of a click on an element, or of choosing in it. Raises: WrongChoiceError."""
    action = {
        "type": element["type"],
        "action_id": element["action_id"],
        "block_id": block["block_id"],
        "action_ts": world.next_ts(),
    }
    if element["type"] == "button":
        return action | {key: element[key] for key in ("text", "value", "style") if key in element}
    if element["type"] == "overflow" and choice is None:
        raise WrongChoiceError(
            f"{element['action_id']!r} is a menu: choose one of {[o['value'] for o in options_of(element)]}"
        )
    return action | chosen(element, choice)


def _name(channel: Channel) -> str:
    return "directmessage" if channel.direct else channel.name
