"""Views: the modals that a person has open, one on the other, and home tabs; and the triggers that open them.

Sources: docs.slack.dev/surfaces/modals and the pages of `views.open`, `.push`, `.update` and `.publish`. What no
page says is decided so: opening a modal closes the one that is open, and a view that is refused leaves its
trigger unused.
"""

import secrets
from typing import Any

import msgspec

from bot.workspace.files import Files
from bot.workspace.limits import Shows
from bot.workspace.refusals import RefusedError, refuse_arguments, refuse_view
from bot.workspace.view_limits import VIEW_BYTES, check_view
from bot.workspace.world import Change, Json, User, World, new_id, with_ids

TRIGGER_LIFE = 3.0  # seconds
STACK = 3  # views that one modal holds
TRIGGERS = 1000  # how many are remembered
# What a person reads when a submission went wrong.
TROUBLE = "We had some trouble connecting. Try again?"

Values = dict[str, dict[str, Json]]


class View(msgspec.Struct, frozen=True):
    """One view as it stands. `body` is what the app gave, with ids filled in; `values` is what a person
    entered, by block_id and action_id; `errors` is what the app said about it, by block_id (under the empty
    name: what Slack itself says); `previous` is the id of the view below."""

    id: str
    user: str
    body: Json
    hash: str
    root: str
    previous: str | None = None
    values: Values = {}
    errors: dict[str, str] = {}


class _Trigger(msgspec.Struct):
    user: str
    expires: float
    view: str | None
    used: bool = False


class Views:
    """The views of all people."""

    def __init__(self, world: World, files: Files) -> None:
        self._world = world
        self._shows: Shows = files.shows
        self._triggers: dict[str, _Trigger] = {}
        self._open: dict[str, list[View]] = {}
        self._homes: dict[str, View] = {}

    def stack(self, user: User) -> tuple[View, ...]:
        """The views of the modal that a person has open, the visible one last."""
        return tuple(self._open.get(user.id, ()))

    def home(self, user: User) -> View | None:
        """What the app shows on its home tab to a person."""
        return self._homes.get(user.id)

    def trigger(self, user: User, view: View | None = None) -> str:
        """A trigger_id for what a person just did, perhaps in a view."""
        id = f"{secrets.randbelow(10**13)}.{secrets.randbelow(10**13)}.{secrets.token_hex(16)}"
        expires = self._world.clock.now() + TRIGGER_LIFE
        self._triggers[id] = _Trigger(user.id, expires, None if view is None else view.id)
        if len(self._triggers) > TRIGGERS:
            del self._triggers[next(iter(self._triggers))]
        return id

    # What the app does

    def open(self, trigger_id: str, body: Any) -> View:
        """Open a modal. Raises: RefusedError."""
        body = self._checked(body)
        trigger = self._trigger(trigger_id)
        trigger.used = True
        view = self._new(trigger.user, body, None)
        self._open[trigger.user] = [view]
        return self._told(view)

    def push(self, trigger_id: str, body: Any) -> View:
        """Put a view on top of the modal in which the trigger was made. Raises: RefusedError."""
        body = self._checked(body)
        trigger = self._trigger(trigger_id)
        stack = self._open.get(trigger.user, [])
        if trigger.view is None or all(view.id != trigger.view for view in stack):
            raise RefusedError("not_found")
        view = self._on_top(trigger.user, body)
        trigger.used = True
        return self._told(view)

    def update(self, view_id: str, external_id: str, body: Any, hash: str) -> View:
        """Replace a view, which keeps its place and what was entered into the inputs it still has.

        Raises: RefusedError.
        """
        old = self._find(view_id, external_id)
        if old is None:
            raise RefusedError("not_found")
        if hash and hash != old.hash:
            raise RefusedError("hash_conflict")
        return self._told(self._replace(old, self._checked(body, instead_of=old)))

    def publish(self, user: User, body: Any, hash: str) -> View:
        """Show a home tab to a person. Raises: RefusedError."""
        old = self._homes.get(user.id)
        body = self._checked(body, home=True, instead_of=old)
        if hash and (old is None or hash != old.hash):
            raise RefusedError("hash_conflict")
        view = self._new(user.id, body, None) if old is None else self._next(old, body)
        self._homes[user.id] = view
        return self._told(view)

    # What a person does

    def enter(self, view: View, values: Values) -> View:
        """Fill in inputs; the hash stays, since the app did not change anything."""
        new = msgspec.structs.replace(view, values=_merged(view.values, values), errors={})
        self._put(new)
        return new

    def close(self, view: View, *, all: bool) -> None:
        """Take the visible view off its modal, or end the modal."""
        stack = self._open.get(view.user, [])
        self._open[view.user] = [] if all else [other for other in stack if other.id != view.id]
        self._world.tell(Change("delivery"))

    def settle(self, view: View, acknowledged: bool, answer: Json | None) -> None:
        """Do what the app's answer to a submission says; what Slack cannot use, the person sees as trouble."""
        try:
            if not acknowledged:
                raise RefusedError("operation_timeout")
            self._carry_out(view, answer or {})
        except RefusedError:
            self._put(msgspec.structs.replace(view, errors={"": TROUBLE}))
        self._world.tell(Change("delivery"))

    def json(self, view: View) -> Json:
        """A view as the API and interactions give it."""
        body = view.body
        home = body["type"] == "home"
        return {
            "id": view.id,
            "team_id": self._world.team_id,
            "type": body["type"],
            "blocks": body["blocks"],
            "private_metadata": body.get("private_metadata", ""),
            "callback_id": body.get("callback_id", ""),
            "state": {"values": view.values},
            "hash": view.hash,
            "title": body.get("title", {"type": "plain_text", "text": "View Title", "emoji": True}),
            "close": None if home else body.get("close"),
            "submit": None if home else body.get("submit"),
            "clear_on_close": body.get("clear_on_close", False),
            "notify_on_close": body.get("notify_on_close", False),
            "previous_view_id": view.previous,
            "root_view_id": view.root,
            "app_id": self._world.app_id,
            "external_id": body.get("external_id", ""),
            "app_installed_team_id": self._world.team_id,
            "bot_id": self._world.bot_id,
        }

    # Inside

    def _carry_out(self, view: View, answer: Json) -> None:
        action = answer.get("response_action")
        if action is None:
            self.close(view, all=False)
        elif action == "clear":
            self.close(view, all=True)
        elif action == "update":
            self._replace(view, self._checked(answer.get("view"), instead_of=view))
        elif action == "push":
            self._on_top(view.user, self._checked(answer.get("view")))
        elif action == "errors":
            errors = answer.get("errors")
            inputs = {block["block_id"] for block in view.body["blocks"] if block["type"] == "input"}
            if not isinstance(errors, dict) or not errors or not errors.keys() <= inputs:
                raise refuse_arguments("errors must name input blocks")
            self._put(msgspec.structs.replace(view, errors={key: str(e) for key, e in errors.items()}))
        else:
            raise refuse_arguments(f"unknown response_action {action!r}")

    def _checked(self, body: Any, *, home: bool = False, instead_of: View | None = None) -> Json:
        if instead_of is not None:
            home = instead_of.body["type"] == "home"
        if isinstance(body, str):
            try:
                body = msgspec.json.decode(body)
            except (msgspec.DecodeError, RecursionError):
                raise refuse_arguments("must be a valid JSON object [json-pointer:/view]") from None
        if not isinstance(body, dict):
            raise refuse_arguments("missing required field: view")
        problems = check_view(body, home=home, shows=self._shows)
        if problems:
            raise refuse_view(problems)
        if len(msgspec.json.encode(body)) > VIEW_BYTES:
            raise RefusedError("view_too_large")
        taken = self._find("", str(body.get("external_id") or ""))
        if taken is not None and (instead_of is None or taken.id != instead_of.id):
            raise RefusedError("duplicate_external_id")
        return {**body, "blocks": with_ids(body["blocks"])}

    def _trigger(self, id: str) -> _Trigger:
        trigger = self._triggers.get(id)
        if trigger is None:
            raise RefusedError("invalid_trigger_id")
        if trigger.used:
            raise RefusedError("exchanged_trigger_id")
        if trigger.expires <= self._world.clock.now():
            raise RefusedError("expired_trigger_id")
        return trigger

    def _find(self, view_id: str, external_id: str) -> View | None:
        for view in (*(v for stack in self._open.values() for v in stack), *self._homes.values()):
            if view.id == view_id or (external_id and view.body.get("external_id") == external_id):
                return view
        return None

    def _new(self, user: str, body: Json, below: View | None) -> View:
        id = new_id("V")
        return View(
            id=id,
            user=user,
            body=body,
            hash=self._hash(),
            root=id if below is None else below.root,
            previous=None if below is None else below.id,
        )

    def _on_top(self, user: str, body: Json) -> View:
        stack = self._open[user]
        if len(stack) >= STACK:
            raise RefusedError("push_limit_reached")
        view = self._new(user, body, stack[-1])
        stack.append(view)
        return view

    def _replace(self, old: View, body: Json) -> View:
        new = self._next(old, body)
        self._put(new)
        return new

    def _next(self, old: View, body: Json) -> View:
        kept: Values = {}
        for block in body["blocks"]:
            entered = old.values.get(block["block_id"], {})
            action_id = block.get("element", {}).get("action_id")
            if action_id in entered:
                kept[block["block_id"]] = {action_id: entered[action_id]}
        return msgspec.structs.replace(old, body=body, hash=self._hash(), values=kept, errors={})

    def _put(self, view: View) -> None:
        if view.body["type"] == "home":
            self._homes[view.user] = view
            return
        stack = self._open.get(view.user, [])
        self._open[view.user] = [view if other.id == view.id else other for other in stack]

    def _hash(self) -> str:
        return f"{int(self._world.clock.now())}.{secrets.token_hex(4)}"

    def _told(self, view: View) -> View:
        self._world.tell(Change("delivery"))
        return view


def _merged(old: Values, new: Values) -> Values:
    return {block: old.get(block, {}) | new.get(block, {}) for block in {**old, **new}}
