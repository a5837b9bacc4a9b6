"""What a rank runs longer: named where samples tell it, and told from what looks like it."""

import math

import pytest

from diagnosis.causes import name_cause
from diagnosis.findings import Extra, HostTime, Label, Taker, WakerKind, Woken
from diagnosis.layers import running
from tests.diagnosis.layers.facts import PROBES, cause, detail, facts, metric, told, why_not

PERIOD_MS = 1000 / 49
STEPS = 400.0
"""Of the rank; its three peers have as many each."""


def sampled(
    thread: str = "driving",
    *,
    steps: float = STEPS,
    libraries: dict[str, float] | None = None,
    **kinds: float,
) -> dict[Label, float]:
    """What the probe tells of a thread that runs so many ms per step in each kind of code."""
    rows = {metric("on_cpu_ns", **{"thread": thread, "in": kind}): ms for kind, ms in kinds.items()}
    for library, ms in (libraries or {}).items():
        rows[metric("on_cpu_ns", **{"thread": thread, "in": "native", "library": library})] = ms
    if thread == "driving":
        rows[metric("on_cpu_samples", thread=thread)] = sum(rows.values()) / PERIOD_MS
    return rows


def ranks(
    mine: dict[Label, float],
    theirs: dict[Label, float],
    *woken: Woken,
    asleep: dict[str, float] | None = None,
    steps: float = STEPS,
    peers_by: frozenset[str] = PROBES,
    **over: float,
) -> Extra:
    host = told(*woken, asleep=asleep, metrics=mine, steps=steps)
    return facts(host=host, peers=told(metrics=theirs, steps=3 * steps, by=peers_by), **over)


PEERS = sampled(python=3.0, kernel=1.0)
"""Of 2 ms that they run and 2 ms interrupts: three quarters in Python."""


# --- the collector -----------------------------------------------------------------------------------------


def test_the_collector_is_named_with_its_time_and_what_to_do():
    # 2 + 60 ms running and 2 ms of interrupts: 64 ms, 57.6 of them in the collector. 0.9 · 57.6 + … = 2,890 samples
    extra = ranks(sampled(gc=57.6, python=4.8, kernel=1.6), PEERS, running=60.0)
    named = name_cause(extra)
    assert cause(extra) == ("python-gc", 0.96)
    assert named.judgement.owner == "job"
    assert "rank 2 runs Python's garbage collector for 57.6 ms per step, its peers for 0.0 ms" in detail(
        extra
    )
    # 57.6 ms are 1,129 samples in 400 steps: 1.96 · √1129 of 0.051 ms.
    assert (
        f"(± {1.96 * math.sqrt(57.6 * 400 / PERIOD_MS) * PERIOD_MS / 400:.1f} ms, by 1,254 samples)"
        in detail(extra)
    )
    assert "it runs 60.0 ms longer in all, 2.4 ms of it elsewhere" in detail(extra)
    assert "gc.freeze()" in named.judgement.actions[0]
    assert "gc.disable()" in named.judgement.actions[0]
    assert named.judgement.actions[1].startswith("Then diagnose again: ")
    assert why_not(named)["runs-longer"].endswith("4 % of its extra time")


def test_peers_that_collect_as_long_do_not_make_it_the_collector():
    both = ranks(sampled(gc=30.0, python=34.0), sampled(gc=30.0, python=34.0) | {}, running=60.0)
    assert running.python_gc(both).explained_ms == 0.0  # theirs is scaled to the 4 ms that they run
    more = ranks(sampled(gc=60.8, python=3.2), sampled(gc=2.0, python=2.0), running=60.0)
    assert cause(more) == ("python-gc", 0.98)  # 60.8 - 2 of 60


def test_the_samples_split_the_time_that_is_known_exactly():
    """Half of the samples are missing (the probe came late): the shares hold."""
    extra = ranks(sampled(gc=28.8, python=3.2, kernel=1.6), PEERS, running=60.0)
    assert cause(extra)[0] == "python-gc"
    too_few = ranks(sampled(gc=26.0, python=3.0, kernel=1.0), PEERS, running=60.0)
    assert cause(too_few) == ("runs-longer", 1.0)


def test_running_longer_beside_something_else_explains_its_part():
    extra = ranks(sampled(gc=57.6, python=4.8, kernel=1.6), PEERS, running=60.0, blocked=40.0)
    assert running.python_gc(extra).explained_ms == pytest.approx(57.6)
    assert cause(extra) == (None, 0.0)


# --- Python ------------------------------------------------------------------------------------------------


def test_slow_python_is_named_with_its_collector_as_part_of_it():
    extra = ranks(sampled(python=40.0, gc=20.0, kernel=4.0), PEERS, running=60.0)
    assert cause(extra) == ("slow-python", round((60 - 3) / 60, 3))
    assert "rank 2 runs Python code for 40.0 ms per step, its peers for 3.0 ms" in detail(extra)
    assert "and its garbage collector for 20.0 ms per step, its peers for 0.0 ms" in detail(extra)
    assert name_cause(extra).judgement.owner == "job"
    assert "py-spy record --pid 1002" in name_cause(extra).judgement.actions[0]
    assert "python-gc" not in why_not(name_cause(extra)), "it does not claim the same time"


def test_what_the_c_library_does_is_done_for_its_callers():
    mine = sampled(python=48.0, libraries={"libc.so.6": 10.0, "ld-linux-x86-64.so.2": 2.0}, kernel=4.0)
    assert cause(ranks(mine, PEERS, running=60.0))[0] == "slow-python"
    others = sampled(libraries={"libtorch_cpu.so": 48.0, "libc.so.6": 12.0}, kernel=4.0)
    assert "it is 60.0 ms in libtorch_cpu.so" in detail(ranks(others, PEERS, running=60.0))


def test_a_stripped_interpreter_is_said_and_nothing_is_guessed():
    extra = ranks(
        sampled(interpreter=60.0, kernel=4.0), sampled(python=2.0, gc=1.0, kernel=1.0), running=60.0
    )
    assert cause(extra) == ("runs-longer", 1.0)
    assert "57.0 ms in Python's interpreter (its file has no symbols: code or garbage collector?)" in detail(
        extra
    )


def test_a_library_or_the_kernel_is_said_of_who_runs_longer():
    extra = ranks(
        sampled(libraries={"libtorch_cpu.so": 40.0, "libmkl.so": 11.0}, kernel=10.0, python=3.0),
        PEERS,
        running=60.0,
    )
    assert cause(extra) == ("runs-longer", 1.0)
    assert "; it is 40.0 ms in libtorch_cpu.so, 11.0 ms in libmkl.so, 9.0 ms in the kernel (± " in detail(
        extra
    )


def test_more_of_everything_is_no_code_of_its_own():
    """Its CPU is slower, or it has more of the same to do."""
    libraries = {f"lib{number}.so": 2.9 for number in range(22)}
    mine = sampled(libraries=libraries, steps=STEPS)
    theirs = sampled(libraries=dict.fromkeys(libraries, 4.0 / 22))
    extra = ranks(mine, theirs, running=60.0)
    assert "; that is spread over all the code that it runs" in detail(extra)


@pytest.mark.parametrize("code", ["gc", "python"])
def test_a_slower_cpu_is_no_slow_python_though_peers_run_little_else(code: str):
    """64 ms instead of 4, in the collector, in the interpreter and in all the rest: each 16 times as long."""
    extra = ranks(sampled(**{code: 57.6, "kernel": 6.4}), sampled(**{code: 3.6, "kernel": 0.4}), running=60.0)
    assert cause(extra) == ("runs-longer", 1.0)
    assert "whether its code does more or its CPU is slower is not seen" in detail(extra)
    assert "54.0 ms in Python" in detail(extra)
    # The rest as long as that of its peers: it is this code.
    own = ranks(sampled(**{code: 63.6, "kernel": 0.4}), sampled(**{code: 3.6, "kernel": 0.4}), running=60.0)
    assert cause(own) == ({"gc": "python-gc", "python": "slow-python"}[code], 1.0)


def test_too_few_samples_name_nothing_and_say_how_many_it_takes():
    # 30 samples in all: 27 of them are 54 ms ± 20.
    steps = 30 * PERIOD_MS / 64
    extra = ranks(sampled(gc=57.6, python=4.8, kernel=1.6), PEERS, steps=steps, running=60.0)
    assert cause(extra) == ("runs-longer", 1.0)
    # ± 1.96 · √27 · 2.13 ms = 21.7 ms; 12 are wanted: (21.7/12)² times as many.
    assert "in which code is not known yet: 30 samples tell it to ± 21.7 ms, about 99 are needed" in detail(
        extra
    )


def test_a_hundred_samples_do():
    steps = 110 * PERIOD_MS / 64
    extra = ranks(sampled(gc=57.6, python=4.8, kernel=1.6), PEERS, steps=steps, running=60.0)
    assert cause(extra)[0] == "python-gc"


def test_peers_of_whom_nothing_is_told_are_not_taken_for_unhurt():
    without = PROBES - {"on_cpu"}
    extra = ranks(sampled(gc=57.6, python=6.4), PEERS, peers_by=without, running=60.0)
    assert cause(extra) == ("runs-longer", 1.0)
    assert "is not seen (needs stacks and the CPU's frequency)" in detail(extra)
    assert "it is " not in detail(extra)


def test_who_does_not_run_longer_is_not_named_for_what_it_runs():
    extra = ranks(sampled(gc=3.6, python=0.4), PEERS, blocked=40.0)
    assert running.python_gc(extra).explained_ms == 0.0
    assert running.slow_python(extra).explained_ms == 0.0
    assert running.in_what_code(extra) == ""


# --- Python's lock -----------------------------------------------------------------------------------------


def woken(kind: WakerKind, ms: float, tid: int = 1090) -> Woken:
    return Woken("futex", kind, "python3", 0 if kind == "interrupt" else 1002, tid, ms)


GIL = (woken("interrupt", 30.0, 0), woken("own", 1.0))
SPINNER = sampled("spinner (1090)", python=40.0)


def locked(*rows: Woken, others: dict[Label, float] = SPINNER, **over: float) -> Extra:
    mine = sampled(python=3.0, kernel=1.0) | others
    return ranks(mine, PEERS, *rows, asleep={"futex": 31.0}, blocked=32.0, **over)


def test_a_thread_that_keeps_pythons_lock_is_named():
    extra = locked(*GIL)
    named = name_cause(extra)
    assert cause(extra) == ("gil", round(31 / 32, 3))
    assert named.judgement.owner == "job"
    assert detail(extra) == (
        "rank 2 waits 31.0 ms per step longer than its peers for Python's lock (GIL) while threads of its own run "
        "Python: spinner (1090) for 40.0 ms"
    )
    assert not {"lock-contention", "sleeps"} & why_not(named).keys(), "they do not claim the same time"


def test_what_its_own_threads_take_of_its_cpu_counts_with_it():
    own = Taker("own", "python3", (1002,), "", 10.0)
    host = told(*GIL, asleep={"futex": 31.0}, metrics=sampled(python=3.0, kernel=1.0) | SPINNER, steps=STEPS)
    extra = facts(own, host=host, peers=told(metrics=PEERS, steps=3 * STEPS), blocked=32.0, runnable=9.0)
    assert cause(extra) == ("gil", round(40 / 41, 3))
    assert "Python's lock (GIL), and 9.0 ms for the CPU that its threads share, while " in detail(extra)


def test_work_that_is_handed_over_is_no_lock_of_python():
    """It waits for the result of its thread, without a timeout."""
    extra = locked(woken("own", 31.0))
    assert cause(extra) == ("lock-contention", round(31 / 32, 3))


def test_a_timer_is_no_lock_of_python():
    extra = locked(woken("interrupt", 31.0, 0))
    assert cause(extra) == ("sleeps", round(31 / 32, 3))


def test_a_lock_while_nobody_runs_python_is_none_of_pythons():
    native = locked(*GIL, others=sampled("worker (1090)", native=40.0))
    assert running.gil(native).explained_ms == 0.0
    assert "waits 31.0 ms per step for locks or other threads" in detail(native)
    little = locked(*GIL, others=sampled("worker (1090)", python=8.0))
    assert running.gil(little).explained_ms == 0.0


def test_threads_that_peers_have_as_well_hold_no_lock_against_it_alone():
    extra = ranks(
        sampled(python=3.0, kernel=1.0) | SPINNER, PEERS | SPINNER, *GIL, asleep={"futex": 31.0}, blocked=32.0
    )
    assert running.gil(extra).explained_ms == 0.0


def test_too_few_samples_hold_no_lock():
    extra = locked(*GIL, steps=10.0)  # 40 ms in 10 steps: 20 samples, ± 17.5 ms
    assert running.gil(extra).explained_ms == 0.0
    assert running.gil(locked(*GIL, steps=100.0)).explained_ms == pytest.approx(31.0)


@pytest.mark.parametrize("untold", ["mine", "theirs"])
def test_where_the_probe_saw_too_little_no_lock_is_named(untold: str):
    """It was on for a tenth of the time: neither how long threads of peers run Python is known, nor how surely."""
    seen = {"mine": sampled(python=3.0, kernel=1.0), "theirs": PEERS}
    seen[untold] = {label: value / 10 for label, value in seen[untold].items()}
    waits = {"asleep": {"futex": 31.0}, "blocked": 32.0}
    extra = ranks(seen["mine"] | SPINNER, seen["theirs"], *GIL, **waits)
    assert running.gil(extra).explained_ms == 0.0
    seen[untold] = {}
    assert running.gil(ranks(seen["mine"] | SPINNER, seen["theirs"], *GIL, **waits)).explained_ms == 0.0


def test_threads_that_are_not_listed_are_called_others():
    assert "run Python: others for 40.0 ms" in detail(locked(*GIL, others=sampled("other", python=40.0)))


def test_nothing_told_is_nothing_named():
    assert running.ran_in(facts(host=HostTime(), peers=HostTime(), running=20.0)).samples == 0.0
    assert cause(facts(running=20.0)) == ("runs-longer", 1.0)
