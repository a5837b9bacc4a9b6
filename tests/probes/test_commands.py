"""What the server asks is done once, in the watching thread, told, and still holds after a restart."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from diagnosis.orders import Signer
from probes.codec import encode
from probes.commands import Inbox, Ledger
from probes.records import Command, CommandKind, Event, Reply
from tests.probes.batches import a_batch
from tests.probes.test_orders import KEY, SERVER

OFF = Command(id="c-1", kind=CommandKind.PROBE_OFF, probe="gloo")
ON = Command(id="c-2", kind=CommandKind.PROBE_ON, probe="gloo")
CAPTURE = Command(id="c-3", kind=CommandKind.CAPTURE_START, job="job-1", seconds=60)
END = Command(id="c-4", kind=CommandKind.CAPTURE_END, job="job-1")


class Watch:
    """Stands where NodeWatch does: has one probe and, once found, one job; notes what it was told."""

    def __init__(self, jobs: tuple[str, ...] = ("job-1",)) -> None:
        self.jobs = jobs
        self.told: list[tuple[object, ...]] = []

    def switch(self, probe: str, on: bool, why: str) -> None:
        if probe != "gloo":
            raise ValueError(f"no probe is called {probe!r}; there is gloo")
        self.told.append(("switch", probe, on))

    def start_capture(self, job: str, seconds: float) -> None:
        if job not in self.jobs:
            raise ValueError(f"no rank of {job!r} runs here")
        self.told.append(("start", job, seconds))

    def end_capture(self, job: str) -> None:
        if ("start", job) not in [one[:2] for one in self.told]:
            raise ValueError(f"{job!r} is not captured")
        self.told.append(("end", job))


def ledger(folder: Path, agent: str = "agent-1", boot: str = "boot-1") -> Ledger:
    return Ledger(folder / "commands.json", agent, boot)


def details(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.kind, event.detail) for event in events]


def test_commands_are_done_in_order_and_their_outcomes_told(tmp_path: Path) -> None:
    watch = Watch()
    events = ledger(tmp_path).follow([(1, OFF), (1, ON), (1, CAPTURE), (1, END)], watch, 2, at_ns=5)
    assert watch.told == [
        ("switch", "gloo", False),
        ("switch", "gloo", True),
        ("start", "job-1", 60),
        ("end", "job-1"),
    ]
    assert details(events) == [
        ("command-done", "c-1 probe gloo is switched off"),
        ("command-done", "c-2 probe gloo is switched on"),
        ("command-done", "c-3 job-1 is watched at full detail for 60 s"),
        ("command-done", "c-4 the capture of job-1 has ended"),
    ]
    assert {event.at_ns for event in events} == {5}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            Command(id="c", kind=CommandKind.PROBE_OFF, probe="nvml"),
            "no probe is called 'nvml'; there is gloo",
        ),
        (
            Command(id="c", kind=CommandKind.CAPTURE_START, job="job-2", seconds=9),
            "no rank of 'job-2' runs here",
        ),
        (Command(id="c", kind=CommandKind.CAPTURE_START, job="job-1"), "a capture lasts 1 to 600 s, not 0 s"),
        (
            Command(id="c", kind=CommandKind.CAPTURE_START, job="job-1", seconds=601),
            "a capture lasts 1 to 600 s, not 601 s",
        ),
        (Command(id="c", kind=CommandKind.CAPTURE_START, seconds=9), "a capture needs a job"),
        (END, "'job-1' is not captured"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(tmp_path: Path, command: Command, words: str) -> None:
    events = ledger(tmp_path).follow([(1, command)], Watch(), 2, at_ns=5)
    assert details(events) == [("command-refused", f"{command.id} {words}")]


def test_a_command_that_fails_is_refused_and_the_agent_goes_on(tmp_path: Path) -> None:
    class Broken(Watch):
        def switch(self, probe: str, on: bool, why: str) -> None:
            raise RuntimeError("no such file or directory")

    watch = Broken()
    events = ledger(tmp_path).follow([(1, OFF), (1, CAPTURE)], watch, 2, at_ns=5)
    assert details(events)[0] == ("command-refused", "c-1 it failed: no such file or directory")
    assert watch.told == [("start", "job-1", 60)]


def test_a_command_heard_again_is_neither_done_nor_told_until_its_outcome_should_be_known(
    tmp_path: Path,
) -> None:
    watch, book = Watch(), ledger(tmp_path)
    assert len(book.follow([(10, OFF)], watch, 20, at_ns=1)) == 1  # told with batch 20
    assert book.follow([(11, OFF)], watch, 21, at_ns=2) == []  # replies to the backlog before it
    assert book.follow([(20, OFF)], watch, 22, at_ns=3) == []
    again = book.follow([(21, OFF)], watch, 23, at_ns=4)  # the server has 21 and not the outcome: 20 was lost
    assert details(again) == [("command-done", "c-1 probe gloo is switched off")]
    assert book.follow([(22, OFF)], watch, 24, at_ns=5) == []
    assert watch.told == [("switch", "gloo", False)]


def test_after_a_restart_what_was_done_is_not_done_again_and_a_probe_stays_off(tmp_path: Path) -> None:
    ledger(tmp_path).follow([(1, OFF)], Watch(), 2, at_ns=1)
    watch, book = Watch(), ledger(tmp_path)
    book.restore(watch)
    assert watch.told == [("switch", "gloo", False)]
    assert book.follow([(1, OFF)], watch, 3, at_ns=2) == []
    book.follow([(2, ON)], watch, 3, at_ns=3)
    fresh = Watch()
    ledger(tmp_path).restore(fresh)
    assert fresh.told == []


def test_a_capture_goes_on_after_a_restart_for_the_time_it_has_left_once_its_job_is_found(
    tmp_path: Path,
) -> None:
    ledger(tmp_path).follow([(1, CAPTURE)], Watch(), 2, at_ns=1)
    book, blind, seeing = ledger(tmp_path), Watch(jobs=()), Watch()
    book.resume(blind)
    assert blind.told == []
    book.resume(seeing)
    book.resume(seeing)
    ((what, job, seconds),) = seeing.told
    assert (what, job) == ("start", "job-1")
    assert 55 <= int(str(seconds)) <= 60

    rebooted = Watch()
    ledger(tmp_path, boot="boot-2").resume(rebooted)
    assert rebooted.told == []


def test_a_capture_that_waits_to_go_on_can_be_ended(tmp_path: Path) -> None:
    ledger(tmp_path).follow([(1, CAPTURE)], Watch(), 2, at_ns=1)
    book, watch = ledger(tmp_path), Watch()
    assert details(book.follow([(2, END)], watch, 3, at_ns=1)) == [
        ("command-done", "c-4 the capture of job-1 has ended")
    ]
    book.resume(watch)
    assert watch.told == []


def test_with_a_new_spool_outcomes_are_told_again(tmp_path: Path) -> None:
    ledger(tmp_path).follow([(100, OFF)], Watch(), 101, at_ns=1)
    watch = Watch()
    events = ledger(tmp_path, agent="agent-2").follow([(0, OFF)], watch, 1, at_ns=2)
    assert details(events) == [("command-done", "c-1 probe gloo is switched off")]
    assert watch.told == []


def test_a_record_that_cannot_be_read_or_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "commands.json").write_text("{")
    watch = Watch()
    assert len(ledger(tmp_path).follow([(1, OFF)], watch, 2, at_ns=1)) == 1
    nowhere = Ledger(tmp_path / "missing" / "commands.json", "agent-1", "boot-1")
    assert len(nowhere.follow([(1, ON)], watch, 2, at_ns=1)) == 1


def test_only_so_many_ids_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.commands.REMEMBERED", 2)
    watch, book = Watch(), ledger(tmp_path)
    for number in range(4):
        book.follow(
            [(1, Command(id=str(number), kind=CommandKind.PROBE_ON, probe="gloo"))], watch, 2, at_ns=1
        )
    assert len(watch.told) == 4
    book.follow([(1, Command(id="3", kind=CommandKind.PROBE_ON, probe="gloo"))], watch, 3, at_ns=1)
    assert len(watch.told) == 4


def reply(*asked: Command) -> Reply:
    return Signer(SERVER).reply(a_batch(7), stored=True, commands=asked)


def test_signed_commands_are_heard_once_until_they_are_taken() -> None:
    inbox = Inbox(KEY)
    wire = encode(a_batch(7))
    inbox.hear(wire, reply(OFF, ON))
    inbox.hear(wire, reply(OFF))
    inbox.hear(wire, Reply(stored=True))
    assert inbox.take() == [(7, OFF), (7, ON)]
    assert inbox.take() == []
    assert inbox.events(at_ns=1) == []


def test_orders_that_are_not_believed_are_counted_logged_once_and_told_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 1000.0
    inbox = Inbox(None, clock=lambda: now)
    wire = encode(a_batch(7))
    inbox.hear(wire, reply(OFF))
    (told,) = inbox.events(at_ns=3)
    assert (told.kind, told.at_ns) == ("orders-refused", 3)
    assert told.detail.startswith("1 times: the server sends commands, and this agent has no key")
    for _ in range(5):
        inbox.hear(wire, reply(OFF))
    now += 59
    assert inbox.events(at_ns=4) == []
    now += 2
    (told,) = inbox.events(at_ns=5)
    assert told.detail.startswith("5 times: ")
    assert inbox.events(at_ns=6) == []
    assert inbox.refused == 6
    assert inbox.take() == []
    assert len(caplog.records) == 1


def test_a_flood_of_commands_waits_in_bounded_room() -> None:
    inbox = Inbox(KEY)
    wire = encode(a_batch(7))
    for number in range(600):
        inbox.hear(wire, reply(Command(id=str(number), kind=CommandKind.PROBE_ON, probe="gloo")))
    assert len(inbox.take()) == 256


def test_hearing_does_not_touch_the_watch(tmp_path: Path) -> None:
    """Doing is for the watching thread: hearing takes microseconds, whatever is asked."""
    inbox = Inbox(KEY)
    begun = time.monotonic()
    inbox.hear(encode(a_batch(7)), reply(CAPTURE))
    assert time.monotonic() - begun < 1
    assert inbox.take() == [(7, CAPTURE)]
