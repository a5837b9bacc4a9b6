"""What is pure in watching a node: lives of ranks, and cuts as columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from probes.discovery import Process, RankProcess
from probes.host.reasons import REASONS
from probes.host.thread_time import Cut
from probes.interval import life, thread_columns, utc_offset_ns
from probes.records import Role

PROCESS = Process(pid=7, parent=5, start_ticks=100, name="python3", image=0x7FFE)
RANK = RankProcess("job", 1, 4, 1, PROCESS, Path("/lib/libtorch_cpu.so"), {"RANK": "1"})


def cut(at: int, *, tid: int = 7, role: Role = Role.DRIVING, since: int = 100) -> Cut:
    return Cut(since, at, (at - since) // 2, 0, (at - since) - (at - since) // 2, 3, 2, tid, role)


@pytest.mark.parametrize(
    "change", [{"name": "train: step 5"}, {"parent": 1}], ids=["new name", "launcher ended"]
)
def test_a_rank_that_is_renamed_or_left_by_its_launcher_lives_on(change: dict[str, object]) -> None:
    assert life(replace(RANK, process=replace(PROCESS, **change))) == life(RANK)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"start_ticks": 900}, {"image": 0x7AAA}], ids=["pid reused", "exec"])
def test_a_pid_used_again_or_another_program_is_anotherlife(change: dict[str, object]) -> None:
    assert life(replace(RANK, process=replace(PROCESS, **change))) != life(RANK)  # type: ignore[arg-type]


def test_cuts_become_columns_in_time_order() -> None:
    (thread,) = thread_columns([cut(300), cut(200), cut(400)], {7: 5})
    assert (thread.tid, thread.role, thread.since_ns, thread.stolen_ns) == (7, Role.DRIVING, 100, 5)
    assert thread.at_ns == [200, 300, 400]
    assert thread.running_ns == [50, 100, 150]
    assert thread.blocked_ns == [50, 100, 150]
    assert (thread.runnable_ns, thread.uninterruptible_ns) == ([0] * 3, [3] * 3)


def test_a_thread_watched_anew_is_another_row() -> None:
    old, new = thread_columns([cut(200), cut(900, since=800)], {})
    assert (old.since_ns, old.at_ns, new.since_ns, new.at_ns) == (100, [200], 800, [900])


def test_stolen_time_goes_to_driving_threads_only() -> None:
    driving, communication = thread_columns(
        [cut(200), cut(200, tid=0, role=Role.COMMUNICATION)], {7: 5, 0: 9}
    )
    assert (driving.stolen_ns, communication.stolen_ns) == (5, 0)


def by(**parts: int) -> tuple[int, ...]:
    return tuple(parts.get(reason.replace("-", "_"), 0) for reason in REASONS)


def test_parts_of_blocked_time_become_columns_by_reason_without_those_that_took_nothing() -> None:
    rows = [
        cut(300)._replace(blocked_by=by(futex=60, storage_read=40)),
        cut(200)._replace(blocked_by=by(futex=50)),
    ]
    (thread,) = thread_columns(rows, {})
    assert thread.blocked_by == {"storage-read": [0, 40], "futex": [50, 60]}


def test_what_is_not_known_is_no_reason() -> None:
    (thread,) = thread_columns([cut(200)._replace(blocked_by=(50, *[0] * (len(REASONS) - 1)))], {})
    assert thread.blocked_by == {}


def test_cuts_that_tell_no_parts_make_no_columns() -> None:
    (thread,) = thread_columns([cut(200), cut(300)._replace(blocked_by=by(futex=60))], {})
    assert thread.blocked_by == {}


def test_a_helper_has_rows_of_its_own() -> None:
    helper, driving = (cut(200, tid=9, role=Role.HELPER), cut(200))
    rows = thread_columns([helper, driving], {7: 5, 9: 6})
    assert [(row.tid, row.role, row.stolen_ns) for row in rows] == [
        (7, Role.DRIVING, 5),
        (9, Role.HELPER, 0),
    ]


def test_the_offset_leads_from_monotonic_to_utc() -> None:
    import time

    first, now, second = utc_offset_ns(), time.time_ns() - time.monotonic_ns(), utc_offset_ns()
    assert min(first, second) - 50_000_000 <= now <= max(first, second) + 50_000_000
