"""Seconds of a rank as Hypothesis draws them, whatever a batch may say; and what was read of them, as rows."""

from hypothesis import strategies as st

from diagnosis.store.columns import THREAD, at_rows
from probes.records import Collectives, Metric, Occupant, Operations, Role, ThreadTime, Waker
from tests.probes.batches import SECOND, a_rank

LOW, HIGH = -(1 << 63), (1 << 63) - 1
NUMBERS = st.sampled_from([0, 1, -1, 200, 1 << 31, -(1 << 31) - 1, 1 << 40, LOW, HIGH]) | st.integers(
    LOW, HIGH
)
NAMES = st.sampled_from(["f32", "bf16", "", "ncclKernel"])
ODD = st.text(max_size=4) | st.sampled_from(["futex", "at_ns", "a\0b", "\U0001f980", "'; DROP TABLE tail"])
VALUES = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [-0.0, 5e-324, 1.8e308 / 2, 2.0**63]
)


def columns_of(draw, rows, *names):
    return {name: draw(st.lists(NUMBERS, min_size=rows, max_size=rows)) for name in names}


@st.composite
def instants(draw, start_ns):
    """Up to four, in order, of the second that begins at ``start_ns``."""
    return sorted(draw(st.sets(st.integers(start_ns, start_ns + SECOND - 1), max_size=4)))


@st.composite
def ranks(draw, start_ns):
    """A rank in the second that begins at ``start_ns``; each of its tables may be empty."""
    enter, begin = draw(instants(start_ns)), draw(instants(start_ns))
    named = draw(st.lists(NAMES, min_size=1, max_size=3))
    collectives = Collectives(
        enter_ns=enter,
        dtype=draw(st.lists(NAMES, min_size=len(enter), max_size=len(enter))),
        failed=draw(st.lists(st.booleans(), min_size=len(enter), max_size=len(enter))),
        state=draw(st.lists(st.integers(0, 3), min_size=len(enter), max_size=len(enter)) | st.just([])),
        **columns_of(draw, len(enter), "communicator", "seq", "op", "bytes", "duration_ns"),
    )
    operations = Operations(
        names=named,
        start_ns=begin,
        kind=draw(st.lists(st.integers(0, len(named) - 1), min_size=len(begin), max_size=len(begin))),
        **columns_of(draw, len(begin), "lane", "step", "duration_ns", "seq", "micro_batch", "chunk"),
    )
    threads = []
    for tid in draw(st.sets(st.integers(0, 2))):
        at = draw(instants(start_ns))
        threads.append(
            ThreadTime(
                tid=tid,
                role=Role.DRIVING,
                since_ns=tid * 7,
                at_ns=at,
                stolen_ns=draw(NUMBERS),
                **columns_of(draw, len(at), *THREAD[1:]),
                blocked_by=columns_of(draw, len(at), *draw(st.sets(ODD, max_size=4))),
            )
        )
    occupants = [
        Occupant(
            role=Role.COMMUNICATION, pid=pid, name=draw(NAMES), cgroup="", took_ns=pid + 1, kernel=pid == 1
        )
        for pid in draw(st.sets(st.integers(0, 3)))
    ]
    wakers = [
        Waker(
            tid=tid, reason=draw(ODD), pid=draw(NUMBERS), waker_tid=2, name=draw(ODD), slept_ns=draw(NUMBERS)
        )
        for tid in draw(st.sets(st.integers(0, 3)))
    ]
    metrics = [
        Metric(
            name=name, value=draw(VALUES), unit=draw(ODD), labels=draw(st.dictionaries(ODD, ODD, max_size=2))
        )
        for name in draw(st.sets(ODD, max_size=3))
    ]
    return a_rank(
        0,
        collectives=collectives,
        operations=operations,
        threads=threads,
        occupants=occupants,
        wakers=wakers,
        metrics=metrics,
    )


@st.composite
def minutes(draw):
    """Pairs of a second's start and a rank, in order of time."""
    starts = sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=4)))
    return [(number * SECOND, draw(ranks(number * SECOND))) for number in starts]


def blocked_by(read):
    """Series → reason → values, without those that are 0 throughout: a reason that is not told is 0."""
    found = {}
    for key, table in read.details().blocked.items():
        columns = zip(table.names[1:], at_rows(table, read.threads[key]["at_ns"]).tolist(), strict=True)
        told = {reason: values for reason, values in columns if any(values)}
        if told:
            found[key] = told
    return found


def sent_blocked_by(key, threads):
    own = [thread for thread in threads if thread.tid == key.tid]
    told = {}
    for reason in {reason for thread in own for reason in thread.blocked_by}:
        parts = [thread.blocked_by.get(reason) or [0] * len(thread.at_ns) for thread in own]
        values = [value for part in parts for value in part]
        if any(values):
            told[reason] = values
    return told


def rows(table, *names):
    return list(zip(*(table[name].tolist() for name in names), strict=True))
