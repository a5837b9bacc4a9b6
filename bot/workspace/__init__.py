"""A local, strict, Slack-compatible workspace: the bot runs on it unchanged, with or without a browser."""

from bot.workspace.delivery import Delivery
from bot.workspace.forms import IncompleteError
from bot.workspace.http_mode import RequestUrlError
from bot.workspace.people import NotThereError, Person
from bot.workspace.plain import plain
from bot.workspace.views import View
from bot.workspace.workspace import Workspace
from bot.workspace.world import Channel, Message

__all__ = [
    "Channel",
    "Delivery",
    "IncompleteError",
    "Message",
    "NotThereError",
    "Person",
    "RequestUrlError",
    "View",
    "Workspace",
    "plain",
]
