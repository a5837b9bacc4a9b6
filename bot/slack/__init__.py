"""sysom in Slack: commands in, verdicts out. The ways in are :func:`running_bot` (Socket Mode), and
:func:`running_http_bot` with an :class:`Inbound` that a server mounts."""

from bot.slack.connection import running_bot, running_http_bot
from bot.slack.desk import Home
from bot.slack.inbound import Inbound
from bot.slack.service import Diagnoser
from bot.slack.tokens import SlackAway, SlackRefused

__all__ = ["Diagnoser", "Home", "Inbound", "SlackAway", "SlackRefused", "running_bot", "running_http_bot"]
