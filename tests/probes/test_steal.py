"""Stolen time, worked out by hand on a made-up /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from probes.host.steal import StealMeter

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
MS = 1_000_000


def stat(proc: Path, *steal: int) -> None:
    """Ticks stolen from each CPU so far."""
    rows = [f"cpu{cpu} 1 2 3 4 5 6 7 {ticks} 9 10" for cpu, ticks in enumerate(steal)]
    total = f"cpu  1 2 3 4 5 6 7 {sum(steal)} 9 10"
    (proc / "stat").write_text("\n".join([total, *rows, "intr 5 4", "ctxt 3"]) + "\n")


def executed(proc: Path, tid: int, ns: int) -> None:
    (proc / str(tid)).mkdir(exist_ok=True)
    (proc / str(tid) / "schedstat").write_text(f"{ns} 0 5\n")


def test_what_the_switches_show_beyond_the_scheduler_was_stolen(tmp_path: Path) -> None:
    stat(tmp_path, 0, 0)
    executed(tmp_path, 7, 1000 * MS)
    meter = StealMeter(tmp_path)
    assert meter.stolen({7: 2000 * MS}) == {}, "a first look has nothing to compare with"
    stat(tmp_path, 0, 10)
    executed(tmp_path, 7, 1070 * MS)
    # 100 ms on a CPU by the switches, 70 ms by the scheduler.
    assert meter.stolen({7: 2100 * MS}) == {7: 30 * MS}
    assert meter.by_cpu() == {"1": pytest.approx(10 * TICK_NS / 1e9)}


def test_a_thread_cannot_lose_more_than_the_cpus_did(tmp_path: Path) -> None:
    stat(tmp_path, 0, 0)
    executed(tmp_path, 7, 0)
    meter = StealMeter(tmp_path)
    meter.stolen({7: 0})
    stat(tmp_path, 1, 1)
    assert meter.stolen({7: 500 * MS}) == {7: 2 * TICK_NS}


def test_nothing_is_stolen_where_no_cpu_lost_anything(tmp_path: Path) -> None:
    stat(tmp_path, 3, 4)
    executed(tmp_path, 7, 0)
    meter = StealMeter(tmp_path)
    meter.stolen({7: 0})
    assert meter.stolen({7: 100 * MS}) == {}
    assert meter.by_cpu() == {}


def test_a_scheduler_that_is_ahead_of_the_switches_means_nothing_stolen(tmp_path: Path) -> None:
    stat(tmp_path, 0)
    executed(tmp_path, 7, 0)
    meter = StealMeter(tmp_path)
    meter.stolen({7: 0})
    stat(tmp_path, 5)
    executed(tmp_path, 7, 80 * MS)
    assert meter.stolen({7: 70 * MS}) == {7: 0}


def test_a_thread_that_has_ended_is_left_out_and_forgotten(tmp_path: Path) -> None:
    stat(tmp_path, 0)
    executed(tmp_path, 7, 0)
    meter = StealMeter(tmp_path)
    meter.stolen({7: 0})
    (tmp_path / "7" / "schedstat").unlink()
    stat(tmp_path, 5)
    assert meter.stolen({7: 70 * MS}) == {}
    executed(tmp_path, 7, 0)
    stat(tmp_path, 9)
    assert meter.stolen({7: 70 * MS}) == {}, "what is seen again begins anew"


def test_a_cpu_that_appears_later_has_lost_nothing_yet(tmp_path: Path) -> None:
    stat(tmp_path, 5)
    meter = StealMeter(tmp_path)
    stat(tmp_path, 5, 900)
    meter.stolen({})
    assert meter.by_cpu() == {}


def test_a_kernel_without_steal_columns_has_none(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu 1 2 3\ncpu0 1 2 3\n")
    meter = StealMeter(tmp_path)
    assert meter.stolen({}) == {}
