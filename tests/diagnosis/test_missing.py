"""Missing evidence is said, never guessed away."""

import re
from dataclasses import replace

from bench.synthetic import (
    blamed,
    build,
    contended,
    plan,
    rows,
    verdict_of,
    with_rank,
    without,
)
from diagnosis.engine import diagnose
from probes.records import Probe


def test_no_ranks():
    evidence, _ = build(plan(steps=100))
    verdict = diagnose(replace(evidence, ranks={}))
    assert (verdict.status, verdict.ranks_seen) == ("insufficient", 0)
    assert "no rank" in verdict.summary


def test_one_rank():
    verdict = diagnose(without(build(plan(steps=100))[0], 0, 1, 3))
    assert verdict.status == "insufficient"
    assert "only rank 2" in verdict.summary


def test_no_collectives():
    evidence, _ = build(plan(steps=100))
    for rank in range(4):
        table = evidence.ranks[rank].collectives
        evidence = with_rank(evidence, rank, collectives=rows(table, table.seq < 0))
    assert "no collective was seen" in diagnose(evidence).summary


def test_too_few_steps():
    verdict = verdict_of(plan(steps=40))
    assert verdict.status == "insufficient"
    assert "39 steps seen, 60 are needed" in verdict.summary


def test_no_thread_times():
    evidence, _ = build(plan(steps=200))
    for rank in range(4):
        evidence = with_rank(evidence, rank, threads=[])
    verdict = diagnose(evidence)
    assert verdict.status == "insufficient"
    assert "thread times were seen of no rank" in verdict.summary


def test_the_culprit_may_be_among_ranks_that_nobody_watches():
    made = plan(ranks=8)
    made.asleep[6] += 25.0
    verdict = diagnose(without(build(made)[0], 5, 6, 7))
    assert (verdict.status, verdict.culprits) == ("insufficient", [])
    assert "ranks 5–7" in verdict.summary


def test_a_rank_whose_thread_is_not_watched_is_not_cleared():
    made = plan()
    made.asleep[1] += 25.0
    evidence, _ = build(made)
    verdict = diagnose(with_rank(evidence, 1, threads=[]))
    assert verdict.status == "insufficient"
    assert "rank 1 comes 2" in verdict.summary
    assert any(gap.startswith("rank 1: its driving thread was not watched") for gap in verdict.not_seen)


def test_missing_ranks_are_named_beside_a_verdict():
    verdict = diagnose(without(build(contended(plan(ranks=8), 2, 18.0))[0], 5, 7))
    assert blamed(verdict) == [2]
    assert verdict.ranks_seen == 6
    assert any("ranks 5 and 7 of 8 not watched" in gap for gap in verdict.not_seen)


def test_a_rank_watched_from_late_on_is_compared_where_it_was_seen():
    evidence, _ = build(contended(plan(), 1, 18.0))
    table = evidence.ranks[1].collectives
    verdict = diagnose(with_rank(evidence, 1, collectives=rows(table, table.seq > 600)))
    assert (blamed(verdict), verdict.steps) == ([1], 301)


def test_a_rank_with_too_few_steps_is_left_out_and_said():
    evidence, _ = build(contended(plan(), 1, 18.0))
    table = evidence.ranks[3].collectives
    verdict = diagnose(with_rank(evidence, 3, collectives=rows(table, table.seq > 880)))
    assert blamed(verdict) == [1]
    assert [cleared.rank for cleared in verdict.cleared] == [0, 2]
    assert any(re.match(r"rank 3 was watched in \d+ of 899 steps", gap) for gap in verdict.not_seen)


def test_a_job_that_stands_still_is_not_called_healthy():
    evidence, _ = build(plan())
    for rank in range(4):
        evidence = with_rank(evidence, rank, last_ns=evidence.ranks[rank].last_ns + 60 * 10**9)
    verdict = diagnose(evidence)
    assert verdict.status == "insufficient"
    assert "no step has ended for 60 s" in verdict.summary


def test_probes_and_the_stores_notes_are_passed_on():
    evidence, _ = build(plan())
    probes = {
        "node-a": [
            Probe(name="gloo", state="on", lost=12_000),
            Probe(name="gpu", state="unavailable", why="no GPU"),
        ]
    }
    not_seen = diagnose(replace(evidence, probes=probes, notes=["clock of node-a jumped"])).not_seen
    assert {
        "clock of node-a jumped",
        "probe gpu on node-a: no GPU",
        "probe gloo on node-a lost 12,000 events",
    } <= set(not_seen)


def test_what_machines_do_not_tell_comes_last_and_nodes_of_one_kind_are_told_together():
    evidence, _ = build(plan(ranks=4, steps=20))
    lacks = Probe(name="machine{}", state="on", why="no PSI")
    gone = Probe(name="tcp", state="unavailable", why="no tracepoint")
    probes = {"node-a": [lacks, gone], **{f"node-{n}": [gone] for n in range(3)}}
    not_seen = diagnose(replace(evidence, probes=probes)).not_seen
    assert not_seen[-1] == "probe machine{} on node-a, in part: no PSI"
    assert "probe tcp on 4 nodes: no tracepoint" in not_seen[:-1]
