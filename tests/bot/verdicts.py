"""Sample verdicts, one of each kind that a person may read."""

from __future__ import annotations

from msgspec.structs import replace

from diagnosis.verdict import (
    AccountLine,
    Baseline,
    Cleared,
    Culprit,
    Evidence,
    RuledOut,
    Verdict,
    Window,
)

WINDOW = Window(start="2026-01-02T14:00:00Z", end="2026-01-02T14:10:00Z")
BASELINE = Baseline(step_ms=33.0, start="2026-01-02T14:00:00Z", end="2026-01-02T14:05:12Z", steps=9400)

HOG = Culprit(
    rank=2,
    node="node-7",
    gpu=None,
    layer="os",
    cause="cpu-contention",
    owner="node",
    confidence=0.973,
    cost_ms_per_step=19.1,
    share_explained=0.962,
    detail="stress-7f (pid 4411) had the CPU for 18.4 ms of each step while rank 2 wanted it",
)

SLOW = Verdict(
    job="job-123",
    window=WINDOW,
    status="slow",
    since="2026-01-02T14:05:12Z",
    baseline=BASELINE,
    step_ms=52.1,
    steps=5530,
    world_size=4,
    ranks_seen=4,
    culprits=[HOG],
    layer="os",
    cause="cpu-contention",
    owner="node",
    confidence=0.973,
    cost_ms_per_step=19.1,
    joint_cost_ms_per_step=19.1,
    share_explained=0.962,
    account=[
        AccountLine(part="running", layer="os", ms=30.6, peers_ms=30.9),
        AccountLine(part="runnable", layer="os", ms=19.9, peers_ms=0.4),
        AccountLine(part="waiting", layer="nccl", ms=0.6, peers_ms=19.7),
        AccountLine(part="blocked", layer="os", ms=0.5, peers_ms=0.6),
        AccountLine(part="interrupted", layer="os", ms=0.2, peers_ms=0.2),
    ],
    unexplained_ms=0.3,
    summary="Rank 2 on node-7 waits 19.5 ms of each step for a CPU that stress-7f (pid 4411) has.",
    evidence=[
        Evidence(
            layer="nccl",
            metric="lateness",
            rank=2,
            value=19.2,
            peers=0.1,
            unit="ms/step",
            effect=19.1,
            q=0.0004,
        ),
        Evidence(
            layer="os",
            metric="runnable",
            rank=2,
            value=19.9,
            peers=0.4,
            unit="ms/step",
            effect=19.5,
            q=0.0004,
        ),
    ],
    cleared=[
        Cleared(rank=0, why="waited for rank 2"),
        Cleared(rank=1, why="waited for rank 2"),
        Cleared(rank=3, why="waited for rank 2"),
    ],
    ruled_out=[RuledOut(cause="runs-longer", why="it ran 30.6 ms of each step, its peers 30.9 ms")],
    not_seen=["GPU: no probe was on", "the hypervisor: stolen time is estimated"],
    actions=["Stop or move pid 4411 (stress-7f) on node-7", "Pin the ranks of job-123 to CPUs of their own"],
    links={"page": "https://sysom.example/jobs/job-123"},
)

HEALTHY = Verdict(
    job="job-123",
    window=WINDOW,
    status="healthy",
    step_ms=33.1,
    steps=18000,
    world_size=4,
    ranks_seen=4,
    confidence=0.9,
    account=[
        AccountLine(part="running", layer="os", ms=30.6, peers_ms=30.9),
        AccountLine(part="waiting", layer="nccl", ms=2.2, peers_ms=2.1),
    ],
    unexplained_ms=0.1,
    summary="All 4 ranks keep step: no rank is later than its peers by more than chance allows.",
    not_seen=["GPU: no probe was on"],
)

INSUFFICIENT = Verdict(
    job="job-123",
    window=WINDOW,
    status="insufficient",
    steps=12,
    world_size=4,
    ranks_seen=1,
    summary="Only 12 steps of 1 rank were seen; a comparison needs at least 2 ranks and 30 steps.",
    not_seen=["ranks 1–3: no agent reported them", "GPU: no probe was on"],
    actions=["Start sysom agent on the nodes of ranks 1–3"],
)

HANG = replace(
    SLOW,
    status="hang",
    since="2026-01-02T14:07:00Z",
    step_ms=None,
    culprits=[
        replace(
            HOG,
            cause=None,
            share_explained=0.0,
            confidence=0.7,
            cost_ms_per_step=0.0,
            detail="rank 2 has not entered all-reduce 4,711 that the others wait in",
        )
    ],
    cause=None,
    account=[],
    evidence=[],
    actions=["Look at rank 2’s stack: py-spy dump --pid 4242"],
    summary="Ranks 0, 1 and 3 wait in all-reduce 4,711; rank 2 has not entered it for 180 s.",
)

NO_CAUSE = replace(
    SLOW,
    culprits=[replace(HOG, cause=None, layer=None, owner="unknown", share_explained=0.43, confidence=0.55)],
    cause=None,
    layer=None,
    owner="unknown",
)

NOBODY = replace(
    SLOW,
    culprits=[],
    cause=None,
    layer="job",
    owner="job",
    cleared=[],
    summary="All ranks turned slow together: each runs 19 ms longer per step than before.",
)

SEVERAL = replace(
    SLOW,
    culprits=[
        HOG,
        replace(
            HOG, rank=5, node="node-9", cause="runs-longer", cost_ms_per_step=6.5, detail="", owner="unknown"
        ),
        replace(
            HOG, rank=6, node="node-9", cause=None, layer=None, cost_ms_per_step=1.2, share_explained=0.3
        ),
    ],
    joint_cost_ms_per_step=24.4,
    world_size=8,
    ranks_seen=8,
)

ALL = {
    "slow": SLOW,
    "healthy": HEALTHY,
    "insufficient": INSUFFICIENT,
    "hang": HANG,
    "no cause": NO_CAUSE,
    "nobody": NOBODY,
    "several": SEVERAL,
}

EVIL = "<!channel> *b* `c` _i_ ~s~ :fire: <@U1> &amp; \x1b[31mred\x07 a\u202eb\u200bc\n> quote\n• x"
"""A name as a process, cgroup or job may have it: it must neither ping, nor format, nor break a line."""


def hostile(evil: str = EVIL, many: int = 40) -> Verdict:
    """A verdict in which every text from outside is hostile, and every list is long."""
    culprit = replace(HOG, node=evil, cause=evil, detail=evil * 20)
    return replace(
        SLOW,
        job=evil,
        culprits=[replace(culprit, rank=rank) for rank in range(many)],
        summary=evil * 30,
        since=evil,
        account=[AccountLine(part=f"{evil}{i}", layer="os", ms=i, peers_ms=0.0) for i in range(many)],
        evidence=[
            Evidence(
                layer="os", metric=evil, rank=i, value=1e9, peers=float("nan"), unit=evil, effect=-1.0, q=1.0
            )
            for i in range(many)
        ],
        cleared=[Cleared(rank=i, why=f"{evil}{i}") for i in range(many)],
        ruled_out=[RuledOut(cause=evil, why=evil * 10) for _ in range(many)],
        not_seen=[evil * 10] * many,
        actions=[evil * 10] * many,
        links={evil: "javascript:alert(1)", "page": f"https://x.example/{evil}|>"},
    )
