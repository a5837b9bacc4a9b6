"""What a hang reads like: calls, holders and victims in words."""

from __future__ import annotations

from collections import Counter

from diagnosis import wording
from diagnosis.hang.pending import Queues, Wait
from probes.records import Op

OPS = {
    Op.BROADCAST: "broadcast",
    Op.ALLREDUCE: "all-reduce",
    Op.ALLREDUCE_COALESCED: "coalesced all-reduce",
    Op.ALLREDUCE_SPARSE: "sparse all-reduce",
    Op.REDUCE: "reduce",
    Op.ALLGATHER: "all-gather",
    Op.ALLGATHER_BASE: "all-gather",
    Op.ALLGATHER_COALESCED: "coalesced all-gather",
    Op.GATHER: "gather",
    Op.SCATTER: "scatter",
    Op.REDUCE_SCATTER: "reduce-scatter",
    Op.REDUCE_SCATTER_BASE: "reduce-scatter",
    Op.REDUCE_SCATTER_COALESCED: "coalesced reduce-scatter",
    Op.ALLTOALL: "all-to-all",
    Op.ALLTOALL_BASE: "all-to-all",
    Op.SEND: "send",
    Op.RECV: "receive",
    Op.RECV_ANY_SOURCE: "receive from any",
    Op.BARRIER: "barrier",
}


def op(number: int) -> str:
    """A collective by its name."""
    return OPS.get(Op(number), "collective") if number in Op.__members__.values() else "collective"


def call(wait: Wait) -> str:
    """What a rank calls: ``all-reduce of 4,096 bytes of float32``, as far as it is known."""
    size = f"{wait.bytes:,} bytes" if wait.bytes >= 0 else ""
    what = " of ".join(filter(None, (size, wait.dtype)))
    return f"{op(wait.op)} of {what}" if what else op(wait.op)


def place(seen: Queues, wait: Wait) -> str:
    """Where a rank waits: ``all-gather 39,407 on TENSOR_MODEL_PARALLEL_GROUP``."""
    return f"{op(wait.op)} {wait.seq:,} on {seen.name(wait.key)}"


def never_came(seen: Queues, rank: int, accusers: list[Wait]) -> str:
    """``accusers``: the first call of each rank that waits for this one."""
    calls = Counter((wait.key, wait.seq, wait.op) for wait in accusers)
    most = max(calls.values())
    first = next(wait for wait in accusers if calls[wait.key, wait.seq, wait.op] == most)
    same = sorted({w.rank for w in accusers if (w.key, w.seq, w.op) == (first.key, first.seq, first.op)})
    rest = sorted({wait.rank for wait in accusers} - set(same))
    pending = len(seen.ranks[rank].waits)
    held = "nothing is pending on it" if not pending else f"{pending} earlier ones are pending on it"
    elsewhere = f"; {wording.ranks(rest)} {_wait(rest)} for it elsewhere" if rest else ""
    return f"never entered {place(seen, first)}, where {wording.ranks(same)} {_wait(same)}{elsewhere}; {held}"


def _wait(ranks: list[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def stuck_inside(seen: Queues, rank: int, wait: Wait) -> str:
    others = wording.ranks(sorted(wait.ended_on))
    behind = max(seen.ranks[peer].completed[wait.key] for peer in wait.ended_on) - wait.seq + 1
    pending = len(seen.ranks[rank].waits)
    return (
        f"does not end {place(seen, wait)}, which ended on {others} ({behind:,} behind there); "
        f"{pending} collectives are pending on it"
    )


def victim(seen: Queues, wait: Wait, other: int, holders: set[int]) -> str:
    """Why a rank that waits in ``wait`` for ``other`` is cleared."""
    if other < 0:
        return (
            f"waits in {place(seen, wait)}, for ranks that were not seen, are busy, or do not call the same"
        )
    came = "" if other in wait.absent or other in holders else ", where something earlier is pending"
    chain = "" if other in holders else ", which waits itself"
    return f"waits in {place(seen, wait)} for rank {other}{came or chain}"
