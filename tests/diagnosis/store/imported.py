"""Ranks as importers tell them, small and made by hand."""

from __future__ import annotations

from typing import Any

import msgspec

from probes.records import Collectives, Lane, Operations, RankBatch, State
from tests.probes.batches import OFFSET, SECOND, WORLD, a_batch, a_rank

DAY = 86_400 * SECOND
THEN = OFFSET - 400 * DAY
"""When the traces of these tests were taken, UTC: over a year before anything else happens."""
NAMES = ["forward", "backward"]


def a_part(rank: int, second: int = 0, **changes: Any) -> RankBatch:
    """Second ``second`` of a rank's trace, in UTC: one all-reduce, of which a flight recorder says that it
    started, and a forward and a backward operation of one step."""
    at = THEN + second * SECOND
    fields = {
        "job": "traced",
        "rank": rank,
        "pid": 0,
        "start_ns": 0,
        "name": "",
        "env": {},
        "communicators": [msgspec.structs.replace(WORLD, rank=rank)],
        "collectives": Collectives(
            communicator=[0],
            seq=[second],
            op=[1],
            bytes=[64],
            dtype=["f32"],
            enter_ns=[at + 9],
            duration_ns=[-1],
            failed=[False],
            state=[State.STARTED],
        ),
        "threads": [],
        "occupants": [],
        "operations": Operations(
            names=NAMES,
            kind=[0, 1],
            lane=[Lane.COMPUTE, Lane.COMPUTE],
            step=[second, second],
            start_ns=[at + 1, at + 5],
            duration_ns=[4, 4],
            seq=[0, 1],
            micro_batch=[0, -1],
            chunk=[-1, 2],
        ),
        "source": "operations",
    }
    return a_rank(0, **(fields | changes))


def batches(*ranks: RankBatch, node: str = "", second: int = 0, **changes: Any) -> list[Any]:
    """A batch for each of these ranks' seconds, as ``Store.add_import`` takes them."""
    start = THEN + second * SECOND
    times = {"start_ns": start, "end_ns": start + SECOND, "utc_offset_ns": 0} | changes
    return [a_batch(0, node=node, ranks=[rank], probes=[], **times) for rank in ranks]
