"""The outgoing queue: paced, patient, and never silently lossy. Slack is played by a script of answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from bot.slack.blocks import Message, section
from bot.slack.calls import CallError, RateLimitedError, RefusedError, UnavailableError
from bot.slack.outbox import NotDeliveredError, Outbox
from tests.bot.slack.moved_clock import MovedClock, settle


class Slack:
    """Notes each call with its time; fails as told, one entry of ``fails`` per call."""

    def __init__(self, clock: MovedClock, *fails: CallError | None) -> None:
        self.clock = clock
        self.fails = list(fails)
        self.calls: list[tuple[float, str, Mapping[str, Any]]] = []
        self.gone: set[str] = set()

    async def __call__(self, method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self.calls.append((self.clock.now(), method, arguments))
        fail = self.fails.pop(0) if self.fails else None
        if fail is not None:
            raise fail
        ts = arguments.get("ts") or f"{len(self.calls)}.0"
        thread = arguments.get("thread_ts")
        return {"ts": ts, "message": {"thread_ts": thread} if thread and thread not in self.gone else {}}

    @property
    def said(self) -> list[tuple[float, str, str]]:
        return [(round(at, 2), method, str(arguments.get("text"))) for at, method, arguments in self.calls]


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


def text(words: str) -> Message:
    return Message(words, (section(words),))


async def test_a_channel_gets_one_message_per_second_and_another_channel_does_not_wait(
    clock: MovedClock,
) -> None:
    slack = Slack(clock)
    outbox = Outbox(slack, clock)
    for words in ("one", "two", "three"):
        outbox.post("C1", text(words))
    outbox.post("C2", text("elsewhere"))
    await clock.advance(10)
    assert slack.said == [
        (0.0, "chat.postMessage", "one"),
        (0.0, "chat.postMessage", "elsewhere"),
        (1.05, "chat.postMessage", "two"),
        (2.1, "chat.postMessage", "three"),
    ]


async def test_of_many_changes_only_the_newest_is_sent(clock: MovedClock) -> None:
    slack = Slack(clock)
    posting = Outbox(slack, clock).post("C1", text("looking"))
    await clock.advance(1)
    for second in range(100):
        posting.show(text(f"{second} s"))
    await clock.advance(10)
    assert slack.said == [(0.0, "chat.postMessage", "looking"), (3.0, "chat.update", "99 s")]


async def test_an_answer_does_not_wait_for_the_pace_of_edits(clock: MovedClock) -> None:
    slack = Slack(clock)
    posting = Outbox(slack, clock).post("C1", text("looking"))
    await clock.advance(0)
    posting.show(text("1 s"))
    await settle()
    posting.show(text("answer"), urgent=True)
    await clock.advance(10)
    assert slack.said[1:] == [(1.05, "chat.update", "answer")]
    await posting.delivered()


async def test_an_answer_goes_before_the_edits_of_others(clock: MovedClock) -> None:
    slack = Slack(clock)
    outbox = Outbox(slack, clock)
    first, second = outbox.post("C1", text("first")), outbox.post("C1", text("second"))
    await clock.advance(10)
    slack.calls.clear()
    outbox.post("C1", text("third"))
    await settle()
    first.show(text("first, 10 s"))
    second.show(text("answer"), urgent=True)
    await clock.advance(10)
    assert [words for _, _, words in slack.said] == ["third", "answer", "first, 10 s"]


async def test_a_rate_limit_is_waited_out_and_the_newest_text_goes_then(clock: MovedClock) -> None:
    slack = Slack(clock, None, RateLimitedError("chat.update", 30))
    posting = Outbox(slack, clock).post("C1", text("looking"))
    await clock.advance(5)
    posting.show(text("5 s"))
    await clock.advance(5)
    posting.show(text("answer"), urgent=True)
    await clock.advance(24.9)
    assert len(slack.calls) == 2
    await clock.advance(0.2)
    assert slack.said[2] == (35.0, "chat.update", "answer")


async def test_an_outage_is_tried_again_with_growing_pauses(clock: MovedClock) -> None:
    away = UnavailableError("chat.postMessage: HTTP 503")
    slack = Slack(clock, away, away, away)
    posting = Outbox(slack, clock).post("C1", text("answer"))
    await clock.advance(60)
    # 1 s is raised to the channel's pace of 1.05 s; then 2 and 4 s.
    assert [at for at, _, _ in slack.said] == [0.0, 1.05, 3.05, 7.05]
    await posting.delivered()


async def test_after_a_long_outage_the_lost_text_stands_in_the_log(
    clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    slack = Slack(clock, *[UnavailableError("HTTP 500")] * 50)
    posting = Outbox(slack, clock).post("C1", text("rank 2 is to blame"))
    await clock.advance(600)
    assert len(slack.calls) == 6
    with pytest.raises(NotDeliveredError, match="HTTP 500"):
        await posting.delivered()
    assert any("rank 2 is to blame" in r.message and r.levelno == logging.ERROR for r in caplog.records)


async def test_refused_blocks_are_sent_as_text(clock: MovedClock) -> None:
    slack = Slack(clock, None, RefusedError("chat.update", "invalid_blocks"))
    posting = Outbox(slack, clock).post("C1", text("looking"))
    await clock.advance(5)
    posting.show(text("answer"), urgent=True)
    await clock.advance(5)
    assert [len(arguments["blocks"]) for _, _, arguments in slack.calls] == [1, 1, 0]
    assert slack.said[-1][2] == "answer"
    await posting.delivered()


async def test_a_message_over_the_limits_is_not_even_tried_with_blocks(
    clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    slack = Slack(clock)
    bad = {"type": "section", "text": {"type": "mrkdwn", "text": "x" * 3001}}
    await settle()
    posting = Outbox(slack, clock).post("C1", Message("y" * 5000, (bad,)))
    await clock.advance(1)
    await posting.delivered()
    assert slack.calls[0][2]["blocks"] == []
    assert len(slack.calls[0][2]["text"]) <= 4000
    assert "/blocks/0/text: 3001 characters" in caplog.text


async def test_a_text_that_slack_finds_too_long_is_cut(clock: MovedClock) -> None:
    slack = Slack(clock, RefusedError("chat.postMessage", "msg_too_long"))
    posting = Outbox(slack, clock).post("C1", Message("word " * 500))
    await clock.advance(5)
    await posting.delivered()
    assert len(slack.calls[1][2]["text"]) <= 500


async def test_an_answer_to_a_deleted_message_is_posted_anew(clock: MovedClock) -> None:
    slack = Slack(clock, None, RefusedError("chat.update", "message_not_found"))
    posting = Outbox(slack, clock).post("C1", text("looking"))
    await clock.advance(5)
    posting.show(text("5 s"))
    await clock.advance(5)
    assert [method for _, method, _ in slack.said] == ["chat.postMessage", "chat.update"]
    slack.fails = [RefusedError("chat.update", "message_not_found")]
    posting.show(text("answer"), urgent=True)
    await clock.advance(5)
    assert slack.said[-1][1:] == ("chat.postMessage", "answer")
    await posting.delivered()


async def test_a_closed_channel_is_said_to_be_one(clock: MovedClock) -> None:
    slack = Slack(clock, RefusedError("chat.postMessage", "not_in_channel"))
    posting = Outbox(slack, clock).post("C1", text("looking"))
    await clock.advance(5)
    with pytest.raises(NotDeliveredError) as caught:
        await posting.delivered()
    assert caught.value.closed
    posting.show(text("answer"), urgent=True)
    await clock.advance(5)
    assert len(slack.calls) == 1


async def test_a_reply_waits_for_the_message_above_it(clock: MovedClock) -> None:
    slack = Slack(clock, UnavailableError("HTTP 500"), UnavailableError("HTTP 500"))
    outbox = Outbox(slack, clock)
    parent = outbox.post("C1", text("answer"))
    reply = outbox.post("C1", text("evidence"), parent=parent)
    await clock.advance(20)
    assert [words for _, _, words in slack.said] == ["answer", "answer", "answer", "evidence"]
    assert slack.calls[3][2]["thread_ts"] == parent.ts == "3.0"
    await reply.delivered()


async def test_a_reply_that_fell_into_the_channel_is_taken_back(clock: MovedClock) -> None:
    slack = Slack(clock)
    outbox = Outbox(slack, clock)
    parent = outbox.post("C1", text("answer"))
    await clock.advance(5)
    slack.gone.add(str(parent.ts))
    reply = outbox.post("C1", text("evidence"), parent=parent)
    await clock.advance(5)
    assert slack.calls[-1][1:] == ("chat.delete", {"channel": "C1", "ts": "2.0"})
    with pytest.raises(NotDeliveredError, match="deleted"):
        await reply.delivered()


async def test_nothing_sent_can_ping_or_unfold_by_itself(clock: MovedClock) -> None:
    slack = Slack(clock)
    Outbox(slack, clock).post("C1", text("answer"))
    await clock.advance(1)
    sent = slack.calls[0][2]
    assert (sent["parse"], sent["link_names"]) == ("none", False)
    assert (sent["unfurl_links"], sent["unfurl_media"]) == (False, False)


async def test_closing_sends_what_waits_within_its_time(
    clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    import asyncio

    slack = Slack(clock)
    outbox = Outbox(slack, clock)
    for number in range(5):
        outbox.post("C1", text(f"message {number}"))
    closing = asyncio.create_task(outbox.close(2.5))
    await clock.advance(10)
    await closing
    assert [words for _, _, words in slack.said] == ["message 0", "message 1", "message 2"]
    assert "message 4" in caplog.text


async def test_a_fault_in_the_queue_itself_is_logged_and_the_rest_goes_on(
    clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    slack = Slack(clock, ZeroDivisionError())  # type: ignore[arg-type]
    outbox = Outbox(slack, clock)
    broken = outbox.post("C1", text("broken"))
    outbox.post("C1", text("whole"))
    await clock.advance(5)
    assert slack.said[-1][2] == "whole"
    with pytest.raises(NotDeliveredError):
        await broken.delivered()
    assert "it said: broken" in caplog.text
