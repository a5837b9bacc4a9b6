"""Load of a real size, and a server that notes what it is sent."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from diagnosis.store.sqlite import SqliteStore
from probes.records import Batch, Collectives, Communicator, RankBatch, Role, ThreadTime
from tests.probes.batches import SECOND, a_rank

STEPS = 25
"""Steps per second, one collective each; four cuts of the driving thread per step."""


def a_real_rank(second: int, rank: int, world: int) -> RankBatch:
    """One second of a rank as a job with 25 steps per second makes it: about 2.5 kB on the wire."""
    noise = np.random.default_rng(second * 1000 + rank)
    enter = np.sort(noise.integers(0, SECOND, STEPS)) + second * SECOND
    cuts = np.sort(noise.integers(0, SECOND, 4 * STEPS)) + second * SECOND
    running, runnable = cuts // 2, cuts // 8
    return a_rank(
        second,
        rank=rank,
        world_size=world,
        pid=100 + rank,
        communicators=[Communicator(uid="0", desc="default_pg", rank=rank, size=world)],
        collectives=Collectives(
            communicator=[0] * STEPS,
            seq=list(range(second * STEPS, (second + 1) * STEPS)),
            op=[1] * STEPS,
            bytes=[790_528] * STEPS,
            dtype=["f32"] * STEPS,
            enter_ns=enter.tolist(),
            duration_ns=noise.integers(1, SECOND // 30, STEPS).tolist(),
            failed=[False] * STEPS,
        ),
        threads=[
            ThreadTime(
                tid=1000 + rank,
                role=Role.DRIVING,
                since_ns=0,
                at_ns=cuts.tolist(),
                running_ns=running.tolist(),
                runnable_ns=runnable.tolist(),
                blocked_ns=(cuts - running - runnable).tolist(),
                uninterruptible_ns=[0] * len(cuts),
                interrupted_ns=(cuts // 100).tolist(),
            )
        ],
    )


class Watched:
    """A store, and what was added to it: per (node, number) whether it was new, each time that it came."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.added: dict[tuple[str, int], list[bool]] = defaultdict(list)
        self.first: dict[tuple[str, int], Batch] = {}

    def add(self, batch: Batch, received_ns: int) -> bool:
        name = (batch.node, batch.seq)
        assert self.first.setdefault(name, batch) == batch, f"another batch under the same name: {name}"
        stored = self._store.add(batch, received_ns)
        self.added[name].append(stored)
        return stored

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)
