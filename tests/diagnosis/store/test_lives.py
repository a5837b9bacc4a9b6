"""One rank that several processes were, or several agents saw: its newest life, and communicators told apart."""

import msgspec

from probes.records import Collectives, Communicator
from tests.diagnosis.store.arrivals import add
from tests.probes.batches import OFFSET, SECOND, WORLD, a_batch, a_rank, utc


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


def test_numbers_start_anew_with_another_boot_or_agent(store):
    add(store, a_batch(5), a_batch(0, agent="agent-2", start_ns=7 * SECOND, end_ns=8 * SECOND))
    add(store, a_batch(1, boot_id="boot-2", utc_offset_ns=OFFSET + 7 * SECOND))
    assert not [note for note in store.evidence("job-1", utc(0), utc(20)).notes if "missing" in note]
