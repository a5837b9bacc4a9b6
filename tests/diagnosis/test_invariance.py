"""What must not matter to a verdict: numbers of ranks, clocks, units, who else is seen, names."""

import re
from datetime import datetime

import msgspec
import pytest

from bench.synthetic import (
    blamed,
    build,
    contended,
    noisy,
    plan,
    renumbered,
    scaled,
    verdict_of,
    with_clock_offset,
    with_rank,
    without,
)
from diagnosis.engine import diagnose
from diagnosis.evidence import Evidence
from diagnosis.limits import EVIDENCE_PEERS
from diagnosis.scene import observe, pieces
from diagnosis.verdict import Verdict, to_json


def faulty(**where: object) -> Evidence:
    made = noisy(ranks=5, steps=700, seed=11)
    contended(made, 1, 22.0, since=250)
    made.running[3, 250:] += 22.0
    return build(made, **where)[0]  # type: ignore[arg-type]


def test_the_same_evidence_gives_the_same_verdict():
    assert to_json(diagnose(faulty())) == to_json(diagnose(faulty()))


def test_permuted_ranks_permute_the_verdict():
    number = {0: 3, 1: 4, 2: 0, 3: 2, 4: 1}
    here, there = diagnose(faulty()), diagnose(renumbered(faulty(), number))
    assert blamed(here) == [1, 3]

    def known(verdict: Verdict, rename: dict[int, int]) -> dict[str, object]:
        def words(text: str) -> str:
            return re.sub(r"(?i)rank (\d+)", lambda found: f"rank {rename[int(found[1])]}", text)

        return {
            "culprits": [
                (
                    rename[c.rank],
                    c.cause,
                    c.cost_ms_per_step,
                    c.confidence,
                    c.share_explained,
                    words(c.detail),
                )
                for c in verdict.culprits
            ],
            "evidence": sorted(
                (rename[e.rank], e.metric, e.value, e.peers, e.effect, e.q) for e in verdict.evidence
            ),
            "cleared": sorted(rename[c.rank] for c in verdict.cleared),
            "account": verdict.account,
            "rest": (verdict.since, verdict.baseline, verdict.step_ms, verdict.joint_cost_ms_per_step),
            "actions": [words(action) for action in verdict.actions],
        }

    assert known(there, {rank: rank for rank in range(5)}) == known(here, number)


def test_of_many_peers_the_same_are_looked_at_whatever_their_numbers():
    made = noisy(ranks=EVIDENCE_PEERS + 9, steps=300, seed=4)
    contended(made, 5, 22.0)
    made.running[5] += 120.0  # beyond the hiccups of the others
    for rank in range(made.ranks):  # what takes CPUs of peers differs from peer to peer
        made.taken_by[rank].append((7000 + rank, "backup", "/system.slice", 0.02 * rank))
    evidence = build(made)[0]
    number = {rank: (rank * 7 + 3) % made.ranks for rank in range(made.ranks)}
    here, there = diagnose(evidence), diagnose(renumbered(evidence, number))
    assert (blamed(here), blamed(there)) == ([5], [number[5]])
    assert [(r.cause, r.why.replace("rank 5 ", "it ")) for r in here.ruled_out] == [
        (r.cause, r.why.replace(f"rank {number[5]} ", "it ")) for r in there.ruled_out
    ]
    assert here.culprits[0].detail == there.culprits[0].detail.replace(f"rank {number[5]} ", "rank 5 ")


def test_so_many_rows_are_taken_at_most_and_all_where_there_are_no_more():
    evidence = build(noisy(ranks=12, steps=200, seed=4))[0]
    tables, found = pieces(evidence)
    scene = observe(evidence, tables, found[0])
    number = {rank: (rank * 5 + 3) % 12 for rank in range(12)}
    moved = renumbered(evidence, number)
    tables, found = pieces(moved)
    other = observe(moved, tables, found[0])
    assert scene.some([4, 2, 9], 3) == [4, 2, 9]
    assert len(scene.some(range(12), 5)) == 5
    assert {number[row] for row in scene.some(range(12), 5)} == set(other.some(range(12), 5))


@pytest.mark.parametrize("factor", [0.6, 4.0])
def test_scaled_time_scales_the_costs(factor):
    made = contended(plan(steps=1500), 2, 18.0, since=600)
    here, there = verdict_of(made), verdict_of(scaled(made, factor))
    assert (blamed(there), there.cause, there.status) == (blamed(here), here.cause, here.status)
    assert there.cost_ms_per_step == pytest.approx(factor * here.cost_ms_per_step, rel=0.02)
    assert there.step_ms == pytest.approx(factor * here.step_ms, rel=0.02)


@pytest.mark.parametrize("gone", range(5))
def test_removing_a_rank_never_names_an_innocent(gone):
    verdict = diagnose(without(faulty(), gone))
    assert set(blamed(verdict)) == {1, 3} - {gone}


@pytest.mark.parametrize("gone", range(4))
def test_removing_the_only_culprit_names_nobody(gone):
    verdict = diagnose(without(build(contended(plan(), 2, 25.0))[0], gone))
    assert (verdict.status, blamed(verdict)) == (("insufficient", []) if gone == 2 else ("slow", [2]))


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_nodes_clock_does_not_matter(node):
    here = faulty(nodes=["a", "a", "a", "b", "b"])
    there = with_clock_offset(here, node, 90_000_000_001)
    first, second = diagnose(here), diagnose(there)
    for name in (
        "culprits",
        "account",
        "evidence",
        "cleared",
        "step_ms",
        "joint_cost_ms_per_step",
        "actions",
    ):
        assert getattr(first, name) == getattr(second, name), name
    if node == "b":  # the clocks of the many say when it began
        assert first.since is not None
        assert second.since is not None
        apart = datetime.fromisoformat(second.since) - datetime.fromisoformat(first.since)
        assert abs(apart.total_seconds()) < 0.1


def test_names_from_outside_go_in_verbatim():
    verdict = verdict_of(contended(plan(), 2, 18.0, name="<!channel> *x*"))
    assert "<!channel> *x* (pid 4711" in verdict.culprits[0].detail
    assert "<!channel> *x* (pid 4711" in verdict.summary


def test_other_ranks_on_the_same_cpu_are_named_as_such():
    evidence, _ = build(contended(plan(), 2, 18.0, name="python3", pid=1003))
    crowd = [
        msgspec.structs.replace(row, rank_job="job-123", rank=3) if row.pid == 1003 else row
        for row in evidence.ranks[2].occupants
    ]
    verdict = diagnose(with_rank(evidence, 2, occupants=crowd))
    assert (verdict.cause, verdict.owner) == ("cpu-contention", "job")
    assert "rank 3 of this job" in verdict.culprits[0].detail
    assert any("CPUs of their own" in action for action in verdict.actions)


def test_a_ranks_own_threads_are_no_contention():
    evidence, _ = build(contended(plan(), 2, 18.0, name="python3", pid=1002))
    verdict = diagnose(evidence)
    assert (blamed(verdict), verdict.cause) == ([2], None)
