"""Slack's date tokens, in the time zone of this machine.

The tokens are those of docs.slack.dev/messaging/formatting-message-text#date-formatting; the page does the
same in the browser, in the reader's own zone.
"""

import re
from datetime import datetime

_TOKEN = re.compile(r"\{(\w+)\}")


def say_date(timestamp: int, pattern: str, fallback: str, now: float) -> str:
    """A moment (seconds since 1970) in Slack's `pattern`, such as `{date_short_pretty} {time}`.

    An unknown token, or a moment that no calendar holds, gives the fallback, as in Slack.
    """
    try:
        moment, today = (
            datetime.fromtimestamp(timestamp).astimezone(),
            datetime.fromtimestamp(now).astimezone(),
        )
        return _TOKEN.sub(lambda match: _say(match[1], moment, today), pattern)
    except (KeyError, ValueError, OverflowError, OSError):
        return fallback


def _say(part: str, moment: datetime, today: datetime) -> str:
    if part.endswith("_pretty"):
        days = (moment.date() - today.date()).days
        if days in (-1, 0, 1):
            return {-1: "yesterday", 0: "today", 1: "tomorrow"}[days]
        part = part.removesuffix("_pretty")
    if part == "ago":
        return _ago((today - moment).total_seconds())
    clock = moment.strftime("%I:%M").lstrip("0")
    half = moment.strftime("%p")
    day = f"{moment.day}{_ordinal(moment.day)}"
    return {
        "date_num": moment.strftime("%Y-%m-%d"),
        "date_slash": moment.strftime("%m/%d/%Y"),
        "date": f"{moment:%B} {day}, {moment.year}",
        "date_short": f"{moment:%b} {moment.day}, {moment.year}",
        "date_long": f"{moment:%A}, {moment:%B} {day}, {moment.year}",
        "time": f"{clock} {half}",
        "time_secs": f"{clock}:{moment:%S} {half}",
    }[part]


def _ago(seconds: float) -> str:
    for unit, size in (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        count = int(abs(seconds) // size)
        if count:
            amount = f"{count} {unit}{'s' if count > 1 else ''}"
            return f"{amount} ago" if seconds > 0 else f"in {amount}"
    return "now"


def _ordinal(day: int) -> str:
    return "th" if 10 < day % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
