"""What goes wrong at Slack or on the way there, in both modes: said in words, and made good where it can be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from bot.slack import SlackRefused, running_bot
from bot.workspace import Workspace
from bot.workspace.faults import BadSignature
from tests.bot.slack.modes import MODES, Engine, HurriedClock, by_http, by_socket, found

ASK = "/sysom diagnose job-123"
ANSWER = "job-123 is slow: rank 2 on node-7"


@pytest.fixture(params=MODES)
async def ws(request: Any) -> AsyncIterator[Workspace]:
    async with request.param(Engine(), HurriedClock()) as workspace:
        yield workspace


class Heard(logging.Handler):
    """Whether a line with these words went to the log."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.heard = asyncio.Event()
        self._words = words

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.heard.set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        logging.getLogger("bot").addHandler(self)
        try:
            yield
        finally:
            logging.getLogger("bot").removeHandler(self)


async def answered(ws: Workspace) -> None:
    """Ask, and wait for the answer and its thread."""
    assert (await ws.person("ada").command(ASK)).acknowledged
    await ws.wait_for(lambda: found(ws, "training", ANSWER), 20)
    await ws.wait_for(lambda: found(ws, "training", "Cleared"), 20)


def roots(ws: Workspace) -> list[str]:
    return [ws.plain(message).split("\n")[0] for message in ws.channel("training").roots]


async def test_silence_that_slack_asks_for_is_kept_and_the_answer_comes(ws: Workspace) -> None:
    ws.faults.rate_limit("chat.postMessage", times=2, retry_after=2)
    ws.faults.rate_limit("chat.update", retry_after=1)
    await answered(ws)
    assert len(roots(ws)) == 1


@pytest.mark.parametrize("status", [500, 503])
async def test_a_slack_that_fails_for_a_while_is_tried_again(
    ws: Workspace, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    ws.faults.server_error("chat.postMessage", times=3, status=status)
    ws.faults.server_error("chat.update", status=status)
    await answered(ws)
    assert len(roots(ws)) == 1
    assert f"chat.postMessage: HTTP {status}; try 4 of 6 follows" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_slack_that_goes_on_failing_is_said_to_and_the_asker_reads_the_answer_alone(
    ws: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    ws.faults.server_error("chat.postMessage", times=6)
    assert (await ws.person("ada").command(ASK)).acknowledged
    await ws.wait_for(lambda: found(ws, "training", ANSWER), 30)
    assert ws.channel("training").roots[0].ephemeral_to == ws.person("ada").id
    assert "not delivered: chat.postMessage: HTTP 500; it said:" in caplog.text


async def test_a_connection_that_breaks_before_slack_has_done_anything_loses_nothing(ws: Workspace) -> None:
    ws.faults.drop("chat.postMessage", after_effect=False)
    ws.faults.drop("chat.update", after_effect=False)
    await answered(ws)
    assert len(roots(ws)) == 1


async def test_an_answer_that_got_lost_on_the_way_back_is_written_again_and_not_twice(ws: Workspace) -> None:
    """An edit may be repeated. Whether a lost post arrived Slack does not say: it may stand there twice."""
    ws.faults.drop("chat.update", after_effect=True, times=2)
    await answered(ws)
    assert len(roots(ws)) == 1


async def test_a_slow_slack_delays_the_message_and_not_the_acknowledgement(ws: Workspace) -> None:
    ws.faults.slow("chat.postMessage", seconds=60)
    assert (await ws.person("ada").command(ASK)).acknowledged
    await ws.wait_for(lambda: roots(ws))
    assert (await ws.person("ada").command("/sysom help")).acknowledged
    ws.clock.advance(60)
    await ws.wait_for(lambda: found(ws, "training", ANSWER), 20)
    assert sum("job-123" in root for root in roots(ws)) == 1


async def test_an_answer_for_one_is_tried_three_times_then_kept_in_the_log(ws: Workspace) -> None:
    lost = Heard("an ephemeral answer was lost (HTTP 500); it said:")
    with lost.listening():
        ws.faults.server_error("response_url", times=2)
        await ws.person("ada").command("/sysom jobs")
        await ws.wait_for(lambda: found(ws, "training", "4 of 4 ranks"), 20)
        assert not lost.heard.is_set()
        ws.faults.server_error("response_url", times=3)
        await ws.person("ada").command("/sysom help")
        await asyncio.wait_for(lost.heard.wait(), 20)
    assert not found(ws, "training", "What sysom answers")


async def test_what_is_sent_twice_is_answered_once(ws: Workspace) -> None:
    ws.send_twice()
    await answered(ws)
    assert len(roots(ws)) == 1
    ws.send_twice()
    await ws.person("ada").say("hello @sysom")
    await ws.wait_for(lambda: ws.pending == 0 or None)
    assert len(roots(ws)) == 2


@pytest.mark.parametrize("bad", ["wrong", "stale", "no_number", "not_ascii", "missing"])
async def test_a_request_with_a_bad_signature_is_refused_and_the_next_is_answered(
    bad: BadSignature, caplog: pytest.LogCaptureFixture
) -> None:
    async with by_http(Engine(), HurriedClock()) as ws:
        ws.faults.signature(bad)
        assert not (await ws.person("ada").command(ASK)).acknowledged
        await answered(ws)
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.getMessage().startswith("a request to /slack/events was refused: it")
    assert "job-123" not in line.getMessage()


async def test_a_connection_that_slack_renews_goes_on() -> None:
    async with by_socket(Engine(), HurriedClock()) as ws:
        for reason in ("warning", "refresh_requested"):
            ws.disconnect(reason)  # type: ignore[arg-type]
            await ws.wait_for(lambda: ws.connections == 1, 30)
        await answered(ws)


@pytest.mark.parametrize("method", ["auth.test", "apps.connections.open"])
async def test_a_slack_that_fails_at_the_start_is_not_blamed_on_the_tokens(method: str) -> None:
    async with Workspace() as ws:

        async def start() -> None:
            async with running_bot(ws.bot_token, ws.app_token, Engine(), base_url=ws.api_url):
                pass

        ws.faults.server_error(method)
        with pytest.raises(
            SlackRefused, match=r"does not work at the moment \(HTTP 500\).*nothing about the tokens"
        ):
            await start()
        ws.faults.rate_limit(method)
        with pytest.raises(SlackRefused, match="HTTP 429, ratelimited"):
            await start()
        ws.faults.drop(method, after_effect=False)
        with pytest.raises(SlackRefused, match="is not reached"):
            await start()
