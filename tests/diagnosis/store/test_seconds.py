"""What a batch says of a rank is read as it was written, each second by itself and many put together."""

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.store import seconds
from diagnosis.store.columns import COLLECTIVES, OPERATIONS, THREAD, DamagedColumns, ThreadKey, Who, at_rows
from probes.records import Collectives, Metric, Occupant, Operations, Role, ThreadTime, Waker
from tests.diagnosis.store import older
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


@settings(max_examples=80, deadline=None)
@given(data=st.data(), minute=minutes())
def test_what_was_written_is_read(data, minute):
    blobs = [seconds.pack(start, start + SECOND, rank).columns for start, rank in minute]
    read = seconds.unpack(data.draw(st.permutations(blobs)))
    assert rows(read.batches, "start_ns", "end_ns") == [(start, start + SECOND) for start, _ in minute]
    expected = [
        (*values, failed + 2 * state, dtype)
        for _, rank in minute
        for *values, failed, state, dtype in zip(
            *(getattr(rank.collectives, name) for name in COLLECTIVES if name not in ("failed", "dtype")),
            rank.collectives.failed,
            rank.collectives.state or [0] * len(rank.collectives.failed),
            rank.collectives.dtype,
            strict=True,
        )
    ]
    names = [name for name in COLLECTIVES if name not in ("failed", "dtype")]
    found = rows(read.collectives, *names, "failed", "dtype")
    assert [(*row[:-1], read.dtypes[row[-1]]) for row in found] == expected
    begun = [
        tuple(
            rank.operations.names[place] if name == "kind" else getattr(rank.operations, name)[row]
            for name in OPERATIONS
            for place in [rank.operations.kind[row]]
        )
        for _, rank in minute
        for row in range(len(rank.operations.start_ns))
    ]
    kind = OPERATIONS.index("kind")
    assert [
        (*row[:kind], read.kinds[row[kind]], *row[kind + 1 :]) for row in rows(read.operations, *OPERATIONS)
    ] == begun
    of_thread, stolen = {}, {}
    for start, rank in minute:
        for thread in rank.threads:
            key = ThreadKey(thread.tid, int(thread.role), thread.since_ns)
            of_thread.setdefault(key, []).extend(zip(*(getattr(thread, n) for n in THREAD), strict=True))
            stolen.setdefault(key, []).append((start + SECOND, thread.stolen_ns))
    assert {key: rows(table, *THREAD) for key, table in read.threads.items()} == of_thread
    assert blocked_by(read) == {
        key: told
        for key in of_thread
        if (told := sent_blocked_by(key, [thread for _, rank in minute for thread in rank.threads]))
    }
    assert {key: rows(table, "at_ns", "stolen_ns") for key, table in read.stolen.items()} == stolen
    took = [
        (start, start + SECOND, one.pid + 1, (int(one.role), one.pid, one.name, one.kernel))
        for start, rank in minute
        for one in rank.occupants
    ]
    told = read.details()
    assert sorted(
        (start, end, *told.wakings[waking], slept)
        for start, end, waking, slept in rows(told.wakers, "start_ns", "end_ns", "waking", "slept_ns")
    ) == sorted(
        (start, start + SECOND, one.tid, one.reason, one.pid, one.waker_tid, one.name, one.slept_ns)
        for start, rank in minute
        for one in rank.wakers
    )
    assert sorted(
        (start, end, *told.measured[measured], repr(struct.unpack("d", struct.pack("q", bits))[0]))
        for start, end, measured, bits in rows(told.metrics, "start_ns", "end_ns", "measured", "value")
    ) == sorted(
        (start, start + SECOND, one.name, one.unit, tuple(sorted(one.labels.items())), repr(one.value))
        for start, rank in minute
        for one in rank.metrics
    )
    found = rows(told.occupants, "start_ns", "end_ns", "took_ns", "who")
    assert sorted(
        (*row[:-1], (who.role, who.pid, who.name, who.kernel)) for row in found for who in [told.who[row[-1]]]
    ) == sorted(took)


@settings(max_examples=20, deadline=None)
@given(minute=minutes())
def test_the_span_of_a_second_holds_all_its_instants(minute):
    for start, rank in minute:
        shifted = a_rank(0, collectives=rank.collectives, operations=rank.operations, threads=rank.threads)
        packed = seconds.pack(start + SECOND // 2, start + SECOND // 2 + 1, shifted)
        instants = [*rank.collectives.enter_ns, *rank.operations.start_ns]
        instants += [at for thread in rank.threads for at in thread.at_ns]
        assert packed.first_ns == min([*instants, start + SECOND // 2])
        assert packed.last_ns == max([*instants, start + SECOND // 2 + 1])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), minute=minutes())
def test_bytes_that_were_changed_are_damaged_or_columns_and_nothing_else(data, minute):
    blobs = [bytearray(seconds.pack(start, start + SECOND, rank).columns) for start, rank in minute]
    for _ in range(data.draw(st.integers(1, 3))):
        blob = data.draw(st.sampled_from(blobs))
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(DamagedColumns):
        columns = seconds.unpack(map(bytes, blobs))
        for place, known in (
            (columns.collectives["dtype"], columns.dtypes),
            (columns.operations["kind"], columns.kinds),
            (columns.details().wakers["waking"], columns.details().wakings),
            (columns.details().metrics["measured"], columns.details().measured),
        ):
            assert all(0 <= one < len(known) for one in place.tolist())


ROWS, DTYPES, KEYS, STOLEN, FIRST, REST = ([place] for place in (3, 4, 5, 6, 8, 9))
WHO, TOOK, REASONS, REASONS_FIRST, REASONS_REST, WAKINGS, SLEPT, METRICS = ([10, place] for place in range(8))
"""Places in what is stored."""


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (ROWS, []),
        (ROWS, [2, 2]),
        (ROWS, [-1, 2, 0]),
        (ROWS, [1 << 40, 2, 0]),
        (ROWS, [1 << 62, 2, 0]),
        (ROWS, [3, 2, 0]),
        (ROWS, [2, 0, 2]),
        (DTYPES, []),
        (KEYS, []),
        (STOLEN, []),
        (FIRST, b""),
        (REST, b""),
        (REST, b"\0" * 3),
        (REASONS, [["futex"]]),
        (REASONS, [[], []]),
        (WHO, []),
        (TOOK, []),
        (REASONS_FIRST, b"\0" * 8),
        (REASONS_REST, b"\0" * 3),
        (SLEPT, [5]),
        (WAKINGS, [b"no waker"]),
        (METRICS, [[], b"\0" * 8]),
        (METRICS, [[b"\x93\xa1a\xa1b\x90"], b"\0" * 7]),
        (METRICS, [[b"\x92\xa1a\xa1b"], b"\0" * 8]),
    ],
)
def test_a_second_that_does_not_fit_together_is_damaged(place, value):
    packed = msgspec.msgpack.decode(seconds.pack(3 * SECOND, 4 * SECOND, a_rank(3)).columns)
    *into, last = place
    of = packed
    for one in into:
        of = of[one]
    of[last] = value
    with pytest.raises(DamagedColumns):
        seconds.unpack([msgspec.msgpack.encode(packed)]).details()


def test_a_second_takes_four_bytes_a_number():
    thread = ThreadTime(
        tid=1,
        role=Role.DRIVING,
        since_ns=0,
        at_ns=[10**15 + number * 10**7 for number in range(100)],
        **{name: [10**14 + number * 10**6 for number in range(100)] for name in THREAD[1:]},
    )
    rank = a_rank(0, collectives=Collectives(), threads=[thread], occupants=[])
    assert len(seconds.pack(10**15, 10**15 + SECOND, rank).columns) < 4 * 600 + 110


def test_threads_that_come_under_one_name_are_one_series():
    def thread(at):
        zeros = {name: [0] for name in THREAD[1:]}
        return ThreadTime(tid=1, role=Role.DRIVING, since_ns=0, at_ns=[at], **zeros)

    packed = seconds.pack(0, SECOND, a_rank(0, threads=[thread(7), thread(5)], collectives=Collectives()))
    (series,) = seconds.unpack([packed.columns]).threads.values()
    assert series["at_ns"].tolist() == [5, 7]


def test_a_thread_that_comes_and_goes_leaves_the_others_as_they_are():
    def second(number, *tids):
        zeros = {name: [number] for name in THREAD[1:]}
        threads = [
            ThreadTime(tid=tid, role=Role.DRIVING, since_ns=0, at_ns=[number * SECOND + tid], **zeros)
            for tid in tids
        ]
        return seconds.pack(number * SECOND, (number + 1) * SECOND, a_rank(number, threads=threads)).columns

    read = seconds.unpack([second(0, 1), second(1, 2, 1), second(2, 1), second(3), second(4, 1, 2)])
    found = {key.tid: table["at_ns"].tolist() for key, table in read.threads.items()}
    assert found == {
        1: [1, SECOND + 1, 2 * SECOND + 1, 4 * SECOND + 1],
        2: [SECOND + 2, 4 * SECOND + 2],
    }
    assert read.collectives["seq"].tolist() == list(range(10))


def test_types_that_change_from_second_to_second_stay_with_their_rows():
    def second(number, *dtypes):
        begin = number * SECOND
        fields = ("communicator", "seq", "op", "bytes", "duration_ns", "failed")
        collectives = Collectives(
            enter_ns=[begin + place for place in range(len(dtypes))],
            dtype=list(dtypes),
            **{name: [0] * len(dtypes) for name in fields},
        )
        rank = a_rank(0, collectives=collectives, threads=[], occupants=[])
        return seconds.pack(begin, begin + SECOND, rank).columns

    read = seconds.unpack([second(0, "f32", "bf16"), second(1), second(2, "i8"), second(3, "f32", "i8")])
    places = read.collectives["dtype"].tolist()
    assert [read.dtypes[place] for place in places] == ["f32", "bf16", "i8", "f32", "i8"]


def test_a_number_that_needs_eight_bytes_widens_its_own_second_alone():
    def second(number, *durations):
        at = [number * SECOND + place for place in range(len(durations))]
        fields = ("communicator", "seq", "op", "bytes", "failed")
        collectives = Collectives(
            enter_ns=at,
            duration_ns=list(durations),
            dtype=["f32"] * len(at),
            **{name: [0] * len(at) for name in fields},
        )
        return seconds.pack(at[0], at[0] + SECOND, a_rank(0, collectives=collectives)).columns

    blobs = [second(0, 5, 6, 7), second(1, 0, HIGH, LOW), second(2, 8, 9, -1)]
    assert seconds.unpack(blobs).collectives["duration_ns"].tolist() == [5, 6, 7, 0, HIGH, LOW, 8, 9, -1]
    assert len(blobs[1]) - len(blobs[0]) > 100 > len(blobs[2]) - len(blobs[0])


# --- what older versions wrote


def test_a_second_that_an_older_version_wrote_is_read_as_it_was():
    read = seconds.unpack([older.RECORDED_SECOND])
    assert rows(read.batches, "start_ns", "end_ns") == [(3 * SECOND, 4 * SECOND)]
    assert read.dtypes == ["bf16", "f32"]
    names = ("enter_ns", "communicator", "seq", "op", "duration_ns", "failed", "bytes", "dtype")
    assert rows(read.collectives, *names) == [
        (3 * SECOND + 1, 0, 6, 1, 5, 6, 4096, 1),
        (3 * SECOND + 2, 0, 7, 1, 6, 1, -1, 0),
        (3 * SECOND + 3, 0, 8, 1, -1, 4, 1 << 40, 1),
    ]
    driving, communication = ThreadKey(101, 0, 7), ThreadKey(0, 1, 8)
    assert list(read.threads) == [communication, driving]
    assert rows(read.threads[communication], *THREAD) == []
    assert rows(read.threads[driving], *THREAD) == [
        (3 * SECOND + 4, 10, 20, 30, 0, 1),
        (3 * SECOND + 5, 11, 20, -(1 << 62), 0, 2),
    ]
    assert rows(read.stolen[driving], "at_ns", "stolen_ns") == [(4 * SECOND, 40)]
    assert read.details().who == [
        Who(0, 7, "stress", "/user", "", -1, kernel=False),
        Who(1, 0, "swapper/0", "", "job-2", 1, kernel=True),
    ]
    assert rows(read.details().occupants, "start_ns", "end_ns", "who", "took_ns") == [
        (3 * SECOND, 4 * SECOND, 0, 30),
        (3 * SECOND, 4 * SECOND, 1, 5),
    ]
    assert read.kinds == ["a", "b"]
    assert rows(read.operations, *OPERATIONS) == [
        (3 * SECOND, 0, 0, 1, 2, 0, -1, 0),
        (3 * SECOND + 1, 1, 1, -1, 3, 1, 4, 0),
    ]


def test_a_second_of_the_version_before_is_read_as_it_was():
    read = seconds.unpack([older.RECORDED_SECOND_2])
    driving, communication = ThreadKey(101, 0, 0), ThreadKey(0, 1, 9)
    assert list(read.threads) == [communication, driving]
    assert len(read.threads[communication]) == 0
    assert rows(read.threads[driving], "at_ns", "running_ns") == [
        (3_250_000_000, 1_625_000_000),
        (3_750_000_000, 1_875_000_000),
    ]
    assert read.collectives["seq"].tolist() == [6, 7]
    assert read.details().who == [Who(0, 7, "stress", "/user", "", -1, kernel=False)]
    assert [len(told) for told in read.details()[2:]] == [0, 0, 0, 0, 0]
    waker = Waker(tid=101, reason="futex", pid=7, waker_tid=8, name="w", slept_ns=9)
    thread = msgspec.structs.replace(a_rank(4).threads[0], blocked_by={"futex": [4, 5]})
    new = seconds.pack(4 * SECOND, 5 * SECOND, a_rank(4, threads=[thread], wakers=[waker])).columns
    both = seconds.unpack([new, older.RECORDED_SECOND_2])
    assert blocked_by(both) == {driving: {"futex": [0, 0, 4, 5]}}
    assert rows(both.details().wakers, "start_ns", "slept_ns") == [(4 * SECOND, 9)]


@pytest.mark.parametrize("second", [0, 3, 127, 128, 1 << 40])
def test_seconds_of_old_and_new_stand_together(second):
    """An instant of any size stands where the newer format has its number."""
    start = second
    old = older.second(start, start + 1, a_rank(3))
    new = seconds.pack(start + 1, start + 2, a_rank(4)).columns
    read = seconds.unpack([new, old])
    assert rows(read.batches, "start_ns", "end_ns") == [(start, start + 1), (start + 1, start + 2)]
    assert read.collectives["seq"].tolist() == [6, 7, 8, 9]
    assert read.threads[ThreadKey(101, 0, 0)]["at_ns"].tolist() == [
        int(at * SECOND) for at in (3.25, 3.75, 4.25, 4.75)
    ]
