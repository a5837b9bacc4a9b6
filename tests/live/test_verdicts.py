"""What the whole chain says of real jobs: real ranks, real eBPF, the wire, the store, the command."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
import time
from collections.abc import Callable
from datetime import datetime

import pytest

from bench.stack import until
from diagnosis.engine import diagnose
from diagnosis.evidence import Evidence, RankEvidence
from diagnosis.store import UnknownJob, open_store
from diagnosis.verdict import Verdict
from tests.live.conftest import LIGHT, Stack, Watched, cpu_hog

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

Start = Callable[..., Watched]


def apart(rank: int, cpu: int) -> tuple[int, ...]:
    """CPUs of four ranks, one of them alone on its own."""
    return tuple(cpu if other == rank else 1 - cpu for other in range(4))


def utc_ns(instant: str) -> int:
    return int(datetime.fromisoformat(instant).timestamp() * 1e9)


def to_monotonic(utc: int) -> int:
    return utc - (time.time_ns() - time.monotonic_ns())


def culprits(verdict: Verdict) -> list[int]:
    return [culprit.rank for culprit in verdict.culprits]


def stored(stack: Stack, job: str) -> Evidence:
    store = open_store(stack.store, read_only=True)
    try:
        return store.evidence(job, 0, 1 << 62)
    finally:
        store.close()


def test_a_rank_beside_a_cpu_hog_is_named_with_the_process_that_takes_its_cpu(
    stack: Stack, watched: Start
) -> None:
    rank, cpu = random.randrange(4), random.randrange(2)
    name = f"intruder-{secrets.token_hex(2)}"
    job = watched("job-hog", cpus=apart(rank, cpu))
    job.alone_on(cpu)
    job.seconds_of_steps(15)
    began = time.time_ns()
    with cpu_hog(cpu, name) as hog:
        job.seconds_of_steps(20)
        verdict = until(
            lambda: (found := stack.diagnose(job.name)).status == "slow" and found, "a slow verdict", 120
        )
    assert culprits(verdict) == [rank], verdict
    assert (verdict.cause, verdict.layer, verdict.owner) == ("cpu-contention", "os", "node")
    assert name in verdict.culprits[0].detail
    assert str(hog.pid) in verdict.culprits[0].detail
    assert verdict.share_explained >= 0.8
    # The other three share one CPU with the agent and the tests: they wait for the culprit, and are cleared.
    assert sorted(line.rank for line in verdict.cleared) == sorted(set(range(4)) - {rank})

    assert verdict.since is not None
    assert abs(utc_ns(verdict.since) - began) < 8e9
    account = sum(line.ms for line in verdict.account) + verdict.unexplained_ms
    since, end = (to_monotonic(utc_ns(instant)) for instant in (verdict.since, verdict.window.end))
    true = job.true_step_ms(since, end, verdict.steps)
    assert account == pytest.approx(true, rel=0.05), verdict
    # What it costs, against what the job lost by its own log.
    before = job.true_step_ms(to_monotonic(began) - int(10e9), to_monotonic(began))
    # Other work on this machine slows all ranks alike, and is no part of what the culprit costs.
    assert 0.25 * (true - before) < verdict.cost_ms_per_step < 1.5 * (true - before)

    permuted_ranks_permute_the_verdict(stored(stack, job.name))


def permuted_ranks_permute_the_verdict(evidence: Evidence) -> None:
    """On the recording of a real run: nothing in the engine goes by a rank's number."""
    plain = diagnose(evidence)
    order = [2, 0, 3, 1]
    assert plain.status == "slow"
    moved: dict[int, RankEvidence] = {
        order[rank]: dataclasses.replace(
            life,
            rank=order[rank],
            local_rank=order[rank],
            communicators=[renumbered(communicator, order[rank]) for communicator in life.communicators],
            occupants=[
                type(row)(**{**as_dict(row), "rank": order[row.rank] if row.rank >= 0 else -1})
                for row in life.occupants
            ],
        )
        for rank, life in evidence.ranks.items()
    }
    permuted = diagnose(dataclasses.replace(evidence, ranks=moved))
    assert culprits(permuted) == [order[rank] for rank in culprits(plain)]
    assert permuted.cause == plain.cause
    assert permuted.cost_ms_per_step == plain.cost_ms_per_step
    assert permuted.account == plain.account
    assert {line.rank for line in permuted.cleared} == {order[line.rank] for line in plain.cleared}


def renumbered(communicator: object, rank: int) -> object:
    import msgspec

    return msgspec.structs.replace(communicator, rank=rank)  # type: ignore[type-var]


def as_dict(row: object) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(row)  # type: ignore[arg-type]


def test_a_healthy_job_has_no_culprit_whenever_it_is_asked_about(stack: Stack, watched: Start) -> None:
    job = watched("job-healthy")
    first = time.monotonic_ns()
    for seconds in (20, 10, 10):
        job.seconds_of_steps(seconds)
        nobody_is_blamed(stack, job, first)
    steps_match_the_log(stack, job)


def nobody_is_blamed(stack: Stack, job: Watched, first: int) -> None:
    """A verdict on a healthy job. ``first``: instant of its first steps, CLOCK_MONOTONIC."""
    last = time.monotonic_ns()
    verdict = stack.diagnose(job.name)
    assert (verdict.culprits, verdict.cause) == ([], None), verdict.summary
    assert verdict.ranks_seen == verdict.world_size == 4
    if verdict.status == "slow":  # only where the machine did slow all ranks, by the job's own log
        assert verdict.since is not None
        since = to_monotonic(utc_ns(verdict.since))
        assert job.true_median_ms(since, last) > 1.15 * job.true_median_ms(0, since), verdict.summary
    elif verdict.status == "insufficient":  # likewise where the machine held one rank up now and then
        assert "too unsteadily to be sure" in verdict.summary, verdict.summary
    else:
        assert verdict.status == "healthy", verdict.summary
        assert verdict.step_ms == pytest.approx(job.true_median_ms(first, last), rel=0.25)


def steps_match_the_log(stack: Stack, job: Watched) -> None:
    """The steps that were found are those that each rank logged: as many, and of the same times within 2 %."""
    import numpy as np

    from diagnosis.steps import find_steps, join

    evidence = stored(stack, job.name)
    steps = find_steps(join(evidence.ranks))
    assert steps is not None
    for row, rank in enumerate(steps.ranks):
        starts, ends = steps.start_ns[row][steps.seen[row]], steps.end_ns[row][steps.seen[row]]
        found = (ends - starts) / 1e6
        logged = np.array(job.starts_ns(rank))
        first, last = to_monotonic(int(starts[0])), to_monotonic(int(ends[-1]))
        true = np.diff(logged[(logged >= first) & (logged <= last)]) / 1e6
        assert abs(len(found) - len(true)) <= 1
        assert len(found) >= 100
        assert float(np.mean(found)) == pytest.approx(float(np.mean(true)), rel=0.02)
        assert float(np.median(found)) == pytest.approx(float(np.median(true)), rel=0.02)


def test_a_rank_that_sleeps_is_late_and_not_for_want_of_a_cpu(stack: Stack, watched: Start) -> None:
    rank = random.randrange(4)
    job = watched("job-sleeps", rank_options={rank: ["--sleep-ms", "20"]})
    job.seconds_of_steps(18)
    verdict = stack.diagnose(job.name)
    assert (verdict.status, culprits(verdict)) == ("slow", [rank]), verdict.summary
    assert (verdict.cause, verdict.owner) == ("sleeps", "job"), verdict.summary
    assert verdict.cost_ms_per_step == pytest.approx(20, rel=0.3)
    assert "cpu-contention" in {line.cause for line in verdict.ruled_out}


def test_a_rank_that_computes_more_runs_longer(stack: Stack, watched: Start) -> None:
    rank = random.randrange(4)
    cpu = random.randrange(2)  # alone, so that its work costs nobody else a CPU
    job = watched("job-burns", cpus=apart(rank, cpu), rank_options={rank: ["--burn-ms", "40"]})
    job.alone_on(cpu)
    job.seconds_of_steps(18)
    verdict = stack.diagnose(job.name)
    assert (verdict.status, culprits(verdict)) == ("slow", [rank]), verdict.summary
    # That it is Python is told once there are samples enough.
    assert (verdict.cause, verdict.owner) in (("runs-longer", "unknown"), ("slow-python", "job"))


def test_two_communicators_are_told_apart(stack: Stack, watched: Start) -> None:
    job = watched("job-groups", options=[*LIGHT, "--groups"])

    def seen() -> dict[int, RankEvidence] | None:
        with contextlib.suppress(UnknownJob):
            lives = stored(stack, job.name).ranks
            enough = [
                len(life.communicators) == 2
                and all(
                    c.uid and (life.collectives.communicator == i).sum() > 50
                    for i, c in enumerate(life.communicators)
                )
                for life in lives.values()
            ]
            return lives if enough == [True] * 4 else None
        return None

    for rank, life in until(seen, "collectives of all ranks, with names", 60).items():
        groups = {(c.uid, c.rank, c.size) for c in life.communicators}
        assert groups == {("0", rank, 4), (str(1 + rank // 2), rank % 2, 2)}
        # The model's gradients on the one, 1,000 floats on the other, in turn.
        table = life.collectives
        sizes = {
            life.communicators[i].uid: int(n) for i, n in zip(table.communicator, table.bytes, strict=True)
        }
        assert sizes == {"0": 3 * (256 * 256 + 256) * 4, str(1 + rank // 2): 4000}
        for index in range(len(life.communicators)):
            seqs = table.seq[table.communicator == index]
            assert (seqs[1:] - seqs[:-1] == 1).all()
