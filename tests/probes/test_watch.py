"""Watching two real jobs: switches, captures, the kill switch, costs and budgets, under real eBPF.

Two jobs of two ranks each run for all tests here. Each all-reduces gradients among all ranks and a thousand
numbers within a group of one rank, every few milliseconds.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bot.demo import job as demo_job
from probes import budget, in_kernel, loaded
from probes.bpf import Kernel
from probes.budget import Budget
from probes.interval import Interval
from probes.records import MAX_CAPTURE_S, Probe, RankBatch, Role
from probes.watch import Limits, NodeWatch, UnknownProbe

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

ONE, OTHER = f"watched-{os.getpid()}", f"other-{os.getpid()}"
WITHIN_S = 150.0


@pytest.fixture(scope="module")
def jobs(root_and_bpf: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    logs = tmp_path_factory.mktemp("jobs")
    started = []
    try:
        for name in (ONE, OTHER):
            (logs / name).mkdir()
            options = ("--device-ms", "2", "--width", "32", "--groups")
            started.append(demo_job.start(name, cpus=(-1, -1), options=options, logs=logs / name))
            for rank in started[-1].ranks:  # they never rest, and what watches them is what is tested here
                os.setpriority(os.PRIO_PROCESS, rank.pid, 5)
        for name, job in zip((ONE, OTHER), started, strict=True):
            steps = logs / name / "steps-0.jsonl"
            _until(
                lambda steps=steps: steps.exists() and steps.read_text().count("\n") > 5, f"steps of {name}"
            )  # type: ignore[misc]
            assert job.running(), job.last_words()
        yield
    finally:
        for job in started:
            job.stop()


Start = Callable[..., NodeWatch]


@pytest.fixture(scope="module")
def watch(jobs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeWatch]:
    # Of the host's probes those of files: they come and go as the others do, and take no seconds to compile.
    of_files = [kind for kind in loaded.KINDS if kind.name in ("cgroup", "process", "machine")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded, "KINDS", of_files)
        watch = NodeWatch(tmp_path_factory.mktemp("cache"))
    yield watch
    watch.close()


@pytest.fixture
def watching(watch: NodeWatch) -> Start:
    """Begin to watch within these limits. One watch for all tests here: compiling its programs takes seconds."""

    def start(**limits: float) -> NodeWatch:
        for part, _ in watch._budget.shed:
            watch._give_up(part, "")
        watch._budget = Budget(Limits(**({"cpu_share": 1.0, "memory_bytes": 1 << 40} | limits)), cpus=2)  # type: ignore[arg-type]
        watch.allow_all()
        for probe in ("thread_time", "gloo"):
            watch.switch(probe, True, "")
        for job in watch.captures():
            watch.end_capture(job)
        watch._events.clear()
        return watch

    return start


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"within {WITHIN_S:.0f} s did not come about: {what}"
        select.select([], [], [], 0.1)


def gather(watch: NodeWatch) -> Interval:
    """A short interval."""
    select.select([], [], [], 0.2)
    return watch.gather()


def gather_until(watch: NodeWatch, condition: Callable[[Interval], object], what: str) -> list[Interval]:
    """All intervals up to the one for which the condition holds."""
    seen: list[Interval] = []
    deadline = time.monotonic() + WITHIN_S
    while not seen or not condition(seen[-1]):
        assert time.monotonic() < deadline, f"within {WITHIN_S:.0f} s did not come about: {what}"
        seen.append(gather(watch))
    return seen


def ranks(interval: Interval, job: str = ONE) -> list[RankBatch]:
    return [rank for rank in interval.ranks if rank.job == job]


def collectives(interval: Interval, job: str = ONE) -> int:
    return sum(len(rank.collectives.seq) for rank in ranks(interval, job))


def state(watch: NodeWatch, name: str) -> Probe:
    (probe,) = [probe for probe in watch.probes() if probe.name == name]
    return probe


def kinds(intervals: list[Interval], kind: str) -> list[str]:
    return [event.detail for interval in intervals for event in interval.events if event.kind == kind]


def ours() -> list[str]:
    """Programs in the kernel that this process holds."""
    return [program.name for program in in_kernel.programs() if os.getpid() in program.holders]


def watched(watch: NodeWatch) -> None:
    """Both probes see the job."""
    gather_until(
        watch,
        lambda i: len(ranks(i)) == 2 and all(r.collectives.seq and len(r.threads) > 1 for r in ranks(i)),
        "collectives and threads of both ranks",
    )


def test_each_probe_tells_what_it_costs_and_the_sysctl_is_left_alone(watching: Start) -> None:
    watch = watching()
    switch = Path("/proc/sys/kernel/bpf_stats_enabled")
    before = switch.read_text()
    watched(watch)
    gather_until(watch, lambda i: all(p.cost_ms_per_s >= 0 for p in i.probes), "costs of all")
    told_ms, traps = (
        0.0,
        0,
    )  # over some time: an interval's costs are counted to its end, its collectives a bit less
    for interval in (gather(watch) for _ in range(10)):
        cost = {probe.name: probe.cost_ms_per_s for probe in interval.probes}
        seconds = (interval.end_ns - interval.start_ns) / 1e9
        told_ms += cost["gloo"] * seconds
        traps += 2 * sum(len(rank.collectives.seq) for rank in interval.ranks)
    assert told_ms >= 0.5 * traps * 14e-6 * 1e3 > 0, "two traps of 14 µs for each collective, at least"
    assert 0 < cost["thread_time"] < 1000
    assert watch.cost().probes_ms_per_s.keys() == {"thread_time", "gloo", "cgroup", "process", "machine"}
    assert watch.cost().compile_ms > watch.cost().agent_ms_per_s > 0
    assert switch.read_text() == before
    told = {m.labels["probe"]: m.value for m in interval.metrics if m.name == "probe_cpu"}
    assert told["thread_time"] == pytest.approx(cost["thread_time"] / 1e3 * seconds)


def test_a_probe_switched_off_stays_off_until_it_is_switched_on(watching: Start) -> None:
    watch = watching()
    watched(watch)
    watch.switch("gloo", False, "not today")
    gather(watch)  # what had been seen before
    assert collectives(gather(watch)) == 0
    assert (state(watch, "gloo").state, state(watch, "gloo").why) == ("off", "not today")
    assert state(watch, "thread_time").state == "on"
    watch._probes.unload()  # as it happens when watching fails, or no rank runs for a while
    later = gather_until(watch, lambda _: watch._probes.threads is not None, "loaded anew")
    assert sum(map(collectives, [*later, gather(watch)])) == 0
    assert state(watch, "gloo").why == "not today"
    watch.switch("gloo", True, "")
    gather_until(watch, collectives, "collectives again")


def test_thread_time_can_be_off_while_gloo_is_on_and_comes_back_anew(watching: Start) -> None:
    watch = watching()
    watched(watch)
    watch.switch("thread_time", False, "too dear")
    gather(watch)
    off = gather(watch)
    assert collectives(off) > 0
    assert [rank.threads for rank in ranks(off)] == [[], []]
    since = time.monotonic_ns()
    watch.switch("thread_time", True, "")
    seen = gather_until(watch, lambda i: all(rank.threads for rank in ranks(i)), "thread times again")
    for rank in ranks(seen[-1]):
        for thread in rank.threads:
            assert thread.since_ns >= since, "what was not watched is not made up"
            if thread.role == Role.DRIVING:
                wholes = zip(
                    thread.running_ns, thread.runnable_ns, thread.blocked_ns, thread.at_ns, strict=True
                )
                assert all(a + b + c == at - thread.since_ns for a, b, c, at in wholes)


def test_with_both_off_nothing_is_loaded(watching: Start) -> None:
    watch = watching()
    watched(watch)
    for probe in ("gloo", "thread_time"):
        watch.switch(probe, False, "off")
    assert ours() == []
    assert {(rank.rank, rank.ended) for rank in ranks(gather(watch))} == {(0, False), (1, False)}


def test_a_probe_that_is_none_is_refused_with_those_there_are(watching: Start) -> None:
    with pytest.raises(UnknownProbe, match="there is no probe 'nccl': there are thread_time, gloo"):
        watching().switch("nccl", False, "")


def test_the_kill_switch_leaves_nothing_loaded_and_ranks_are_told(watching: Start) -> None:
    watch = watching()
    watched(watch)
    watch.start_capture(ONE, 60)
    watch.detach_all("maintenance")
    assert ours() == []
    told = gather(watch)
    assert ours() == []
    assert {(probe.state, probe.why) for probe in told.probes} == {("off", "maintenance")}
    assert len(ranks(told)) == 2
    assert collectives(told) == 0
    assert kinds([told], "capture-ended")[0].endswith("maintenance")
    watch.allow_all()
    gather_until(watch, collectives, "collectives again")


def test_a_capture_sees_one_job_in_detail_and_ends_by_itself(watching: Start) -> None:
    watch = watching()
    watched(watch)
    watch.start_capture(ONE, 3)
    assert 2 < watch.captures()[ONE] <= 3
    seen = gather_until(watch, lambda i: kinds([i], "capture-ended"), "the end of the capture")
    assert watch.captures() == {}
    assert kinds(seen, "capture-started") == ["for 3 s"]
    during = seen[3:-3]
    for rank in (0, 1):
        (calls, driving, apart, together), (calls_o, driving_o, apart_o, _) = (
            _detail(during, job, rank) for job in (ONE, OTHER)
        )
        assert driving >= 2 * calls - 10, "a cut at each arrival and each end"
        assert driving_o < 1.5 * calls_o, "others are merged below 5 ms"
        assert apart >= 2 * calls, "and of each communication thread"
        assert (together, apart_o) == (0, 0)
    (words,) = kinds(seen, "capture-ended")
    assert "2 ranks" in words
    assert words.endswith("its time is over")
    after = gather_until(watch, lambda i: _detail([i], ONE, 0)[3], "the sum over threads again")
    assert _detail(after[-1:], ONE, 0)[2] == 0


def _detail(intervals: list[Interval], job: str, rank: int) -> tuple[int, int, int, int]:
    """(collectives, cuts of the driving thread, of single communication threads, of their sum)."""
    counts = [0, 0, 0, 0]
    for interval in intervals:
        for batch in ranks(interval, job):
            if batch.rank == rank:
                counts[0] += len(batch.collectives.seq)
                for thread in batch.threads:
                    counts[1 if thread.role == Role.DRIVING else 2 if thread.tid else 3] += len(thread.at_ns)
    return counts[0], counts[1], counts[2], counts[3]


def test_a_capture_can_be_prolonged_and_ended(watching: Start) -> None:
    watch = watching()
    watched(watch)
    watch.start_capture(ONE, 2)
    watch.start_capture(ONE, 100)
    watch.start_capture(ONE, 5)  # shorter than what is left: nothing is taken away
    assert watch.captures()[ONE] > 95
    watch.end_capture(ONE)
    watch.end_capture(ONE)
    assert watch.captures() == {}
    events = [event for event in gather(watch).events if event.kind.startswith("capture-")]
    assert [(event.kind, event.job) for event in events] == [("capture-started", ONE), ("capture-ended", ONE)]
    watch.start_capture(ONE, 100)
    watch.switch("thread_time", False, "too dear")
    assert watch.captures() == {}, "it needs both probes"
    assert kinds([gather(watch)], "capture-ended")[0].endswith(
        "thread_time was switched off, and it needs both probes"
    )


@pytest.mark.parametrize("seconds", [0, 0.5, -1, MAX_CAPTURE_S + 1, float("nan"), float("inf")])
def test_a_capture_of_no_sensible_length_is_refused(watching: Start, seconds: float) -> None:
    with pytest.raises(ValueError, match="a capture lasts 1 to 600 seconds, not"):
        watching().start_capture(ONE, seconds)


def test_a_capture_of_what_is_not_there_is_refused(watching: Start) -> None:
    watch = watching()
    with pytest.raises(ValueError, match="no rank of job 'nobody' runs on this node"):
        watch.start_capture("nobody", 10)
    watched(watch)
    watch.switch("gloo", False, "not today")
    with pytest.raises(ValueError, match="a capture needs gloo, which is off: not today"):
        watch.start_capture(ONE, 10)


def test_over_its_budget_it_sheds_in_order_and_restores_ever_later(
    watching: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "OVER_INTERVALS", 3)
    monkeypatch.setattr(budget, "OFF_FOR_S", 1.0)
    monkeypatch.setattr(budget, "FAR_OVER", 1e9)
    watch = watching(events_per_s=5.0)
    watched_once = gather_until(watch, ranks, "ranks")
    watch.start_capture(ONE, 600)
    seen = watched_once + gather_until(watch, lambda i: not ours(), "all probes are given up")
    shed = kinds(seen, "probe-shed")
    assert [words.partition(":")[0] for words in shed] == [
        "captures",
        "the other probes of the host",
        "who had the CPU",
        "the probe gloo",
        "the probe thread_time",
    ]
    assert all("events per second, above the budget of 5: off for 1 s" in words for words in shed)
    assert kinds(seen, "capture-ended"), "a capture that is given up is told to have ended"
    assert len(watch.shed()) == 5
    assert "above the budget" in state(watch, "gloo").why
    with pytest.raises(ValueError, match="captures are given up for now"):
        watch.start_capture(ONE, 10)
    assert len(ranks(gather(watch))) == 2, "ranks are told without any probe"
    later = gather_until(watch, lambda i: kinds([i], "probe-restored"), "something comes back")
    assert kinds(later, "probe-restored")[0].startswith("the probe thread_time: it was given up because")
    again = gather_until(watch, lambda i: kinds([i], "probe-shed"), "it has to go again")
    assert kinds(again, "probe-shed")[0].endswith("off for 2 s"), "twice as long"


def test_over_its_memory_it_loads_anew_before_it_switches_off(
    watching: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "OVER_INTERVALS", 3)
    watch = watching(memory_bytes=1 << 20)
    seen = gather_until(watch, lambda i: len(watch.shed()) >= 4, "all probes are given up")
    words = [detail.partition(":")[0] for detail in kinds(seen, "probe-shed")]
    assert words == [
        "caches",
        "all probes are loaded anew",
        "the other probes of the host",
        "who had the CPU",
        "the probe gloo",
        "the probe thread_time",
    ]
    assert ours() == []
