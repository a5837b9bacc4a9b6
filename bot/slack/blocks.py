"""Block Kit, the few blocks that this bot writes. Each cuts its text to Slack's limit and says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bot import wording
from bot.slack import limits

Block = dict[str, Any]


@dataclass(frozen=True)
class Message:
    """What one message shows: blocks, and the text for notifications, screen readers and hard times."""

    text: str
    blocks: tuple[Block, ...] = ()

    def plain(self) -> Message:
        """The same without blocks."""
        return Message(self.text)


def header(text: str) -> Block:
    """Plain text, so nothing formats; angle brackets become look-alikes, since Slack parses those first."""
    safe = wording.shown(text, limits.HEADER).replace("<", "‹").replace(">", "›")
    return {
        "type": "header",
        "text": {"type": "plain_text", "text": safe, "emoji": False},
    }


def section(mrkdwn: str, limit: int = limits.SECTION) -> Block:
    return {"type": "section", "text": _mrkdwn(cut_lines(mrkdwn, limit))}


def context(mrkdwn: str) -> Block:
    return {"type": "context", "elements": [_mrkdwn(cut_lines(mrkdwn, 1500))]}


def preformatted(text: str) -> Block:
    """Lines in a monospaced box, literally: rich text is not parsed."""
    return {
        "type": "rich_text",
        "elements": [
            {
                "type": "rich_text_preformatted",
                "elements": [{"type": "text", "text": cut_lines(text, limits.SECTION)}],
            }
        ],
    }


def message(text: str, *blocks: Block) -> Message:
    """A message of at most :data:`bot.slack.limits.ROOT` characters: the last blocks give way first."""
    kept: list[Block] = []
    room = limits.ROOT - 100
    for index, block in enumerate(blocks):
        if limits.weight(block) > room or len(kept) == limits.BLOCKS - 1:
            kept.append(context(f"… {wording.count(len(blocks) - index, 'part')} left out: no room"))
            break
        room -= limits.weight(block)
        kept.append(block)
    return Message(cut_bytes(" ".join(text.split()), limits.TEXT_BYTES), tuple(kept))


def cut_lines(text: str, limit: int) -> str:
    """Whole lines up to ``limit`` characters; a cut within a line would tear an entity or a link."""
    if len(text) <= limit:
        return text
    lines = text.split("\n")
    kept: list[str] = []
    size = 40  # for the line that says what is missing
    for line in lines:
        size += len(line) + 1
        if size > limit:
            break
        kept.append(line)
    return "\n".join([*kept, f"… {wording.count(len(lines) - len(kept), 'more line')} left out"])


def cut_bytes(text: str, limit: int) -> str:
    """At most ``limit`` bytes of UTF-8, cut between words and never within a link or a date."""
    if len(text.encode()) <= limit:
        return text
    kept = text.encode()[: limit - 4].decode(errors="ignore")
    kept = kept[: max(kept.rfind(" "), 0)]
    if kept.rfind("<") > kept.rfind(">"):
        kept = kept[: kept.rfind("<")]
    return f"{kept.rstrip()} …"


def _mrkdwn(text: str) -> dict[str, Any]:
    """``verbatim``: Slack turns no address, @name or #name into a link by itself."""
    return {"type": "mrkdwn", "text": text, "verbatim": True}
