"""What probes of the host tell is read as it was sent: what threads blocked for, who woke them, and metrics of
ranks and of nodes, in the running minute and in minutes that are packed, from batches in any order."""

import math
import sqlite3
from dataclasses import astuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diagnosis.evidence import MetricRow, WakerRow
from diagnosis.host_time import host_time, metrics_of
from diagnosis.ingest import Ingest
from diagnosis.store import Keep, StoreError, stats
from diagnosis.store.sqlite import SqliteStore
from probes import codec
from probes.recording import Header, Writer, read
from probes.records import Collectives, Metric, Role, ThreadTime, Waker
from probes.replay import play, retimed
from tests.diagnosis.store.arrivals import add
from tests.diagnosis.store.compared import plain
from tests.probes.batches import OFFSET, SECOND, a_batch, a_rank, utc

FUTEX_FROM = 5
"""Before this second the thread never blocked on a futex, so no batch tells of it."""
SILENT = 8
"""In this second nothing tells what it blocked for."""


def a_thread(second, role=Role.DRIVING, tid=101):
    at = [second * SECOND + SECOND // 4, second * SECOND + 3 * SECOND // 4]
    blocked_by = {"poll": [one // 10 + 1 for one in at]}
    if second >= FUTEX_FROM:
        blocked_by["futex"] = [one // 5 - FUTEX_FROM * SECOND // 5 for one in at]
    return ThreadTime(
        tid=tid,
        role=role,
        since_ns=0,
        at_ns=at,
        running_ns=[0, 0],
        runnable_ns=[0, 0],
        blocked_ns=at,
        uninterruptible_ns=[0, 0],
        interrupted_ns=[0, 0],
        blocked_by={} if second == SILENT else blocked_by,
    )


def a_second(second, **changes):
    """Two threads; a waker, of sleeps that grow by 1 ms each second; a counter and a state of rank and node."""
    rank = a_rank(
        second,
        threads=[a_thread(second), a_thread(second, Role.HELPER, 300)],
        wakers=[
            Waker(tid=101, reason="poll", pid=300, waker_tid=301, name="pt_data", slept_ns=second * 1_000_000)
        ],
        metrics=[
            Metric(name="major_faults", value=float(second), unit="1"),
            Metric(name="softirq_ns", value=2e6, unit="ns", labels={"vector": "NET_RX", "cpu": "3"}),
        ],
    )
    metrics = [
        Metric(name="load", value=0.5 + second, unit="ratio"),
        Metric(name="block_bytes", value=1e15 + second, unit="B", labels={"device": "sda\n\0'\U0001f980"}),
    ]
    return a_batch(second, **({"ranks": [rank], "metrics": metrics} | changes))


def told(evidence, node="node-a"):
    """All of it, as plain values."""
    rank = evidence.ranks[0]
    return (
        {(t.tid, t.role): (plain(t.at_ns), plain(dict(t.blocked_by))) for t in rank.threads},
        list(rank.wakers),
        list(rank.metrics),
        list(evidence.metrics[node]),
    )


def expected(first, last):
    """What :func:`told` is of the seconds ``first`` to before ``last``, from how :func:`a_second` makes them."""
    at = [second * SECOND + part * SECOND // 4 for second in range(first, last) for part in (1, 3)]
    poll, futex = [], []
    for one in at:
        silent = one // SECOND == SILENT
        poll.append(poll[-1] if silent and poll else 0 if silent else one // 10 + 1)
        since = max(0, one // 5 - FUTEX_FROM * SECOND // 5)
        futex.append(futex[-1] if silent and futex else 0 if silent else since)
    blocked_by = {"futex": futex, "poll": poll}
    columns = ([OFFSET + one for one in at], {reason: one for reason, one in blocked_by.items() if any(one)})
    spans = [(second, utc(second), utc(second + 1)) for second in range(first, last)]
    odd = (("device", "sda\n\0'\U0001f980"),)
    return (
        {(101, Role.DRIVING): columns, (300, Role.HELPER): columns},
        [WakerRow(a, b, 101, "poll", 300, 301, "pt_data", second * 1_000_000) for second, a, b in spans],
        [
            row
            for second, a, b in spans
            for row in (
                MetricRow(a, b, "major_faults", "1", (), float(second)),
                MetricRow(a, b, "softirq_ns", "ns", (("cpu", "3"), ("vector", "NET_RX")), 2e6),
            )
        ],
        [
            row
            for second, a, b in spans
            for row in (
                MetricRow(a, b, "block_bytes", "B", odd, 1e15 + second),
                MetricRow(a, b, "load", "ratio", (), 0.5 + second),
            )
        ],
    )


def test_what_is_sent_is_evidence(store):
    add(store, *map(a_second, range(3, 12)))
    assert told(store.evidence("job-1", utc(0), utc(100))) == expected(3, 12)


def test_a_window_has_what_overlaps_it(store, path):
    add(store, *map(a_second, range(130)))
    assert told(store.evidence("job-1", utc(50), utc(70))) == expected(50, 70)
    evidence = store.evidence("job-1", utc(50.5), utc(51.1))
    assert [row.start_ns for row in evidence.ranks[0].wakers] == [utc(50), utc(51)]
    assert [row.start_ns for row in evidence.metrics["node-a"]] == [utc(50)] * 2 + [utc(51)] * 2
    assert evidence.ranks[0].threads[0].at_ns.tolist() == [utc(50.75)]
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT minute FROM node_chunk ORDER BY minute").fetchall() == [(0,), (1,)]
        (left,) = db.execute("SELECT count(*) FROM batch WHERE metrics IS NOT NULL").fetchone()
        assert left == 10, "only the running minute's are as they came"


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_in_any_order_and_twice_it_is_the_same(tmp_path_factory, data):
    """Some minutes are packed before all of theirs came."""
    seconds = [*range(2, 12), *range(58, 63), 121]
    sent = data.draw(st.permutations(seconds)) + data.draw(st.lists(st.sampled_from(seconds), max_size=5))
    store = SqliteStore(tmp_path_factory.mktemp("any") / "sysom.db")
    store._writer.execute("PRAGMA synchronous = OFF")
    add(store, *map(a_second, sent))
    for first, last in ((2, 12), (58, 63), (121, 122)):
        assert told(store.evidence("job-1", utc(first), utc(last))) == expected(first, last)
    store.close()


def test_a_reason_is_what_it_was_where_a_batch_does_not_tell_it(store):
    add(store, *map(a_second, range(FUTEX_FROM - 1, SILENT + 2)))
    (thread, _) = store.evidence("job-1", utc(0), utc(100)).ranks[0].threads
    futex = thread.blocked_by["futex"].tolist()
    assert futex[:3] == [0, 0, SECOND // 20]
    silent = 2 * (SILENT - FUTEX_FROM + 1)
    assert futex[silent : silent + 2] == [futex[silent - 1]] * 2 < futex[silent + 2 : silent + 4]


def test_a_reason_never_grew_by_more_than_the_thread_blocked_where_the_window_begins_without_it(store):
    """A batch that was too large for the server tells reasons at its last cut only (``probes.fit``)."""

    def thinned(second):
        thread = a_thread(second)
        last = {reason: [0, column[-1]] for reason, column in thread.blocked_by.items()}
        return a_second(
            second, ranks=[a_rank(second, threads=[msgspec.structs.replace(thread, blocked_by=last)])]
        )

    add(store, thinned(1000), thinned(1001))
    (thread,) = store.evidence("job-1", utc(1000), utc(1002)).ranks[0].threads
    assert thread.blocked_by["poll"].tolist() == [99_575_000_001, *[100_075_000_001] * 2, 100_175_000_001]


def test_nodes_keep_their_own(store):
    """Also over a reboot; one without metrics has none."""
    later = OFFSET + 1000 * SECOND
    load = [Metric(name="load", value=7.0, unit="ratio")]
    add(
        store,
        a_second(3),
        a_second(3, node="node-b", ranks=[a_rank(3, rank=1)], metrics=load),
        a_second(4, node="node-c", ranks=[a_rank(4, rank=2)], metrics=[]),
        a_second(5, boot_id="boot-2", utc_offset_ns=later),
    )
    evidence = store.evidence("job-1", utc(0), utc(2000))
    assert {node: [row.value for row in rows] for node, rows in evidence.metrics.items()} == {
        "node-a": [1e15 + 3, 3.5, 1e15 + 5, 5.5],
        "node-b": [7.0],
    }
    assert [row.start_ns for row in evidence.metrics["node-a"]] == [utc(3)] * 2 + [utc(1005)] * 2


@pytest.mark.parametrize("values", [[-0.0, 5e-324, 1.7976931348623157e308, -1e-9, 2.0**53 + 2]])
def test_numbers_are_kept_to_the_last_bit_packed_or_not(store, values):
    def second(number):
        metrics = [
            Metric(name=f"m{place}", value=value, unit="", labels={}) for place, value in enumerate(values)
        ]
        slept = [-(1 << 63), (1 << 63) - 1, -1]
        wakers = [
            Waker(tid=-1, reason="", pid=0, waker_tid=place, name="", slept_ns=one)
            for place, one in enumerate(slept)
        ]
        rank = a_rank(number, metrics=metrics, wakers=wakers)
        return a_batch(number, ranks=[rank], metrics=metrics)

    add(store, second(3), second(70))
    for number in (3, 70):
        evidence = store.evidence("job-1", utc(number), utc(number + 1))
        for rows in (evidence.ranks[0].metrics, evidence.metrics["node-a"]):
            assert [repr(row.value) for row in rows] == [repr(value) for value in values]
        assert [row.slept_ns for row in evidence.ranks[0].wakers] == [-(1 << 63), (1 << 63) - 1, -1]


def test_encoded_batches_become_the_numbers_that_the_engine_counts_with(store):
    now = 0
    ingest = Ingest(store, {"node-a": "t"}, clock_ns=lambda: now)
    for second in range(55, 65):
        now = utc(second + 1)
        assert ingest.accept("node-a", codec.encode(a_second(second))).stored
    evidence = store.evidence("job-1", utc(55), utc(65))
    of_rank = metrics_of(evidence.ranks[0].metrics, utc(55), utc(65), steps=20.0)
    assert of_rank == {
        ("major_faults", ()): pytest.approx(sum(range(55, 65)) / 20),
        ("softirq_ns", (("cpu", "3"), ("vector", "NET_RX"))): pytest.approx(10 * 2.0 / 20),  # ms per step
    }
    of_node = metrics_of(evidence.metrics["node-a"], utc(60), utc(65), steps=1.0)
    assert of_node["load", ()] == pytest.approx(62.5)  # the mean of 60.5 to 64.5


def test_encoded_batches_become_what_a_rank_slept_for_and_who_woke_it(store):
    """Of each second the thread polls a tenth and waits on a futex for a fifth; its own process wakes it."""
    ingest = Ingest(store, {"node-a": "t"}, clock_ns=lambda: utc(65))
    for second in range(55, 65):
        waker = Waker(tid=101, reason="futex", pid=100, waker_tid=102, name="w", slept_ns=second * 1_000_000)
        rank = a_rank(second, collectives=Collectives(), threads=[a_thread(second)], wakers=[waker])
        ingest.accept("node-a", codec.encode(a_second(second, ranks=[rank])))
    rank = store.evidence("job-1", utc(0), utc(100)).ranks[0]
    found = host_time(rank, {100}, (), utc(58), utc(62), steps=8.0, blocked_ms=500.0)
    assert found.asleep == pytest.approx({"poll": 50.0, "futex": 100.0}, rel=1e-6)
    ((reason, kind, name, pid, tid, ms),) = map(astuple, found.woken)
    assert (reason, kind, name, pid, tid) == ("futex", "own", "w", 100, 102)
    assert ms == pytest.approx((58 + 59 + 60 + 61) / 8)


def test_a_recording_gives_the_evidence_when_it_is_played(store, tmp_path):
    header = Header(node="node-a", made_ns=0, kernel="", cpus=2, note="")
    writer = Writer(tmp_path / "r", header)
    for second in range(55, 65):
        writer.add(a_second(second))
    writer.close()
    ingest = Ingest(store, {"node-a": "t"}, clock_ns=lambda: utc(65))
    play(
        retimed([read(tmp_path / "r")], utc(65)),
        lambda node, wire: ingest.accept(node, wire),
        live=False,
        wait=pytest.fail,
    )
    assert told(store.evidence("job-1", utc(0), utc(100))) == expected(55, 65)


# --- age, size, damage, and older stores


def test_metrics_of_a_node_go_with_its_batches(path):
    store = SqliteStore(path, keep=Keep(days=1, gb=20))
    store._writer.execute("PRAGMA synchronous = OFF")
    add(store, *map(a_second, range(0, 200, 5)))
    assert store.tidy(utc(86_400 + 125)) > 0
    assert {row.start_ns for row in store.evidence("job-1", utc(0), utc(300)).metrics["node-a"]} == {
        utc(second) for second in range(180, 200, 5)
    }
    store.tidy(utc(3 * 86_400))
    with sqlite3.connect(path) as db:
        for table in ("batch", "node_chunk", "chunk", "tail"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    store.close()


def test_metrics_alone_fill_a_store_that_forgets_for_size(path):
    """A node without ranks: what it measures is all there is."""
    store = SqliteStore(path, keep=Keep(days=14, gb=0.0003))
    store._writer.execute("PRAGMA synchronous = OFF")
    for second in range(0, 3600, 6):
        values = [math.sin(second * 40 + place) for place in range(40)]
        metrics = [Metric(name=f"m{place}", value=value, unit="1") for place, value in enumerate(values)]
        add(store, a_batch(second, ranks=[], metrics=metrics))
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT sum(length(columns)) FROM node_chunk").fetchone()[0] > 120_000
    assert store.tidy(utc(3600)) > 0
    with sqlite3.connect(path) as db:
        oldest = db.execute("SELECT min(start_ns) / 60000000000 FROM batch").fetchone()
        assert db.execute("SELECT min(minute) FROM node_chunk").fetchone() == oldest > (0,)
    store.close()


def test_metrics_that_an_older_version_stored_are_read_and_packed(store, path):
    """They stood there as records."""
    metrics = [Metric(name="load", value=0.25, unit="ratio", labels={"b": "2", "a": "1"})]
    add(store, a_batch(3))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE batch SET metrics = ?", (msgspec.msgpack.encode(metrics),))
    rows = [MetricRow(utc(3), utc(4), "load", "ratio", (("a", "1"), ("b", "2")), 0.25)]
    assert store.evidence("job-1", utc(0), utc(10)).metrics == {"node-a": rows}
    add(store, a_batch(70))
    assert store.evidence("job-1", utc(0), utc(10)).metrics == {"node-a": rows}
    assert sqlite3.connect(path).execute("SELECT count(*) FROM node_chunk").fetchone() == (1,)


@pytest.mark.parametrize("table", ["batch", "node_chunk"])
def test_damage_is_said_and_found(store, path, table):
    add(store, a_second(3), a_second(70))
    column = "metrics" if table == "batch" else "columns"
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE {table} SET {column} = x'93fd01'")
    with pytest.raises(StoreError, match="damaged columns"):
        list(store.evidence("job-1", utc(0), utc(100)).metrics["node-a"])
    assert [words for words in stats.check(path) if words.startswith(table)]
