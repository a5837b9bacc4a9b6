"""What the host's rules say of one culprit."""

from dataclasses import replace

import msgspec
import pytest

from bench.synthetic import build, plan
from diagnosis.accounting import PARTS
from diagnosis.causes import name_cause
from diagnosis.evidence import OccupantRow, RankEvidence
from diagnosis.findings import Extra, Taker
from diagnosis.layers import host
from probes.records import Role

HOG = Taker(kind="process", name="stress-ng", pids=(4711,), cgroup="/user.slice", ms=18.0)


def extra(*takers: Taker, peers_took: float = 0.0, peers_idle: float = 0.0, **over: float) -> Extra:
    """Rank 2 takes longer than its peers' 2 ms in the parts given."""
    return Extra(
        job="job-123",
        rank=2,
        node="node-a",
        pid=1002,
        parts={part: 2.0 + over.get(part, 0.0) for part in PARTS},
        peers_parts=dict.fromkeys(PARTS, 2.0),
        takers=takers,
        peers_took={("process", "stress-ng", "/user.slice"): peers_took},
        peers_idle=peers_idle,
    )


@pytest.mark.parametrize(
    ("facts", "cause", "share"),
    [
        (extra(HOG, runnable=20.0), "cpu-contention", 0.9),
        (extra(HOG, runnable=10.0, communication=10.0), "cpu-contention", 0.9),
        (extra(HOG, runnable=18.0, running=2.0), "cpu-contention", 0.9),
        (extra(HOG, runnable=18.0, blocked=6.0), None, 0.0),  # 75 % is not enough
        (extra(HOG, runnable=20.0, peers_took=4.0), None, 0.0),  # its peers are taken from, too
        (extra(replace(HOG, kind="idle"), runnable=20.0), None, 0.0),
        (extra(replace(HOG, kind="own"), runnable=20.0), None, 0.0),
        (extra(replace(HOG, kind="helper", rank=2), runnable=20.0), "cpu-contention", 0.9),
        (extra(runnable=20.0), None, 0.0),
        (extra(running=20.0, blocked=2.0), "runs-longer", 20 / 22),
        (extra(running=20.0, blocked=-2.0), "runs-longer", 1.0),
        (extra(blocked=20.0), None, 0.0),
    ],
)
def test_a_cause_is_named_when_it_explains_enough(facts, cause, share):
    named = name_cause(facts)
    assert (named.cause.id if named.cause else None) == cause
    assert named.share == pytest.approx(share)
    ruled_out = {one.cause for one in named.ruled_out}
    assert cause not in ruled_out
    assert {"cpu-contention", "runs-longer"} - {cause} <= ruled_out  # the usual suspects are always told of


@pytest.mark.parametrize(
    ("facts", "owner", "words"),
    [
        (
            extra(replace(HOG, kind="idle"), runnable=20.0),
            "node",
            "A CPU quota (cgroup throttling) is suspected",
        ),
        (extra(replace(HOG, ms=9.0), runnable=20.0), "unknown", "who had it is seen for 9.0 ms"),
        (
            extra(blocked=20.0),
            "unknown",
            "is asleep outside collectives 20.0 ms per step longer than its peers",
        ),
        (extra(running=12.0, blocked=8.0), "unknown", "(also: asleep outside collectives +8.0 ms)"),
    ],
)
def test_without_a_cause_the_words_say_where_the_time_is(facts, owner, words):
    judgement = name_cause(facts).judgement
    assert judgement.owner == owner
    assert words in judgement.detail
    assert judgement.actions


def test_two_causes_that_explain_it_only_together_are_both_said_and_neither_named():
    named = name_cause(extra(HOG, runnable=18.0, running=20.0))  # 47 % and 53 %
    assert (named.cause, named.share, named.ruled_out) == (None, 0.0, [])
    assert named.judgement.detail.startswith("Runs longer and CPU contention together: rank 2 runs 22.0 ms")
    assert "; stress-ng (pid 4711" in named.judgement.detail
    assert any("stress-ng" in action for action in named.judgement.actions)
    assert any("py-spy" in action for action in named.judgement.actions)
    assert named.judgement.owner == "unknown"  # one is the node's, of the other nobody knows


def test_what_explains_little_is_not_said_beside_another():
    named = name_cause(extra(replace(HOG, ms=3.0), runnable=3.0, running=14.0, blocked=3.0))  # 15 % and 70 %
    assert "together" not in named.judgement.detail
    assert len(named.ruled_out) == 2


def test_who_runs_longer_is_interrupted_longer_at_the_rate_of_its_peers():
    """Peers run 2 ms and lose 0.5 ms meanwhile: 20 ms more running lose 5 ms, and the sixth is not running's."""
    facts = extra(replace(HOG, ms=6.5), peers_took=0.5, runnable=6.0, running=20.0)
    named = name_cause(facts)
    assert named.cause is not None
    assert (named.cause.id, named.share) == ("runs-longer", pytest.approx(25 / 26))
    assert "(and so waits 5.0 ms longer for one)" in named.judgement.detail


def test_a_stranger_that_leaves_the_peers_alone_is_no_part_of_running_longer():
    assert host.runs_longer(extra(HOG, runnable=18.0, running=20.0)).explained_ms == 20.0


def test_a_little_more_running_explains_no_contention_away():
    """Half a millisecond more running beside 30 ms of waiting: the peers' rate (5 ms per ms) does not matter."""
    facts = extra(replace(HOG, ms=40.0), peers_took=10.0, runnable=30.0, running=0.5)
    named = name_cause(facts)
    assert named.cause is not None
    assert named.cause.id == "cpu-contention"
    assert host.runs_longer(facts).explained_ms == 0.5


def test_the_words_say_which_threads_waited():
    split = replace(HOG, ms=28.2, communication_ms=10.4)
    said = "had the CPU for 28.2 ms per step while rank 2 waited for one"
    detail = host.cpu_contention(extra(split, runnable=20.0, communication=10.0)).detail
    assert f"{said} (17.8 ms in its driving thread, 10.4 ms in its communication threads)" in detail
    assert host.cpu_contention(extra(HOG, runnable=20.0)).detail.endswith("while rank 2 waited for one")
    inside = host.cpu_contention(extra(replace(HOG, communication_ms=18.0), communication=20.0)).detail
    assert inside.endswith("while the communication threads of rank 2 waited for one")


def test_the_goal_counts_what_the_cause_counts():
    actions = host.cpu_contention(extra(HOG, runnable=10.0, communication=10.0)).actions
    assert "should wait about 4.0 ms per step for a CPU" in actions[-1]  # 2 ms and 2 ms of the peers


@pytest.mark.parametrize(
    ("taker", "advice"),
    [
        (HOG, "(taskset -apc CPUS 4711), or give it a lower weight (its cgroup's cpu.weight)."),
        (replace(HOG, cgroup="/"), "(taskset -apc CPUS 4711), or lower its priority (renice -n 10 -p 4711)."),
        (
            replace(HOG, cgroup="", pids=(7, 9)),
            "(taskset -apc CPUS PID), or lower its priority (renice -n 10 -p PID).",
        ),
    ],
)
def test_what_to_do_about_a_process_depends_on_its_cgroup(taker, advice):
    judgement = host.cpu_contention(extra(taker, runnable=20.0))
    assert judgement.actions[0].endswith(advice)
    assert "cgroup /)" not in judgement.detail


def test_the_owner_is_whoever_owns_most_of_what_was_taken():
    other = Taker(kind="rank", name="python3", pids=(1003,), cgroup="", ms=12.0, job="job-123", rank=3)
    assert host.cpu_contention(extra(other, replace(HOG, ms=6.0), runnable=20.0)).owner == "job"
    assert (
        host.cpu_contention(extra(replace(HOG, ms=12.0), replace(other, ms=6.0), runnable=20.0)).owner
        == "node"
    )


def test_many_takers_are_named_by_the_first_three_and_counted():
    crowd = [replace(HOG, name=f"p{place}", pids=(place,), ms=5.0) for place in range(1, 6)]
    detail = host.cpu_contention(extra(*crowd, runnable=25.0)).detail
    assert "p3 (pid 3" in detail
    assert "p4" not in detail
    assert "2 more for 10.0 ms" in detail


def with_occupants(*rows: OccupantRow) -> RankEvidence:
    return replace(build(plan(steps=2))[0].ranks[2], occupants=list(rows))


def occupant(**fields: object) -> OccupantRow:
    usual = OccupantRow(
        start_ns=0, end_ns=10**9, role=Role.DRIVING, pid=7, name="make", cgroup="/b", took_ns=300_000_000,
        rank_job="", rank=-1, kernel=False,
    )  # fmt: skip
    return msgspec.structs.replace(usual, **fields)


def taken(
    rank: RankEvidence, runnable_ms: float = 99.0, communication_ms: float = 99.0
) -> list[tuple[str, str, float]]:
    found = host.takers(rank, "job-123", 0, 10**9, 30.0, runnable_ms, communication_ms)
    return [(taker.kind, taker.name, round(taker.ms, 6)) for taker in found]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "process"),
        ({"kernel": True}, "kernel"),
        ({"pid": 0}, "idle"),
        ({"pid": 1002, "rank_job": "job-123", "rank": 2}, "own"),
        ({"rank_job": "job-123", "rank": 2}, "helper"),
        ({"rank_job": "job-123", "rank": 3}, "rank"),
        ({"rank_job": "other", "rank": 2}, "rank"),
    ],
)
def test_who_a_taker_is(fields, kind):
    assert taken(with_occupants(occupant(**fields))) == [(kind, "make", 10.0)]


def test_a_batch_across_the_bounds_counts_by_its_overlap():
    assert taken(with_occupants(occupant(start_ns=-(10**9) // 2, end_ns=10**9 // 2))) == [
        ("process", "make", 5.0)
    ]


def test_takers_never_explain_more_than_was_waited():
    rank = with_occupants(occupant(), occupant(pid=0, name="swapper"))
    assert taken(rank, runnable_ms=4.0) == [("process", "make", 2.0), ("idle", "swapper", 2.0)]


def test_what_communication_threads_waited_unexposed_is_left_out():
    rank = with_occupants(occupant(role=Role.COMMUNICATION), occupant(pid=8, name="cc"))
    assert taken(rank, communication_ms=0.0) == [("process", "cc", 10.0), ("process", "make", 0.0)]


def test_a_taker_knows_which_threads_waited_for_it():
    rank = with_occupants(occupant(), occupant(role=Role.COMMUNICATION))
    found = host.takers(rank, "job-123", 0, 10**9, 30.0, 99.0, 4.0)
    assert [(taker.ms, taker.communication_ms) for taker in found] == [(pytest.approx(14.0), 4.0)]


def test_processes_of_one_name_and_cgroup_are_one_taker():
    rank = with_occupants(occupant(), occupant(pid=9), occupant(pid=5, cgroup="/other"))
    found = host.takers(rank, "job-123", 0, 10**9, 30.0, 99.0, 99.0)
    assert [(taker.pids, taker.ms) for taker in found] == [
        ((7, 9), pytest.approx(20.0)),
        ((5,), pytest.approx(10.0)),
    ]


def test_peers_that_contend_with_each_other_do_not_excuse_the_intruder():
    """The culprit loses its CPU to a stranger, its peers lose theirs to one another: two different things."""
    facts = replace(extra(HOG, runnable=20.0), peers_took={("rank", "", ""): 15.0})
    assert "stress-ng (pid 4711" in name_cause(facts).judgement.detail


def test_who_takes_as_much_from_the_peers_is_not_named():
    everywhere = replace(HOG, name="node_exporter", pids=(99,), ms=6.0)
    facts = replace(
        extra(HOG, everywhere, runnable=18.0), peers_took={("process", "node_exporter", "/user.slice"): 6.0}
    )
    judgement = name_cause(facts).judgement
    assert "node_exporter" not in judgement.detail
    assert not any("node_exporter" in action for action in judgement.actions)
