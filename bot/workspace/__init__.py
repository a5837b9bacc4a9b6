"""A local, strict, Slack-compatible workspace: the bot runs on it unchanged, with or without a browser."""

from bot.workspace.people import NotThereError, Person
from bot.workspace.plain import plain
from bot.workspace.socket_mode import Delivery
from bot.workspace.workspace import Workspace
from bot.workspace.world import Channel, Message

__all__ = ["Channel", "Delivery", "Message", "NotThereError", "Person", "Workspace", "plain"]
