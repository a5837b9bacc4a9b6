"""Data into Slack's mrkdwn without harm: nothing a process, a log or a user is called can ping or reformat.

Slack knows three entities (``& < >``); that stops ``<!channel>``, and not asterisks, backticks, underscores,
tildes and ``:emoji:``. In running text those become look-alikes; in a code span, where only the backtick
means anything, names stay as they are and can be copied.
"""

from __future__ import annotations

import re
from datetime import timedelta
from urllib.parse import quote

from bot import wording
from diagnosis.verdict import Window

MAX_NAME = 120
"""Longest name in a message, in characters; the rest is left out, and said to be."""

MAX_ADDRESS = 500

_LOOK_ALIKES = str.maketrans({"*": "∗", "`": "ˋ", "~": "∼"})
_EDGE_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
"""Within a word an underscore formats nothing."""
_EMOJI = re.compile(r":(?=[a-z0-9_'+-]*[a-z_'+-][a-z0-9_'+-]*:)", re.IGNORECASE)
_WEB = re.compile(r"https?://[\w\[]", re.IGNORECASE)
_USER = re.compile(r"[UW][A-Z0-9]{2,20}")


class Mrkdwn(str):
    """Text that may go into mrkdwn as it stands. Everything else is escaped on its way into a template."""

    __slots__ = ()


def escape(value: object) -> Mrkdwn:
    """Any value as running text; instants in it in the reader's own time zone."""
    if isinstance(value, Mrkdwn):
        return value
    text = wording.shown(str(value), wording.MAX_SENTENCE)
    parts, at = [], 0
    for found in wording.INSTANT.finditer(text):  # its colons are no emoji's
        parts += [_neutral(text[at : found.start()]), when(found[0])]
        at = found.end()
    return Mrkdwn("".join([*parts, _neutral(text[at:])]))


def _neutral(text: str) -> str:
    text = text.translate(_LOOK_ALIKES)
    text = _EMOJI.sub("꞉", _EDGE_UNDERSCORE.sub("ˍ", text))
    if text.startswith(">"):  # would be a quotation at the start of a line
        text = "›" + text[1:]
    return entities(text)


def entities(text: str) -> str:
    """Slack's three, the ampersand first."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def name(value: object) -> Mrkdwn:
    """A name in a code span."""
    text = wording.shown(str(value), MAX_NAME).replace("`", "ˋ")
    return Mrkdwn(f"`{entities(text)}`") if text else Mrkdwn("(no name)")


def strong(value: object) -> Mrkdwn:
    return Mrkdwn(f"*{escape(value)}*")


def when(text: str, form: str = "{date_short_pretty} {time_secs}") -> Mrkdwn:
    """An RFC 3339 instant in the reader's own time zone, as Slack's date formatting shows it."""
    moment = wording.instant(text)
    if moment is None:
        return Mrkdwn(_neutral(wording.shown(text, wording.MAX_SENTENCE)))
    return Mrkdwn(f"<!date^{int(moment.timestamp())}^{form}|{entities(wording.utc(text))}>")


def span(window: Window) -> Mrkdwn:
    """From when to when; the end as a time alone where it is less than a day later."""
    start, end = wording.instant(window.start), wording.instant(window.end)
    short = start is not None and end is not None and abs(end - start) < timedelta(days=1)
    return Mrkdwn(f"{when(window.start)} to {when(window.end, '{time_secs}') if short else when(window.end)}")


def link(url: str, label: str) -> Mrkdwn:
    """A link, for http and https addresses; the label alone for anything else."""
    if not _WEB.match(url):
        return escape(label)
    address = quote(wording.visible(url[:MAX_ADDRESS]), safe="/:?#[]@!$'()+,;=%-._~&")
    return Mrkdwn(f"<{entities(address)}|{escape(label)}>")


def person(user_id: str) -> Mrkdwn:
    """A mention of one user, for a well-formed user id only."""
    return Mrkdwn(f"<@{user_id}>") if _USER.fullmatch(user_id) else name(user_id or "someone")
