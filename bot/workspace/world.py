"""What exists in the workspace: people, channels, messages; and who hears of a change."""

import secrets
import string
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from bot.workspace.clock import Clock

Json = dict[str, Any]
Hears = Callable[["Change"], None]


# A channel forgets its oldest messages beyond this many: the workspace lives in memory.
MESSAGES = 5000


class User(msgspec.Struct, frozen=True):
    """A person, a bot, or Slackbot, through whom Slack itself speaks.

    `team` is the id of another workspace for somebody who is here through a shared channel, else empty;
    `bot_id` is the `B…` id of a bot other than the app's own, else empty.
    """

    id: str
    name: str
    is_bot: bool = False
    team: str = ""
    bot_id: str = ""


class Message(msgspec.Struct, frozen=True):
    """One message as it stands; an update replaces the object, so one that is kept shows how it was.

    `ts` is its identity in the channel (seconds since 1970 with six digits, unique and growing);
    `thread_ts` is the ts of the thread's root (for a root that has replies, its own); `user` is a user id;
    `edited` is `{"user", "ts"}` or None; `ephemeral_to` is the id of the only person who sees it, or None;
    `files` are the ids of files shown under it; `metadata` is `{"event_type", "event_payload"}` or None.
    """

    ts: str
    channel: str
    user: str
    text: str
    blocks: list[Json] = []
    thread_ts: str | None = None
    edited: Json | None = None
    ephemeral_to: str | None = None
    reactions: dict[str, tuple[str, ...]] = {}
    files: tuple[str, ...] = ()
    metadata: Json | None = None

    @property
    def is_reply(self) -> bool:
        """Whether it stands in a thread rather than in the channel."""
        return self.thread_ts is not None and self.thread_ts != self.ts


class Channel:
    """A channel, or a direct message (`C…` and `D…`): who is in it and what was said.

    `private`: only its members know of it; `shared`: with another workspace (Slack Connect); `archived`:
    nobody can write in it any more.
    """

    def __init__(
        self, id: str, name: str, created: int, *, direct: bool, private: bool = False, shared: bool = False
    ) -> None:
        self.id = id
        self.name = name
        self.created = created
        self.direct = direct
        self.private = private
        self.shared = shared
        self.archived = False
        self.members: set[str] = set()
        self._messages: dict[str, Message] = {}

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything in it in the order of posting: roots, replies in threads, and ephemeral messages."""
        return tuple(self._messages.values())

    @property
    def roots(self) -> tuple[Message, ...]:
        """The messages that stand in the channel itself, without the replies in threads."""
        return tuple(message for message in self.messages if not message.is_reply)

    def thread(self, root: Message | str) -> tuple[Message, ...]:
        """The replies under a root message (or its ts), in order, without the root."""
        ts = root if isinstance(root, str) else root.ts
        return tuple(message for message in self.messages if message.is_reply and message.thread_ts == ts)

    def get(self, ts: str) -> Message | None:
        """The message with this ts as it stands now."""
        return self._messages.get(ts)

    def put(self, message: Message) -> None:
        """Add a message, or replace the one with its ts; the oldest beyond `MESSAGES` is forgotten."""
        self._messages[message.ts] = message
        if len(self._messages) > MESSAGES:
            del self._messages[next(iter(self._messages))]

    def drop(self, ts: str) -> None:
        """Remove a message."""
        del self._messages[ts]


class Change(msgspec.Struct, frozen=True):
    """Something that happened: what, where, and the message as it is now (or was, when deleted).

    `actor` is the user id of who joined or reacted, `emoji` the name of the reaction.
    """

    kind: Literal["posted", "updated", "deleted", "reacted", "unreacted", "joined", "channel", "delivery"]
    channel: Channel | None = None
    message: Message | None = None
    previous: Message | None = None
    actor: str = ""
    emoji: str = ""


class World:
    """The state of one workspace. All of it lives in the event loop's thread; nothing is stored."""

    def __init__(self, clock: Clock, *, bot_name: str, team_name: str) -> None:
        self.clock = clock
        self.team_id = new_id("T")
        self.team_name = team_name
        self.app_id = new_id("A")
        self.bot_id = new_id("B")
        self.users: dict[str, User] = {}
        self.channels: dict[str, Channel] = {}
        self.bot = self.add_user(bot_name, is_bot=True)
        self.slackbot = User(id="USLACKBOT", name="slackbot", is_bot=True)
        self.users[self.slackbot.id] = self.slackbot
        self._listeners: list[Hears] = []
        self._last_ts = 0

    # People and channels

    def add_user(self, name: str, *, is_bot: bool = False, team: str = "", bot_id: str = "") -> User:
        """A new user, who is in every public channel (bots and strangers are where they are let in)."""
        user = User(id=new_id("U"), name=name, is_bot=is_bot, team=team, bot_id=bot_id)
        self.users[user.id] = user
        if not is_bot and not team:
            for channel in self.channels.values():
                if not channel.direct and not channel.private:
                    channel.members.add(user.id)
        return user

    def user_named(self, name: str) -> User | None:
        """The user with this name, with or without `@`."""
        return next((user for user in self.users.values() if user.name == name.removeprefix("@")), None)

    def name_of(self, id: str) -> str:
        """The name of a user or channel, or the id itself where there is none."""
        known = self.users.get(id) or self.channels.get(id)
        return id if known is None else known.name

    def add_channel(
        self, name: str, *, with_bot: bool, private: bool = False, shared: bool = False
    ) -> Channel:
        """A new channel with every person of this workspace in it."""
        channel = self._new_channel(new_id("C"), name, direct=False, private=private, shared=shared)
        channel.members |= {user.id for user in self.users.values() if not user.is_bot and not user.team}
        if with_bot:
            channel.members.add(self.bot.id)
        self.tell(Change("channel", channel))
        return channel

    def direct(self, user: User) -> Channel:
        """The direct messages between a person and the bot, opened when they do not exist yet."""
        members = {user.id, self.bot.id}
        for channel in self.channels.values():
            if channel.direct and channel.members == members:
                return channel
        channel = self._new_channel(new_id("D"), user.name, direct=True)
        channel.members |= members
        self.tell(Change("channel", channel))
        return channel

    def channel(self, name: str) -> Channel | None:
        """The channel with this id or name, with or without `#`."""
        found = self.channels.get(name)
        if found is not None:
            return found
        named = (c for c in self.channels.values() if not c.direct and c.name == name.removeprefix("#"))
        return next(named, None)

    def join(self, channel: Channel, user: User) -> None:
        """Let a user into a channel; nothing happens where the user is in it."""
        if user.id in channel.members:
            return
        channel.members.add(user.id)
        self.tell(Change("joined", channel, actor=user.id))

    def archive(self, channel: Channel, *, archived: bool = True) -> None:
        """Close a channel for writing, or open it again."""
        channel.archived = archived
        self.tell(Change("channel", channel))

    def _new_channel(
        self, id: str, name: str, *, direct: bool, private: bool = False, shared: bool = False
    ) -> Channel:
        channel = Channel(id, name, int(self.clock.now()), direct=direct, private=private, shared=shared)
        self.channels[id] = channel
        return channel

    # Messages

    def post(
        self,
        channel: Channel,
        user: User,
        text: str,
        blocks: Iterable[Json] = (),
        *,
        thread_ts: str | None = None,
        ephemeral_to: str | None = None,
        files: tuple[str, ...] = (),
        metadata: Json | None = None,
    ) -> Message:
        """Post a message. A reply to a message that is not there lands in the channel, as in Slack."""
        root = channel.get(thread_ts) if thread_ts is not None else None
        if root is not None and root.ephemeral_to is not None:
            root = None  # nothing hangs under a message that only one person sees
        if root is not None and root.thread_ts is None and ephemeral_to is None:
            channel.put(msgspec.structs.replace(root, thread_ts=root.ts))
            self.tell(Change("updated", channel, channel.get(root.ts)))
        message = Message(
            ts=self.next_ts(),
            channel=channel.id,
            user=user.id,
            text=text,
            blocks=with_ids(blocks),
            # A reply to a reply stands in the same thread.
            thread_ts=None if root is None else root.thread_ts or root.ts,
            ephemeral_to=ephemeral_to,
            files=files,
            metadata=metadata,
        )
        channel.put(message)
        self.tell(Change("posted", channel, message))
        return message

    def update(
        self,
        channel: Channel,
        message: Message,
        text: str,
        blocks: Iterable[Json],
        metadata: Json | None = None,
    ) -> Message:
        """Replace what a message says; metadata stays as it was unless new is given."""
        new = msgspec.structs.replace(
            message,
            text=text,
            blocks=with_ids(blocks),
            edited={"user": message.user, "ts": self.next_ts()},
            metadata=message.metadata if metadata is None else metadata,
        )
        channel.put(new)
        self.tell(Change("updated", channel, new, message))
        return new

    def react(self, channel: Channel, message: Message, name: str, user: User, *, added: bool) -> None:
        """Put a user's reaction with an emoji on a message, or take it off."""
        others = tuple(id for id in message.reactions.get(name, ()) if id != user.id)
        users = (*others, user.id) if added else others
        reactions = {**message.reactions, name: users}
        if not users:
            del reactions[name]
        new = msgspec.structs.replace(message, reactions=reactions)
        channel.put(new)
        kind: Literal["reacted", "unreacted"] = "reacted" if added else "unreacted"
        self.tell(Change(kind, channel, new, actor=user.id, emoji=name))

    def delete(self, channel: Channel, message: Message) -> None:
        """Take a message away."""
        channel.drop(message.ts)
        self.tell(Change("deleted", channel, message, message))

    def next_ts(self) -> str:
        """A timestamp that no message has yet, later than all before it."""
        self._last_ts = max(self._last_ts + 1, int(self.clock.now() * 1_000_000))
        return f"{self._last_ts // 1_000_000}.{self._last_ts % 1_000_000:06d}"

    # Changes

    def listen(self, hears: Hears) -> Callable[[], None]:
        """Call `hears` at each change; gives a function that ends it."""
        self._listeners.append(hears)
        return lambda: self._listeners.remove(hears)

    def tell(self, change: Change) -> None:
        """Tell everybody who listens."""
        for hears in tuple(self._listeners):
            hears(change)


def with_ids(blocks: Iterable[Json]) -> list[Json]:
    """Blocks with the ids that Slack gives to the blocks and elements that came without."""
    return [_with_id(block) for block in blocks]


def _with_id(block: Json) -> Json:
    block = {**block, "block_id": block.get("block_id") or new_id("", 5)}
    if block["type"] == "actions":
        block["elements"] = [_with_action(element) for element in block["elements"]]
    for place in ("accessory", "element"):
        if place in block and block[place]["type"] != "image":
            block[place] = _with_action(block[place])
    return block


def _with_action(element: Json) -> Json:
    return {**element, "action_id": element.get("action_id") or new_id("", 5)}


def new_id(prefix: str, length: int = 10) -> str:
    """A random id in Slack's form, such as `C0J4K2M7QX1`."""
    return prefix + "".join(secrets.choice(string.ascii_uppercase + string.digits) for _ in range(length))
