"""Answers that one person sees, through the command's ``response_url``: it works where the bot is no member.

Slack takes five answers per address, for 30 minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from bot.slack import limits
from bot.slack.blocks import Message
from bot.slack.clock import Clock

log = logging.getLogger(__name__)

ATTEMPTS = 3

Post = Callable[[str, Mapping[str, Any]], Awaitable[int]]
"""``(address, body) → HTTP status``. Raises ``aiohttp.ClientError``, ``TimeoutError``, ``OSError``."""

_TIMEOUT = aiohttp.ClientTimeout(total=20)


def over_http(session: aiohttp.ClientSession) -> Post:
    """Posting through a session that is open."""

    async def post(address: str, body: Mapping[str, Any]) -> int:
        async with session.post(address, json=dict(body), timeout=_TIMEOUT) as response:
            return response.status

    return post


async def whisper(post: Post, clock: Clock, address: str, message: Message) -> bool:
    """Show a message to one person. False, and a line in the log, when that failed."""
    blocks = list(message.blocks)
    if found := limits.problems(message.text, blocks):
        log.error("an ephemeral answer breaks Slack's limits, sent as text: %s", "; ".join(found))
        blocks = []
    why = "no response_url"
    for attempt in range(ATTEMPTS if address else 0):
        if attempt:
            await clock.sleep(2.0 ** (attempt - 1))
        body: dict[str, Any] = {"response_type": "ephemeral", "replace_original": False, "text": message.text}
        if blocks:
            body["blocks"] = blocks
        try:
            status = await post(address, body)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
            continue
        if status == 200:
            return True
        why = f"HTTP {status}"
        if status < 500 and status != 429:
            if not blocks:
                break
            blocks = []  # perhaps it is they that Slack dislikes
    log.error("an ephemeral answer was lost (%s); it said: %s", why, message.text)
    return False
