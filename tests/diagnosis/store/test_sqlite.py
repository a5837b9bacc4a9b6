"""What goes into the store comes out as evidence of the window that is asked for, once."""

import pytest

from diagnosis.store import UnknownJob
from probes.records import Collectives, Event, Metric, Probe
from tests.diagnosis.store.arrivals import add
from tests.diagnosis.store.compared import stored
from tests.probes.batches import OFFSET, SECOND, WORLD, a_batch, a_rank, utc


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


def test_batches_that_miss_in_the_window_are_counted(store):
    add(store, *[a_batch(s) for s in range(30) if s not in (3, 12, 13, 14, 20)])
    (note,) = store.evidence("job-1", utc(10), utc(18)).notes
    assert note.startswith("3 batches of node-a are missing")
    # Of the gap from 12 to 15 the part before 13.
    (note,) = store.evidence("job-1", utc(10), utc(13)).notes
    assert note.startswith("1 batch of node-a is missing")
    assert store.evidence("job-1", utc(21), utc(29)).notes == []


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
