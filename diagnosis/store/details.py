"""What one batch tells of a rank that a diagnosis looks at of few ranks: its bytes in the store, which are left as
they are until somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, groupby

import msgspec
import numpy as np

from diagnosis.evidence import Ints
from diagnosis.store import lines, measures
from diagnosis.store.columns import (
    BLOCKED,
    OCCUPANTS,
    WAKERS,
    DamagedColumns,
    Details,
    Table,
    ThreadKey,
    Waking,
    Who,
    in_order,
    join,
    listed_rows,
    undamaged,
)
from probes.records import Metric, Occupant, ThreadTime, Waker


class _Second(msgspec.Struct, frozen=True, array_like=True):
    who: list[Who]
    took_ns: list[int]
    reasons: list[list[str]] = []
    """For which each of the threads blocked; none at all where no thread told any."""
    first: bytes = b""
    """This and the next: a column for each reason, in the rows of the thread's table, by :func:`lines.packed`."""
    rest: bytes = b""
    wakings: list[bytes] = []
    """Each ``Waking`` in msgpack, as it is only compared until it is known which are the same."""
    slept_ns: list[int] = []
    metrics: measures.Packed = measures.NONE


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Second)
_waking = msgspec.msgpack.Decoder(Waking)


def packed(
    threads: list[ThreadTime],
    occupants: list[Occupant],
    wakers: Sequence[Waker] = (),
    metrics: Sequence[Metric] = (),
) -> msgspec.Raw:
    """To be read by :func:`joined`."""
    reasons = [sorted(thread.blocked_by) if thread.at_ns else [] for thread in threads]
    blocked = [
        thread.blocked_by[reason] for thread, told in zip(threads, reasons, strict=True) for reason in told
    ]
    first, rest = lines.packed(blocked)
    woken = sorted(
        (Waking(one.tid, one.reason, one.pid, one.waker_tid, one.name), one.slept_ns) for one in wakers
    )
    second = _Second(
        who=[
            Who(one.role, one.pid, one.name, one.cgroup, one.rank_job, one.rank, one.kernel)
            for one in occupants
        ],
        took_ns=[one.took_ns for one in occupants],
        reasons=reasons if blocked else [],
        first=first,
        rest=rest,
        wakings=[_encoder.encode(waking) for waking, _ in woken],
        slept_ns=[slept_ns for _, slept_ns in woken],
        metrics=measures.packed(metrics),
    )
    return msgspec.Raw(_encoder.encode(second))


def only_occupants(who: list[Who], took_ns: list[int]) -> msgspec.Raw:
    """Of a second in which nothing else was told."""
    return msgspec.Raw(_encoder.encode(_Second(who, took_ns)))


def joined(
    starts: list[int],
    ends: list[int],
    keys: list[ThreadKey],
    at_ns: list[Ints],
    counts: Ints,
    raw: list[msgspec.Raw],
) -> Details:
    """What several seconds tell: each begins and ends as ``starts`` and ``ends`` say, and is the :func:`packed` of
    one of ``raw``. ``at_ns``: instants of the rows of each of ``keys``, second by second, so many of each second as
    ``counts`` (seconds × keys) says. Raises :class:`DamagedColumns`."""
    with undamaged():
        told = [_decoder.decode(details) for details in raw]
        took = _in_line(one.took_ns for one in told)
        who, occupants = listed_rows(
            OCCUPANTS, starts, ends, [one.who for one in told], took, lambda one: one
        )
        slept = _in_line(one.slept_ns for one in told)
        named = [one.wakings for one in told]
        wakings, wakers = listed_rows(WAKERS, starts, ends, named, slept, _waking.decode)
        measured, metrics = measures.unpacked(starts, ends, [one.metrics for one in told])
        blocked = _blocked(keys, at_ns, counts, told)
    return Details(in_order(occupants), who, in_order(wakers), wakings, metrics, measured, blocked)


def _blocked(
    keys: list[ThreadKey], at_ns: list[Ints], counts: Ints, told: list[_Second]
) -> dict[ThreadKey, Table]:
    ends = counts.cumsum(axis=0)
    tables: dict[ThreadKey, list[Table]] = {}
    # What a thread blocks for is the same for many seconds.
    for reasons, alike in groupby(range(len(told)), lambda second: told[second].reasons):
        seconds = list(alike)
        names = [tuple(of) for of in reasons or [[]] * len(keys)]
        if len(names) != len(keys):
            raise DamagedColumns("reasons of other threads")
        rows = counts[seconds] * np.array([bool(of) for of in names], np.bool_)
        columns = lines.tables(names, rows, [told[s].first for s in seconds], [told[s].rest for s in seconds])
        first, last = ends[seconds[0]] - counts[seconds[0]], ends[seconds[-1]]
        for place, (key, table) in enumerate(zip(keys, columns, strict=True)):
            if len(table):
                at = at_ns[place][first[place] : last[place]]
                rows_of_key = Table((*BLOCKED, *table.names), np.concatenate([at[None], table.values]))
                tables.setdefault(key, []).append(in_order(rows_of_key))
    return {key: join(BLOCKED, tables[key]) for key in sorted(tables)}


def _in_line(numbers: Iterable[list[int]]) -> Ints:
    return np.array(list(chain.from_iterable(numbers)), np.int64)
