"""What a rank sleeps for: each cause is named for what it is, and told from what looks like it."""

import pytest

from diagnosis.causes import name_cause
from diagnosis.findings import WakerKind, Woken
from diagnosis.layers import asleep, host
from tests.diagnosis.layers.facts import PROBES, cause, detail, facts, metric, told, why_not


def woken(
    reason: str, kind: WakerKind, ms: float, name: str = "python3", pid: int = 1002, tid: int = 1090
) -> Woken:
    return Woken(reason, kind, name, pid, tid, ms)


@pytest.mark.parametrize(
    ("reason", "named", "owner", "words"),
    [
        ("storage-read", "storage-read", "storage", "rank 2 waits for reads from storage 18.0 ms per step"),
        ("storage-write", "storage-write", "storage", "waits for writes to storage (fsync, journal) 18.0 ms"),
        ("page-fault", "page-faults", "node", "waits for pages that come from a disk 18.0 ms"),
        ("reclaim", "memory-reclaim", "node", "spends 18.0 ms per step freeing memory"),
        ("kernel-lock", "kernel-contention", "node", "waits for locks of the kernel or on files 18.0 ms"),
        ("pipe-write", "slow-pipe", "job", "waits until what it wrote to a pipe or terminal is read 18.0 ms"),
        ("sleep", "sleeps", "job", "asks to sleep for 18.0 ms"),
        ("network-receive", "network-wait", "network", "waits for the network outside collectives 18.0 ms"),
        ("network-send", "network-wait", "network", "waits for the network outside collectives 18.0 ms"),
        ("stopped", "process-stopped", "node", "process 1002 of rank 2 was stopped"),
    ],
)  # fmt: skip
def test_what_it_sleeps_for_is_named_with_its_share(reason, named, owner, words):
    extra = facts(host=told(asleep={reason: 18.0}), blocked=20.0)
    assert cause(extra) == (named, 0.9)
    judgement = name_cause(extra).judgement
    assert judgement.owner == owner
    assert words in judgement.detail
    assert len(judgement.actions) == 2  # what to do, and how to see that it helped
    assert "node-a" in judgement.actions[0]
    assert judgement.actions[1].startswith("Then diagnose again: ")


@pytest.mark.parametrize("reason", ["poll", "other", "child", "pipe-read", "futex"])
def test_what_nobody_is_known_to_end_is_no_cause_but_is_said(reason):
    extra = facts(host=told(asleep={reason: 18.0}), blocked=20.0)
    assert cause(extra) == (None, 0.0)
    assert "+18.0 ms, for what is not seen +2.0 ms" in detail(extra)


def test_what_peers_sleep_for_as_well_does_not_count():
    both = facts(
        host=told(asleep={"storage-read": 38.0}), peers=told(asleep={"storage-read": 20.0}), blocked=20.0
    )
    assert cause(both) == ("storage-read", 0.9)
    alike = told(asleep={"storage-read": 38.0})
    assert cause(facts(host=alike, peers=alike, blocked=20.0)) == (None, 0.0)


def test_a_sleep_that_the_steps_do_not_contain_explains_nothing():
    """It was stopped in a pause between the steps; within them it slept as long as its peers."""
    extra = facts(host=told(asleep={"stopped": 7.0, "storage-read": 20.0}), running=20.0)
    assert cause(extra) == ("runs-longer", 1.0)
    assert not {"process-stopped", "storage-read"} & why_not(name_cause(extra)).keys()
    assert (
        asleep.storage_read(facts(host=told(asleep={"storage-read": 20.0}), blocked=15.0)).explained_ms
        == 15.0
    )


def test_peers_of_whom_nothing_is_told_are_not_taken_for_awake():
    """Their agents are of an earlier version, or the probe is off on their nodes."""
    unknown = told(by=frozenset())
    extra = facts(host=told(asleep={"storage-read": 20.0, "futex": 0.1}), peers=unknown, blocked=20.0)
    assert cause(extra) == (None, 0.0)
    assert detail(extra) == (
        "rank 2 is asleep outside collectives 20.0 ms per step longer than its peers, not for want of a CPU; what "
        "its peers sleep for is not seen, so nothing can be compared (itself: reading from storage 20.0 ms)"
    )
    assert "its peers an unknown time" in asleep.storage_read(extra).otherwise


def test_without_any_reasons_the_words_say_that_nothing_is_seen():
    unknown = told(by=frozenset())
    assert "what it waits for is not seen (stacks, locks and disks are not watched)" in detail(
        facts(host=unknown, peers=unknown, blocked=20.0)
    )


def test_reasons_that_explain_too_little_are_said_with_their_times():
    mine = {"storage-read": 8.0, "futex": 6.0, "poll": 4.0, "other": 2.0, "child": 0.1}
    extra = facts(host=told(asleep=mine), peers=told(asleep={"storage-read": 1.0}), blocked=20.0)
    assert detail(extra).endswith(
        "; it is: reading from storage +7.0 ms, locks, its own threads +6.0 ms, polling for an event +4.0 ms, "
        "for what is not seen +0.9 ms"
    )  # 20 − 19.1


def test_two_causes_together_are_both_said():
    extra = facts(host=told(asleep={"storage-read": 12.0, "sleep": 8.0}), blocked=20.0)
    named = name_cause(extra)
    assert named.cause is None
    assert named.judgement.detail.startswith(
        "Slow reads from storage and The code sleeps together: rank 2 waits"
    )
    assert not {"storage-read", "sleeps"} & why_not(named).keys()


# --- storage -----------------------------------------------------------------------------------------------


def reading(**limits: float) -> dict:
    """The rank got 0.1 MB per step through a limit, in 20 ms: 5 MB/s."""
    on = {"cgroup": "/train", "device": "sda"}
    return {metric("io_limited_read_bytes", **on): 1e5} | {
        metric(name, **on): value for name, value in limits.items()
    }


def test_a_limit_that_was_reached_is_at_fault_with_its_group_and_device():
    metrics = reading(io_limit_read_bytes=5e6)
    judgement = name_cause(
        facts(host=told(asleep={"storage-read": 20.0}, metrics=metrics), blocked=20.0)
    ).judgement
    assert judgement.owner == "node"
    assert judgement.detail.endswith("its peers 0.0 ms; cgroup /train limits reads of sda to 5 MB/s")
    assert judgement.actions[0] == "Raise or remove that limit on node-a."


def test_a_limit_far_above_what_came_through_is_not_at_fault():
    """5 MB/s came, 1 GB/s might have: the disk is slow."""
    metrics = reading(io_limit_read_bytes=1e9)
    judgement = name_cause(
        facts(host=told(asleep={"storage-read": 20.0}, metrics=metrics), blocked=20.0)
    ).judgement
    assert (judgement.owner, "limits" in judgement.detail) == ("storage", False)


def test_a_limit_on_reads_says_nothing_about_writes():
    metrics = reading(io_limit_read_bytes=5e6)
    judgement = name_cause(
        facts(host=told(asleep={"storage-write": 20.0}, metrics=metrics), blocked=20.0)
    ).judgement
    assert (judgement.owner, "limits" in judgement.detail) == ("storage", False)


def test_reads_of_what_a_memory_limit_threw_out_tell_the_limit():
    metrics = {metric("memory_limit_hits", cgroup="/train", limit="max"): 3.0}
    words = detail(facts(host=told(asleep={"storage-read": 20.0}, metrics=metrics), blocked=20.0))
    assert words.endswith("; the memory limit of cgroup /train was reached 3 times per step")


def test_a_slow_device_is_named_with_its_latency_and_who_keeps_it_busy():
    mine = {metric("block_read_ns", device="sdb"): 30.0, metric("block_read_requests", device="sdb"): 4.0}
    node = {
        metric("block_process_read_ns", device="sda", process="tar"): 900.0,
        metric("block_process_read_ns", device="sdb", process="rsync"): 500.0,
    }
    extra = facts(host=told(asleep={"storage-read": 20.0}, metrics=mine), node=node, blocked=20.0)
    assert detail(extra).endswith("; sdb took 7.5 ms per read, and was busier with reads of rsync")


def test_a_disk_that_a_worker_waits_for_is_the_disk_with_the_worker():
    worker = (Woken("storage-read", "helper", "pt_data_worker", 4411, 4411, 17.0),)
    through = {"storage-read": 17.0, "running": 3.0}
    extra = facts(host=told(through=through, helpers=worker), blocked=20.0)
    assert cause(extra) == ("storage-read", 0.85)
    assert "its peers 0.0 ms through its helper pt_data_worker (pid 4411)" in detail(extra)
    assert "-p 4411 for a moment" in name_cause(extra).judgement.actions[0]
    assert why_not(name_cause(extra))["slow-workers"].endswith(": 15 % of its extra time")


def test_a_worker_that_computes_is_a_slow_worker():
    worker = (Woken("running", "helper", "pt_data_worker", 4411, 4411, 20.0),)
    through = {"storage-read": 2.0, "running": 15.0, "runnable": 3.0}
    extra = facts(host=told(through=through, helpers=worker), blocked=20.0)
    assert cause(extra) == ("slow-workers", 0.9)
    assert name_cause(extra).judgement.owner == "job"
    assert "helpers that compute, its peers 0.0 ms through its helper pt_data_worker (pid 4411)" in detail(
        extra
    )


def test_a_page_fault_is_not_a_read_and_tells_the_limit_that_caused_it():
    metrics = {
        metric("major_faults"): 12.0,
        metric("memory_limit_hits", cgroup="/train", limit="max"): 3.0,
        metric("memory_limit_bytes", cgroup="/train", limit="max"): 12e6,
    }
    extra = facts(host=told(asleep={"page-fault": 17.0, "storage-read": 1.0}, metrics=metrics), blocked=20.0)
    assert cause(extra) == ("page-faults", 0.85)
    assert detail(extra).endswith(
        "12 major faults per step; the memory limit of 12 MB of cgroup /train was reached 3 times per step"
    )
    assert why_not(name_cause(extra))["storage-read"].endswith(": 5 % of its extra time")


# --- memory ------------------------------------------------------------------------------------------------


def test_freeing_memory_while_running_is_reclaim_and_not_running_longer():
    extra = facts(host=told(reclaiming=19.0), running=20.0)
    assert cause(extra) == ("memory-reclaim", 0.95)
    assert host.runs_longer(extra).explained_ms == pytest.approx(1.0)


def test_sleeps_within_reclaim_count_once():
    """25 ms freeing memory in all, 10 of them asleep: 15 ran."""
    extra = facts(host=told(asleep={"reclaim": 10.0}, reclaiming=25.0), running=16.0, blocked=10.0)
    assert asleep.memory_reclaim(extra).explained_ms == pytest.approx(25.0)
    assert host.runs_longer(extra).explained_ms == pytest.approx(1.0)


def test_reclaim_explains_no_more_than_the_rank_runs_longer():
    assert asleep.memory_reclaim(facts(host=told(reclaiming=90.0), running=20.0)).explained_ms == 20.0
    assert asleep.memory_reclaim(facts(host=told(reclaiming=90.0), running=-1.0)).explained_ms == 0.0


def test_a_rank_that_frees_a_little_memory_runs_longer_all_the_same():
    extra = facts(host=told(reclaiming=1.0), running=20.0)
    assert cause(extra) == ("runs-longer", 0.95)
    assert why_not(name_cause(extra))["memory-reclaim"].startswith(
        "rank 2 spends 1.0 ms per step freeing memory"
    )


def test_peers_whose_memory_nobody_watches_are_not_taken_for_unhurt():
    extra = facts(host=told(reclaiming=19.0), peers=told(by=PROBES - {"memory"}), running=20.0)
    assert cause(extra) == ("runs-longer", 1.0)


# --- locks, timers, pipes, processes -----------------------------------------------------------------------


def test_a_lock_that_a_thread_of_its_own_gives_back_is_named_with_that_thread():
    other = woken("futex", "own", 17.0, name="prefetch", tid=1090)
    extra = facts(host=told(other, asleep={"futex": 18.0}), blocked=20.0)
    assert cause(extra) == ("lock-contention", 0.85)
    assert detail(extra).endswith("its peers 0.0 ms; woken by its thread prefetch (1090)")


def test_what_wakes_by_timeout_and_is_handed_over_in_between_is_a_lock():
    rows = (woken("futex", "interrupt", 17.0, pid=0), woken("futex", "own", 1.0, name="spinner"))
    extra = facts(host=told(*rows, asleep={"futex": 18.2}), blocked=20.0)
    assert cause(extra) == ("lock-contention", 0.9)
    assert asleep.sleeps(extra).explained_ms == 0.0


@pytest.mark.parametrize("own", [0.01, 0.1, 0.8])
def test_waits_that_threads_of_its_own_hardly_end_are_a_lock_or_a_timer(own: float):
    """Who waits for Python's lock looks every 5 ms and then gets it within microseconds; a timer's wait that
    some thread ends early now and then looks alike."""
    rows = (woken("futex", "interrupt", 18.0, pid=0), woken("futex", "own", own, name="spinner"))
    extra = facts(host=told(*rows, asleep={"futex": 18.8}), blocked=20.0)
    assert cause(extra) == (None, 0.0)
    words = detail(extra)
    assert "together" in words
    assert "woken by its thread spinner" in words
    assert "18.0 ms more in waits that ended by their timeout, which may as well be a lock" in words


def test_a_wait_that_only_its_timeout_ends_is_a_sleep():
    rows = (woken("futex", "interrupt", 18.0, pid=0),)
    extra = facts(host=told(*rows, asleep={"futex": 18.2}), blocked=20.0)
    assert cause(extra) == ("sleeps", 0.9)
    assert detail(extra).endswith("and 18.0 ms more in waits that ended by their timeout")


def test_waiting_for_threads_that_move_data_is_no_lock():
    gloo = woken("futex", "communication", 18.0, name="pt_gloo_runloop")
    assert cause(facts(host=told(gloo, asleep={"futex": 18.0}), blocked=20.0)) == (None, 0.0)


def test_own_threads_that_wake_peers_as_long_are_no_lock_of_this_rank():
    """It sleeps 18 ms more for its data (whoever woke it from that is not listed), as long as they for threads."""
    own = woken("futex", "own", 18.0)
    extra = facts(
        host=told(own, asleep={"futex": 36.0}), peers=told(own, asleep={"futex": 18.0}), blocked=20.0
    )
    assert asleep.lock_contention(extra).explained_ms == 0.0


def test_a_slow_reader_of_a_pipe_is_named_and_storage_is_not():
    reader = woken("pipe-write", "process", 18.0, name="tee", pid=77)
    extra = facts(host=told(reader, asleep={"pipe-write": 18.0, "storage-write": 1.0}), blocked=20.0)
    assert cause(extra) == ("slow-pipe", 0.9)
    assert detail(extra).endswith("; the reader is tee (pid 77)")
    assert why_not(name_cause(extra))["storage-write"].endswith(": 5 % of its extra time")


def test_an_interrupt_or_the_rest_reads_no_pipe():
    rows = (
        woken("pipe-write", "interrupt", 9.0, pid=0),
        woken("pipe-write", "rest", 9.0, name="other", pid=-1),
    )
    assert "the reader is" not in detail(facts(host=told(*rows, asleep={"pipe-write": 18.0}), blocked=20.0))


@pytest.mark.parametrize("reason", ["pipe-read", "poll", "child"])
def test_a_process_that_hands_something_over_late_is_named(reason):
    server = woken(reason, "process", 17.0, name="feature-server", pid=321)
    extra = facts(host=told(server, asleep={reason: 18.0}), blocked=20.0)
    assert cause(extra) == ("waits-for-process", 0.85)
    assert detail(extra).endswith("; most of it for feature-server (pid 321)")


def test_a_poll_that_the_network_ends_is_no_process():
    packet = woken("poll", "interrupt", 18.0, name="", pid=0)
    assert cause(facts(host=told(packet, asleep={"poll": 18.0}), blocked=20.0)) == (None, 0.0)


def test_who_holds_the_kernels_lock_is_named():
    finder = woken("kernel-lock", "process", 18.0, name="updatedb", pid=55)
    extra = facts(host=told(finder, asleep={"kernel-lock": 18.0}), blocked=20.0)
    assert detail(extra).endswith("; woken most often by updatedb (pid 55)")


def test_segments_sent_again_are_said_where_the_network_is_waited_for():
    metrics = {metric("tcp_retransmits", peer="10.0.0.7"): 3.0}
    extra = facts(host=told(asleep={"network-receive": 20.0}, metrics=metrics), blocked=20.0)
    assert "TCP sent 3 segments per step more again" in detail(extra)


def test_names_stay_as_they_came():
    """Who shows them escapes them."""
    reader = woken("pipe-write", "process", 18.0, name="<!here>*_`", pid=77)
    assert "<!here>*_` (pid 77)" in detail(
        facts(host=told(reader, asleep={"pipe-write": 18.0}), blocked=20.0)
    )
