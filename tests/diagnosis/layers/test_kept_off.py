"""A quota, interrupts, the hypervisor and a stop: told apart from each other and from processes."""

from dataclasses import replace

import pytest

from diagnosis.causes import Named, name_cause
from diagnosis.findings import Extra, Taker
from diagnosis.layers import host, kept_off
from tests.diagnosis.layers.facts import PROBES, facts, metric, told

IDLE = Taker(kind="idle", name="swapper/3", pids=(0,), cgroup="", ms=18.0)
HOG = Taker(kind="process", name="stress-ng", pids=(4711,), cgroup="/user.slice", ms=18.0)
SOFTIRQS = Taker(kind="kernel", name="ksoftirqd/7", pids=(52,), cgroup="/", ms=18.0)
GROUP = {"cgroup": "/user.slice", "quota_us": "50000", "period_us": "100000"}


def throttled(ms: float) -> dict:
    """A quota of 50 ms per 100 ms that ran out in 3 of 4 periods."""
    return {
        metric("cpu_throttled_ns", **GROUP): ms,
        metric("cpu_periods", **GROUP): 0.4,
        metric("cpu_throttled_periods", **GROUP): 0.3,
    }


def cause(extra: Extra) -> str | None:
    named = name_cause(extra)
    return named.cause.id if named.cause else None


def why_not(named: Named) -> dict[str, str]:
    return {one.cause: one.why for one in named.ruled_out}


# --- a quota -----------------------------------------------------------------------------------------------


def test_a_quota_is_named_with_its_group_and_size_while_the_cpu_idles():
    named = name_cause(facts(IDLE, host=told(metrics=throttled(25.0)), runnable=18.0, blocked=2.0))
    assert named.cause is not None
    assert (named.cause.id, named.judgement.owner) == ("cpu-quota", "node")
    assert named.share == pytest.approx(18 / 20)  # of 25 ms of the whole group no more than it waited
    assert (
        "cgroup /user.slice: quota 50 ms per 100 ms, used up in 75 % of them, which held its threads up for 25.0 ms"
        in named.judgement.detail
    )
    assert "rank 2 waited 22.0 ms for a CPU, its peers 4.0 ms" in named.judgement.detail
    assert "quota of cgroup /user.slice on node-a" in named.judgement.actions[0]
    assert "0 % of its extra time" in why_not(named)["cpu-contention"]


def test_what_a_quota_does_inside_collectives_counts_as_well():
    named = name_cause(facts(IDLE, host=told(metrics=throttled(25.0)), runnable=8.0, communication=10.0))
    assert (named.cause and named.cause.id, named.share) == ("cpu-quota", 1.0)


def test_who_has_the_cpu_while_a_quota_holds_the_rank_does_not_matter():
    """Half of the time others had it: that of itself would be contention."""
    extra = facts(
        replace(IDLE, ms=9.0), replace(HOG, ms=9.0), host=told(metrics=throttled(25.0)), runnable=18.0
    )
    assert cause(extra) == "cpu-quota"
    assert host.cpu_contention(extra).explained_ms == 0.0


def test_a_group_that_is_throttled_elsewhere_does_not_excuse_a_hog():
    """The group's other threads (64 of them) use the quota up; this rank's CPU was never idle."""
    named = name_cause(facts(HOG, replace(IDLE, ms=1.0), host=told(metrics=throttled(640.0)), runnable=19.0))
    assert (named.cause and named.cause.id, named.share) == ("cpu-contention", pytest.approx(18 / 19))
    assert named.judgement.detail.endswith(
        "; the quota of cgroup /user.slice held threads of its group up for 640 ms, which may add to it"
    )
    assert kept_off.throttled_over(facts(HOG, host=told(metrics=throttled(640.0)), runnable=19.0)) == 0.0


def test_a_process_that_has_the_cpu_most_of_the_time_is_named_beside_a_quota():
    """Of 20 ms the CPU was idle for 4: the group's counter, over all its threads, says nothing of the other 16."""
    idle, hog = replace(IDLE, ms=4.0), replace(HOG, ms=16.0)
    extra = facts(idle, hog, host=told(metrics=throttled(60.0)), runnable=20.0)
    named = name_cause(extra)
    assert (named.cause and named.cause.id, named.share) == ("cpu-contention", pytest.approx(0.8))
    assert "stress-ng (pid 4711" in named.judgement.detail
    assert kept_off.throttled_over(extra) == pytest.approx(4.0)


def test_a_quota_that_its_own_threads_use_up_is_named_on_a_busy_machine():
    """Others had the CPU for 15 of 20 ms while it was held: but the group had all that its quota gives."""
    idle, hog = replace(IDLE, ms=5.0), replace(HOG, ms=15.0)
    named = name_cause(facts(idle, hog, host=told(metrics=throttled(25.0)), runnable=20.0))
    assert (named.cause and named.cause.id, named.share) == ("cpu-quota", pytest.approx(1.0))


def test_a_quota_and_a_process_that_share_a_wait_are_both_said():
    idle, hog = replace(IDLE, ms=8.0), replace(HOG, ms=12.0)
    named = name_cause(facts(idle, hog, host=told(metrics=throttled(60.0)), runnable=20.0))
    assert named.cause is None
    assert "stress-ng (pid 4711" in named.judgement.detail
    assert "cgroup /user.slice: quota 50 ms per 100 ms" in named.judgement.detail


def test_an_idle_cpu_without_throttling_is_no_quota():
    named = name_cause(facts(IDLE, runnable=18.0))
    assert named.cause is None
    assert "no CPU quota held it up, nor did other processes" in named.judgement.detail


def test_where_quotas_are_not_watched_one_is_suspected():
    named = name_cause(facts(IDLE, host=told(by=frozenset()), peers=told(by=frozenset()), runnable=18.0))
    assert named.cause is None
    assert "A CPU quota (cgroup throttling) is suspected" in named.judgement.detail


def test_peers_that_are_throttled_alike_are_no_evidence_against_this_rank():
    both = told(metrics=throttled(25.0))
    assert cause(facts(IDLE, host=both, peers=both, runnable=18.0)) is None


def test_peers_whose_quotas_nobody_watches_are_not_taken_for_unthrottled():
    unknown = told(by=PROBES - {"cgroup"})
    extra = facts(IDLE, host=told(metrics=throttled(25.0)), peers=unknown, runnable=18.0)
    assert cause(extra) is None
    assert "its peers' for not known" in kept_off.cpu_quota(extra).otherwise


def test_a_quota_that_explains_a_fifth_is_ruled_out_in_words():
    extra = facts(HOG, replace(IDLE, ms=5.0), host=told(metrics=throttled(4.0)), runnable=22.0)
    named = name_cause(extra)
    assert (named.cause and named.cause.id, named.share) == ("cpu-contention", pytest.approx(18 / 22))
    assert "may add to it" not in named.judgement.detail
    assert why_not(named)["cpu-quota"] == (
        "the quotas of rank 2's cgroups held threads up for 4.0 ms per step, its peers' for 0.0 ms: "
        "18 % of its extra time"
    )


# --- interrupts --------------------------------------------------------------------------------------------

NET_RX = {
    metric("softirq_ns", vector="NET_RX"): 19.0,
    metric("softirq_ns", vector="TIMER"): 1.0,
    metric("softirq_cpu_ns", vector="TIMER", cpu="3"): 1.0,
    metric("softirq_cpu_ns", vector="NET_RX", cpu="7"): 12.0,
}
SHARES = {
    metric("net_rx_share", cpu="7", device="eth0"): 0.9,
    metric("net_rx_share", cpu="7", device="lo"): 0.1,
    metric("net_rx_share", cpu="3", device="eth9"): 1.0,
}


def test_interrupts_are_named_by_vector_cpu_and_interface():
    named = name_cause(facts(host=told(metrics=NET_RX), node=SHARES, interrupted=18.0, running=2.0))
    assert named.cause is not None
    assert (named.cause.id, named.share, named.judgement.owner) == ("interrupts", pytest.approx(0.9), "node")
    assert named.judgement.detail == (
        "NET_RX on CPU 7 from eth0 took 18.0 ms per step more from rank 2 than from peers"
    )


def test_a_device_is_named_by_its_interrupt():
    disk = {metric("hardirq_ns", irq="45", device="nvme0q1"): 17.0}
    where = {metric("hardirq_cpu_ns", irq="45", device="nvme0q1", cpu="5"): 17.0}
    detail = kept_off.interrupts(facts(host=told(metrics=disk | where), interrupted=18.0)).detail
    assert detail.startswith("interrupt 45 (nvme0q1) on CPU 5 took 18.0 ms")


def test_a_vector_that_took_a_tenth_is_not_called_the_culprit():
    little = {metric("softirq_ns", vector="TIMER"): 2.0}
    detail = kept_off.interrupts(facts(host=told(metrics=little), interrupted=18.0)).detail
    assert detail.startswith("interrupts (none of them most of it; TIMER 2.0 ms) took 18.0 ms")
    assert "interrupts (which is not seen)" in kept_off.interrupts(facts(interrupted=18.0)).detail


def test_what_a_vector_takes_from_peers_as_well_is_no_lead():
    mine = {
        metric("softirq_ns", vector="NET_RX"): 30.0,
        metric("softirq_ns", vector="BLOCK"): 18.0,
        metric("softirq_cpu_ns", vector="NET_RX", cpu="1"): 30.0,
        metric("softirq_cpu_ns", vector="BLOCK", cpu="2"): 18.0,
    }
    theirs = {metric("softirq_ns", vector="NET_RX"): 30.0}
    extra = facts(host=told(metrics=mine), peers=told(metrics=theirs), interrupted=18.0)
    assert kept_off.interrupts(extra).detail.startswith("BLOCK on CPU 2 took")


def test_ksoftirqd_is_interrupts_and_no_process():
    node = SHARES | {
        metric("softirq_ns", vector="TASKLET", cpu="3", **{"in": "ksoftirqd"}): 99.0,
        metric("softirq_ns", vector="NET_RX", cpu="7", **{"in": "ksoftirqd"}): 20.0,
        metric("softirq_ns", vector="TIMER", cpu="7", **{"in": "interrupt"}): 50.0,
    }
    named = name_cause(facts(SOFTIRQS, node=node, runnable=20.0))
    assert (named.cause and named.cause.id, named.share) == ("interrupts", pytest.approx(0.9))
    assert named.judgement.detail.startswith(
        "NET_RX on CPU 7 from eth0 took 18.0 ms per step more from rank 2 than from peers (0.0 ms of its "
        "running time, 18.0 ms in ksoftirqd, pid 52)"
    )
    assert host.cpu_contention(facts(SOFTIRQS, runnable=20.0)).explained_ms == 0.0


@pytest.mark.parametrize("name", ["ksoftirqd/7", "ksoftirqd"])
def test_a_process_that_calls_itself_ksoftirqd_is_a_process(name):
    liar = replace(HOG, name=name)
    assert cause(facts(liar, runnable=20.0)) == "cpu-contention"


def test_interrupts_inside_and_outside_add_up():
    extra = facts(replace(SOFTIRQS, ms=10.0), host=told(metrics=NET_RX), runnable=10.0, interrupted=10.0)
    named = name_cause(extra)
    assert (named.cause and named.cause.id, named.share) == ("interrupts", 1.0)
    assert (
        "took 20.0 ms per step more from rank 2 than from peers (10.0 ms of its running time, 10.0 ms in "
        in named.judgement.detail
    )


def test_ksoftirqd_that_peers_suffer_as_well_is_nobodys_cause():
    extra = facts(SOFTIRQS, peers_took={("kernel", "ksoftirqd", "/"): 18.0}, runnable=18.0)
    assert kept_off.interrupts(extra).explained_ms == 0.0


# --- the hypervisor, a stop --------------------------------------------------------------------------------


def test_stolen_time_is_the_hypervisors():
    named = name_cause(facts(stolen=20.0, running=1.0))
    assert (named.cause and named.cause.id, named.share) == ("hypervisor-steal", pytest.approx(20 / 21))
    assert named.judgement.detail == "the hypervisor took 22.0 ms per step from rank 2, 2.0 ms from its peers"


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (
            {metric("stopped_ns", process="rank", by="bash", by_pid="812"): 20.0},
            "process 1002 of rank 2 was stopped by bash (pid 812), 20.0 ms per step in the mean",
        ),
        (
            {metric("stopped_ns", process="helper", by="bash", by_pid="812"): 20.0},
            "process 1002 of rank 2 was stopped, 20.0 ms per step in the mean",
        ),
        (
            {metric("traced", tracer="gdb", tracer_pid="99"): 1.0},
            "was stopped by gdb (pid 99), which traces it,",
        ),
        ({metric("cgroup_frozen", cgroup="/job"): 1.0}, "was stopped: cgroup /job was frozen,"),
    ],
)
def test_a_stop_is_named_with_who_did_it(metrics, words):
    named = name_cause(facts(host=told(asleep={"stopped": 20.0}, metrics=metrics), blocked=20.0))
    assert (named.cause and named.cause.id, named.share) == ("process-stopped", 1.0)
    assert words in named.judgement.detail


@pytest.mark.parametrize(
    ("process", "blocked", "peers", "explained"),
    [
        ("rank", 20.0, 0.0, 18.0),
        ("rank", 15.0, 0.0, 15.0),  # of 18 ms some lie in a pause between the steps
        ("rank", 20.0, 17.0, 1.0),
        ("helper", 20.0, 0.0, 0.0),
    ],
)
def test_a_stop_by_a_signal_is_seen_where_the_kernel_hides_what_threads_sleep_for(
    process, blocked, peers, explained
):
    by = PROBES - {"reasons"}
    stop = metric("stopped_ns", process=process, by="bash", by_pid="812")
    extra = facts(
        host=told(metrics={stop: 18.0}, by=by), peers=told(metrics={stop: peers}, by=by), blocked=blocked
    )
    assert kept_off.stopped(extra).explained_ms == explained


def test_a_tracer_that_stops_nothing_is_no_cause():
    traced = {metric("traced", tracer="strace", tracer_pid="99"): 1.0}
    assert cause(facts(host=told(metrics=traced), running=20.0)) == "runs-longer"


def test_names_stay_as_they_came():
    """Who shows them escapes them."""
    evil = metric("stopped_ns", process="rank", by="<!channel>\x1b[31m", by_pid="7")
    extra = facts(host=told(asleep={"stopped": 20.0}, metrics={evil: 20.0}), blocked=20.0)
    assert "<!channel>\x1b[31m (pid 7)" in name_cause(extra).judgement.detail
