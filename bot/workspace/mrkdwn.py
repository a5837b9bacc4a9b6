"""Slack's text format, read into the elements of Block Kit's rich text.

One parser serves the page, the terminal and the messages that people type: all three show rich text. The
rules are those of docs.slack.dev/messaging/formatting-message-text.
"""

import re
from typing import Any

from bot.workspace.emoji import EMOJI

Json = dict[str, Any]

_FENCE = re.compile(r"```\n?(.+?)\n?```", re.DOTALL)
_QUOTE = re.compile(r"^(?:&gt;|>) ?")
# A mark opens after a space or punctuation and closes before one, with no space inside next to it.
_INLINE = re.compile(
    r"<(?P<entity>[^<>\n]+)>"
    r"|`(?P<code>[^`\n]+)`"
    r"|(?<![\w*])\*(?=\S)(?P<bold>[^*\n]+?)(?<=\S)\*(?![\w*])"
    r"|(?<![\w_])_(?=\S)(?P<italic>[^_\n]+?)(?<=\S)_(?![\w_])"
    r"|(?<![\w~])~(?=\S)(?P<strike>[^~\n]+?)(?<=\S)~(?![\w~])"
    r"|:(?P<emoji>[a-z0-9_+'-]+):"
)
_LINK = re.compile(r"(?:https?://|mailto:|tel:)", re.IGNORECASE)
_DATE = re.compile(r"!date\^(-?\d{1,12})\^([^^]+)(?:\^(.+))?", re.DOTALL)


def parse(text: str) -> list[Json]:
    """Text in Slack's format as `rich_text_section`, `_preformatted` and `_quote` elements.

    The character data in the result is decoded (`&lt;` is `<`): it is text, never markup.
    """
    elements: list[Json] = []
    for index, part in enumerate(_FENCE.split(text)):
        if index % 2:
            elements.append({"type": "rich_text_preformatted", "elements": [_text(part, {})]})
        elif part.strip("\n"):
            elements += _paragraphs(part.strip("\n") if len(text) > len(part) else part)
    return elements


def parse_plain(text: str) -> list[Json]:
    """The text of a `plain_text` object: no marks and no entities, only `:emoji:`."""
    parts: list[Json] = []
    end = 0
    for match in re.finditer(r":(?P<emoji>[a-z0-9_+'-]+):", text):
        if match["emoji"] in EMOJI:
            parts += [{"type": "text", "text": text[end : match.start()]}, _emoji(match["emoji"], {})]
            end = match.end()
    parts.append({"type": "text", "text": text[end:]})
    return [{"type": "rich_text_section", "elements": [part for part in parts if part.get("text") != ""]}]


def escape(text: str) -> str:
    """Text that stands for itself in Slack's format: `&`, `<` and `>`, and nothing else, are escaped."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def unescape(text: str) -> str:
    """The inverse of `escape`."""
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def _paragraphs(text: str) -> list[Json]:
    """Runs of quoted lines become quotes, the lines between them sections."""
    runs: list[tuple[bool, list[str]]] = []
    for line in text.split("\n"):
        quoted = _QUOTE.match(line) is not None
        if not runs or runs[-1][0] != quoted:
            runs.append((quoted, []))
        runs[-1][1].append(_QUOTE.sub("", line) if quoted else line)
    return [
        {
            "type": "rich_text_quote" if quoted else "rich_text_section",
            "elements": _inline("\n".join(lines), {}),
        }
        for quoted, lines in runs
    ]


def _inline(text: str, style: Json) -> list[Json]:
    elements: list[Json] = []
    end = 0
    for match in _INLINE.finditer(text):
        found = _marked(match, style)
        if found is None:
            continue
        if match.start() > end:
            elements.append(_text(text[end : match.start()], style))
        elements += found
        end = match.end()
    if end < len(text):
        elements.append(_text(text[end:], style))
    return elements


def _marked(match: re.Match[str], style: Json) -> list[Json] | None:
    """What a mark stands for, or None where it stands for itself."""
    kind = match.lastgroup or ""
    body = match[kind]
    if kind == "entity":
        return _entity(body, style)
    if kind == "emoji":
        return [_emoji(body, style)] if body in EMOJI else None
    if kind == "code":
        return [_text(body, {**style, "code": True})]
    return _inline(body, {**style, kind: True})


def _entity(body: str, style: Json) -> list[Json] | None:
    target, _, label = body.partition("|")
    date = _DATE.fullmatch(target)
    if date:
        element = {"type": "date", "timestamp": int(date[1]), "format": date[2], "fallback": unescape(label)}
        return [_styled({**element, "url": unescape(date[3])} if date[3] else element, style)]
    if target.startswith("@"):
        return [_styled({"type": "user", "user_id": target[1:]}, style)]
    if target.startswith("#"):
        return [_styled({"type": "channel", "channel_id": target[1:]}, style)]
    if target in ("!here", "!channel", "!everyone"):
        return [_styled({"type": "broadcast", "range": target[1:]}, style)]
    if _LINK.match(target):
        link = {"type": "link", "url": unescape(target)}
        return [_styled({**link, "text": unescape(label)} if label else link, style)]
    return None


def _text(text: str, style: Json) -> Json:
    return _styled({"type": "text", "text": unescape(text)}, style)


def _emoji(name: str, style: Json) -> Json:
    return _styled({"type": "emoji", "name": name, "unicode": EMOJI[name]}, style)


def _styled(element: Json, style: Json) -> Json:
    return {**element, "style": style} if style else element
