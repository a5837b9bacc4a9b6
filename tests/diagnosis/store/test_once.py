"""Batches sent again, twice, late, in any order, by agents of one name, over reboots and restarts: the store
holds each once, and what it says is what it would say had they come once and in order."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from diagnosis.store import Keep
from diagnosis.store.sqlite import SqliteStore
from probes.records import Collectives, Communicator
from tests.diagnosis.store.arrivals import add
from tests.diagnosis.store.compared import plain
from tests.probes.batches import OFFSET, SECOND, a_batch, a_rank, utc

NAMES = ("world", "row", "column")
SIZES = {"world": 4, "row": 2, "column": 2}
BYTES = {"world": 1000, "row": 2000, "column": 3000}
"""What a collective says of itself without its communicator's number."""
NAME_OF = {size: name for name, size in BYTES.items()}


@dataclass(frozen=True)
class Run:
    """One run of an agent: what it learns of communicators, in its own order, one more with each batch."""

    order: tuple[str, ...]
    known_at_once: int
    seconds: int
    clock_jump: int


def batches_of(node, boot, agent, first_seq, runs):
    """All batches of one agent within one boot. Each boot has a rank of its own, so that all lives are seen."""
    made, second, offset = [], 0, OFFSET
    for run in runs:
        offset += run.clock_jump * SECOND
        for k in range(run.seconds):
            known = run.order[: run.known_at_once + k]
            at = [second * SECOND + (NAMES.index(name) + 1) * SECOND // 10 for name in known]
            collectives = Collectives(
                communicator=list(range(len(known))),
                seq=[second] * len(known),
                op=[1] * len(known),
                bytes=[BYTES[name] for name in known],
                dtype=["f32"] * len(known),
                enter_ns=at,
                duration_ns=[SECOND // 100] * len(known),
                failed=[False] * len(known),
            )
            communicators = [Communicator(uid=name, desc="", rank=0, size=SIZES[name]) for name in known]
            rank = a_rank(second, rank=boot, communicators=communicators, collectives=collectives)
            made.append(
                a_batch(
                    second,
                    node=node,
                    boot_id=f"boot-{boot}",
                    agent=agent,
                    seq=first_seq + second,
                    utc_offset_ns=offset,
                    ranks=[rank],
                )
            )
            second += 1
    return made


runs = st.builds(
    Run,
    order=st.permutations(NAMES).map(tuple),
    known_at_once=st.integers(0, 3),
    seconds=st.integers(1, 4),
    clock_jump=st.sampled_from([0, 0, 5, -5]),
)
lives = st.lists(runs, min_size=1, max_size=3)


@st.composite
def senders(draw):
    """Batches of: an agent; one of the same name beside it; the first after a reboot, its numbers going on; and
    after its spool was lost."""
    made = batches_of("node-a", 0, "agent-1", 0, draw(lives))
    if draw(st.booleans()):
        made += batches_of("node-a", 0, "agent-2", 0, draw(lives))
    if draw(st.booleans()):
        made += batches_of("node-a", 1, "agent-1", draw(st.sampled_from([0, len(made)])), draw(lives))
    if draw(st.booleans()):
        made += batches_of("node-a", 1, "agent-3", 0, draw(lives))
    return made


def deliver(path, batches):
    store = SqliteStore(path)
    store._writer.execute("PRAGMA synchronous = OFF")
    new = add(store, *batches)
    evidence = store.evidence("job-1", 0, utc(10_000))
    store.close()
    with closing(sqlite3.connect(path)) as db:
        kept = db.execute(
            "SELECT node, boot_id, agent, seq FROM batch JOIN sender ON sender.id = batch.sender"
            " JOIN boot ON boot.id = sender.boot"
        ).fetchall()
    return new, sorted(kept), evidence


def meaning(evidence):
    """An evidence in which communicators go by their names: how they are numbered is nobody's business."""
    said = plain(evidence)
    for rank in said["ranks"].values():
        uids = [communicator.uid for communicator in rank["communicators"]]
        assert len(set(uids)) == len(uids)
        rank["collectives"]["communicator"] = [uids[place] for place in rank["collectives"]["communicator"]]
        rank["communicators"] = sorted(uids)
    return said


def name(batch):
    return (batch.node, batch.boot_id, batch.agent, batch.seq)


ON_DISK = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # with files, shrinking takes minutes
)


@ON_DISK
@given(data=st.data())
def test_a_batch_is_stored_once_and_means_the_same_however_it_came(data, tmp_path_factory):
    batches = data.draw(senders())
    repeats = data.draw(st.lists(st.sampled_from(batches), max_size=8))
    sent = data.draw(st.permutations([*batches, *repeats]))
    folder = tmp_path_factory.mktemp("once")
    new, kept, evidence = deliver(folder / "any.db", sent)
    _, _, in_order = deliver(folder / "in_order.db", batches)
    assert kept == sorted({name(batch) for batch in batches})
    assert sorted(name(batch) for batch, was_new in zip(sent, new, strict=True) if was_new) == kept
    assert meaning(evidence) == meaning(in_order)
    for rank, seen in evidence.ranks.items():
        rows = seen.collectives
        assert [seen.communicators[place].uid for place in rows.communicator.tolist()] == [
            NAME_OF[size] for size in rows.bytes.tolist()
        ]
        truth = {
            (batch.start_ns, size)
            for batch in batches
            for of_rank in batch.ranks
            if of_rank.rank == rank
            for size in of_rank.collectives.bytes
        }
        assert {
            (seq * SECOND, size) for seq, size in zip(rows.seq.tolist(), rows.bytes.tolist(), strict=True)
        } == truth


@ON_DISK
@given(data=st.data())
def test_what_was_forgotten_never_comes_back(data, tmp_path_factory):
    """Sent again and again, with tidying in between: each is new once, and what is left is what is kept."""
    batches = [
        a_batch(10 * number, agent=agent, seq=number)
        for agent in ("agent-1", "agent-2")
        for number in range(data.draw(st.integers(1, 30)))
    ]
    sent = data.draw(st.lists(st.sampled_from([*batches, "tidy"]), max_size=80))
    store = SqliteStore(tmp_path_factory.mktemp("once") / "sysom.db", keep=Keep(days=100 / 86_400, gb=20))
    store._writer.execute("PRAGMA synchronous = OFF")
    was_new, now_ns = [], utc(0)
    for one in sent:
        if one == "tidy":
            now_ns += 40 * SECOND
            store.tidy(now_ns)
        elif add(store, one) == [True]:
            was_new.append(name(one))
    assert len(was_new) == len(set(was_new))
    store.tidy(now_ns)
    with store._reading() as db:
        marks = dict(db.execute("SELECT agent, forgotten_ns FROM sender").fetchall())
        left = db.execute("SELECT agent, seq FROM batch JOIN sender ON sender.id = sender").fetchall()
    store.close()
    kept = {
        (batch.agent, batch.seq)
        for batch in batches
        if name(batch) in was_new and batch.end_ns >= marks[batch.agent]
    }
    assert set(left) == kept


def unnamed(size):
    return Communicator(uid="", desc="", rank=0, size=size)


def seen(second, communicators, numbers):
    collectives = Collectives(
        communicator=numbers,
        seq=[second] * len(numbers),
        op=[1] * len(numbers),
        bytes=[10 * second + number for number in numbers],
        dtype=["f32"] * len(numbers),
        enter_ns=[second * SECOND + number for number in range(len(numbers))],
        duration_ns=[1000] * len(numbers),
        failed=[False] * len(numbers),
    )
    return a_batch(second, ranks=[a_rank(second, communicators=communicators, collectives=collectives)])


def named_rows(store):
    rank = store.evidence("job-1", utc(0), utc(100)).ranks[0]
    rows = rank.collectives
    return {
        size: rank.communicators[place].uid
        for size, place in zip(rows.bytes.tolist(), rows.communicator.tolist(), strict=True)
    }


WORLD = Communicator(uid="world", desc="", rank=0, size=4)
PAIR = Communicator(uid="pair", desc="", rank=0, size=4)


def test_an_agent_that_was_started_again_may_number_anew(store):
    add(store, seen(1, [WORLD], [0]), seen(2, [WORLD, PAIR], [0, 1]))
    add(store, seen(3, [PAIR], [0]), seen(4, [PAIR, WORLD], [0, 1]))
    assert named_rows(store) == {
        10: "world",
        20: "world",
        21: "pair",
        30: "pair",
        40: "pair",
        41: "world",
    }


def test_a_communicator_that_got_its_name_later_had_it_all_along(store):
    add(
        store,
        seen(1, [unnamed(4)], [0]),
        seen(2, [WORLD, unnamed(4)], [0, 1]),
        seen(3, [WORLD, PAIR], [0, 1]),
    )
    assert named_rows(store) == {10: "world", 20: "world", 21: "pair", 30: "world", 31: "pair"}


def test_a_nameless_communicator_after_a_restart_is_not_taken_for_an_older_one(store):
    """After the restart the pair is met first, and its name learned a second later."""
    add(store, seen(1, [WORLD, PAIR], [0, 1]))
    add(store, seen(2, [unnamed(4)], [0]), seen(3, [PAIR], [0]), seen(4, [PAIR, WORLD], [0, 1]))
    assert named_rows(store) == {10: "world", 11: "pair", 20: "pair", 30: "pair", 40: "pair", 41: "world"}


def test_a_list_that_shrank_is_another_runs_though_nothing_on_it_has_a_name(store):
    """What the second run calls 0 gets a name; what the first called 0 may have been any other."""
    add(store, seen(1, [unnamed(4), unnamed(4)], [0, 1]))
    add(store, seen(2, [unnamed(4)], [0]), seen(3, [PAIR], [0]))
    assert named_rows(store) == {10: "", 11: "", 20: "pair", 30: "pair"}


@pytest.mark.parametrize("seconds", [1, 70])
def test_many_restarts_with_the_same_order_are_one_series(store, path, seconds):
    for second in range(seconds):
        add(store, seen(second, [WORLD, PAIR][: 1 + second % 2], [0]))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM watch").fetchone() == (1,)
