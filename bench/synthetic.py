"""A simulated training job, as the agents would have seen it, and the truth about it.

Each rank repeats: sleep (device time), wait for a CPU, run, arrive at the first all-reduce, run on, arrive at
the others; all leave together when the last has come and the transfer is done. From that the generator
builds the tables of the evidence with the cuts that the agent makes: at each arrival and completion of the
driving thread unless the last cut is less than 5 ms old, once a second besides, and at each completion for
the communication thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt

from diagnosis.engine import diagnose
from diagnosis.evidence import CollectiveTable, Evidence, OccupantRow, RankEvidence, ThreadSeries
from diagnosis.verdict import Verdict
from probes.records import Communicator, Op, Role

Floats = npt.NDArray[np.float64]
T0 = 1_790_000_000_000_000_000
BUCKET = 790_528


@dataclass
class Plan:
    """What each rank does in each step: arrays of ranks × steps, in ms. Change them before ``build``."""

    asleep: Floats
    runnable: Floats
    running: Floats
    transfer: Floats
    """Per step."""
    starved: Floats
    """Time in the collective for which this rank's communication thread waits for a CPU; all wait with it."""
    buckets: int = 1
    taken_by: dict[int, list[tuple[int, str, str, float]]] = field(default_factory=dict)
    """Per rank: (pid, name, cgroup, share of its runnable and starved time)."""
    prefix: tuple[int, ...] = (4096, 64, 1_052_672)
    """Bytes of the broadcasts before the first step."""

    @property
    def ranks(self) -> int:
        return len(self.asleep)

    @property
    def steps(self) -> int:
        return self.asleep.shape[1]


def plan(*, ranks: int = 4, steps: int = 900, seed: int = 0, noise: float = 0.05, buckets: int = 1) -> Plan:
    """A healthy job: 18 ms asleep, 8 ms running, 1 ms waiting for a CPU, 2 ms transfer; with small noise."""
    random = np.random.default_rng(seed)
    shape = (ranks, steps)

    def around(mean: float) -> Floats:
        return mean * random.lognormal(0.0, noise, shape)

    return Plan(
        asleep=around(18.0),
        runnable=around(1.0),
        running=around(8.0),
        transfer=2.0 * random.lognormal(0.0, noise, steps),
        starved=np.zeros(shape),
        buckets=buckets,
    )


def noisy(*, ranks: int = 4, steps: int = 900, seed: int = 0) -> Plan:
    """A healthy job on a crowded machine: autocorrelated waits for CPUs, differences between ranks of up to
    5 % that stay, and hiccups of 20 to 100 ms on random ranks, one in 50 steps."""
    random = np.random.default_rng(seed)
    shape = (ranks, steps)
    made = plan(ranks=ranks, steps=steps, seed=seed + 1)
    drift = np.zeros(shape)
    for step in range(1, steps):  # forgets itself after some 20 steps, as a scheduler's placement does
        drift[:, step] = 0.95 * drift[:, step - 1] + random.normal(0.0, 0.3, ranks)
    made.runnable = 2.0 * np.exp(drift - 0.5 * 0.92) + random.exponential(0.5, shape)
    made.running *= 1 + random.uniform(0.0, 0.05, (ranks, 1))
    made.asleep *= 1 + random.uniform(0.0, 0.05, (ranks, 1))
    hit = np.flatnonzero(random.random(steps) < 0.02)
    made.runnable[random.integers(0, ranks, len(hit)), hit] += random.uniform(20.0, 100.0, len(hit))
    for rank in range(ranks):
        made.taken_by[rank] = [(50 + rank, "kworker/u8:1", "", 0.3), (0, "swapper/0", "", 0.4)]
    return made


@dataclass(frozen=True)
class Truth:
    """Per step: what the loop itself would log. ms."""

    step: Floats
    """From one arrival to the next, the mean over ranks."""
    own: Floats
    """Ranks × steps."""
    begins_ns: npt.NDArray[np.int64]
    """When all left the collective before step k."""


def build(
    made: Plan, *, nodes: list[str] | None = None, world_size: int | None = None, uid: str = "default"
) -> tuple[Evidence, Truth]:
    """The evidence of a whole run of the plan."""
    starved = made.starved.max(axis=0)
    own = made.asleep + made.runnable + made.running
    work = own.max(axis=0)
    leave = np.cumsum(work + made.transfer + starved)
    begins = np.concatenate([[0.0], leave[:-1]])
    nodes = nodes or ["node-a"] * made.ranks
    ranks = {
        rank: _rank(made, rank, nodes[rank], begins, leave, world_size or made.ranks, uid)
        for rank in range(made.ranks)
    }
    end = max(rank.last_ns for rank in ranks.values())
    evidence = Evidence(
        job="job-123",
        world_size=world_size or made.ranks,
        start_ns=T0,
        end_ns=end + 1,
        watched_since_ns=T0,
        ranks=ranks,
    )
    arrivals = begins + own
    step = np.diff(arrivals, axis=1).mean(axis=0)
    return evidence, Truth(step, own + made.starved, T0 + (begins * 1e6).astype(np.int64))


def _rank(
    made: Plan, rank: int, node: str, begins: Floats, leave: Floats, world_size: int, uid: str
) -> RankEvidence:
    asleep, runnable, running, starved = (
        a[rank] for a in (made.asleep, made.runnable, made.running, made.starved)
    )
    buckets = made.buckets
    arrivals = [begins + asleep + runnable + running * (bucket + 1) / buckets for bucket in range(buckets)]
    # Earlier buckets end before the last, when their own last rank has come.
    own = made.asleep + made.runnable
    ends = [
        np.minimum(
            (begins + own + made.running * (bucket + 1) / buckets).max(axis=0) + made.transfer,
            leave - 0.05 * (buckets - 1 - bucket),
        )
        for bucket in range(buckets - 1)
    ] + [leave]
    enter = np.stack(arrivals, axis=1).reshape(-1)
    done = np.stack(ends, axis=1).reshape(-1)
    head = len(made.prefix)
    before = -np.arange(head, 0, -1) * 3.0
    driving_states = [asleep, runnable, running, leave - arrivals[-1]]
    return RankEvidence(
        rank=rank,
        node=node,
        pid=1000 + rank,
        local_rank=rank,
        name="python3",
        communicators=[Communicator(uid=uid, desc="default_pg", rank=rank, size=world_size)],
        collectives=CollectiveTable(
            communicator=np.zeros(head + len(enter), np.int64),
            seq=np.arange(head + len(enter), dtype=np.int64),
            op=np.concatenate([np.full(head, Op.BROADCAST), np.full(len(enter), Op.ALLREDUCE)]).astype(
                np.int64
            ),
            bytes=np.concatenate([made.prefix, np.full(len(enter), BUCKET)]).astype(np.int64),
            enter_ns=_instants(np.concatenate([before, enter])),
            duration_ns=np.concatenate([np.full(head, 1_000_000), _instants(done) - _instants(enter)]),
            failed=np.zeros(head + len(enter), np.bool_),
        ),
        threads=[
            _driving(1000 + rank, driving_states, begins, np.sort(np.concatenate([enter, done])), leave[-1]),
            _communication(1500 + rank, begins, leave, arrivals[-1], starved),
        ],
        occupants=_occupants(made, rank, begins, runnable, starved),
        first_ns=T0,
        last_ns=T0 + int((leave[-1] + 5.0) * 1e6),
    )


def _instants(ms: Floats) -> npt.NDArray[np.int64]:
    return T0 + np.rint(ms * 1e6).astype(np.int64)


def _driving(tid: int, states: list[Floats], begins: Floats, cuts: Floats, end: float) -> ThreadSeries:
    """Exact curves with a corner at each change of state, sampled at the agent's cuts."""
    asleep, runnable, running, waiting = states
    corner = np.concatenate(
        [np.cumsum(np.stack([asleep, runnable, running, waiting], axis=1), axis=1)], axis=1
    )
    times = np.concatenate([[0.0], (begins[:, None] + corner).reshape(-1)])
    blocked, wants, runs = (np.zeros((len(begins), 4)) for _ in range(3))
    blocked[:, 0], blocked[:, 3], wants[:, 1], runs[:, 2] = asleep, waiting, runnable, running
    kept = [0.0]
    for cut in np.unique(np.concatenate([cuts, np.arange(0.0, end, 1000.0)])).tolist():
        if cut - kept[-1] >= 5.0 or (cut % 1000.0 == 0 and cut > kept[-1]):
            kept.append(cut)
    at = np.rint(np.array(kept) * 1e6).astype(np.int64)

    def sampled(state: Floats) -> npt.NDArray[np.int64]:
        total = np.concatenate([[0.0], np.cumsum(state.reshape(-1))])
        return np.rint(np.interp(at / 1e6, times, total) * 1e6).astype(np.int64)

    runnable_ns, blocked_ns = sampled(wants), sampled(blocked)
    return _series(tid, Role.DRIVING, at, runnable_ns, blocked_ns)


def _communication(tid: int, begins: Floats, leave: Floats, arrival: Floats, starved: Floats) -> ThreadSeries:
    """Asleep but for ``starved`` ms before each completion, where it is cut."""
    at = np.concatenate([[0], np.rint(leave * 1e6).astype(np.int64)])
    runnable = np.concatenate([[0], np.cumsum(np.rint(starved * 1e6).astype(np.int64))])
    return _series(tid, Role.COMMUNICATION, at, runnable, at - runnable)


def _series(
    tid: int,
    role: Role,
    at: npt.NDArray[np.int64],
    runnable: npt.NDArray[np.int64],
    blocked: npt.NDArray[np.int64],
) -> ThreadSeries:
    seconds = np.arange(1, int(at[-1] // 10**9) + 2, dtype=np.int64) * 10**9
    return ThreadSeries(
        tid=tid,
        role=role,
        since_ns=T0,
        at_ns=T0 + at,
        running_ns=at - runnable - blocked,
        runnable_ns=runnable,
        blocked_ns=blocked,
        uninterruptible_ns=np.zeros_like(at),
        interrupted_ns=np.zeros_like(at),
        stolen_at_ns=T0 + seconds,
        stolen_ns=np.zeros_like(seconds),
    )


def _occupants(made: Plan, rank: int, begins: Floats, runnable: Floats, starved: Floats) -> list[OccupantRow]:
    rows = []
    second = (begins // 1000).astype(np.int64)
    for role, waited in ((Role.DRIVING, runnable), (Role.COMMUNICATION, starved)):
        per_second = np.bincount(second, weights=waited)
        for number, ms in enumerate(per_second):
            for pid, name, cgroup, share in made.taken_by.get(rank, []):
                if ms * share > 0:
                    rows.append(
                        OccupantRow(
                            start_ns=T0 + number * 10**9,
                            end_ns=T0 + (number + 1) * 10**9,
                            role=role,
                            pid=pid,
                            name=name,
                            cgroup=cgroup,
                            took_ns=int(ms * share * 1e6),
                            rank_job="",
                            rank=-1,
                            kernel=name.startswith("kworker"),
                        )
                    )
    return rows


def contended(
    made: Plan, rank: int, ms: float, *, since: int = 0, name: str = "stress-ng", pid: int = 4711
) -> Plan:
    """A process takes the CPU of ``rank`` for ``ms`` of each step from step ``since`` on."""
    made.runnable[rank, since:] += ms
    mine = made.runnable[rank].sum()
    taken = ms * (made.steps - since) / mine
    made.taken_by[rank] = [(pid, name, "/user.slice", taken), (0, "swapper/1", "", 1 - taken)]
    return made


def scaled(made: Plan, factor: float) -> Plan:
    return replace(
        made,
        asleep=made.asleep * factor,
        runnable=made.runnable * factor,
        running=made.running * factor,
        transfer=made.transfer * factor,
        starved=made.starved * factor,
    )


def renumbered(evidence: Evidence, number: dict[int, int]) -> Evidence:
    """The same job with other rank numbers: old → new."""
    return replace(
        evidence,
        ranks={number[old]: replace(rank, rank=number[old]) for old, rank in evidence.ranks.items()},
    )


def without(evidence: Evidence, *gone: int) -> Evidence:
    return replace(evidence, ranks={rank: life for rank, life in evidence.ranks.items() if rank not in gone})


def with_rank(evidence: Evidence, rank: int, **changes: object) -> Evidence:
    """One rank's evidence with some fields replaced."""
    return replace(evidence, ranks={**evidence.ranks, rank: replace(evidence.ranks[rank], **changes)})  # type: ignore[arg-type]


def rows(table: CollectiveTable, keep: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> CollectiveTable:
    """Some of a table's rows."""
    return CollectiveTable(
        **{c: values[keep] if len(values) else values for c, values in vars(table).items()}
    )


def with_clock_offset(evidence: Evidence, node: str, ns: int) -> Evidence:
    """The clock of one node set forward: all its instants, and nothing else."""
    moved = {}
    for number, rank in evidence.ranks.items():
        if rank.node == node:
            rank = replace(
                rank,
                collectives=replace(rank.collectives, enter_ns=rank.collectives.enter_ns + ns),
                threads=[
                    replace(t, since_ns=t.since_ns + ns, at_ns=t.at_ns + ns, stolen_at_ns=t.stolen_at_ns + ns)
                    for t in rank.threads
                ],
                occupants=[
                    msgspec.structs.replace(row, start_ns=row.start_ns + ns, end_ns=row.end_ns + ns)
                    for row in rank.occupants
                ],
                first_ns=rank.first_ns + ns,
                last_ns=rank.last_ns + ns,
            )
        moved[number] = rank
    return replace(evidence, ranks=moved)


def verdict_of(made: Plan, **where: object) -> Verdict:
    return diagnose(build(made, **where)[0])  # type: ignore[arg-type]


def blamed(verdict: Verdict) -> list[int]:
    return sorted(culprit.rank for culprit in verdict.culprits)
