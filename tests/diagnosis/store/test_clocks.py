"""Nodes whose clocks jumped, or are off the server's: nothing is lost, all stands at one time, and it is said."""

import pytest

from probes.records import Event
from tests.diagnosis.store.arrivals import add
from tests.probes.batches import OFFSET, SECOND, a_batch, a_rank, utc


def test_a_clock_that_jumped_back_reorders_and_loses_nothing_and_is_said(store):
    hour = 3600 * SECOND
    for s in range(10):
        store.add(a_batch(s, utc_offset_ns=OFFSET + (hour if s < 5 else 0)), utc(s + 1))
    evidence = store.evidence("job-1", utc(0), utc(10))
    assert evidence.ranks[0].collectives.seq.tolist() == list(range(20))
    assert evidence.ranks[0].collectives.enter_ns.tolist()[::2] == [utc(s + 0.25) for s in range(10)]
    assert evidence.notes == [
        "the clock of node-a jumped once (-3600.0 s); its times here are all by one clock, "
        "order and durations are as they were"
    ]


def test_a_clock_that_is_slewed_is_not_a_jump(store):
    add(store, *[a_batch(s, utc_offset_ns=OFFSET + s * SECOND // 2) for s in range(5)])
    assert store.evidence("job-1", utc(0), utc(20)).notes == []


def test_the_newest_offset_counts_whenever_it_came(store):
    batches = [a_batch(1, utc_offset_ns=OFFSET), a_batch(2, utc_offset_ns=OFFSET + SECOND // 2)]
    add(store, *reversed(batches))
    assert store.evidence("job-1", utc(0), utc(10)).ranks[0].first_ns == utc(1.5)


def node_of(rank, second, *, ahead_s=0):
    """Second ``second`` of one of several nodes of one rank each, whose clocks need not agree."""
    return a_batch(
        second,
        node=f"node-{rank}",
        utc_offset_ns=OFFSET + ahead_s * SECOND,
        ranks=[a_rank(second, rank=rank)],
    )


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_node_whose_clock_is_an_hour_off_is_in_the_window_with_the_others(store, ahead_s):
    for second in range(20):
        for rank in range(4):
            batch = node_of(rank, second, ahead_s=ahead_s if rank == 2 else 0)
            store.add(batch, utc(second + 1))
    (info,) = store.jobs()
    assert (info.first_ns, info.last_ns) == (utc(0), utc(20))
    evidence = store.evidence("job-1", utc(10), utc(20))
    assert sorted(evidence.ranks) == [0, 1, 2, 3]
    assert {(r.first_ns, r.last_ns) for r in evidence.ranks.values()} == {(utc(10), utc(20))}
    side = "ahead of" if ahead_s > 0 else "behind"
    assert evidence.notes == [
        f"the clock of node-2 is 3600 s {side} the server's: its times here are by the server's; set up time "
        "synchronisation there"
    ]


def test_a_clock_that_jumps_ahead_in_mid_run_stays_in_the_window_and_is_said(store):
    for second in range(20):
        for rank in range(4):
            ahead_s = 3600 if rank == 2 and second >= 10 else 0
            store.add(node_of(rank, second, ahead_s=ahead_s), utc(second + 1))
    assert store.jobs()[0].last_ns == utc(20)
    evidence = store.evidence("job-1", utc(5), utc(20))
    assert {(r.first_ns, r.last_ns) for r in evidence.ranks.values()} == {(utc(5), utc(20))}
    jumped, off = sorted(evidence.notes, key=lambda note: "jumped" not in note)
    assert jumped.startswith("the clock of node-2 jumped once (+3600.0 s)")
    assert off.startswith("the clock of node-2 is 3600 s ahead of the server's")


def test_events_of_a_node_whose_clock_is_off_are_by_the_servers_clock(store):
    event = Event(kind="oom", at_ns=3 * SECOND, detail="")
    store.add(a_batch(3, utc_offset_ns=OFFSET + 3600 * SECOND, events=[event]), utc(4))
    assert [one.at_ns for one in store.evidence("job-1", utc(0), utc(10)).events] == [utc(3)]


def test_a_spool_that_is_being_sent_is_not_taken_for_a_clock_that_is_behind(store):
    for second in range(40):  # an hour late, twenty a second
        store.add(a_batch(second), utc(3600 + second / 20))
    assert store.jobs()[0].last_ns == utc(40)
    (note,) = store.evidence("job-1", utc(0), utc(40)).notes
    assert note.endswith("or everything that it sent came that late")


def test_after_the_servers_own_clock_was_set_its_old_time_is_forgotten(store):
    for second in range(130):
        store.add(a_batch(second), utc(second + 1 - (3600 if second < 30 else 0)))
    assert store.jobs()[0].last_ns == utc(130)
    assert store.evidence("job-1", utc(0), utc(130)).notes == []


@pytest.mark.parametrize(
    ("late_s", "notes"),
    [
        (
            -300,
            [
                "the clock of node-a is 300 s ahead of the server's: its times here are by the server's; set up "
                "time synchronisation there"
            ],
        ),
        (-5, []),
        (5, []),
        (
            300,
            ["the clock of node-a is 300 s behind the server's, or everything that it sent came that late"],
        ),
    ],
)
def test_a_clock_far_from_the_servers_is_said(store, late_s, notes):
    add(store, a_batch(1), late_s=late_s)
    assert store.evidence("job-1", utc(-400), utc(400)).notes == notes


def test_batches_from_the_spool_say_nothing_about_the_clock_once_one_was_fresh(store):
    add(store, *[a_batch(s) for s in range(5)], late_s=1000)
    add(store, a_batch(5))
    assert store.evidence("job-1", utc(0), utc(10)).notes == []
