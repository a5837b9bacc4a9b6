"""The runner's own pieces: what is drawn, what counts as bitten, what counts as right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diagnosis.verdict import Culprit, Verdict, Window
from tests.scenarios import rank
from tests.scenarios.catalogue import FAULTS
from tests.scenarios.fault import Expected, Fault
from tests.scenarios.runner import has_bitten, is_right, lasts, mean_step_ms, prepare

MS = 1_000_000
HERE = Path("/nowhere")


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})


def course(_run: object):
    yield


def fault(**changes: object) -> Fault:
    return Fault(**{"name": "made-up", "course": course, "expected": Expected("slow")} | changes)


def verdict(status: str, ranks: list[int], cause: str | None = None) -> Verdict:
    culprits = [
        Culprit(
            rank=rank,
            node="node-1",
            gpu=None,
            layer="os",
            cause=cause,
            owner="node",
            confidence=0.9,
            cost_ms_per_step=10.0,
            share_explained=1.0,
            detail="",
        )
        for rank in ranks
    ]
    return Verdict(job="j", window=Window(start="", end=""), status=status, culprits=culprits, cause=cause)


# --- what is drawn


@pytest.mark.usefixtures("four_cpus")
def test_a_seed_draws_the_same_again_and_others_draw_others() -> None:
    def drawn(seed: int) -> tuple[object, ...]:
        run = prepare(FAULTS["cpu-hog"], seed, HERE)
        return run.world, run.ranks, run.cpus, run.intruder(), run.draw.random()

    assert drawn(3) == drawn(3)
    assert len({str(drawn(seed)) for seed in range(20)}) == 20


@pytest.mark.usefixtures("four_cpus")
def test_the_rank_has_its_cpu_alone_and_any_rank_and_cpu_can_be_drawn() -> None:
    runs = [prepare(fault(), seed, HERE) for seed in range(60)]
    for run in runs:
        assert [rank for rank in range(run.world) if run.cpus[rank] == run.cpu] == [run.rank]
        assert 4 <= run.world == len(run.cpus) <= 8
    assert {run.cpu for run in runs} == {2, 3, 5, 7}
    assert {run.rank for run in runs} >= {0, 1, 2, 3}


@pytest.mark.usefixtures("four_cpus")
def test_what_is_no_single_ranks_fault_is_spread_over_all_cpus() -> None:
    run = prepare(fault(spread=True), 1, HERE)
    assert run.cpus[:4] == [2, 3, 5, 7]


@pytest.mark.usefixtures("four_cpus")
def test_faults_do_not_share_what_a_seed_draws() -> None:
    hogs = [prepare(FAULTS["cpu-hog"], seed, HERE).rank for seed in range(30)]
    assert hogs != [prepare(FAULTS["cpu-quota"], seed, HERE).rank for seed in range(30)]


def test_each_fault_has_a_name_of_its_own_and_healthy_is_among_them() -> None:
    assert all(FAULTS[name].name == name for name in FAULTS)
    assert [name for name, one in FAULTS.items() if one.bite == "nothing"] == ["healthy"]
    assert len(FAULTS) >= 22


def test_the_usual_step_is_the_median_of_the_newest_whole_lines(tmp_path: Path) -> None:
    run = prepare(fault(), 1, tmp_path)
    starts = [0, 500, 550, 600, 660, 700]  # ms; then a line that is being written
    lines = [f'{{"step": 0, "start_ns": {at * MS}}}' for at in starts]
    (tmp_path / f"steps-{run.rank}.jsonl").write_text("\n".join([*lines, '{"step": 6, "st']))
    assert run.usual_step_s() == pytest.approx(0.050)


# --- whether it bit


def test_a_pause_at_the_very_beginning_is_part_of_the_steps_after_it() -> None:
    starts = [0, 50 * MS, 100 * MS, 5_100 * MS, 5_150 * MS]
    # Put in at 120 ms, into the step that began at 100 ms and took 5 s: (5150 − 100) / 2 steps.
    assert mean_step_ms(starts, 120 * MS, 6_000 * MS) == 2_525.0
    assert mean_step_ms(starts, 0, 100 * MS) == 50.0


def test_without_a_step_there_is_no_mean() -> None:
    assert mean_step_ms([0, 50 * MS], 60 * MS, 900 * MS) is None
    assert mean_step_ms([], 0, 900 * MS) is None


@pytest.mark.parametrize(("after_ms", "bit"), [(48.1, True), (48.0, True), (47.9, False), (None, False)])
def test_steps_must_take_a_fifth_longer_or_the_run_is_void(after_ms: float | None, bit: bool) -> None:
    assert has_bitten(fault(), 40.0, after_ms, 0.0) is bit


def test_what_stops_the_job_must_have_stopped_it() -> None:
    killed = fault(bite="stops")
    assert has_bitten(killed, 40.0, 41.0, 7.0)
    assert not has_bitten(killed, 40.0, 400.0, 0.5)


def test_a_healthy_run_has_nothing_to_prove() -> None:
    assert has_bitten(fault(bite="nothing"), 40.0, 39.0, 0.0)


def test_a_fault_lasts_until_there_are_steps_enough_to_judge_by_but_not_forever() -> None:
    slow, killed = fault(after_s=20.0), fault(after_s=20.0, bite="stops")
    assert lasts(slow, 19.0, 500)
    assert not lasts(slow, 20.0, 120)
    assert lasts(slow, 59.0, 119)
    assert not lasts(slow, 60.0, 0)
    assert not lasts(killed, 20.0, 0)


# --- what is right


def test_status_and_culprits_must_be_right_all_of_them_and_nobody_else() -> None:
    two = fault(expected=Expected("slow", culprits=2), culprits=2)
    assert is_right(two, [3, 1], verdict("slow", [1, 3]))
    assert not is_right(two, [3, 1], verdict("slow", [1]))
    assert not is_right(two, [3, 1], verdict("slow", [1, 2, 3]))
    assert not is_right(two, [3, 1], verdict("hang", [1, 3]))


def test_a_cause_is_asked_for_as_soon_as_the_catalogue_has_it() -> None:
    known = fault(expected=Expected("slow", cause="cpu-contention"))
    not_yet = fault(expected=Expected("slow", cause="no-rule-says-so"))
    assert known.expected.cause_is_known
    assert not not_yet.expected.cause_is_known
    assert not is_right(known, [1], verdict("slow", [1], "runs-longer"))
    assert is_right(known, [1], verdict("slow", [1], "cpu-contention"))
    assert is_right(not_yet, [1], verdict("slow", [1], "runs-longer"))


def test_where_a_fault_takes_the_time_in_two_ways_both_are_right() -> None:
    both = fault(expected=Expected("slow", cause="cpu-contention", or_cause="runs-longer"))
    assert is_right(both, [1], verdict("slow", [1], "runs-longer"))
    assert is_right(both, [1], verdict("slow", [1], "cpu-contention"))
    assert not is_right(both, [1], verdict("slow", [1], "slow-link"))
    assert not is_right(both, [1], verdict("slow", [1], None))


# --- the rank's side


def test_a_rank_goes_wrong_once_the_file_is_there_and_works_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []

    def noting(word: str):
        def made(argument: str):
            did.append(f"{word} made with {argument}")
            return lambda: did.append(word)

        return made

    monkeypatch.setitem(rank.WORK, "work", noting("work"))
    monkeypatch.setitem(rank.FAULTS, "fault", noting("fault"))
    when = tmp_path / "now"
    load = rank.loading("work:a:b", "fault:", when)
    load()
    assert did == ["work made with a:b", "work"]
    when.touch()
    load()
    load()
    assert did[2:] == ["work", "fault made with ", "fault", "work", "fault"]


def test_reading_goes_on_through_the_file_and_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(2 * rank.READ_BYTES))
    places = []
    pread = os.pread

    def noted(file: int, size: int, at: int) -> bytes:
        places.append(at)
        return pread(file, size, at)

    monkeypatch.setattr(os, "pread", noted)
    step = rank.reads(str(path))
    for _ in range(3):
        step()
    assert places == [0, rank.READ_BYTES, 0]


def test_every_so_many_steps_and_no_other_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = []
    monkeypatch.setattr(rank, "slow_python", lambda ms: lambda: slow.append(ms))
    step = rank.now_and_then("50:700")
    for number in range(1, 151):
        step()
        assert len(slow) == number // 50
    assert set(slow) == {"700"}
