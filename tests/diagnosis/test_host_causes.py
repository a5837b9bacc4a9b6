"""From what the host's probes told of a simulated job to the verdict: one story per family of causes."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from bench.synthetic import T0, Plan, blamed, build, contended, plan, with_rank
from diagnosis.engine import diagnose
from diagnosis.evidence import Evidence, MetricRow, OccupantRow, RankEvidence, ThreadSeries, WakerRow
from diagnosis.thread_parts import waiting_intervals
from diagnosis.verdict import Verdict
from probes.records import Probe, Role

S = 10**9
STEPS, RANK = 300, 2
PERIOD_MS = 1000 / 49
WATCHING = [Probe(name=name, state="on") for name in ("cgroup", "interrupts", "memory", "on_cpu", "storage")]


def job(**more: float) -> Plan:
    """Healthy, but for what rank 2 takes longer in each step: ``asleep``, ``runnable``, ``running``, in ms."""
    made = plan(steps=STEPS, seed=5)
    for state, ms in more.items():
        getattr(made, state)[RANK] += ms
    return made


def watched(made: Plan, reasons: Mapping[int, Mapping[str, float]] | None = None) -> Evidence:
    """The job's evidence with what driving threads slept for: on futexes in collectives, and outside for
    ``reasons``, of each rank in these proportions (without any: for something else)."""
    evidence, _ = build(made)
    for number, life in list(evidence.ranks.items()):
        by = (reasons or {}).get(number, {"other": 1.0})
        evidence = with_rank(
            evidence, number, threads=[asleep_by(life, life.threads[0], by), *life.threads[1:]]
        )
    return replace(evidence, probes={"node-a": WATCHING})


def asleep_by(life: RankEvidence, thread: ThreadSeries, by: Mapping[str, float]) -> ThreadSeries:
    begin, until = waiting_intervals(life.collectives, life.last_ns)
    corners = (np.stack([begin, until], axis=1).ravel() - T0).astype(float)
    waited = np.stack([np.zeros(len(begin)), until - begin], axis=1).ravel().cumsum()
    inside = np.minimum(np.diff(np.interp(thread.at_ns - T0, corners, waited)), np.diff(thread.blocked_ns))
    outside = np.diff(thread.blocked_ns) - inside
    grown = {reason: outside * share / sum(by.values()) for reason, share in by.items()}
    grown["futex"] = grown.get("futex", 0.0) + inside
    return replace(
        thread,
        blocked_by={
            reason: np.concatenate([[0], np.rint(np.cumsum(ns)).astype(np.int64)])
            for reason, ns in grown.items()
        },
    )


def seconds(evidence: Evidence) -> range:
    return range((evidence.end_ns - T0) // S + 1)


def metric(evidence: Evidence, name: str, unit: str, per_second: float, **labels: str) -> list[MetricRow]:
    return [
        MetricRow(T0 + at * S, T0 + (at + 1) * S, name, unit, tuple(sorted(labels.items())), per_second)
        for at in seconds(evidence)
    ]


def wakers(evidence: Evidence, reason: str, pid: int, name: str, ms_per_second: float) -> list[WakerRow]:
    return [
        WakerRow(
            T0 + at * S, T0 + (at + 1) * S, 1000 + RANK, reason, pid, pid, name, int(ms_per_second * 1e6)
        )
        for at in seconds(evidence)
    ]


def idle_cpu(evidence: Evidence, ms_per_second: float) -> list[OccupantRow]:
    return [
        OccupantRow(
            T0 + at * S,
            T0 + (at + 1) * S,
            Role.DRIVING,
            0,
            "swapper",
            "",
            "",
            -1,
            False,
            int(ms_per_second * 1e6),
        )
        for at in seconds(evidence)
    ]


def steps_per_second(evidence: Evidence) -> float:
    return STEPS / ((evidence.end_ns - T0) / S)


def named(verdict: Verdict) -> tuple[str, list[int], str | None, str | None]:
    return verdict.status, blamed(verdict), verdict.cause, verdict.owner


def why_not(verdict: Verdict) -> set[str]:
    return {one.cause for one in verdict.ruled_out}


def lines(verdict: Verdict) -> dict[str, tuple[float, float]]:
    return {line.part: (line.ms, line.peers_ms) for line in verdict.account}


def test_reads_from_a_disk_are_named_and_stand_in_the_account():
    """38 ms asleep, 20 of them for reads; its peers 18, none."""
    evidence = watched(job(asleep=20.0), {RANK: {"other": 18.0, "storage-read": 20.0}})
    verdict = diagnose(evidence)
    assert named(verdict) == ("slow", [RANK], "storage-read", "storage")
    assert verdict.culprits[0].share_explained == pytest.approx(1.0, abs=0.05)
    assert why_not(verdict) == {"cpu-contention", "runs-longer"}
    account = lines(verdict)
    assert account["asleep-storage-read"] == (pytest.approx(20.0, rel=0.03), 0.0)
    assert account["asleep-other"] == (pytest.approx(18.0, rel=0.03), pytest.approx(18.0, rel=0.03))
    assert account["blocked"] == (pytest.approx(0.0, abs=0.01), pytest.approx(0.0, abs=0.01))
    plain = diagnose(build(job(asleep=20.0))[0])
    assert sum(ms for ms, _ in account.values()) == pytest.approx(
        sum(ms for ms, _ in lines(plain).values()), abs=1e-9
    )
    assert sum(ms for _, ms in account.values()) == pytest.approx(
        sum(ms for _, ms in lines(plain).values()), abs=1e-9
    )
    assert "reading from storage" not in verdict.summary  # the summary has the cause's own words
    assert "waits for reads from storage" in verdict.summary


def test_a_disk_that_a_worker_waits_for_is_the_disk():
    evidence = watched(job(asleep=20.0), {RANK: {"other": 18.0, "poll": 20.0}})
    at = np.arange(len(seconds(evidence)) + 1, dtype=np.int64) * S
    worker = ThreadSeries(
        tid=4411, role=Role.HELPER, since_ns=T0, at_ns=T0 + at, running_ns=at // 20, runnable_ns=at * 0,
        blocked_ns=at - at // 20, uninterruptible_ns=at * 0, interrupted_ns=at * 0, stolen_at_ns=at[:0],
        stolen_ns=at[:0], blocked_by={"storage-read": at * 9 // 20, "poll": at // 2},
    )  # fmt: skip
    life = evidence.ranks[RANK]
    rows = wakers(evidence, "poll", 4411, "pt_data_worker", 20.0 * steps_per_second(evidence))
    evidence = with_rank(evidence, RANK, threads=[*life.threads, worker], wakers=rows)
    verdict = diagnose(evidence)
    assert named(verdict) == ("slow", [RANK], "storage-read", "storage")
    assert "through its helper pt_data_worker (pid 4411)" in verdict.culprits[0].detail
    assert verdict.culprits[0].share_explained == pytest.approx(0.9, abs=0.05)
    assert lines(verdict)["asleep-helpers"] == (pytest.approx(20.0, rel=0.05), 0.0)


def test_a_lock_is_told_from_waiting_for_peers():
    """All its waits, in collectives and out of them, are futexes: gloo's threads end some, its own the others."""
    evidence = watched(job(asleep=20.0), {RANK: {"other": 18.0, "futex": 20.0}})
    rate = steps_per_second(evidence)
    rows = wakers(evidence, "futex", 1002, "pt_gloo_runloop", 5.0 * rate)
    rows += wakers(evidence, "futex", 1002, "prefetch", 20.0 * rate)
    verdict = diagnose(with_rank(evidence, RANK, wakers=rows))
    assert named(verdict) == ("slow", [RANK], "lock-contention", "job")
    assert "woken by its thread prefetch (1002)" in verdict.culprits[0].detail
    only_gloo = diagnose(with_rank(evidence, RANK, wakers=rows[: len(rows) // 2]))
    assert named(only_gloo) == ("slow", [RANK], None, "unknown")
    assert "it is: locks, its own threads +" in only_gloo.culprits[0].detail


@pytest.mark.parametrize(("throttled", "cause"), [(1.2, "cpu-quota"), (0.0, None)])
def test_a_quota_is_named_where_it_throttled_and_the_cpu_idled(throttled, cause):
    evidence = watched(job(runnable=20.0))
    rate = steps_per_second(evidence)
    group = {"cgroup": "/user.slice", "quota_us": "50000", "period_us": "100000"}
    metrics = (
        metric(evidence, "cpu_throttled_ns", "ns", throttled * 20e6 * rate, **group) if throttled else []
    )
    idle = idle_cpu(evidence, 20.0 * rate)
    verdict = diagnose(with_rank(evidence, RANK, metrics=metrics, occupants=idle))
    assert named(verdict) == ("slow", [RANK], cause, "node")
    words = "cgroup /user.slice: quota 50 ms per 100 ms" if cause else "no CPU quota held it up"
    assert words in verdict.culprits[0].detail


@pytest.mark.parametrize(
    ("state", "throttled", "cause"),
    [("on", False, "cpu-quota"), ("on", True, None), ("off", False, None), ("unavailable", False, None)],
)
def test_a_quota_is_named_only_where_the_peers_quotas_are_watched(state, throttled, cause):
    """Peers are on another node, whose probe may be off: then nobody knows whether they are throttled as much."""
    evidence = watched(job(runnable=20.0))
    rate = steps_per_second(evidence)
    group = {"cgroup": "/user.slice", "quota_us": "50000", "period_us": "100000"}
    metrics = metric(evidence, "cpu_throttled_ns", "ns", 24e6 * rate, **group)
    for number in (0, 1, 3):
        evidence = with_rank(evidence, number, node="node-b", metrics=metrics if throttled else [])
    evidence = with_rank(evidence, RANK, metrics=metrics, occupants=idle_cpu(evidence, 20.0 * rate))
    others = [Probe(name=probe.name, state=state) for probe in WATCHING]
    verdict = diagnose(replace(evidence, probes={"node-a": WATCHING, "node-b": others}))
    assert named(verdict) == ("slow", [RANK], cause, "node")


def test_interrupts_are_named_by_vector_cpu_and_interface():
    evidence = watched(job(running=20.0))
    rate = steps_per_second(evidence)
    driving, *others = evidence.ranks[RANK].threads
    driving = replace(driving, interrupted_ns=driving.running_ns * 20 // 28)
    metrics = metric(evidence, "softirq_ns", "ns", 19e6 * rate, vector="NET_RX")
    metrics += metric(evidence, "softirq_cpu_ns", "ns", 19e6 * rate, vector="NET_RX", cpu="7")
    evidence = with_rank(evidence, RANK, threads=[driving, *others], metrics=metrics)
    evidence = replace(
        evidence, metrics={"node-a": metric(evidence, "net_rx_share", "ratio", 0.9, cpu="7", device="eth0")}
    )
    verdict = diagnose(evidence)
    assert named(verdict) == ("slow", [RANK], "interrupts", "node")
    assert verdict.culprits[0].detail.startswith("NET_RX on CPU 7 from eth0 took 20.")


def test_freeing_memory_is_told_from_running_longer():
    evidence = watched(job(running=20.0))
    rate = steps_per_second(evidence)
    metrics = metric(evidence, "reclaim_thread_ns", "ns", 19e6 * rate, kind="memcg", tid="1002")
    metrics += metric(evidence, "memory_limit_hits", "1", 2 * rate, cgroup="/train", limit="max")
    metrics += metric(evidence, "memory_limit_bytes", "B", 12e6, cgroup="/train", limit="max")
    verdict = diagnose(with_rank(evidence, RANK, metrics=metrics))
    assert named(verdict) == ("slow", [RANK], "memory-reclaim", "node")
    assert (
        "; the memory limit of 12 MB of cgroup /train was reached 2 times per step"
        in verdict.culprits[0].detail
    )
    assert verdict.culprits[0].share_explained == pytest.approx(0.95, abs=0.03)


def sampled(evidence: Evidence, thread: str = "driving", **ms_per_step: float) -> list[MetricRow]:
    """What the probe on_cpu tells, by kind of code."""
    rate, metrics = steps_per_second(evidence), []
    for kind, ms in ms_per_step.items():
        labels = {"thread": thread, "in": kind}
        metrics += metric(evidence, "on_cpu_ns", "ns", 1e6 * ms * rate, **labels)
    if thread == "driving":
        samples = sum(ms_per_step.values()) * rate / PERIOD_MS
        metrics += metric(evidence, "on_cpu_samples", "1", samples, thread=thread)
    return metrics


@pytest.mark.parametrize(
    ("mine", "cause", "owner"),
    [
        ({"gc": 20.0, "python": 8.0}, "python-gc", "job"),
        ({"python": 24.0, "gc": 4.0}, "slow-python", "job"),
        ({"kernel": 20.0, "python": 8.0}, "runs-longer", "unknown"),
        ({"interpreter": 28.0}, "runs-longer", "unknown"),
    ],
)
def test_what_a_rank_runs_longer_is_named_where_samples_tell_it(mine, cause, owner):
    """It runs 28 ms, its peers 8, all of that in Python."""
    evidence = watched(job(running=20.0))
    for number in range(4):
        of = mine if number == RANK else {"python": 8.0}
        evidence = with_rank(evidence, number, metrics=sampled(evidence, **of))
    verdict = diagnose(evidence)
    assert named(verdict) == ("slow", [RANK], cause, owner)
    assert verdict.culprits[0].share_explained == pytest.approx(1.0, abs=0.05)


def test_a_thread_that_holds_pythons_lock_is_named():
    evidence = watched(job(asleep=20.0), {RANK: {"other": 18.0, "futex": 20.0}})
    rate = steps_per_second(evidence)
    rows = wakers(evidence, "futex", 0, "", 19.0 * rate) + wakers(evidence, "futex", 1002, "x", 1.0 * rate)
    for number in range(4):
        metrics = sampled(evidence, python=8.0)
        if number == RANK:
            metrics += sampled(evidence, "prefetch (1090)", python=35.0)
        evidence = with_rank(evidence, number, metrics=metrics)
    verdict = diagnose(with_rank(evidence, RANK, wakers=rows))
    assert named(verdict) == ("slow", [RANK], "gil", "job")
    assert "prefetch (1090) for 35." in verdict.culprits[0].detail


def test_a_healthy_job_stays_healthy_whatever_its_probes_tell():
    """Disks, locks, quotas and interrupts of all ranks alike."""
    by = {"storage-read": 6.0, "futex": 6.0, "sleep": 6.0}
    evidence = watched(job(), dict.fromkeys(range(4), by))
    group = {"cgroup": "/user.slice", "quota_us": "50000", "period_us": "100000"}
    for number in range(4):
        metrics = metric(evidence, "cpu_throttled_ns", "ns", 5e8, **group)
        metrics += metric(evidence, "softirq_ns", "ns", 5e8, vector="NET_RX")
        evidence = with_rank(
            evidence, number, metrics=metrics, wakers=wakers(evidence, "futex", 1002, "x", 100.0)
        )
    verdict = diagnose(evidence)
    assert (verdict.status, verdict.culprits, verdict.cause) == ("healthy", [], None)


def test_what_all_ranks_sleep_for_is_no_cause_of_one():
    """All read from a disk for half of what they sleep; a process takes the CPU of one."""
    by = {number: {"storage-read": 1.0, "other": 1.0} for number in range(4)}
    verdict = diagnose(watched(contended(job(), RANK, 18.0), by))
    assert named(verdict) == ("slow", [RANK], "cpu-contention", "node")
    assert "storage-read" not in why_not(verdict)
    mine, theirs = lines(verdict)["asleep-storage-read"]
    assert mine == pytest.approx(theirs, rel=0.05)


def test_a_rank_whose_node_alone_tells_more_is_not_blamed_for_it():
    """The agent of its node is of a later version: the others tell no reasons, and know no quotas."""
    made = job(asleep=20.0)
    evidence = watched(made, {RANK: {"other": 18.0, "storage-read": 20.0}})
    plain, _ = build(made, nodes=["node-b", "node-b", "node-a", "node-b"])
    for number in (0, 1, 3):
        evidence = with_rank(evidence, number, threads=plain.ranks[number].threads, node="node-b")
    verdict = diagnose(evidence)
    assert named(verdict) == ("slow", [RANK], None, "unknown")
    assert "what its peers sleep for is not seen" in verdict.culprits[0].detail
    assert set(lines(verdict)) == set(lines(diagnose(plain)))  # nor is the account split for one side only
