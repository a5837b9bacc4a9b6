"""What a batch says of a rank is read as it was written, each second by itself and many put together."""

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.store import seconds
from diagnosis.store.columns import COLLECTIVES, OPERATIONS, THREAD, DamagedColumns, ThreadKey
from probes.records import Collectives, Role, ThreadTime
from tests.diagnosis.store.drawn_seconds import HIGH, LOW, blocked_by, minutes, rows, sent_blocked_by
from tests.probes.batches import SECOND, a_rank


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
