"""The confusion table: which runs are done, where it goes on, and what it says of lines made by hand."""

from __future__ import annotations

import fcntl
from pathlib import Path

import msgspec
import pytest

from bench import faults
from bench.faults import Line
from tests.scenarios.catalogue import FAULTS
from tests.scenarios.runner import Result


def result(fault: str = "cpu-hog", seed: int = 1, **changes: object) -> Result:
    fields: dict[str, object] = {
        "fault": fault,
        "seed": seed,
        "world": 4,
        "ranks": [2],
        "words": [],
        "bit": True,
        "before_ms": 40.0,
        "after_ms": 80.0,
        "status": "slow",
        "culprits": [2],
        "cause": "cpu-contention",
        "layer": "os",
        "owner": "node",
        "confidence": 0.9,
        "seconds": 12.0,
        "summary": "",
        "details": [],
    }
    return Result(**fields | changes)


def line(fault: str = "cpu-hog", seed: int = 1, **changes: object) -> Line:
    return Line(fault=fault, seed=seed, result=result(fault, seed, **changes))


def row(text: str, begins: str, which: int = 0) -> list[str]:
    return [one for one in text.splitlines() if one.startswith(begins + " ")][which].split()


# --- which runs


def test_each_seed_of_all_faults_comes_before_the_next_and_healthy_runs_are_counted_apart() -> None:
    runs = faults.wanted(["healthy", "sigstop", "cpu-hog"], range(1, 3), range(1, 4))
    assert runs == [
        ("cpu-hog", 1),
        ("sigstop", 1),
        ("healthy", 1),
        ("cpu-hog", 2),
        ("sigstop", 2),
        ("healthy", 2),
        ("healthy", 3),
    ]


def test_what_has_a_result_is_done_void_or_not_and_what_failed_is_done_again() -> None:
    lines = [line(seed=1), line(seed=2, bit=False), Line(fault="cpu-hog", seed=3, error="OSError: no")]
    assert faults.missing([("cpu-hog", seed) for seed in (1, 2, 3, 4)], lines) == [
        ("cpu-hog", 3),
        ("cpu-hog", 4),
    ]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Runs are counted, not made."""
    done: list[tuple[str, int]] = []

    def run(fault: object, seed: int, on: object, out: Path) -> Result:
        done.append((fault.name, seed))
        if (fault.name, seed) == ("sigstop", 1) and len(done) < 4:
            raise RuntimeError("the job ended")
        return result(fault.name, seed)

    monkeypatch.setattr(faults, "_run", run)
    monkeypatch.setattr(faults.runner, "ground", lambda: faults.contextlib.nullcontext("a ground"))
    return done


def test_it_goes_on_where_it_was_stopped_also_in_the_middle_of_a_line(
    tmp_path: Path, counted: list[tuple[str, int]]
) -> None:
    runs = faults.wanted(["cpu-hog", "sigstop"], range(1, 3), [])
    faults.do(runs[:1], tmp_path)
    path = tmp_path / "results.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + msgspec.json.encode(line("sigstop"))[:40])
    faults.do(runs, tmp_path)
    assert counted == [("cpu-hog", 1), ("sigstop", 1), ("cpu-hog", 2), ("sigstop", 2)]
    lines = faults.read(path)
    assert [(one.fault, one.seed, bool(one.result)) for one in lines] == [
        ("cpu-hog", 1, True),
        ("sigstop", 1, False),
        ("cpu-hog", 2, True),
        ("sigstop", 2, True),
    ]
    assert lines[1].error == "RuntimeError: the job ended"
    faults.do(runs, tmp_path)  # what failed, and nothing else
    assert counted[4:] == [("sigstop", 1)]


def test_a_folder_is_for_one_at_a_time(tmp_path: Path, counted: list[tuple[str, int]]) -> None:
    with (tmp_path / "results.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another process makes runs in"):
            faults.do([("cpu-hog", 1)], tmp_path)
    assert counted == []


def test_a_run_asked_for_by_its_seed_is_made_again(tmp_path: Path, counted: list[tuple[str, int]]) -> None:
    arguments = ["--fault", "cpu-hog", "--seed", "7", "--out", str(tmp_path)]
    faults.main(arguments)
    faults.main(arguments)
    assert counted == [("cpu-hog", 7), ("cpu-hog", 7)]


def test_an_unknown_fault_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(SystemExit, match=r"no such fault: cpu-hag; there are cpu-hog, .*healthy"):
        faults.main(["--fault", "cpu-hag"])


# --- the table


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    # Of all n: n / (n + z²), and of none the rest to 1; 8 of 10 by hand.
    [(5, 5, 0.5655, 1.0), (0, 5, 0.0, 0.4345), (8, 10, 0.4902, 0.9433), (50, 50, 0.9287, 1.0)],
)
def test_intervals_are_wilsons(count: int, of: int, low: float, high: float) -> None:
    assert faults.wilson(count, of) == pytest.approx((low, high), abs=5e-5)


def test_causes_put_in_stand_against_causes_named() -> None:
    lines = [line(seed=seed) for seed in (1, 2, 3, 4)] + [line(seed=5, cause=None, culprits=[])]
    lines += [line("cpu-quota", seed, cause="cpu-contention") for seed in (1, 2)]
    text = faults.table(lines)
    assert text.splitlines()[0].split() == [
        "put", "in", "cause", "expected", "cpu-contention", "(none)", "cause", "right",
    ]  # fmt: skip
    assert row(text, "cpu-hog") == ["cpu-hog", "cpu-contention", "4", "1", "4/5", "(38–96", "%)"]
    assert row(text, "cpu-quota")[:4] == ["cpu-quota", "cpu-quota", "2", "·"]


def test_culprits_right_wrong_and_none_are_told_apart_and_void_runs_count_for_none() -> None:
    lines = [
        line(seed=1),
        line(seed=2, culprits=[1]),
        line(seed=3, culprits=[1, 2]),
        line(seed=4, culprits=[]),
        line(seed=5, bit=False, culprits=[]),
    ]
    text = faults.table(lines)
    assert row(text, "cpu-hog", 1) == [
        "cpu-hog", "5", "1", "40", "→", "80", "1/4", "(5–70", "%)", "2", "1", "12",
    ]  # fmt: skip
    assert "culprit right: 1/4 (5–70 %)" in text
    assert "void: 1 of 5 runs" in text


def test_a_fault_of_the_whole_job_is_not_right_where_it_was_not_seen() -> None:
    of_all = {"ranks": [], "culprits": [], "cause": None}
    seen, missed = (line("all-alike", 1, **of_all | {"status": status}) for status in ("slow", "healthy"))
    assert (faults.culprit(seen.result), faults.culprit(missed.result)) == ("right", "none")


def test_of_a_run_made_again_the_newer_result_counts() -> None:
    text = faults.table([line(culprits=[1]), line()])
    assert "culprit right: 1/1 (21–100 %)" in text


def test_healthy_runs_are_false_alarms_when_somebody_is_named_or_slowness_is_made_up() -> None:
    quiet = {"ranks": [], "culprits": [], "cause": None, "after_ms": 41.0}
    runs = [
        ("healthy", [], 41.0, False),
        ("insufficient", [], 41.0, False),
        ("slow", [], 60.0, False),  # the machine slowed it, by the job's own log
        ("slow", [], 41.0, True),
        ("slow", [3], 60.0, True),
        ("hang", [], 41.0, True),
    ]
    lines = []
    for seed, (status, culprits, after_ms, alarm) in enumerate(runs):
        changes = quiet | {"status": status, "culprits": culprits, "after_ms": after_ms}
        lines.append(line("healthy", seed, **changes))
        assert faults.false_alarm(lines[-1].result) is alarm
    text = faults.table(lines)
    assert "false alarms in healthy runs: 3/6 (19–81 %)" in text
    assert not [one for one in text.splitlines() if one.startswith("healthy ")]


def test_what_failed_is_said_with_its_words() -> None:
    text = faults.table(
        [line(), Line(fault="udp-flood", seed=2, error="NoGround: there is no command tc here")]
    )
    assert "failed: udp-flood --seed 2: FAILED, NoGround: there is no command tc here" in text


def test_a_run_is_told_with_the_seed_that_repeats_it() -> None:
    assert faults.told(line(seed=9)) == (
        "cpu-hog --seed 9: step 40.0 → 80.0 ms; slow, ranks 2 (right), cpu-contention, right after 12 s"
    )
    assert (
        faults.told(line(seed=9, bit=False, after_ms=41.0)) == "cpu-hog --seed 9: void, step 40.0 → 41.0 ms"
    )


def test_all_faults_can_stand_in_one_table() -> None:
    text = faults.table([line(name) for name in FAULTS])
    assert all(row(text, name) for name in FAULTS if name != "healthy")
