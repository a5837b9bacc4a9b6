"""People: what somebody does in Slack, typing a command, writing, replying, clicking, filling in a form."""

import re
from typing import Any

import msgspec

from bot.workspace import events, mrkdwn
from bot.workspace.delivery import Delivery, Dispatch
from bot.workspace.emoji import EMOJI
from bot.workspace.files import Files
from bot.workspace.forms import fill_in
from bot.workspace.payloads import Payloads, WrongChoiceError, action_of, chosen, elements_of, initial_values
from bot.workspace.refusals import RefusedError
from bot.workspace.response_urls import ResponseUrls
from bot.workspace.views import View, Views
from bot.workspace.world import Channel, Json, Message, User, World

_TOKEN = re.compile(r"(?P<url>https?://[^\s<>|]+)|@(?P<user>[\w.-]*\w)|#(?P<channel>[\w-]+)")


# Slack's own words.
_SLASH = (
    "In Slack, all messages that start with the “/” character are interpreted as commands. If you are trying "
    "to send a message and not run a command, try preceding the “/” with an empty space."
)


class NotThereError(LookupError):
    """A person reached for something that is not there, or that this person cannot see."""


class Desk(msgspec.Struct, frozen=True):
    """What all people share: the workspace, the way to the app, its files, views and response_urls."""

    world: World
    dispatch: Dispatch
    files: Files
    views: Views
    hooks: ResponseUrls
    commands: frozenset[str]


class Person:
    """Somebody in the workspace. Channels are given by name, id or object."""

    def __init__(self, desk: Desk, user: User) -> None:
        self._world = desk.world
        self._desk = desk
        self._payloads = Payloads(desk.world, desk.files, desk.views, desk.hooks, user)
        self.user = user

    @property
    def id(self) -> str:
        return self.user.id

    @property
    def name(self) -> str:
        return self.user.name

    @property
    def direct(self) -> Channel:
        """The direct messages with the bot."""
        return self._world.direct(self.user)

    def sees(self, message: Message) -> bool:
        """Whether this person can see a message."""
        return message.ephemeral_to in (None, self.id)

    @property
    def views(self) -> tuple[View, ...]:
        """The views of the modal that is open, the visible one last."""
        return self._desk.views.stack(self.user)

    @property
    def view(self) -> View | None:
        """The view that this person looks at."""
        return self.views[-1] if self.views else None

    @property
    def home(self) -> View | None:
        """What the app shows on its home tab."""
        return self._desk.views.home(self.user)

    # Commands and messages

    async def command(self, line: str, channel: str | Channel = "training") -> Delivery:
        """Type a slash command, such as `/sysom diagnose job-123`, and wait until the app acknowledged it.

        Where the app does not, within 3 s, or cannot be reached, the person reads so in the channel.
        """
        where = self._writable(self._channel(channel))
        name, _, text = line.strip().partition(" ")
        if name == "/invite" and text.strip() == f"@{self._world.bot.name}":
            self.invite_bot(where)
            self._slackbot(where, f"<@{self._world.bot.id}> was added to #{where.name}.")
            return Delivery("", acknowledged=True)
        if name not in self._desk.commands or self.user.team:
            # People of another workspace have the commands of their own apps alone.
            self._slackbot(where, f"`{mrkdwn.escape(name)}` is not a valid command. {_SLASH}")
            return Delivery("", acknowledged=False)
        payload = self._payloads.command(where, name, text.strip())
        delivery = await self._desk.dispatch.send("slash_commands", payload)
        if not delivery.acknowledged:
            what = f"{name} failed because the app did not respond. ({delivery.error})"
            self._slackbot(where, what)
        elif delivery.payload is not None:
            self._show_answer(where, line, delivery.payload)
        return delivery

    async def say(self, text: str, channel: str | Channel = "training") -> Message:
        """Write a message in a channel."""
        return self._post(self._channel(channel), text, None)

    async def reply(self, message: Message, text: str) -> Message:
        """Write in the thread of a message."""
        channel = self._world.channels[message.channel]
        self._current(message)
        return self._post(channel, text, message.thread_ts or message.ts)

    async def mention(self, text: str, channel: str | Channel = "training") -> Message:
        """Write a message that begins with the bot's name."""
        return await self.say(f"@{self._world.bot.name} {text}", channel)

    async def react(self, message: Message, name: str, *, added: bool = True) -> Message:
        """Put an emoji on a message, or take it off.

        Raises: NotThereError, when there is no such emoji, or message.
        """
        current, name = self._current(message), name.strip(":")
        if name not in EMOJI:
            raise NotThereError(f"there is no emoji :{name}:")
        channel = self._world.channels[current.channel]
        self._world.react(channel, current, name, self.user, added=added)
        return self._current(message)

    async def upload(
        self, name: str, content: bytes, channel: str | Channel = "training", text: str = ""
    ) -> Message:
        """Put a file into a channel, with a few words."""
        where = self._writable(self._channel(channel))
        file = self._desk.files.add(self.user, name, content)
        marked = self._marked_up(text)
        blocks = [{"type": "rich_text", "elements": mrkdwn.parse(marked)}] if marked else ()
        return self._world.post(where, self.user, marked, blocks, files=(file.id,))

    # Buttons, menus and shortcuts

    async def click(self, place: Message | View, action_id: str, choice: Any = None) -> Delivery:
        """Use a button, or choose in a menu, and wait for the acknowledgement.

        `choice` is the value of an option, several in a list, an id, or a date, as the menu asks for.

        Raises: NotThereError, when what is there now has no such element or option.
        """
        if isinstance(place, View):
            return await self._click_in_view(self._showing(place), action_id, choice)
        current = self._current(place)
        block, element = self._element(current.blocks, action_id, "message")
        action = self._choose(block, element, choice)
        values = initial_values(current.blocks)
        if element["type"] not in ("button", "overflow"):
            values[block["block_id"]][action_id] = chosen(element, choice)
        return await self._desk.dispatch.send("interactive", self._payloads.click(current, action, values))

    async def shortcut(self, callback_id: str, message: Message | None = None) -> Delivery:
        """Use a shortcut of the app, from a message's menu or from anywhere."""
        if message is None:
            payload = self._payloads.global_shortcut(callback_id)
        else:
            payload = self._payloads.message_shortcut(self._current(message), callback_id)
        return await self._desk.dispatch.send("interactive", payload)

    # Modals and the home tab

    async def submit(self, view: View, values: dict[str, Any] | None = None) -> Delivery:
        """Fill in a modal and submit it: values by block_id or action_id, those that are not named stay.

        What comes of it stands in `view`: another view, none, or the same with its `errors`.

        Raises: NotThereError, when the view is not the visible one, or has no such input; IncompleteError, when
            Slack would not let it go, because something is missing or too long.
        """
        current = self._showing(view)
        try:
            entered = fill_in(current, values or {})
        except LookupError as error:
            raise NotThereError(str(error)) from None
        current = self._desk.views.enter(current, entered)
        delivery = await self._desk.dispatch.send("interactive", self._payloads.submission(current))
        self._desk.views.settle(current, delivery.acknowledged, delivery.payload)
        return delivery

    async def close(self, view: View, *, all: bool = False) -> Delivery | None:
        """Close the visible view (or the modal with `all` of its views); the app hears of it where it asked to."""
        current = self._showing(view)
        cleared = all or current.body.get("clear_on_close", False)
        self._desk.views.close(current, all=cleared)
        if not current.body.get("notify_on_close", False):
            return None
        payload = self._payloads.closing(current, cleared=cleared)
        return await self._desk.dispatch.send("interactive", payload)

    def visit_home(self) -> None:
        """Look at the app's home tab: the app gets `app_home_opened`, whether it shows something yet or not."""
        shown = self._desk.views.home(self.user)
        view = None if shown is None else self._desk.views.json(shown)
        event = events.home_opened(self._world, self.user, self.direct, view)
        self._desk.dispatch.event(events.callback(self._world, event))

    def invite_bot(self, channel: str | Channel) -> None:
        """Bring the bot into a channel."""
        self._world.join(self._channel(channel), self._world.bot)

    # Inside

    async def _click_in_view(self, view: View, action_id: str, choice: Any) -> Delivery:
        block, element = self._element(view.body["blocks"], action_id, "view")
        action = self._choose(block, element, choice)
        if element["type"] not in ("button", "overflow"):
            view = self._desk.views.enter(view, {block["block_id"]: {action_id: chosen(element, choice)}})
        return await self._desk.dispatch.send("interactive", self._payloads.click_in_view(view, action))

    def _element(self, blocks: list[Json], action_id: str, where: str) -> tuple[Json, Json]:
        there = [(block, element) for block in blocks for element in elements_of(block)]
        for block, element in there:
            if element["action_id"] == action_id:
                return block, element
        have = [element["action_id"] for _, element in there]
        raise NotThereError(f"the {where} has no element {action_id!r}; it has {have or 'none'}")

    def _choose(self, block: Json, element: Json, choice: Any) -> Json:
        try:
            return action_of(self._world, block, element, choice)
        except WrongChoiceError as error:
            raise NotThereError(str(error)) from None

    def _showing(self, view: View) -> View:
        for shown in (self.view, self.home):
            if shown is not None and shown.id == view.id:
                return shown
        raise NotThereError(f"{self.name} does not look at the view {view.id}: it was closed or covered")

    def _writable(self, channel: Channel) -> Channel:
        if channel.archived:
            raise NotThereError(f"#{channel.name} is archived: nobody can write in it")
        return channel

    def _channel(self, channel: str | Channel) -> Channel:
        if isinstance(channel, Channel):
            return channel
        if channel == f"@{self._world.bot.name}":
            return self.direct
        found = self._world.channel(channel)
        if found is None or self.id not in found.members:
            names = ", ".join(c.name for c in self._world.channels.values() if not c.direct)
            raise NotThereError(f"{self.name} is in no channel {channel!r}; there are: {names}")
        return found

    def _current(self, message: Message) -> Message:
        current = self._world.channels[message.channel].get(message.ts)
        if current is None or not self.sees(current):
            raise NotThereError(
                f"{self.name} sees no message {message.ts} in {message.channel}: was it deleted?"
            )
        return current

    def _post(self, channel: Channel, typed: str, thread_ts: str | None) -> Message:
        self._writable(channel)
        text = self._marked_up(typed)
        blocks = [{"type": "rich_text", "elements": mrkdwn.parse(text)}]
        return self._world.post(channel, self.user, text, blocks, thread_ts=thread_ts)

    def _marked_up(self, typed: str) -> str:
        """Typed text in Slack's format: escaped, and with names and addresses turned into entities."""
        parts: list[str] = []
        end = 0
        for match in _TOKEN.finditer(typed):
            parts.append(mrkdwn.escape(typed[end : match.start()]))
            parts.append(self._entity(match) or mrkdwn.escape(match[0]))
            end = match.end()
        return "".join(parts) + mrkdwn.escape(typed[end:])

    def _entity(self, match: re.Match[str]) -> str | None:
        if match["url"]:
            return f"<{mrkdwn.escape(match['url'])}>"
        if match["user"]:
            user = self._world.user_named(match["user"])
            return f"<@{user.id}>" if user else None
        channel = self._world.channel(match["channel"])
        return f"<#{channel.id}|{channel.name}>" if channel else None

    def _slackbot(self, channel: Channel, text: str) -> None:
        self._world.post(channel, self._world.slackbot, text, ephemeral_to=self.id)

    def _show_answer(self, channel: Channel, line: str, payload: Json) -> None:
        if payload.get("response_type") == "in_channel":
            self._world.post(channel, self.user, mrkdwn.escape(line))
        try:
            self._desk.hooks.respond(channel, self.user, payload)
        except RefusedError as refused:
            what = f'{line.partition(" ")[0]} failed with the error "{refused.answer["error"]}"'
            self._slackbot(channel, mrkdwn.escape(what))
