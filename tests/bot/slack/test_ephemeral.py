"""Answers through a response_url: tried again where that helps, and never lost in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from bot.slack.blocks import Message, section
from bot.slack.ephemeral import whisper
from tests.bot.slack.moved_clock import MovedClock

ANSWER = Message("words", (section("words"),))


async def send(
    statuses: list[int | Exception], message: Message = ANSWER
) -> tuple[bool, list[Mapping[str, Any]]]:
    clock = MovedClock()
    bodies: list[Mapping[str, Any]] = []

    async def post(address: str, body: Mapping[str, Any]) -> int:
        bodies.append(body)
        status = statuses.pop(0)
        if isinstance(status, Exception):
            raise status
        return status

    task = asyncio.create_task(whisper(post, clock, "https://hooks.example/1", message))
    await clock.advance(60)
    return task.result(), bodies


async def test_an_outage_is_tried_again() -> None:
    done, bodies = await send([500, ConnectionResetError(), 200])
    assert done
    assert [len(body["blocks"]) for body in bodies] == [1, 1, 1]


async def test_refused_blocks_are_sent_as_text() -> None:
    done, bodies = await send([400, 200])
    assert done
    assert ["blocks" in body for body in bodies] == [True, False]


async def test_a_used_up_address_is_not_asked_for_ever_and_the_words_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done, bodies = await send([404, 404])
    assert not done
    assert len(bodies) == 2
    assert "it said: words" in caplog.text


async def test_without_an_address_nothing_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    async def post(address: str, body: Mapping[str, Any]) -> int:
        raise AssertionError

    assert not await whisper(post, MovedClock(), "", ANSWER)
    assert "no response_url" in caplog.text
