"""Minutes that are packed once they are over: however batches came and wherever they are cut, the same is read."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diagnosis.store.sqlite import SqliteStore
from probes.records import Collectives, ThreadTime
from tests.diagnosis.store.arrivals import add
from tests.diagnosis.store.compared import plain, stored
from tests.probes.batches import OFFSET, SECOND, a_batch, a_rank, utc


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
