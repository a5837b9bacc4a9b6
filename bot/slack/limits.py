"""Slack's limits on a message, and our own below them: what breaks them is found before Slack refuses it.

Sources: Slack's reference of Block Kit and of chat.postMessage; figures marked * are what others measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Block = Mapping[str, Any]

BLOCKS = 50
HEADER = 150
SECTION = 3000
FIELDS = 10
FIELD = 2000
CONTEXT = 10
BLOCK_ID = 255

TEXT_BYTES = 4000
"""chat.update refuses a longer ``text`` (*)."""
ROOT = 9000
"""All texts of a message together: Slack refuses near 13,200 (*), and nobody reads that much."""


def problems(text: str, blocks: Sequence[Block]) -> list[str]:
    """What Slack would refuse, in words with the place of each; empty when it may be sent."""
    found: list[str] = []
    if not text.strip():
        found.append("text: empty")
    if len(text.encode("utf-8", "replace")) > TEXT_BYTES:
        found.append(f"text: over {TEXT_BYTES} bytes")
    if any("\ud800" <= character <= "\udfff" for character in text):
        found.append("text: half a character")
    if len(blocks) > BLOCKS:
        found.append(f"blocks: {len(blocks)}, at most {BLOCKS}")
    size = sum(weight(block) for block in blocks)
    if size > ROOT:
        found.append(f"blocks: {size} characters together, at most {ROOT}")
    ids = [block["block_id"] for block in blocks if "block_id" in block]
    if len(ids) != len(set(ids)):
        found.append("blocks: a block_id twice")
    for index, block in enumerate(blocks):
        found += [f"/blocks/{index}{where}" for where in _block(block)]
    return found


def weight(block: Block) -> int:
    """Characters in a block's texts, at any depth."""
    return sum(len(text) for text in _texts(block))


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        own = [value["text"]] if isinstance(value.get("text"), str) else []
        return own + [
            text for inner in value.values() if not isinstance(inner, str) for text in _texts(inner)
        ]
    if isinstance(value, list | tuple):
        return [text for inner in value for text in _texts(inner)]
    return []


def _block(block: Block) -> list[str]:
    found = [] if len(block.get("block_id", "")) <= BLOCK_ID else ["/block_id: too long"]
    match block.get("type"):
        case "header":
            found += _text("/text", block.get("text"), HEADER, ("plain_text",))
        case "section":
            fields = block.get("fields", [])
            if "text" not in block and not fields:
                found.append(": neither text nor fields")
            if "text" in block:
                found += _text("/text", block["text"], SECTION, ("mrkdwn", "plain_text"))
            if len(fields) > FIELDS:
                found.append(f"/fields: {len(fields)}, at most {FIELDS}")
            for index, field in enumerate(fields):
                found += _text(f"/fields/{index}", field, FIELD, ("mrkdwn", "plain_text"))
        case "context":
            elements = block.get("elements", [])
            if not 1 <= len(elements) <= CONTEXT:
                found.append(f"/elements: {len(elements)}, 1 to {CONTEXT}")
            for index, element in enumerate(elements):
                found += _text(f"/elements/{index}", element, SECTION, ("mrkdwn", "plain_text"))
        case "rich_text":
            found += _rich_text(block)
        case "divider":
            pass
        case other:
            found.append(f"/type: {other!r} is not a block that this bot writes")
    return found


def _rich_text(block: Block) -> list[str]:
    elements = block.get("elements", [])
    if not elements:
        return ["/elements: none"]
    found = []
    for index, element in enumerate(elements):
        inner = element.get("elements", [])
        if element.get("type") != "rich_text_preformatted" or not inner:
            found.append(f"/elements/{index}: only filled rich_text_preformatted is written here")
        for place, piece in enumerate(inner):
            if piece.get("type") != "text" or not piece.get("text"):
                found.append(f"/elements/{index}/elements/{place}: no text")
    return found


def _text(where: str, value: Any, limit: int, kinds: tuple[str, ...]) -> list[str]:
    if not isinstance(value, Mapping) or value.get("type") not in kinds:
        return [f"{where}: must be {' or '.join(kinds)}"]
    text = value.get("text", "")
    if not text.strip():
        return [f"{where}: empty"]
    if len(text) > limit:
        return [f"{where}: {len(text)} characters, at most {limit}"]
    return []
