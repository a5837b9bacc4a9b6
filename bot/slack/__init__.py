"""sysom in Slack: commands in, verdicts out. :func:`running_bot` is the way in."""

from bot.slack.connection import SlackRefused, running_bot
from bot.slack.desk import Home
from bot.slack.service import Diagnoser

__all__ = ["Diagnoser", "Home", "SlackRefused", "running_bot"]
