"""The what-if replay: what a hand-made step must give, what a played-out job took, and the paper's own figures."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import numpy as np
import pytest

from diagnosis.evidence import Evidence, OperationTable, RankEvidence
from diagnosis.replay.trace import Trace, role_of, trace_of
from diagnosis.replay.whatif import Replayed, what_if
from probes.importers import gather, read
from tests.diagnosis.replay.pipelines import Job, evidence_of, of_parts, step_ms
from tests.recorded import WHAT_IF


@cache
def recorded(name: str) -> Evidence:
    path = WHAT_IF / f"trace-{name}.parquet"
    if not path.is_file():
        pytest.skip(f"the recorded trace is not at {path}")
    return of_parts(read(gather([path]), job="job-123"))


def paper(kind: str, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((WHAT_IF / f"{kind}-{name}.json").read_text())
    return found


def traced(evidence: Evidence) -> Trace:
    trace = trace_of(evidence)
    assert trace is not None
    return trace


def replayed(job: Job) -> Replayed:
    return what_if(traced(evidence_of(job)))


def changed(evidence: Evidence, rank: int, **columns: object) -> Evidence:
    """The evidence with other columns of one rank's operations."""
    one = evidence.ranks[rank]
    assert one.operations is not None
    table = dataclasses.replace(one.operations, **columns)  # type: ignore[arg-type]
    return dataclasses.replace(
        evidence, ranks={**evidence.ranks, rank: dataclasses.replace(one, operations=table)}
    )


def kept(one: RankEvidence, keep: np.ndarray) -> RankEvidence:
    table = one.operations
    assert table is not None
    columns = {
        field.name: getattr(table, field.name)[keep]
        for field in dataclasses.fields(OperationTable)
        if field.name != "names"
    }
    return dataclasses.replace(one, operations=OperationTable(names=table.names, **columns))


# --- the paper's own figures -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AR", "SE"])
def test_the_slowdown_is_the_papers(name: str):
    published = paper("result", name)
    result = what_if(traced(recorded(name)))
    assert result.slowdown == pytest.approx(published["blocking_slowdown"], rel=0.005)
    steps = published["step_t_base"]
    assert isinstance(steps, dict)
    assert result.recorded_ms / 1e3 == pytest.approx(np.mean(list(steps.values())), rel=0.002)
    assert abs(result.error) < 0.01


@pytest.mark.parametrize("name", ["AR", "SE"])
def test_each_kind_and_each_stage_costs_what_the_paper_says(name: str):
    published = paper("result", name)
    result = what_if(traced(recorded(name)))
    trace = result.trace
    kinds, stages = published["blocking_decompose_by_optype"], published["blocking_decompose_by_stage"]
    assert isinstance(kinds, dict)
    assert isinstance(stages, dict)
    for kind, operation in enumerate(trace.names):
        if operation in kinds:
            assert result.added(trace.kind == kind) == pytest.approx(kinds[operation], abs=0.002), operation
    for stage, slowdown in stages.items():
        assert result.added(trace.stage[trace.row] == int(stage)) == pytest.approx(slowdown, abs=0.002)


def test_one_worker_explains_all_of_ar_and_the_last_stage_none():
    result = what_if(traced(recorded("AR")))
    trace = result.trace
    assert trace.ranks[0] == 0
    assert result.explained(trace.row == 0) == pytest.approx(paper("mw", "AR")["Mw"], abs=0.01)
    last = trace.stage[trace.row] == trace.stages - 1
    assert result.explained(last) == pytest.approx(paper("ms", "AR")["Ms"], abs=0.01)


def test_the_last_stage_explains_of_se_what_the_paper_says():
    result = what_if(traced(recorded("SE")))
    last = result.trace.stage[result.trace.row] == 1
    assert result.explained(last) == pytest.approx(paper("ms", "SE")["Ms"], abs=0.01)


# --- played-out jobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job",
    [
        Job(steps=6),
        Job(steps=6, uneven=0.4),
        Job(steps=6, stages=1, data=8, uneven=0.3),
        Job(steps=6, data=1),
        Job(steps=6, data=2, stages=3, chunks=2),
        Job(steps=6, skew_ms=5_000, slow={(1, 2): lambda step: 2.0}),
        Job(steps=1),
    ],
    ids=["even", "uneven", "one stage", "one pipeline", "chunks", "clocks apart", "one step"],
)
def test_the_replay_takes_as_long_as_the_recording(job: Job):
    evidence = evidence_of(job)
    result = what_if(traced(evidence))
    assert result.recorded_ms == pytest.approx(step_ms(evidence), rel=1e-6)
    assert abs(result.error) < 0.02


def test_a_job_without_a_slow_rank_would_take_what_it_takes_when_it_has_none():
    """Independent truth: the same job is played out without the fault, with the same random numbers."""
    sick = evidence_of(Job(steps=8, slow={(1, 2): lambda step: 1.8}, noise=0.0))
    well = evidence_of(Job(steps=8, noise=0.0))
    result = what_if(traced(sick))
    trace = result.trace
    row = trace.ranks.index(6)
    healthy = traced(well)
    others = np.where(trace.row == row, healthy.duration, result.duration)
    cured = result.run(np.where(trace.roles < 3, others, result.duration))
    assert float(cured.mean()) == pytest.approx(step_ms(well), rel=0.02)


def test_stages_of_equal_length_are_the_ideal():
    result = replayed(Job(steps=4, stages=2, stage_factor={1: 3.0}, noise=0.0))
    # Ideal stages take twice the first's time: 8 micro batches of 3 × 100 ms, filling and draining, and the ends.
    flat = replayed(Job(steps=4, stages=2, stage_factor={0: 2.0, 1: 2.0}, noise=0.0))
    assert result.ideal_ms == pytest.approx(flat.replayed_ms, rel=0.01)


def test_without_any_difference_there_is_no_slowdown():
    result = replayed(Job(steps=4, noise=0.0))
    assert result.slowdown == pytest.approx(1.0, abs=1e-6)
    assert result.explained(result.trace.row == 0) == pytest.approx(0.0, abs=1e-3)


# --- what is missing or odd --------------------------------------------------------------------------------


def test_a_transfer_counts_without_the_wait_for_the_other_side():
    result = replayed(Job(steps=4, slow={(0, 1): lambda step: 2.0}, transfer_ms=2.0, noise=0.0))
    receives = result.trace.roles == role_of("forward-recv")
    assert result.wait[receives].max() > 100
    assert np.median(result.duration[receives]) == pytest.approx(2.0)
    assert result.duration[receives].max() == pytest.approx(2.0, rel=0.01)


def test_receives_without_a_sender_do_not_pass_for_long_transfers():
    whole = evidence_of(Job(steps=6, slow={(0, 1): lambda step: 2.0}))
    ranks = {rank: one for rank, one in whole.ranks.items() if rank != 1}
    result = what_if(traced(dataclasses.replace(whole, ranks=ranks)))
    alone = result.graph.members < result.graph.expected
    receives = result.trace.roles == role_of("forward-recv")
    assert (alone & receives).sum() == 6 * 8
    assert result.ideal[receives & alone].max() < 2.0
    assert result.ideal_ms == pytest.approx(what_if(traced(whole)).ideal_ms, rel=0.1)


def test_steps_and_operations_that_are_missing_here_and_there_do_no_harm():
    whole = evidence_of(Job(steps=10))
    random = np.random.default_rng(5)
    ranks = {
        rank: kept(one, random.random(len(one.operations.step)) > 0.02) for rank, one in whole.ranks.items()
    }  # type: ignore[union-attr]
    ranks[3] = kept(ranks[3], ranks[3].operations.step != 4)  # type: ignore[union-attr]
    result = what_if(traced(dataclasses.replace(whole, ranks=ranks)))
    assert np.isfinite(result.steps_ms).all()
    assert result.replayed_ms == pytest.approx(step_ms(whole), rel=0.1)


def test_zero_durations_and_ties_are_fine():
    whole = evidence_of(Job(steps=3))
    for rank in whole.ranks:
        table = whole.ranks[rank].operations
        assert table is not None
        start = table.step * 10**11 + whole.start_ns
        whole = changed(whole, rank, start_ns=start, duration_ns=np.zeros_like(start))
    result = what_if(traced(whole))
    assert result.slowdown == 1.0
    assert result.replayed_ms == 0.0


def test_a_pairing_that_closes_a_circle_is_dissolved():
    """Two ranks whose collectives come in opposite order never meet: each is replayed by itself."""
    whole = evidence_of(Job(steps=3, stages=1, data=2))
    table = whole.ranks[0].operations
    assert table is not None
    order = {6: 7, 7: 6}
    kind = np.array([order.get(k, k) for k in table.kind.tolist()])
    result = what_if(traced(changed(whole, 0, kind=kind)))
    assert np.isfinite(result.steps_ms).all()
    assert result.replayed_ms > 0


def test_an_operation_that_holds_others_is_no_work_of_its_own():
    whole = evidence_of(Job(steps=3, stages=1, data=2))
    for rank in whole.ranks:
        table = whole.ranks[rank].operations
        assert table is not None
        steps, first = np.unique(table.step, return_index=True)
        lasts = [int((table.start_ns + table.duration_ns)[table.step == s].max()) for s in steps]
        more = {
            "kind": np.full(len(steps), len(table.names)),
            "step": steps,
            "start_ns": table.start_ns[first],
            "duration_ns": np.array(lasts) - table.start_ns[first],
        }
        columns = {
            name: np.concatenate([getattr(table, name), more.get(name, np.full(len(steps), -1))])
            for name in ("kind", "lane", "step", "start_ns", "duration_ns", "seq", "micro_batch", "chunk")
        }
        order = np.argsort(columns["start_ns"], kind="stable")
        whole = changed(
            whole,
            rank,
            names=[*table.names, "iteration"],
            **{name: values[order] for name, values in columns.items()},
        )
    trace = traced(whole)
    assert "iteration" not in {trace.names[kind] for kind in np.unique(trace.kind)}
    assert abs(what_if(trace).error) < 0.02


def test_operations_of_no_step_and_of_negative_length_are_left_out():
    whole = evidence_of(Job(steps=3, stages=1, data=2))
    table = whole.ranks[0].operations
    assert table is not None
    step, duration = table.step.copy(), table.duration_ns.copy()
    step[1], duration[2] = -1, -5
    trace = traced(changed(whole, 0, step=step, duration_ns=duration))
    assert (trace.row == 0).sum() == len(table.step) - 2


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("forward-compute", 0),
        ("fwd_compute", 0),
        ("backward-compute", 1),
        ("Backward", 1),
        ("optimizer", 2),
        ("forward-send", 3),
        ("recv_backward", 4),
        ("grads-reduce-scatter", 5),
        ("params_all_gather", 5),
        ("optimizer-clip-main-grad", 5),
    ],
)
def test_names_of_frameworks_are_understood(name: str, role: int):
    assert role_of(name) == role
