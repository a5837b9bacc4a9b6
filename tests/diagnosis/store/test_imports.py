"""What an import puts into the store comes out as evidence: all of it or nothing, whatever happens meanwhile."""

import random
import sqlite3
import subprocess
import sys
from contextlib import closing, contextmanager

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diagnosis.store import JobExists, Keep, StoreError, opening
from diagnosis.store.sqlite import SqliteStore
from probes.records import Collectives, Event, Operations, Place, Progress, State, TimedBy
from tests.diagnosis.store.arrivals import add
from tests.diagnosis.store.compared import plain
from tests.diagnosis.store.imported import DAY, NAMES, THEN, a_part, batches
from tests.probes.batches import SECOND, WORLD, a_batch, a_rank, utc

NOW = utc(0)
EVER = (0, 1 << 61)


def taken(store, *lists, job="traced", imported="files", **options):
    store.add_import(job, imported, [one for batches in lists for one in batches], NOW, **options)


def rows(path):
    """How many rows each table has."""
    with closing(sqlite3.connect(path)) as db:
        tables = ("boot", "sender", "batch", "watch", "chunk", "tail", "event")
        return {name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}


def test_what_a_trace_tells_of_a_rank_comes_out_as_it_was(store):
    place = Place(data=1, stage=2, tensor=3, switch="sw-1")
    progress = [Progress(communicator=0, enqueued=7, started=6, completed=5)]
    taken(store, batches(a_part(1, place=place, progress=progress, timed_by=TimedBy.DEVICE), node="node-x"))
    evidence = store.evidence("traced", *EVER)
    rank = evidence.ranks[1]
    assert (rank.source, rank.timed_by, rank.place, rank.node) == (
        "operations",
        TimedBy.DEVICE,
        place,
        "node-x",
    )
    assert rank.progress == progress
    assert rank.collectives.state.tolist() == [State.STARTED]
    assert rank.collectives.failed.tolist() == [False]
    assert rank.collectives.enter_ns.tolist() == [THEN + 9]
    operations = rank.operations
    assert [operations.names[kind] for kind in operations.kind] == NAMES
    assert operations.start_ns.tolist() == [THEN + 1, THEN + 5]
    assert operations.duration_ns.tolist() == [4, 4]
    assert (operations.step.tolist(), operations.seq.tolist()) == ([0, 0], [0, 1])
    assert (operations.micro_batch.tolist(), operations.chunk.tolist()) == ([0, -1], [-1, 2])
    assert (rank.first_ns, rank.last_ns) == (THEN, THEN + SECOND)
    assert (evidence.notes, evidence.probes, evidence.world_size) == ([], {}, 4)


def test_parts_of_one_rank_are_put_together_in_order_of_time(store):
    later = a_part(
        0, 70, operations=msgspec.structs.replace(a_part(0, 70).operations, names=["x", "forward"])
    )
    taken(store, batches(a_part(0, 1), second=1), batches(later, second=70), batches(a_part(0, 2), second=2))
    operations = store.evidence("traced", *EVER).ranks[0].operations
    assert operations.step.tolist() == [1, 1, 2, 2, 70, 70]
    assert [operations.names[kind] for kind in operations.kind] == [*NAMES, *NAMES, "x", "forward"]


def test_two_operations_that_look_alike_are_two(store):
    one = a_part(0).operations
    double = Operations(
        names=one.names,
        **{name: [getattr(one, name)[0]] * 2 for name in one.__struct_fields__ if name != "names"},
    )
    taken(store, batches(a_part(0, operations=double)))
    assert store.evidence("traced", *EVER).ranks[0].operations.start_ns.tolist() == [THEN + 1] * 2


def test_the_newest_place_and_progress_count_for_each_communicator_in_whatever_order(store):
    pair = msgspec.structs.replace(WORLD, uid="1", size=2)

    def told(second, stage, *reached):
        progress = [
            Progress(communicator=place, enqueued=n, started=n, completed=n - 1) for place, n in reached
        ]
        place = Place() if stage is None else Place(stage=stage)
        return batches(
            a_part(0, second, communicators=[WORLD, pair], place=place, progress=progress), second=second
        )

    taken(store, told(3, None, (1, 30)), told(1, 1, (0, 10), (1, 10)), told(2, 2, (0, 20)))
    rank = store.evidence("traced", *EVER).ranks[0]
    assert rank.place == Place(stage=2)
    assert [(one.communicator, one.enqueued) for one in rank.progress] == [(0, 20), (1, 30)]


def test_a_world_size_that_only_some_know_holds_for_all(store):
    taken(store, batches(a_part(0, world_size=1)), batches(a_part(5, world_size=8)))
    assert store.evidence("traced", 0, THEN + SECOND).world_size == 8
    (info,) = store.jobs()
    assert (info.world_size, info.ranks_seen, info.nodes) == (8, 2, 0)
    assert (info.source, info.imported) == ("operations", "files")


def test_a_rank_without_rows_is_there(store):
    taken(store, batches(a_part(3, collectives=Collectives(), operations=Operations())))
    rank = store.evidence("traced", *EVER).ranks[3]
    assert (len(rank.collectives.seq), rank.operations, rank.first_ns) == (0, None, THEN)


def test_where_nothing_is_known_of_the_node_it_has_no_name_and_no_agent(store):
    taken(store, batches(a_part(0)), batches(a_part(1), node="node-x"))
    add(store, a_batch(3))
    evidence = store.evidence("traced", *EVER)
    assert {rank: one.node for rank, one in evidence.ranks.items()} == {0: "", 1: "node-x"}
    assert list(store.probes()) == ["node-a"]
    assert store.nodes_of("traced") == {}


@pytest.mark.parametrize("imported_at", [NOW, THEN - DAY])
def test_a_trace_keeps_its_own_time_whenever_it_is_imported(store, imported_at):
    store.add_import("traced", "files", batches(a_part(0)), imported_at)
    assert store.evidence("traced", *EVER).notes == []
    assert store.jobs()[0].last_ns == THEN + SECOND


def test_notes_are_told_at_any_window(store):
    note = Event(kind="import-note", at_ns=THEN, detail="half is missing", job="traced", rank=-1)
    taken(store, batches(a_part(0), events=[note]), batches(a_part(0, 50), second=50))
    for window in (EVER, (THEN + 40 * SECOND, THEN + 60 * SECOND)):
        assert store.evidence("traced", *window).notes == ["half is missing"]


# --- all or nothing


class Torn(Exception):
    pass


def torn(after):
    for rank in range(after):
        yield from batches(a_part(rank))
    raise Torn


def test_an_import_that_breaks_off_leaves_nothing(store, path):
    with pytest.raises(Torn):
        store.add_import("traced", "files", torn(3), NOW)
    assert set(rows(path).values()) == {0}


def test_an_import_that_breaks_off_leaves_what_it_was_to_replace(store, path):
    taken(store, batches(a_part(0)), imported="old")
    before = rows(path)
    with pytest.raises(Torn):
        store.add_import("traced", "new", torn(3), NOW, replacing=True)
    assert rows(path) == before
    assert store.jobs()[0].imported == "old"


KILLED = """
import sys
from diagnosis.store.sqlite import SqliteStore
from tests.diagnosis.store.imported import a_part, batches

def half():
    yield from batches(a_part(0))
    print("half", flush=True)
    sys.stdin.read()

SqliteStore(sys.argv[1]).add_import("traced", "files", half(), 0)
"""


def test_an_import_that_is_killed_leaves_nothing_and_the_store_takes_the_next(store, path):
    importing = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with importing:
        assert importing.stdout.readline() == "half\n"
        importing.kill()
    assert set(rows(path).values()) == {0}
    assert not [name for name in path.parent.iterdir() if not name.name.startswith(path.name)]
    taken(store, batches(a_part(1)))
    assert sorted(store.evidence("traced", *EVER).ranks) == [1]


def test_errors_of_the_files_are_not_taken_for_the_stores(store):
    def unreadable():
        yield from batches(a_part(0))
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        store.add_import("traced", "files", unreadable(), NOW)


def test_a_store_that_gets_full_at_the_end_has_nothing_of_it(store, path, monkeypatch):
    pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
    unlimited = opening.for_import

    @contextmanager
    def limited(at):
        with unlimited(at) as db:
            db.execute(f"PRAGMA max_page_count = {pages}")
            yield db

    monkeypatch.setattr(opening, "for_import", limited)
    big = {f"{number}": "x" * 900 for number in range(400)}
    with pytest.raises(StoreError, match=r"disk under the store .* is full"):
        taken(store, batches(*(a_part(rank, env=big) for rank in range(4))))
    assert set(rows(path).values()) == {0}


def test_a_full_folder_for_temporary_files_is_said(store, path, monkeypatch):
    unlimited = opening.for_import

    @contextmanager
    def limited(at):
        with unlimited(at) as db:
            db.execute("CREATE TEMP TABLE one (a)")
            db.execute("PRAGMA temp.max_page_count = 3")
            yield db

    monkeypatch.setattr(opening, "for_import", limited)
    dense = Operations(
        **{
            name: random.Random(name).sample(range(1 << 50), 4096)
            for name in Operations.__struct_fields__
            if name not in ("names", "kind")
        },
        names=NAMES,
        kind=[0] * 4096,
    )
    with pytest.raises(StoreError, match=r"folder for temporary files .* set TMPDIR to another folder"):
        taken(store, batches(*(a_part(rank, operations=dense) for rank in range(4))))
    assert set(rows(path).values()) == {0}


def test_agents_batches_are_stored_while_files_are_read(store):
    def slowly():
        for rank in range(3):
            assert add(store, a_batch(rank)) == [True]
            yield from batches(a_part(rank))

    store.add_import("traced", "files", slowly(), NOW)
    assert len(store.evidence("job-1", *EVER).ranks[0].collectives.seq) == 6
    assert sorted(store.evidence("traced", *EVER).ranks) == [0, 1, 2]


def test_without_a_rank_nothing_is_stored(store, path):
    with pytest.raises(ValueError, match="holds no rank"):
        taken(store, [])
    assert set(rows(path).values()) == {0}


# --- names that are taken


def test_a_name_that_is_taken_is_refused(store, path):
    taken(store, batches(a_part(0)))
    before = rows(path)
    with pytest.raises(JobExists, match="--replace puts this import in its place"):
        taken(store, batches(a_part(1)), imported="others")
    assert rows(path) == before


def test_replacing_leaves_nothing_of_the_import_before(store, path):
    note = Event(kind="import-note", at_ns=THEN, detail="old", job="traced")
    taken(store, batches(a_part(0), events=[note]), batches(a_part(1), node="node-x"))
    taken(store, batches(a_part(2)), imported="new", replacing=True)
    assert rows(path) == {"boot": 1, "sender": 1, "batch": 1, "watch": 1, "chunk": 1, "tail": 0, "event": 0}
    assert sorted(store.evidence("traced", *EVER).ranks) == [2]


def test_what_agents_saw_is_never_replaced(store):
    add(store, a_batch(3))
    with pytest.raises(JobExists, match="seen by agents"):
        taken(store, batches(a_part(0)), job="job-1", replacing=True)
    assert len(store.evidence("job-1", *EVER).ranks[0].collectives.seq) == 2


def test_what_agents_see_later_hides_an_import_of_that_name(store):
    taken(store, batches(a_part(0), a_part(1)), job="job-1")
    add(store, a_batch(3))
    assert sorted(store.evidence("job-1", *EVER).ranks) == [0]
    (info,) = store.jobs()
    assert (info.source, info.imported, info.first_ns) == ("agent", "", utc(3))


# --- forgetting


def test_an_import_is_kept_by_its_arrival_and_goes_as_a_whole(path):
    store = SqliteStore(path, keep=Keep(days=14, gb=20))
    note = Event(kind="import-note", at_ns=THEN, detail="x", job="traced")
    parts = [one for second in range(40) for one in batches(a_part(0, second), second=second, events=[note])]
    store.add_import("traced", "files", parts, NOW)
    store.tidy(NOW + 13 * DAY)
    assert len(store.evidence("traced", *EVER).ranks[0].collectives.seq) == 40
    store.tidy(NOW + 15 * DAY)
    store.close()
    assert set(rows(path).values()) == {0}


def test_an_import_that_was_forgotten_can_be_imported_again(path):
    store = SqliteStore(path, keep=Keep(days=14, gb=20))
    taken(store, batches(a_part(0)))
    store.tidy(NOW + 15 * DAY)
    store.add_import("traced", "files", batches(a_part(0)), NOW + 15 * DAY)
    assert len(store.evidence("traced", *EVER).ranks[0].collectives.seq) == 1
    store.close()


# --- the same by agents' batches


def told_by_an_agent(second):
    """What only importers tell today, in an agent's batch."""
    at = second * SECOND + 5
    rank = a_rank(
        second,
        collectives=msgspec.structs.replace(
            a_rank(second).collectives, state=[State.COMPLETED, State.STARTED]
        ),
        operations=Operations(
            names=["k", f"k{second}"],
            kind=[1, 0],
            lane=[1, 1],
            step=[second, second],
            start_ns=[at, at],
            duration_ns=[1, 1],
            seq=[second, second],
            micro_batch=[0, 0],
            chunk=[0, 0],
        ),
        place=Place(stage=second % 3),
        progress=[Progress(communicator=0, enqueued=second, started=second, completed=-1)],
        timed_by=TimedBy.DEVICE,
    )
    return a_batch(second, ranks=[rank])


AGENTS = [told_by_an_agent(second) for second in range(57, 64)]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations([*AGENTS, *AGENTS[::2]]))
def test_what_agents_tell_of_it_is_the_same_in_any_order_and_however_often(order, tmp_path_factory):
    evidence = []
    for arriving in (AGENTS, order):
        store = SqliteStore(tmp_path_factory.mktemp("store") / "sysom.db")
        store._writer.execute("PRAGMA synchronous = OFF")
        add(store, *arriving)
        evidence.append(plain(store.evidence("job-1", utc(0), utc(100))))
        store.close()
    assert evidence[0] == evidence[1]
    rank = evidence[0]["ranks"][0]
    assert rank["operations"]["step"] == [second for second in range(57, 64) for _ in range(2)]
    assert rank["place"] == Place(stage=63 % 3)
    assert rank["progress"] == [Progress(communicator=0, enqueued=63, started=63, completed=-1)]
    assert rank["collectives"]["state"] == [State.COMPLETED, State.STARTED] * 7
    assert rank["timed_by"] == TimedBy.DEVICE
    assert rank["operations"]["start_ns"][0] == utc(57) + 5


def test_a_state_that_does_not_exist_is_none(store):
    odd = msgspec.structs.replace(a_rank(3).collectives, state=[1 << 62, -5])
    add(store, a_batch(3, ranks=[a_rank(3, collectives=odd)]))
    assert len(store.evidence("job-1", *EVER).ranks[0].collectives.state) == 0
