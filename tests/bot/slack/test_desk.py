"""What happens after a command was acknowledged, with Slack and the engine played by scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from bot.slack.calls import RefusedError
from bot.slack.desk import Desk, Home, is_outsider
from bot.slack.outbox import Outbox
from diagnosis.store import JobInfo, StoreError, UnknownJob
from diagnosis.verdict import Verdict
from tests.bot import verdicts
from tests.bot.slack.moved_clock import MovedClock

HOME = Home(team="lab", team_id="T1", enterprise_id="E1", bot="sysom", bot_id="B1", user_id="U0")


class Engine:
    """Answers at once, or when ``go`` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.asked: list[str] = []
        self.fails: Exception | None = None

    async def diagnose(self, job: str) -> Verdict:
        self.asked.append(job)
        await self.go.wait()
        if self.fails:
            raise self.fails
        return verdicts.SLOW

    async def jobs(self) -> list[JobInfo]:
        if self.fails:
            raise self.fails
        return []


class World:
    """A desk with all that it needs, and what it said, as ``(seconds, where, text)``."""

    def __init__(self) -> None:
        self.clock = MovedClock()
        self.engine = Engine()
        self.said: list[tuple[float, str, str]] = []
        self.closed: set[str] = set()
        self.desk = Desk(self.engine, Outbox(self._call, self.clock), self._post, HOME, self.clock)
        self._commands = 0

    async def _call(self, method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if arguments["channel"] in self.closed:
            raise RefusedError(method, "not_in_channel")
        where = "thread" if "thread_ts" in arguments else method
        self.said.append((round(self.clock.now(), 2), where, arguments["text"]))
        thread = arguments.get("thread_ts")
        return {"ts": arguments.get("ts", "1.0"), "message": {"thread_ts": thread} if thread else {}}

    async def _post(self, address: str, body: Mapping[str, Any]) -> int:
        assert body["response_type"] == "ephemeral"
        self.said.append((round(self.clock.now(), 2), address, body["text"]))
        return 200

    def types(self, text: str, **more: Any) -> None:
        self._commands += 1
        payload = {
            "text": text,
            "channel_id": "C1",
            "user_id": "U123ABC",
            "team_id": "T1",
            "response_url": "only me",
            "trigger_id": f"trigger {self._commands}",
        }
        self.desk.take(payload | more)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    closing = asyncio.create_task(made.desk.close())
    await made.clock.advance(60)
    await closing


async def test_one_message_goes_from_question_to_answer_and_the_evidence_follows(world: World) -> None:
    world.engine.go.clear()
    world.types("diagnose job-123")
    await world.clock.advance(7)
    world.engine.go.set()
    await world.clock.advance(10)
    assert [(at, where) for at, where, _ in world.said] == [
        (0.0, "chat.postMessage"),
        (3.0, "chat.update"),
        (6.0, "chat.update"),
        (7.05, "chat.update"),  # the answer came at 7 s; the channel's pace adds 0.05
        (8.1, "thread"),
    ]
    texts = [text for _, _, text in world.said]
    assert "<@U123ABC> asked about `job-123`" in texts[0]
    assert "(6 s)" in texts[2]
    assert texts[3].startswith("job-123 is slow: rank 2 on node-7. CPU contention. stress-7f (pid 4411)")
    assert texts[4].startswith("Evidence for: job-123 is slow")


async def test_a_command_that_is_delivered_again_is_answered_once(world: World) -> None:
    for _ in range(3):
        world.types("diagnose job-123", trigger_id="the same")
        await world.clock.advance(10)
    assert world.engine.asked == ["job-123"]


async def test_two_people_asking_for_one_job_share_the_answer(world: World) -> None:
    world.engine.go.clear()
    world.types("diagnose job-123")
    world.types("diagnose job-123")
    await world.clock.advance(1)
    assert world.engine.asked == ["job-123"]
    told = [text for _, where, text in world.said if where == "only me"]
    assert told == ["`job-123` is being looked at already: the answer comes in this channel."]
    world.engine.go.set()
    await world.clock.advance(10)
    world.types("diagnose job-123")
    await world.clock.advance(10)
    assert world.engine.asked == ["job-123", "job-123"]


async def test_an_unknown_job_is_answered_with_names_that_are_near(world: World) -> None:
    world.engine.fails = UnknownJob("jab-123", ["job-123"])
    world.types("diagnose jab-123")
    await world.clock.advance(10)
    assert "No job named `jab-123` is known. Did you mean `job-123`?" in world.said[-1][2]


async def test_a_store_that_fails_is_said_in_its_words(world: World) -> None:
    world.engine.fails = StoreError("the file is locked: stop the other server")
    world.types("diagnose job-123")
    world.types("jobs")
    await world.clock.advance(10)
    answers = [text for _, _, text in world.said if "stop the other server" in text]
    assert len(answers) == 2


async def test_a_fault_shows_an_id_and_the_log_has_the_rest(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.engine.fails = ZeroDivisionError("secret detail")
    world.types("diagnose job-123")
    world.types("jobs")
    await world.clock.advance(10)
    answers = [text for _, _, text in world.said if "something broke in sysom itself" in text]
    assert len(answers) == 2
    assert not any("secret" in text for _, _, text in world.said)
    ids = [record.getMessage().split()[1].rstrip(":") for record in caplog.records if record.exc_info]
    assert all(any(error_id in text for text in answers) for error_id in ids)
    assert "secret detail" in caplog.text


async def test_a_search_without_end_is_given_up(world: World) -> None:
    world.engine.go.clear()
    world.types("diagnose job-123")
    await world.clock.advance(200)
    assert "no answer within 120 s" in world.said[-1][2]
    assert world.said[-1][0] == pytest.approx(120, abs=1.1)


async def test_where_the_bot_may_not_write_the_asker_alone_is_told_and_answered(world: World) -> None:
    world.closed.add("C1")
    world.engine.go.clear()
    world.types("diagnose job-123")
    await world.clock.advance(1)
    assert "/invite @sysom" in world.said[0][2]
    world.engine.go.set()
    await world.clock.advance(10)
    assert [where for _, where, _ in world.said] == ["only me"] * 3
    assert world.said[1][2].startswith("job-123 is slow")
    assert world.said[2][2].startswith("Evidence")


async def test_help_and_mistakes_are_for_the_asker_alone(world: World) -> None:
    world.types("")
    world.types("diagnos job-123")
    world.types("jobs")
    await world.clock.advance(1)
    assert {where for _, where, _ in world.said} == {"only me"}
    assert world.engine.asked == []


async def test_people_of_another_organisation_are_told_no_politely(world: World) -> None:
    world.types("diagnose job-123", team_id="T2")
    await world.clock.advance(5)
    assert world.engine.asked == []
    assert "its own workspace only" in world.said[0][2]


@pytest.mark.parametrize(
    ("payload", "outsider"),
    [
        ({"team_id": "T1"}, False),
        ({}, False),
        ({"team_id": "T2"}, True),
        ({"team_id": "T2", "enterprise_id": "E1"}, False),
        ({"team_id": "T2", "enterprise_id": "E2"}, True),
        ({"team_id": "T1", "is_ext_shared_channel": True}, True),
        ({"team_id": "T1", "is_ext_shared_channel": "false"}, False),
    ],
)
def test_who_is_an_outsider(payload: dict[str, Any], outsider: bool) -> None:
    assert is_outsider(payload, HOME) is outsider


async def test_those_who_wait_are_told_when_sysom_stops(world: World) -> None:
    world.engine.go.clear()
    world.types("diagnose job-123")
    await world.clock.advance(1)
    closing = asyncio.create_task(world.desk.close())
    await world.clock.advance(10)
    await closing
    assert "sysom was stopped before it had an answer" in world.said[-1][2]
