"""People: what somebody does in Slack, typing a command, writing, replying, clicking."""

import re
import secrets
from typing import Any

from bot.workspace import mrkdwn
from bot.workspace.response_urls import ResponseUrls
from bot.workspace.shapes import message_json
from bot.workspace.socket_mode import Delivery, SocketMode
from bot.workspace.web_api import RefusedError
from bot.workspace.world import Channel, Json, Message, User, World, new_id

_TOKEN = re.compile(r"(?P<url>https?://[^\s<>|]+)|@(?P<user>[\w.-]*\w)|#(?P<channel>[\w-]+)")


# Slack's own words.
_SLASH = (
    "In Slack, all messages that start with the “/” character are interpreted as commands. If you are trying "
    "to send a message and not run a command, try preceding the “/” with an empty space."
)


class NotThereError(LookupError):
    """A person reached for something that is not there, or that this person cannot see."""


class Person:
    """Somebody in the workspace. Channels are given by name, id or object."""

    def __init__(
        self, world: World, sockets: SocketMode, hooks: ResponseUrls, user: User, commands: frozenset[str]
    ) -> None:
        self._world = world
        self._sockets = sockets
        self._hooks = hooks
        self._commands = commands
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

    async def command(self, line: str, channel: str | Channel = "training") -> Delivery:
        """Type a slash command, such as `/sysom diagnose job-123`, and wait until the app acknowledged it.

        Where the app does not, within 3 s, or cannot be reached, the person reads so in the channel.
        """
        where = self._channel(channel)
        name, _, text = line.strip().partition(" ")
        if name == "/invite" and text.strip() == f"@{self._world.bot.name}":
            self.invite_bot(where)
            self._slackbot(where, f"<@{self._world.bot.id}> was added to #{where.name}.")
            return Delivery("", acknowledged=True)
        if name not in self._commands:
            self._slackbot(where, f"`{mrkdwn.escape(name)}` is not a valid command. {_SLASH}")
            return Delivery("", acknowledged=False)
        delivery = await self._sockets.deliver(
            "slash_commands", self._command_payload(where, name, text.strip()), accepts_response_payload=True
        )
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

    async def click(self, message: Message, action_id: str, option: str | None = None) -> Delivery:
        """Use a button, or choose the option with this value in a menu, and wait for the acknowledgement.

        Raises: NotThereError, when the message as it stands now has no such element or option.
        """
        current = self._current(message)
        for block in current.blocks:
            for element in (*block.get("elements", ()), block.get("accessory", {})):
                if element.get("action_id") == action_id:
                    payload = self._click_payload(current, block, element, option)
                    return await self._sockets.deliver("interactive", payload, accepts_response_payload=False)
        have = [e["action_id"] for b in current.blocks for e in _elements(b) if "action_id" in e]
        raise NotThereError(f"the message has no element {action_id!r}; it has {have or 'none'}")

    def invite_bot(self, channel: str | Channel) -> None:
        """Bring the bot into a channel."""
        self._world.join(self._channel(channel), self._world.bot)

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
            self._hooks.respond(channel, self.user, payload)
        except RefusedError as refused:
            what = f'{line.partition(" ")[0]} failed with the error "{refused.answer["error"]}"'
            self._slackbot(channel, mrkdwn.escape(what))

    def _command_payload(self, channel: Channel, name: str, text: str) -> Json:
        world = self._world
        return {
            "token": secrets.token_hex(12),
            "team_id": world.team_id,
            "team_domain": world.team_name,
            "channel_id": channel.id,
            "channel_name": "directmessage" if channel.direct else channel.name,
            "user_id": self.id,
            "user_name": self.name,
            "command": name,
            "text": mrkdwn.escape(text),
            "api_app_id": world.app_id,
            "is_enterprise_install": "false",
            "response_url": self._hooks.new(channel, self.user),
            "trigger_id": _trigger(),
        }

    def _click_payload(self, message: Message, block: Json, element: Json, option: str | None) -> Json:
        world = self._world
        channel = world.channels[message.channel]
        container: Json = {
            "type": "message",
            "message_ts": message.ts,
            "channel_id": channel.id,
            "is_ephemeral": message.ephemeral_to is not None,
        }
        if message.thread_ts is not None:
            container["thread_ts"] = message.thread_ts
        payload: Json = {
            "type": "block_actions",
            "user": {"id": self.id, "username": self.name, "name": self.name, "team_id": world.team_id},
            "api_app_id": world.app_id,
            "token": secrets.token_hex(12),
            "container": container,
            "trigger_id": _trigger(),
            "team": {"id": world.team_id, "domain": world.team_name},
            "enterprise": None,
            "is_enterprise_install": False,
            "channel": {"id": channel.id, "name": "directmessage" if channel.direct else channel.name},
            "state": {"values": {}},
            "response_url": self._hooks.new(channel, self.user, message.ts),
            "actions": [_action(world, block, element, option)],
        }
        if message.ephemeral_to is None:  # Slack sends no copy of an ephemeral message
            payload["message"] = message_json(world, message)
        return payload


def _action(world: World, block: Json, element: Json, option: str | None) -> Json:
    action: Json = {
        "type": element["type"],
        "action_id": element["action_id"],
        "block_id": block["block_id"],
        "action_ts": world.next_ts(),
    }
    if element["type"] == "button":
        return action | {key: element[key] for key in ("text", "value", "style") if key in element}
    chosen = next((o for o in element["options"] if o["value"] == option), None)
    if chosen is None:
        values = [o["value"] for o in element["options"]]
        raise NotThereError(f"{element['action_id']!r} has no option {option!r}; it has {values}")
    return action | {"selected_option": chosen}


def _elements(block: Json) -> tuple[Any, ...]:
    return (*block.get("elements", ()), block.get("accessory", {}))


def _trigger() -> str:
    return f"{secrets.randbelow(10**13)}.{secrets.randbelow(10**13)}.{new_id('', 32).lower()}"
