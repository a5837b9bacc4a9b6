"""What goes into the store comes out as evidence, once, in whatever order and however often it came."""

import sqlite3

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diagnosis.store import UnknownJob
from diagnosis.store.sqlite import SqliteStore
from probes.records import Collectives, Communicator, Event, Metric, Probe, ThreadTime
from tests.diagnosis.store.arrivals import add
from tests.probes.batches import OFFSET, SECOND, WORLD, a_batch, a_rank, utc


def plain(value):
    """An evidence as comparable lists, tuples and dictionaries."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def test_a_batch_comes_out_as_evidence_in_utc(store):
    add(store, a_batch(3))
    evidence = store.evidence("job-1", utc(0), utc(10))
    rank = evidence.ranks[0]
    assert (evidence.world_size, evidence.watched_since_ns, evidence.notes) == (4, utc(3), [])
    assert (rank.node, rank.pid, rank.name, rank.local_rank, rank.ended) == (
        "node-a",
        100,
        "python",
        0,
        False,
    )
    assert (rank.first_ns, rank.last_ns) == (utc(3), utc(4))
    assert rank.communicators == [WORLD]
    assert rank.collectives.enter_ns.tolist() == [utc(3.25), utc(3.75)]
    assert rank.collectives.seq.tolist() == [6, 7]
    assert rank.collectives.bytes.tolist() == [4096, 8192]
    assert rank.collectives.duration_ns.tolist() == [SECOND // 10] * 2
    assert rank.collectives.failed.tolist() == [False, False]
    (thread,) = rank.threads
    assert (thread.tid, thread.since_ns, thread.at_ns.tolist()) == (101, OFFSET, [utc(3.25), utc(3.75)])
    assert thread.running_ns.tolist() == [1_625_000_000, 1_875_000_000]
    assert (thread.stolen_at_ns.tolist(), thread.stolen_ns.tolist()) == ([utc(4)], [1003])
    (occupant,) = rank.occupants
    assert (occupant.start_ns, occupant.end_ns) == (utc(3), utc(4))
    assert (occupant.pid, occupant.name, occupant.cgroup, occupant.took_ns) == (
        7,
        "stress",
        "/user",
        30_000_000,
    )
    assert evidence.probes == {"node-a": [Probe(name="gloo", state="on", hits=3)]}


def test_a_batch_that_comes_again_is_not_stored_again(store):
    assert add(store, a_batch(3), a_batch(3), a_batch(4)) == [True, False, True]
    assert len(store.evidence("job-1", utc(0), utc(10)).ranks[0].collectives.seq) == 4


@pytest.mark.parametrize(
    "other", [{"node": "node-b"}, {"boot_id": "boot-2"}, {"agent": "agent-2"}, {"seq": 9}]
)
def test_node_boot_agent_and_number_together_name_a_batch(store, other):
    assert add(store, a_batch(3), a_batch(3, **other)) == [True, True]


def test_the_window_has_its_start_and_not_its_end(store):
    add(store, *[a_batch(second) for second in range(10)])
    rank = store.evidence("job-1", utc(3.25), utc(5.25)).ranks[0]
    assert rank.collectives.seq.tolist() == [6, 7, 8, 9]
    assert rank.threads[0].at_ns.tolist() == [utc(3.25), utc(3.75), utc(4.25), utc(4.75)]
    # Batches 3, 4 and 5 overlap the window; the stolen time of batch 5 is stamped with its end.
    assert (rank.first_ns, rank.last_ns) == (utc(3), utc(6))
    assert [row.start_ns for row in rank.occupants] == [utc(3), utc(4), utc(5)]
    assert rank.threads[0].stolen_ns.tolist() == [1003, 1004]


def test_a_known_job_without_data_in_the_window_has_no_ranks(store):
    add(store, a_batch(3))
    evidence = store.evidence("job-1", utc(100), utc(200))
    assert (evidence.ranks, evidence.world_size, evidence.watched_since_ns) == ({}, 4, utc(3))


def test_where_no_name_looks_alike_the_newest_jobs_are_named(store):
    for second, job in enumerate(("aaa", "bbb", "ccc", "ddd")):
        add(store, a_batch(second, ranks=[a_rank(second, job=job)]))
    with pytest.raises(UnknownJob, match=r"no job named 'xyz' is known; known jobs: ddd, ccc, bbb$"):
        store.evidence("xyz", 0, 1)


def test_without_any_job_that_is_said(store):
    with pytest.raises(UnknownJob, match="no job has been seen yet"):
        store.evidence("xyz", 0, 1)


def test_an_unknown_job_names_those_that_look_alike(store):
    add(store, a_batch(1, ranks=[a_rank(1, job="llama-70b"), a_rank(1, job="Resnet")]))
    with pytest.raises(UnknownJob, match="did you mean llama-70b") as caught:
        store.evidence("llama70b", 0, 1)
    assert caught.value.nearest == ["llama-70b"]
    with pytest.raises(UnknownJob) as caught:
        store.evidence("resnet", 0, 1)
    assert caught.value.nearest == ["Resnet"]


def test_jobs_are_listed_with_the_newest_first(store):
    add(store, *[a_batch(second) for second in range(3)])
    add(store, a_batch(7, ranks=[a_rank(7, job="job-2", rank=1), a_rank(7, job="job-2", rank=2)]))
    add(store, a_batch(6, node="node-b", ranks=[a_rank(6, job="job-2", rank=3)]))
    newest, oldest = store.jobs()
    assert (newest.job, newest.ranks_seen, newest.nodes) == ("job-2", 3, 2)
    assert (newest.first_ns, newest.last_ns) == (utc(6), utc(8))
    assert (oldest.job, oldest.world_size, oldest.first_ns, oldest.last_ns) == ("job-1", 4, utc(0), utc(3))


# --- packing


def stored(path, table):
    with sqlite3.connect(path) as db:
        return db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def test_minutes_that_are_over_are_packed_into_one_row_and_read_as_before(store, path):
    batches = [a_batch(second) for second in range(150)]
    add(store, *batches)
    assert (stored(path, "chunk"), stored(path, "tail")) == (2, 30)
    collectives = store.evidence("job-1", utc(0), utc(150)).ranks[0].collectives
    assert collectives.seq.tolist() == list(range(300))
    assert collectives.enter_ns.tolist() == [
        utc(second + part) for second in range(150) for part in (0.25, 0.75)
    ]


def test_a_batch_that_comes_after_its_minute_was_packed_is_found(store):
    add(store, *[a_batch(second) for second in range(130) if second != 40])
    before = store.evidence("job-1", utc(0), utc(130))
    assert before.notes == ["1 batch of node-a is missing: nothing is known about its ranks in that time"]
    add(store, a_batch(40))
    at_once = store.evidence("job-1", utc(0), utc(130))
    add(store, a_batch(130))
    packed_again = store.evidence("job-1", utc(0), utc(130))
    for evidence in (at_once, packed_again):
        assert evidence.notes == []
        assert evidence.ranks[0].collectives.seq.tolist() == list(range(260))


def test_packing_is_shared_out_over_calls_and_leaves_nothing_behind(store, path):
    ranks = [a_rank(59, rank=rank, world_size=20) for rank in range(20)]
    add(store, a_batch(59, ranks=ranks), a_batch(60))
    assert (stored(path, "chunk"), stored(path, "tail")) == (8, 13)
    add(store, a_batch(61), a_batch(62))
    assert (stored(path, "chunk"), stored(path, "tail")) == (20, 3)


BATCHES = [a_batch(second) for second in range(55, 66)]
ORDERS = st.permutations([*BATCHES, *BATCHES[::3]])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=ORDERS)
def test_order_and_repetition_do_not_change_the_evidence(order, tmp_path_factory):
    evidence = []
    for batches in (BATCHES, order):
        store = SqliteStore(tmp_path_factory.mktemp("store") / "sysom.db")
        add(store, *batches)
        evidence.append(plain(store.evidence("job-1", utc(56.5), utc(64.5))))
        store.close()
    assert evidence[0] == evidence[1]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_how_a_series_is_cut_into_batches_does_not_change_it(data, tmp_path_factory):
    count = 40
    enter = sorted(data.draw(st.sets(st.integers(50 * SECOND, 70 * SECOND), min_size=count, max_size=count)))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=8)))
    batches = []
    for number, (low, high) in enumerate(zip([0, *cuts], [*cuts, count], strict=True)):
        rows = range(low, high)
        at = enter[low:high]
        collectives = Collectives(
            communicator=[0] * len(at),
            seq=list(rows),
            op=[1] * len(at),
            bytes=[row * 7 for row in rows],
            dtype=["f32"] * len(at),
            enter_ns=at,
            duration_ns=list(rows),
            failed=[row % 3 == 0 for row in rows],
        )
        thread = ThreadTime(
            tid=1,
            role=0,
            since_ns=0,
            at_ns=at,
            running_ns=at,
            runnable_ns=[0] * len(at),
            blocked_ns=[0] * len(at),
            uninterruptible_ns=[0] * len(at),
            interrupted_ns=list(rows),
        )
        rank = a_rank(0, collectives=collectives, threads=[thread], occupants=[])
        batches.append(a_batch(number, start_ns=at[0], end_ns=at[-1] + 1, ranks=[rank]))
    store = SqliteStore(tmp_path_factory.mktemp("store") / "sysom.db")
    add(store, *data.draw(st.permutations(batches)))
    rank = store.evidence("job-1", utc(0), utc(100)).ranks[0]
    store.close()
    assert rank.collectives.enter_ns.tolist() == [OFFSET + at for at in enter]
    assert rank.collectives.seq.tolist() == list(range(count))
    assert rank.collectives.bytes.tolist() == [row * 7 for row in range(count)]
    assert rank.collectives.failed.tolist() == [row % 3 == 0 for row in range(count)]
    assert rank.threads[0].at_ns.tolist() == [OFFSET + at for at in enter]
    assert rank.threads[0].interrupted_ns.tolist() == list(range(count))


# --- lives, agents, communicators


def test_of_several_lives_the_newest_is_used_and_the_restart_said(store):
    second_life = {"pid": 200, "start_ns": 5 * SECOND}
    add(store, *[a_batch(second) for second in range(4)])
    add(store, *[a_batch(second, ranks=[a_rank(second, **second_life)]) for second in range(6, 8)])
    add(store, a_batch(4, ranks=[a_rank(4, ended=True)]), a_batch(5, ranks=[]))
    evidence = store.evidence("job-1", utc(0), utc(10))
    assert (evidence.ranks[0].pid, evidence.ranks[0].ended) == (200, False)
    assert evidence.ranks[0].collectives.seq.tolist() == [12, 13, 14, 15]
    assert evidence.notes == [
        "rank 0 ran as 2 processes in this window (pid 100 on node-a, then pid 200 on node-a); "
        "only the newest is used"
    ]
    before = store.evidence("job-1", utc(0), utc(6))
    assert (before.ranks[0].pid, before.ranks[0].ended, before.notes) == (100, True, [])


def test_a_pid_that_was_used_again_is_another_life(store):
    add(store, a_batch(1), a_batch(2, ranks=[a_rank(2, start_ns=2 * SECOND)]))
    assert store.evidence("job-1", utc(0), utc(10)).ranks[0].collectives.seq.tolist() == [4, 5]


def test_two_agents_of_one_rank_are_joined_with_their_own_numbering_of_communicators(store):
    pair = Communicator(uid="1", desc="pair", rank=0, size=2)
    renumbered = a_rank(
        2,
        communicators=[pair, WORLD],
        collectives=Collectives(
            communicator=[0, 1],
            seq=[0, 4],
            op=[1, 1],
            bytes=[1, 1],
            dtype=["", ""],
            enter_ns=[2 * SECOND + 1, 2 * SECOND + 2],
            duration_ns=[1, 1],
            failed=[False, False],
        ),
    )
    add(
        store,
        a_batch(1),
        a_batch(0, agent="agent-2", start_ns=2 * SECOND, end_ns=3 * SECOND, ranks=[renumbered]),
    )
    rank = store.evidence("job-1", utc(0), utc(10)).ranks[0]
    assert rank.communicators == [WORLD, pair]
    assert rank.collectives.communicator.tolist() == [0, 0, 1, 0]


def test_communicators_that_look_alike_to_one_agent_stay_two(store):
    unknown = Communicator(uid="", desc="", rank=0, size=2)

    def on_both(second):
        collectives = msgspec.structs.replace(a_rank(second).collectives, communicator=[0, 1])
        return [a_rank(second, communicators=[unknown, unknown], collectives=collectives)]

    add(store, a_batch(1, ranks=on_both(1)), a_batch(2, agent="agent-2", ranks=on_both(2)))
    rank = store.evidence("job-1", utc(0), utc(10)).ranks[0]
    assert rank.communicators == [unknown, unknown]
    assert rank.collectives.communicator.tolist() == [0, 1, 0, 1]


def test_a_list_of_communicators_that_grew_is_kept_though_its_batch_came_first(store):
    pair = Communicator(uid="1", desc="pair", rank=0, size=2)
    add(store, a_batch(2, ranks=[a_rank(2, communicators=[WORLD, pair])]), a_batch(1))
    assert store.evidence("job-1", utc(0), utc(10)).ranks[0].communicators == [WORLD, pair]


@pytest.mark.parametrize("packed", [False, True])
def test_collectives_reported_open_and_then_ended_are_each_one(store, packed):
    def both(second, duration):
        collectives = Collectives(
            communicator=[0, 0],
            seq=[0, 1],
            op=[1, 1],
            bytes=[1, 1],
            dtype=["", ""],
            enter_ns=[SECOND, SECOND],
            duration_ns=[duration, duration],
            failed=[False, False],
        )
        return a_batch(second, ranks=[a_rank(second, collectives=collectives)])

    add(store, both(2, 2 * SECOND), both(1, -1))
    if packed:
        add(store, a_batch(60, ranks=[]))
    collectives = store.evidence("job-1", utc(0), utc(10)).ranks[0].collectives
    assert collectives.seq.tolist() == [0, 1]
    assert collectives.duration_ns.tolist() == [2 * SECOND, 2 * SECOND]


def test_events_of_the_job_and_of_its_nodes_are_given_in_utc(store):
    mine = Event(kind="rank-ended", at_ns=3 * SECOND, detail="", job="job-1", rank=0)
    nodes = Event(kind="oom", at_ns=2 * SECOND, detail="killed")
    others = Event(kind="rank-ended", at_ns=3 * SECOND, detail="", job="job-2", rank=0)
    later = Event(kind="oom", at_ns=30 * SECOND, detail="")
    add(store, a_batch(3, events=[mine, others, nodes, later]))
    add(store, a_batch(3, node="node-b", ranks=[a_rank(3, job="job-2")], events=[nodes]))
    events = store.evidence("job-1", utc(0), utc(10)).events
    assert [(event.kind, event.at_ns, event.job) for event in events] == [
        ("oom", utc(2), ""),
        ("rank-ended", utc(3), "job-1"),
    ]


def test_probes_are_those_of_the_newest_batch(store):
    add(store, a_batch(3), a_batch(2))
    assert store.evidence("job-1", utc(0), utc(10)).probes["node-a"][0].hits == 3


def test_metrics_are_kept_with_their_batch(store, path):
    metrics = [Metric(name="cpu", value=0.5, unit="s", labels={"mode": "user"})]
    add(store, a_batch(3, metrics=metrics))
    assert stored(path, "batch WHERE metrics IS NOT NULL") == 1


# --- clocks and gaps


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


def test_batches_that_miss_in_the_window_are_counted(store):
    add(store, *[a_batch(s) for s in range(30) if s not in (3, 12, 13, 14, 20)])
    (note,) = store.evidence("job-1", utc(10), utc(18)).notes
    assert note.startswith("3 batches of node-a are missing")
    # Of the gap from 12 to 15 the part before 13.
    (note,) = store.evidence("job-1", utc(10), utc(13)).notes
    assert note.startswith("1 batch of node-a is missing")
    assert store.evidence("job-1", utc(21), utc(29)).notes == []


def test_numbers_start_anew_with_another_boot_or_agent(store):
    add(store, a_batch(5), a_batch(0, agent="agent-2", start_ns=7 * SECOND, end_ns=8 * SECOND))
    add(store, a_batch(1, boot_id="boot-2", utc_offset_ns=OFFSET + 7 * SECOND))
    assert not [note for note in store.evidence("job-1", utc(0), utc(20)).notes if "missing" in note]


def standing(entered: int, *, duration: int = -1):
    """One collective that was entered at a second and told of later."""
    return Collectives(
        communicator=[0],
        seq=[2 * entered],
        op=[1],
        bytes=[4096],
        dtype=["f32"],
        enter_ns=[entered * SECOND],
        duration_ns=[duration],
        failed=[False],
    )


def test_what_stands_still_since_before_the_window_is_in_it_until_it_ended(store):
    add(store, a_batch(3), a_batch(100, ranks=[a_rank(100, collectives=standing(20))]))

    def seen(start, end):
        rank = store.evidence("job-1", utc(start), utc(end)).ranks.get(0)
        return rank.collectives.seq.tolist(), rank.collectives.duration_ns.tolist()

    assert seen(90, 110) == ([40], [-1])
    store.tidy(utc(400))  # packed or not
    assert seen(90, 110) == ([40], [-1])
    add(store, a_batch(105, ranks=[a_rank(105, collectives=standing(20, duration=84 * SECOND))]))
    assert seen(90, 110) == ([40], [84 * SECOND]), "it ended at second 104"
    assert seen(104.5, 110) == ([], [])
