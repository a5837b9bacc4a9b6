"""What is forgotten, when, and what is remembered of it: that it was there."""

import sqlite3
import threading

import pytest

from diagnosis.store import Keep, StoreError, UnknownJob, retention
from diagnosis.store.retention import MARK_KEPT_NS
from diagnosis.store.sqlite import SqliteStore
from probes.records import Command, CommandKind, Event
from tests.diagnosis.store.arrivals import add
from tests.probes.batches import SECOND, a_batch, a_rank, utc

DAY_S = 86_400
MINUTES = 5
BATCHES = MINUTES * 60


@pytest.fixture
def keeping(path):
    """Opens the store for a number of days and GB."""
    opened = []

    def open_it(days=14.0, gb=20.0):
        opened.append(SqliteStore(path, keep=Keep(days, gb)))
        opened[-1]._writer.execute("PRAGMA synchronous = OFF")  # no power is cut here
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def counts(path):
    with sqlite3.connect(path) as db:
        tables = ("boot", "sender", "batch", "watch", "tail", "chunk", "event", "command")
        return {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


def seconds_of(store, job="job-1"):
    """The seconds after boot of which there are collectives."""
    found = store.evidence(job, utc(0), utc(400 * DAY_S)).ranks[0].collectives.seq
    return sorted({seq // 2 for seq in found.tolist()})


def test_minutes_that_arrived_before_what_is_kept_go_whole(keeping):
    store = keeping(days=1)
    add(store, *[a_batch(second) for second in range(BATCHES)])
    now = utc(DAY_S + 130)  # what arrived in the first two minutes and some seconds is over a day old
    assert store.tidy(now) == 3 * 60 - 1  # the third minute's last batch ends with the fourth
    assert seconds_of(store) == list(range(180, BATCHES))
    assert store.jobs()[0].first_ns == utc(180)
    assert store.tidy(now) == 0


def test_without_keeping_anything_in_particular_nothing_goes(store):
    add(store, a_batch(0))
    assert store.tidy(utc(1000 * DAY_S)) == 0
    assert seconds_of(store) == [0]


def test_a_batch_that_was_forgotten_is_acknowledged_and_not_stored_again(keeping, path):
    store = keeping(days=1)
    batches = [a_batch(second) for second in range(BATCHES)]
    add(store, *batches)
    store.tidy(utc(DAY_S + 130))
    assert add(store, *batches) == [False] * BATCHES
    assert seconds_of(store) == list(range(180, BATCHES))
    store.tidy(utc(30 * DAY_S))
    with pytest.raises(UnknownJob):
        store.evidence("job-1", 0, utc(10 * DAY_S))
    assert add(store, *batches) == [False] * BATCHES
    assert counts(path) == {"boot": 1, "sender": 1} | dict.fromkeys(
        ("batch", "watch", "tail", "chunk", "event", "command"), 0
    )


def test_a_batch_older_than_what_was_forgotten_is_not_taken_for_news(keeping):
    """The third second never arrived, and does when its minute is long gone."""
    store = keeping(days=1)
    add(store, *[a_batch(second) for second in range(BATCHES) if second != 3])
    store.tidy(utc(DAY_S + 130))
    assert add(store, a_batch(3)) == [False]
    assert seconds_of(store) == list(range(180, BATCHES))


def test_an_agent_of_which_all_was_forgotten_goes_on(keeping):
    store = keeping(days=1)
    add(store, *[a_batch(second) for second in range(60)])
    store.tidy(utc(30 * DAY_S))
    late = 40 * DAY_S
    assert add(store, a_batch(late), a_batch(late), a_batch(5)) == [True, False, False]
    store.tidy(utc(late + 60))
    assert seconds_of(store) == [late]
    assert store.health().newest_ns == utc(late + 1)


def test_marks_of_agents_are_kept_for_a_year(keeping, path):
    store = keeping(days=1)
    add(store, a_batch(0))
    store.tidy(utc(2 * DAY_S))
    store.tidy(utc(2 * DAY_S) + MARK_KEPT_NS)
    assert counts(path)["sender"] == 1
    store.tidy(utc(2 * DAY_S) + MARK_KEPT_NS + 1)
    assert counts(path)["sender"] == counts(path)["boot"] == 0


def test_events_go_with_the_batches_of_their_time(keeping, path):
    store = keeping(days=1)
    for second in range(BATCHES):
        event = Event(kind="events-lost", at_ns=second * SECOND, detail=str(second))
        add(store, a_batch(second, events=[event]))
    store.tidy(utc(DAY_S + 130))
    assert [e.detail for e in store.evidence("job-1", 0, utc(BATCHES)).events] == [
        str(second) for second in range(179, BATCHES)
    ]


def test_another_agent_of_the_node_keeps_its_own(keeping):
    store = keeping(days=1)
    add(store, *[a_batch(second) for second in range(120)])
    other = {"agent": "agent-2", "events": [Event(kind="events-lost", at_ns=SECOND, detail="its own")]}
    add(store, a_batch(0, **other, ranks=[a_rank(0, job="job-2")]), late_s=10_000)
    store.tidy(utc(DAY_S + 500))
    assert [info.job for info in store.jobs()] == ["job-2"]
    assert [event.detail for event in store.evidence("job-2", 0, utc(10)).events] == ["its own"]


def test_above_the_size_the_oldest_go_whoever_sent_them(keeping, path):
    store = keeping(gb=1)
    nodes = ("node-a", "node-b")
    for second in range(0, 40 * 60, 10):
        for node in nodes:
            ranks = [a_rank(second, rank=rank, env={"RANK": str(rank)}) for rank in range(4)]
            add(store, a_batch(second, node=node, ranks=ranks))
    store.close()
    full = path.stat().st_size
    store = keeping(gb=full / 2 / 1e9)
    assert store.tidy(utc(2400)) > 0
    kept = {
        node: min(
            row
            for (row,) in sqlite3.connect(path).execute(
                "SELECT end_ns FROM batch JOIN sender ON sender = sender.id JOIN boot ON boot = boot.id"
                " WHERE node = ?",
                (node,),
            )
        )
        for node in nodes
    }
    assert abs(kept["node-a"] - kept["node-b"]) <= 60 * SECOND
    assert min(kept.values()) > 60 * SECOND
    with sqlite3.connect(path) as db:
        pages = db.execute("PRAGMA page_count").fetchone()[0] * 4096
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert pages <= full / 2
    assert path.stat().st_size == pages  # the disk has it back
    assert seconds_of(store)[-1] == 2390


def test_batches_are_added_between_the_steps_of_tidying(keeping):
    store = keeping(days=1)
    add(store, *[a_batch(second) for second in range(BATCHES)])
    taken = []

    class Between:
        def wait(self, _seconds):
            if len(taken) < 3:
                taken.extend(
                    add(store, a_batch(1000 + len(taken)))
                )  # would wait for ever if the lock was held
            return False

        def set(self):
            pass

    store._ending = Between()
    store.tidy(utc(DAY_S + 130))
    assert taken == [True, True, True]
    assert seconds_of(store) == [*range(180, BATCHES), 1000, 1001, 1002]


def test_who_reads_while_the_oldest_go_sees_one_moment(keeping):
    store = keeping(days=1)
    add(store, *[a_batch(second) for second in range(BATCHES)])
    with store._reading() as db:
        first = db.execute("SELECT count(*), min(minute) FROM chunk").fetchone()
        assert store.tidy(utc(DAY_S + 130)) > 0
        assert db.execute("SELECT count(*), min(minute) FROM chunk").fetchone() == first == (4, 0)
        assert db.execute("SELECT count(*) FROM batch").fetchone() == (BATCHES,)
    with store._reading() as db:
        assert db.execute("SELECT min(minute) FROM chunk").fetchone() == (3,)


def test_a_tidying_that_was_cut_short_goes_on_with_the_next(keeping, monkeypatch):
    monkeypatch.setattr(retention, "ROWS_PER_STEP", 50)  # a minute needs two steps
    store = keeping(days=1)
    add(store, *[a_batch(second) for second in range(BATCHES)])
    steps = []

    class Ending:
        def wait(self, _seconds):
            steps.append(1)
            return len(steps) > 3  # as when the store is closed during the fourth step

        def set(self):
            pass

    store._ending = Ending()
    assert store.tidy(utc(DAY_S + 130)) == 50 + 9 + 50
    assert add(store, *[a_batch(second) for second in range(120)]) == [False] * 120
    assert seconds_of(store) == list(range(120, BATCHES))
    store._ending = threading.Event()
    assert store.tidy(utc(DAY_S + 130)) == 10 + 60
    assert seconds_of(store) == list(range(180, BATCHES))


def test_what_was_asked_of_agents_is_forgotten_with_the_batches_of_its_day(keeping):
    store = keeping(days=1)
    for name, expires in (("old", 10), ("new", DAY_S)):
        store.add_command("node-a", Command(id=name, kind=CommandKind.CAPTURE_END), utc(0), utc(expires))
    store.tidy(utc(DAY_S + 20))
    assert [asked.command.id for asked in store.commands(10)] == ["new"]


def test_a_closed_store_cannot_be_tidied(keeping):
    store = keeping()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.tidy(utc(0))
