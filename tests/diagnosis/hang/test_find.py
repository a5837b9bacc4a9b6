"""Who holds a hanging job, and who only waits. Of real dumps (Megatron, 16 ranks) the injected ranks are known."""

from __future__ import annotations

import random

import pytest

from diagnosis.evidence import Evidence
from diagnosis.hang.find import find_hang
from probes.importers import gather, read
from tests.diagnosis.hang.hangs import (
    AR,
    WORLD,
    calls,
    held,
    kinds,
    made,
    of_parts,
    permuted,
    without,
)
from tests.recorded import DUMPS

INJECTED = {"gpu_error_1st": [12, 14], "lock_gil_1st": [9, 14]}


def recorded(case: str) -> Evidence:
    folder = DUMPS / case
    if not folder.is_dir():
        pytest.skip(f"the recorded dumps are not at {folder}")
    return of_parts(read(gather([folder]), job="job-123"))


@pytest.mark.parametrize("case", INJECTED)
def test_exactly_the_injected_ranks_hold_a_recorded_job(case: str):
    hang = find_hang(recorded(case))
    assert held(hang) == INJECTED[case]
    assert hang is not None
    assert sorted(hang.victims) == [rank for rank in range(16) if rank not in INJECTED[case]]


def test_the_two_recorded_faults_are_told_apart_by_what_is_pending():
    gpu, lock = find_hang(recorded("gpu_error_1st")), find_hang(recorded("lock_gil_1st"))
    assert kinds(gpu) == {"stuck-inside"}
    assert [holder.pending for holder in gpu.holders] == [27, 43]  # type: ignore[union-attr]
    assert kinds(lock) == {"never-came"}
    assert [holder.pending for holder in lock.holders] == [0, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize("case", INJECTED)
def test_no_innocent_is_named_when_a_dump_is_missing(case: str):
    whole = recorded(case)
    for gone in range(16):
        hang = find_hang(without(whole, gone))
        assert held(hang) == [rank for rank in INJECTED[case] if rank != gone], f"without rank {gone}"
        if gone in INJECTED[case]:
            assert hang is not None
            assert hang.unseen == (gone,)


@pytest.mark.parametrize("case", INJECTED)
def test_no_innocent_is_named_when_two_dumps_are_missing(case: str):
    whole = recorded(case)
    for first, second in [(one, (one + far) % 16) for one in range(16) for far in (1, 5)]:
        assert set(held(find_hang(without(whole, first, second)))) <= set(INJECTED[case])


@pytest.mark.parametrize("case", INJECTED)
def test_ranks_numbered_anew_give_the_same_answer_numbered_anew(case: str):
    whole = recorded(case)
    for seed in range(5):
        order = list(range(16))
        random.Random(seed).shuffle(order)
        hang = find_hang(permuted(whole, dict(enumerate(order))))
        assert held(hang) == sorted(order[rank] for rank in INJECTED[case])
        assert len(kinds(hang)) == 1


def test_no_ranks_is_no_hang():
    assert find_hang(without(made(WORLD, {0: calls(5)}), 0)) is None


def test_one_of_a_thousand_ranks_is_found():
    groups = {"world": list(range(1024))} | {f"tp{n}": list(range(8 * n, 8 * n + 8)) for n in range(128)}
    own = {
        rank: [*calls(20, 10, group=f"tp{rank // 8}"), ("world", 3, AR, 9.0, None)] for rank in range(1024)
    }
    own[77] = calls(10, group="tp9")
    evidence = made(groups, own, source="flight-recorder", enqueued={77: {"world": (2, 2)}})
    assert held(find_hang(evidence)) == [77]
