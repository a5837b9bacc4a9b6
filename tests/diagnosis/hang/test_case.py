"""The verdict on a hanging job: what it names, how sure, whom it clears, what it says was not seen."""

from __future__ import annotations

import msgspec
import pytest

from diagnosis.engine import diagnose
from diagnosis.hang.case import verdict_of_hang
from diagnosis.hang.find import find_hang
from diagnosis.verdict import EXIT_STATUS, Verdict, Window, to_json
from probes.importers import gather, read
from probes.records import Op
from tests.diagnosis.hang.hangs import made, of_parts, with_rank, without
from tests.recorded import DUMPS

WINDOW = Window(start="2026-01-02T00:00:00.000Z", end="2026-01-02T00:10:00.000Z")
BARE = Verdict(job="job-123", window=WINDOW, status="insufficient", not_seen=["a gap"])
CALLS = [("world", seq, Op.ALLREDUCE, seq * 0.1, seq * 0.1 + 0.01) for seq in range(1, 101)]
PENDING = ("world", 101, Op.ALLREDUCE, 10.1, None)


def live(late: int | None = 1, **more: object):
    own = {rank: CALLS if rank == late else [*CALLS, PENDING] for rank in range(4)}
    return made({"world": [0, 1, 2, 3]}, own, **({"until": 60.0} | more))  # type: ignore[arg-type]


def verdict_of(evidence) -> Verdict:
    hang = find_hang(evidence)
    assert hang is not None
    return verdict_of_hang(evidence, hang, BARE)


def test_a_rank_that_never_came():
    verdict = verdict_of(live())
    assert (verdict.status, EXIT_STATUS[verdict.status]) == ("hang", 1)
    (culprit,) = verdict.culprits
    assert (culprit.rank, culprit.node, culprit.layer, culprit.cause) == (1, "node-0", "os", "never-came")
    assert (verdict.cause, verdict.layer, verdict.confidence) == ("never-came", "os", 0.9)
    assert verdict.since == "2026-09-21T14:13:30.100Z"
    assert verdict.summary == (
        "The job hangs: rank 1 holds it up. Rank 1 never entered all-reduce 101 on WORLD, where ranks 0, 2 and 3 "
        "wait; nothing is pending on it. 3 other ranks wait for it, directly or through others."
    )
    assert [(one.rank, one.why) for one in verdict.cleared] == [
        (rank, "waits in all-reduce 101 on WORLD for rank 1") for rank in (0, 2, 3)
    ]
    (found,) = verdict.evidence
    assert (found.metric, found.rank, found.value, found.peers, found.effect) == (
        "pending_collectives",
        1,
        0,
        1,
        -1,
    )
    assert "py-spy dump --pid 101 on node-0" in verdict.actions[0]
    assert {one.cause for one in verdict.ruled_out} == {"stuck-inside", "collective-mismatch"}
    assert "a gap" in verdict.not_seen
    assert (verdict.job, verdict.window) == ("job-123", WINDOW)


def test_a_dead_process_is_surer_than_a_missing_rank():
    verdict = verdict_of(with_rank(live(), 1, ended=True))
    assert (verdict.cause, verdict.confidence) == ("process-ended", 0.95)
    assert "its process ended" in verdict.summary


def test_dumps_do_not_tell_how_long_and_that_is_said():
    verdict = verdict_of(live(source="flight-recorder"))
    assert verdict.confidence == 0.81
    assert any("dumps do not tell" in gap for gap in verdict.not_seen)


def test_unseen_ranks_that_others_wait_for_lower_the_confidence_and_are_said():
    verdict = verdict_of(without(live(), 3))
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert verdict.confidence == 0.72
    assert any(gap.startswith("rank 3: not seen") for gap in verdict.not_seen)
    assert verdict.summary.endswith("Rank 3 was not seen and may hold it too.")


def test_nobody_is_named_when_all_are_inside():
    verdict = verdict_of(live(None))
    assert (verdict.status, verdict.culprits, verdict.layer, verdict.cause) == ("hang", [], "nccl", None)
    assert verdict.summary.endswith("No rank can be named.")
    assert verdict.confidence == 0.5
    assert verdict.actions


def test_two_sides_that_disagree_belong_to_the_job():
    own = {0: [*CALLS, PENDING], 1: [*CALLS, ("world", 101, Op.BROADCAST, 10.1, None)]}
    verdict = verdict_of(made({"world": [0, 1]}, own, until=60.0))
    assert (verdict.culprits, verdict.layer, verdict.cause, verdict.owner) == (
        [],
        "job",
        "collective-mismatch",
        "job",
    )
    assert (
        "rank 0 calls all-reduce of 4,096 bytes and rank 1 calls broadcast of 4,096 bytes" in verdict.summary
    )
    assert "{" not in verdict.actions[0]


@pytest.mark.parametrize(
    ("case", "ranks", "cause", "layer"),
    [("gpu_error_1st", [12, 14], "stuck-inside", "gpu"), ("lock_gil_1st", [9, 14], "never-came", "os")],
)
def test_recorded_hangs(case: str, ranks: list[int], cause: str, layer: str):
    folder = DUMPS / case
    if not folder.is_dir():
        pytest.skip(f"the recorded dumps are not at {folder}")
    evidence = of_parts(read(gather([folder]), job="job-123"))
    verdict = verdict_of(evidence)
    assert [culprit.rank for culprit in verdict.culprits] == ranks
    assert {(culprit.cause, culprit.layer) for culprit in verdict.culprits} == {(cause, layer)}
    assert sorted(one.rank for one in verdict.cleared) == sorted(set(range(16)) - set(ranks))
    assert cause not in {one.cause for one in verdict.ruled_out}
    assert to_json(verdict_of(evidence)) == to_json(verdict)
    assert msgspec.json.decode(to_json(verdict), type=Verdict) == verdict


def dumps(pending: int, of: int = 40):
    """Of two ranks, each with so many of the newest all-reduces pending, of so many."""
    own = [(*call[:4], call[4] if call[1] <= of - pending else None) for call in CALLS[:of]]
    return made({"world": [0, 1]}, {0: own, 1: own}, source="flight-recorder", until=10.01)  # type: ignore[dict-item]


@pytest.mark.parametrize(("pending", "told"), [(1, "1 collective is"), (3, "3 collectives are")])
def test_dumps_that_do_not_tell_a_hang_from_a_running_job_say_what_is_pending(pending: int, told: str):
    evidence = dumps(pending)
    assert find_hang(evidence) is None
    verdict = diagnose(evidence)
    words = f"{told} pending on ranks 0 and 1, which cannot be told from a running job"
    assert (verdict.status, verdict.culprits) == ("insufficient", [])
    assert verdict.summary.startswith(f"Not enough evidence: {words}. ")
    assert verdict.not_seen[0] == f"whether the job hangs: {words}"
    assert "again a minute later" in verdict.actions[0]


def test_dumps_that_look_healthy_leave_open_whether_the_job_hangs_now():
    verdict = diagnose(dumps(3, of=100))
    assert verdict.status == "healthy"
    assert verdict.not_seen[0].startswith("whether the job hangs: 3 collectives are pending on ranks 0 and 1")


def test_dumps_in_which_nothing_is_pending_and_agents_ask_for_no_second_dump():
    for evidence in (dumps(0), live(until=12.0)):
        assert find_hang(evidence) is None
        verdict = diagnose(evidence)
        assert "pending" not in verdict.summary
        assert not any("again a minute later" in action for action in verdict.actions)
