"""What programs cost, by the running kernel's own statistics."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probes import costs
from probes.bpf import Kernel
from probes.costs import CostMeter, StatisticsUnavailable
from tests.probes import processes
from tests.probes.processes import until

pytestmark = pytest.mark.live

SWITCH = Path("/proc/sys/kernel/bpf_stats_enabled")


@pytest.fixture
def program(root_and_bpf: Kernel) -> Iterator[Any]:
    """A program that runs whenever a process reads its own parent's number in a loop."""
    text = b"TRACEPOINT_PROBE(raw_syscalls, sys_enter) { return 0; }"
    loaded = root_and_bpf.bcc.BPF(text=text)
    yield loaded
    loaded.cleanup()


def descriptor(program: Any) -> int:
    (function,) = program.funcs.values()
    return int(function.fd)


def work() -> None:
    for _ in range(2000):
        os.getppid()


def runs(program: Any) -> int:
    """How many runs the kernel counts while we work."""
    before = costs.run_time(descriptor(program))[1]
    work()
    return costs.run_time(descriptor(program))[1] - before


def test_run_times_are_counted_while_the_descriptor_is_open_and_the_sysctl_stays(program: Any) -> None:
    if SWITCH.read_text().strip() != "0":
        pytest.skip("somebody else has the statistics on")
    handle = costs.enable()
    try:
        assert runs(program) >= 2000
        assert SWITCH.read_text().strip() == "0"
    finally:
        os.close(handle)


def test_they_go_off_with_the_process_that_switched_them_on(program: Any) -> None:
    code = "import sys; from probes import costs; costs.enable(); print('on', flush=True); sys.stdin.read()"
    child = processes.start([sys.executable, "-c", code])
    assert child.line() == "on"
    assert runs(program) >= 2000
    child.end()  # SIGKILL
    until(lambda: runs(program) == 0, "statistics are off (unless somebody else has them on)")


def test_a_program_that_is_gone_is_said_in_words(program: Any) -> None:
    with pytest.raises(StatisticsUnavailable, match="a program's statistics cannot be read: "):
        costs.run_time(10**6)


def measured(meter: CostMeter, programs: dict[str, list[int]], now: float) -> float:
    """One window of a tenth of a second in which we work all the time."""
    meter.tick(now, programs)
    begun = time.monotonic()
    before = costs.run_time(programs["it"][0])[0]
    while time.monotonic() - begun < 0.1:
        work()
    ran = costs.run_time(programs["it"][0])[0] - before
    meter.tick(now + 0.1, programs)
    return ran / 1e9 / 0.1


def test_the_meter_tells_the_median_of_its_windows(program: Any) -> None:
    meter = CostMeter()
    programs = {"it": [descriptor(program)]}
    assert meter.rate("it") is None
    figures = sorted(measured(meter, programs, now) for now in (0.0, 5.0, 10.0))
    rate = meter.rate("it")
    assert rate is not None
    assert 0.8 * figures[0] <= rate <= 1.5 * figures[2]
    assert figures[0] > 0


def test_the_meter_measures_every_half_minute_once_it_knows(program: Any) -> None:
    meter = CostMeter()
    programs = {"it": [descriptor(program)]}
    windows, now = [], 0.0
    while now < 100:
        opened = meter._descriptor >= 0
        meter.tick(now, programs)
        if meter._descriptor >= 0 and not opened:
            windows.append(now)
        now += 1
    meter.close()
    assert windows == [0, 5, 10, 15, 45, 75]


def test_figures_from_before_a_change_hold_until_there_are_new_ones(program: Any) -> None:
    meter = CostMeter()
    programs = {"it": [descriptor(program)]}
    for now in (0.0, 5.0, 10.0):
        measured(meter, programs, now)
    busy = meter.rate("it")
    meter.changed()
    assert meter.rate("it") == busy
    meter.tick(11.0, programs)
    select.select([], [], [], 0.05)  # nothing of ours runs
    meter.tick(12.0, programs)
    rate = meter.rate("it")
    assert busy is not None
    assert rate is not None
    assert rate < busy / 2


def test_where_the_kernel_gives_none_it_is_said_and_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, program: Any
) -> None:
    monkeypatch.setattr(costs, "BPF_SYSCALL", {})
    meter = CostMeter()
    meter.tick(0.0, {"it": [descriptor(program)]})
    assert "no known number" in meter.why
    assert meter.rate("it") is None
    monkeypatch.undo()
    meter.tick(1.0, {"it": [descriptor(program)]})
    assert "no known number" in meter.why
    meter.tick(31.0, {"it": [descriptor(program)]})
    meter.close()
    assert meter.why == ""
