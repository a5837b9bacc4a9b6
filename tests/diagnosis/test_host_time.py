"""What the host's probes tell of one rank per step: sums that never exceed what was slept, and who is who."""

from dataclasses import replace

import numpy as np
import pytest

from bench.synthetic import T0, build, plan
from diagnosis.evidence import CollectiveTable, MetricRow, RankEvidence, ThreadSeries, WakerRow
from diagnosis.findings import HostTime, Woken
from diagnosis.host_time import host_time, mean_of, metrics_of
from probes.records import Op, Role

MS, S = 10**6, 10**9
PID, WORKER, OTHER_RANK = 1002, 4411, 1003


def thread(
    tid: int = PID,
    role: Role = Role.DRIVING,
    *,
    at: list[int],
    blocked: list[int],
    running: list[int] | None = None,
    **by: list[int],
) -> ThreadSeries:
    """A thread by its cuts; all in ms, cumulative. ``by``: reasons, with _ for -."""
    at_ns, blocked_ns = np.array(at, np.int64) * MS, np.array(blocked, np.int64) * MS
    running_ns = at_ns - blocked_ns if running is None else np.array(running, np.int64) * MS
    return ThreadSeries(
        tid=tid,
        role=role,
        since_ns=T0,
        at_ns=T0 + at_ns,
        running_ns=running_ns,
        runnable_ns=at_ns - running_ns - blocked_ns,
        blocked_ns=blocked_ns,
        uninterruptible_ns=np.zeros_like(at_ns),
        interrupted_ns=np.zeros_like(at_ns),
        stolen_at_ns=np.zeros(0, np.int64),
        stolen_ns=np.zeros(0, np.int64),
        blocked_by={name.replace("_", "-"): np.array(column, np.int64) * MS for name, column in by.items()},
    )


def collectives(*spans: tuple[int, int]) -> CollectiveTable:
    """All-reduces from and to these instants, in ms."""
    begin, end = (np.array([span[place] for span in spans], np.int64) * MS for place in (0, 1))
    rows = len(spans)
    return CollectiveTable(
        communicator=np.zeros(rows, np.int64),
        seq=np.arange(rows, dtype=np.int64),
        op=np.full(rows, Op.ALLREDUCE, np.int64),
        bytes=np.full(rows, 1024, np.int64),
        enter_ns=T0 + begin,
        duration_ns=end - begin,
        failed=np.zeros(rows, np.bool_),
    )


def rank(
    *threads: ThreadSeries, spans: tuple[tuple[int, int], ...] = (), wakers: tuple[WakerRow, ...] = ()
) -> RankEvidence:
    return replace(
        build(plan(steps=2))[0].ranks[2],
        threads=list(threads),
        collectives=collectives(*spans),
        wakers=list(wakers),
        last_ns=T0 + 10 * S,
    )


def waker(
    reason: str, pid: int, slept_ms: float, name: str = "python3", tid: int = PID, **when: int
) -> WakerRow:
    return WakerRow(
        start_ns=T0 + when.get("start_ms", 0) * MS,
        end_ns=T0 + when.get("end_ms", 1000) * MS,
        tid=tid,
        reason=reason,
        pid=pid,
        waker_tid=pid,
        name=name,
        slept_ns=int(slept_ms * MS),
    )


def seen(
    of: RankEvidence, *, start: int = 0, end: int = 1000, steps: float = 10.0, blocked: float = 1e6
) -> HostTime:
    ranks = {PID, OTHER_RANK}
    return host_time(of, ranks, ["cgroup"], T0 + start * MS, T0 + end * MS, steps, blocked)


# --- what it slept for ---------------------------------------------------------------------------------------


def test_sleeps_are_told_by_reason_per_step():
    of = rank(
        thread(at=[0, 500, 1000], blocked=[0, 200, 450], storage_read=[0, 150, 300], sleep=[0, 50, 150])
    )
    assert seen(of).asleep == {"storage-read": pytest.approx(30.0), "sleep": pytest.approx(15.0)}


def test_waits_in_collectives_are_taken_from_futexes_first():
    """300 ms in a collective: that is 300 of 400 ms on futexes, and none of the disk's."""
    of = rank(
        thread(at=[0, 1000], blocked=[0, 600], futex=[0, 400], storage_read=[0, 200]), spans=((100, 400),)
    )
    assert seen(of).asleep == {"futex": pytest.approx(10.0), "storage-read": pytest.approx(20.0)}


def test_what_futexes_do_not_cover_comes_off_all_else_in_proportion():
    """300 ms in a collective, 100 on futexes: of 300 ms for disks and 100 unknown half is left."""
    of = rank(
        thread(at=[0, 1000], blocked=[0, 500], futex=[0, 100], storage_read=[0, 300]), spans=((100, 400),)
    )
    assert seen(of).asleep == {"storage-read": pytest.approx(15.0)}  # 30 ms, half of it


def test_a_collective_takes_only_from_sleeps_around_it():
    """The first half second has the disk, the second the collective."""
    of = rank(
        thread(at=[0, 500, 1000], blocked=[0, 200, 400], storage_read=[0, 200, 200], futex=[0, 0, 200]),
        spans=((600, 800),),
    )
    assert seen(of).asleep == {"storage-read": pytest.approx(20.0)}


def test_all_reasons_together_are_no_more_than_the_account_has():
    """Blocks whose stack got its reason late are added to a later cut, which may be in another window."""
    of = rank(thread(at=[0, 1000], blocked=[0, 600], storage_read=[0, 450], sleep=[0, 150]))
    asleep = seen(of, blocked=30.0).asleep
    assert sum(asleep.values()) == pytest.approx(30.0)
    assert asleep["storage-read"] == pytest.approx(22.5)


def test_a_stretch_across_the_bounds_counts_by_its_overlap():
    of = rank(thread(at=[0, 1000, 2000], blocked=[0, 400, 400], sleep=[0, 400, 400]))
    assert seen(of, start=500, end=2000, steps=10.0).asleep == {"sleep": pytest.approx(20.0)}
    assert seen(of, start=1000, end=2000).asleep == {}


def test_utc_nanoseconds_are_exact_enough():
    """1,000 naps of 100 ns, every other in a collective. A float of UTC nanoseconds is 256 ns coarse: it would not
    tell them apart."""
    naps = np.arange(1001, dtype=np.int64) * 100
    nothing = np.zeros(1001, np.int64)
    driving = replace(
        thread(at=[0] * 1001, blocked=[0] * 1001),
        at_ns=T0 + naps,
        blocked_ns=naps,
        running_ns=nothing,
        runnable_ns=nothing,
        blocked_by={"futex": naps},
    )
    spans = replace(
        collectives(*[(0, 0)] * 500), enter_ns=T0 + naps[:-1:2], duration_ns=np.full(500, 100, np.int64)
    )
    of = replace(rank(driving), collectives=spans)
    told = host_time(of, set(), [], T0, T0 + 100_000, 1.0, 1e6)
    assert told.asleep["futex"] == pytest.approx(0.05, rel=1e-9)


def test_other_threads_and_other_times_tell_nothing():
    of = rank(
        thread(at=[0, 1000], blocked=[0, 600]),
        thread(9, Role.COMMUNICATION, at=[0, 1000], blocked=[0, 900], futex=[0, 900]),
    )
    told = seen(of)
    assert (told.asleep, told.told) == ({}, {"cgroup"})
    assert seen(rank(thread(at=[0, 1000], blocked=[0, 9], sleep=[0, 9]))).told == {"cgroup", "reasons"}


# --- who woke it, and its helpers ------------------------------------------------------------------------------


def test_wakers_are_told_by_what_they_are_to_the_rank():
    driving = thread(at=[0, 1000], blocked=[0, 600], futex=[0, 600])
    helper = thread(WORKER, Role.HELPER, at=[0, 1000], blocked=[0, 0])
    rows = (
        waker("futex", PID, 80, "pt_gloo_runloop"),
        waker("futex", PID, 70, "prefetch"),
        waker("futex", 0, 60, "interrupt"),
        waker("futex", OTHER_RANK, 50),
        waker("futex", WORKER, 40),
        waker("futex", 777, 30, "tee"),
        waker("", -1, 20, "other"),
        waker("futex", 777, 999, tid=PID + 1),  # it woke another thread
    )
    told = seen(rank(driving, helper, wakers=rows))
    assert [(one.kind, one.ms) for one in told.woken] == [
        ("communication", 8.0),
        ("own", 7.0),
        ("interrupt", 6.0),
        ("rank", 5.0),
        ("helper", 4.0),
        ("process", 3.0),
        ("rest", 2.0),
    ]
    assert told.ended["futex", "own"] == 7.0
    assert told.ended["", "rest"] == 2.0


def test_wakings_of_several_seconds_are_one_and_count_by_their_overlap():
    driving = thread(at=[0, 2000], blocked=[0, 600], futex=[0, 600])
    rows = (waker("futex", 777, 80), waker("futex", 777, 40, start_ms=1000, end_ms=2000))
    (one,) = seen(rank(driving, wakers=rows), start=500, end=2000).woken
    assert one.ms == pytest.approx(8.0)  # (40 + 40) / 10


def test_what_it_waited_for_a_worker_is_what_the_worker_did():
    """The worker has work for 400 ms: 300 of them a disk. Its waits for more work do not count."""
    driving = thread(at=[0, 1000], blocked=[0, 250], poll=[0, 250])
    worker = thread(
        WORKER,
        Role.HELPER,
        at=[0, 1000],
        blocked=[0, 900],
        running=[0, 100],
        poll=[0, 600],
        storage_read=[0, 300],
    )
    told = seen(rank(driving, worker, wakers=(waker("poll", WORKER, 200, "pt_data_worker"),)))
    assert told.through_helpers == {"storage-read": pytest.approx(15.0), "running": pytest.approx(5.0)}
    assert told.helpers == (Woken("storage-read", "helper", "pt_data_worker", WORKER, WORKER, 20.0),)
    assert told.asleep == {"poll": pytest.approx(5.0)}  # 25 ms, 20 of them for the worker


def test_helpers_explain_no_more_than_was_slept():
    driving = thread(at=[0, 1000], blocked=[0, 100], poll=[0, 100])
    worker = thread(WORKER, Role.HELPER, at=[0, 1000], blocked=[0, 0])
    told = seen(rank(driving, worker, wakers=(waker("poll", WORKER, 900),)))
    assert told.through_helpers == {"running": pytest.approx(10.0)}
    assert sum(told.asleep.values()) == 0.0


def test_a_worker_that_sleeps_for_unknown_reasons_is_not_said_to_compute():
    driving = thread(at=[0, 1000], blocked=[0, 100], poll=[0, 100])
    worker = thread(WORKER, Role.HELPER, at=[0, 1000], blocked=[0, 750])
    told = seen(rank(driving, worker, wakers=(waker("poll", WORKER, 100),)))
    assert told.through_helpers == {"running": pytest.approx(2.5), "not seen": pytest.approx(7.5)}


def test_a_worker_that_only_waits_itself_explains_nothing():
    driving = thread(at=[0, 1000], blocked=[0, 100], poll=[0, 100])
    worker = thread(WORKER, Role.HELPER, at=[0, 1000], blocked=[0, 1000], futex=[0, 1000])
    told = seen(rank(driving, worker, wakers=(waker("poll", WORKER, 90),)))
    assert (told.through_helpers, told.helpers) == ({}, ())
    assert told.asleep == {"poll": pytest.approx(10.0)}


# --- metrics -------------------------------------------------------------------------------------------------


def row(name: str, unit: str, value: float, start: int = 0, end: int = 1, **labels: str) -> MetricRow:
    return MetricRow(T0 + start * S, T0 + end * S, name, unit, tuple(sorted(labels.items())), value)


def metrics(*rows: MetricRow, start: float = 0, end: float = 2, steps: float = 20.0) -> dict:
    return metrics_of(rows, T0 + int(start * S), T0 + int(end * S), steps)


def test_counters_are_per_step_and_times_in_ms():
    found = metrics(
        row("reclaim_ns", "ns", 300e6), row("reclaim_ns", "ns", 100e6, 1, 2), row("major_faults", "1", 40)
    )
    assert found == {("reclaim_ns", ()): pytest.approx(20.0), ("major_faults", ()): pytest.approx(2.0)}


def test_states_are_means_over_the_time_that_tells_them():
    found = metrics(
        row("memory_limit_bytes", "B", 10e6, cgroup="/a"),
        row("net_rx_share", "ratio", 0.5, cpu="1"),
        row("net_rx_share", "ratio", 0.7, 1, 2, cpu="1"),
        row("io_limit_read_bytes", "B/s", 5e6, 1, 2),
    )
    assert found == {
        ("memory_limit_bytes", (("cgroup", "/a"),)): 10e6,
        ("net_rx_share", (("cpu", "1"),)): pytest.approx(0.6),
        ("io_limit_read_bytes", ()): 5e6,
    }


def test_an_interval_across_the_bounds_counts_by_its_overlap():
    assert metrics(row("major_faults", "1", 40), start=0.75) == {("major_faults", ()): pytest.approx(0.5)}
    assert metrics(row("major_faults", "1", 40), start=1) == {}


def test_freeing_memory_is_told_of_the_driving_thread_only():
    of = replace(
        rank(thread(at=[0, 1000], blocked=[0, 10], sleep=[0, 10])),
        metrics=[
            row("reclaim_thread_ns", "ns", 50e6, kind="memcg", tid=str(PID)),
            row("compaction_thread_ns", "ns", 10e6, tid=str(PID)),
            row("reclaim_thread_ns", "ns", 900e6, kind="memcg", tid="1099"),
            row("reclaim_ns", "ns", 950e6, kind="memcg"),
        ],
    )
    assert seen(of).reclaiming == pytest.approx(6.0)


# --- of several peers ----------------------------------------------------------------------------------------


def test_a_mean_counts_zeros_of_those_that_are_told_of():
    all_told = frozenset({"reasons", "cgroup"})
    one = HostTime(asleep={"sleep": 6.0}, metrics={("m", ()): 3.0}, reclaiming=2.0, told=all_told)
    other = HostTime(ended={("futex", "own"): 4.0}, told=all_told)
    mean = mean_of([one, other], one)
    assert (mean.asleep, mean.metrics, mean.ended, mean.reclaiming, mean.told) == (
        {"sleep": 3.0},
        {("m", ()): 1.5},
        {("futex", "own"): 2.0},
        1.0,
        all_told,
    )


def test_how_many_steps_it_rests_on_is_told_and_added_up_over_peers():
    one = replace(seen(rank(thread(at=[0, 1000], blocked=[0, 10], sleep=[0, 10]))), told=frozenset())
    assert one.steps > 0
    assert mean_of([one, one, one], one).steps == 3 * one.steps


def test_peers_of_whom_less_is_told_are_left_out_while_others_are_there():
    of = HostTime(told=frozenset({"reasons", "cgroup"}))
    like = HostTime(asleep={"sleep": 6.0}, told=frozenset({"reasons", "cgroup", "tcp"}))
    unlike = HostTime(told=frozenset({"cgroup"}))
    assert mean_of([like, unlike], of).asleep == {"sleep": 6.0}
    assert mean_of([unlike, unlike], of).told == {"cgroup"}
