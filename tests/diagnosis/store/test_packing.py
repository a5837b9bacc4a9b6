"""Columns become bytes and the same columns again, whatever is in them."""

import contextlib

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from diagnosis.store import packing
from diagnosis.store.columns import (
    BATCHES,
    BLOCKED,
    COLLECTIVES,
    METRICS,
    OCCUPANTS,
    OPERATIONS,
    STOLEN,
    THREAD,
    WAKERS,
    Columns,
    DamagedColumns,
    Measured,
    Table,
    ThreadKey,
    Waking,
    Who,
    in_order,
    no_details,
    no_rows,
    of_node,
)
from tests.diagnosis.store import older

KINDS = (0, 1, 200, 1 << 20, 1 << 40, (1 << 63) - 1)
"""Sizes of numbers for all widths of differences."""


@st.composite
def tables(draw, names, places=None):
    """A table whose last column, where ``places`` is given, names one of so many."""
    rows = draw(st.integers(0, 4)) if places != 0 else 0
    columns = []
    for _ in names:
        most = draw(st.sampled_from(KINDS))
        columns.append(draw(arrays(np.int64, rows, elements=st.integers(-most - (most > 200), most))))
    return Table(names, np.array(columns))


def numbers(columns, rows):
    return arrays(np.int64, (columns, rows), elements=st.integers(-(2**40), 2**40))


def placed(draw, names, column, count):
    table = draw(tables(names, count))
    return table.replaced(
        column, draw(arrays(np.int64, len(table), elements=st.integers(0, max(0, count - 1))))
    )


@st.composite
def all_columns(draw):
    keys = sorted({ThreadKey(draw(st.integers(0, 3)), 0, draw(st.integers(0, 3))) for _ in range(2)})
    dtypes = draw(st.lists(st.text(max_size=3), max_size=3))
    who = [Who(0, pid, "p", "c", "", -1, kernel=False) for pid in range(draw(st.integers(0, 2)))]
    kinds = draw(st.lists(st.text(max_size=3), max_size=3))
    threads = {key: in_order(draw(tables(THREAD))) for key in keys}
    blocked = {
        key: Table(
            (*BLOCKED, *told), np.concatenate([table.values[:1], draw(numbers(len(told), len(table)))])
        )
        for key, table in threads.items()
        if (told := sorted(draw(st.sets(st.text(max_size=3), max_size=3)))) and len(table)
    }
    wakings = [Waking(1, draw(st.text(max_size=3)), pid, 2, "w") for pid in range(draw(st.integers(0, 2)))]
    labels = st.tuples(st.text(max_size=3), st.text(max_size=3))
    measured = [
        Measured(f"m{place}", "ns", tuple(draw(st.lists(labels, max_size=2))))
        for place in range(draw(st.integers(0, 2)))
    ]
    return Columns(
        batches=draw(tables(BATCHES)),
        collectives=placed(draw, COLLECTIVES, "dtype", len(dtypes)),
        dtypes=dtypes,
        threads=threads,
        stolen={key: draw(tables(STOLEN)) for key in keys},
        operations=placed(draw, OPERATIONS, "kind", len(kinds)),
        kinds=kinds,
        details=details(
            occupants=placed(draw, OCCUPANTS, "who", len(who)),
            who=who,
            blocked=blocked,
            wakers=placed(draw, WAKERS, "waking", len(wakings)),
            wakings=wakings,
            metrics=placed(draw, METRICS, "measured", len(measured)),
            measured=measured,
        ),
    )


def details(**told):
    return lambda: no_details()._replace(**told)


def listed(columns):
    """As plain lists, for comparing."""

    def of(table):
        return table.names, table.values.tolist()

    told = columns.details()
    details = [of(told.occupants), of(told.wakers), of(told.metrics)]
    details += [(key, of(one)) for key, one in told.blocked.items()]
    return (
        [of(getattr(columns, name)) for name in ("batches", "collectives", "operations")],
        [[(key, of(one)) for key, one in each.items()] for each in (columns.threads, columns.stolen)],
        (columns.dtypes, columns.kinds),
        details,
        # Names of nothing are not kept where there is nothing at all.
        (told.who, told.wakings, told.measured) if any(map(len, told[::2])) else (),
    )


@settings(max_examples=50, deadline=None)
@given(columns=all_columns())
def test_what_was_packed_comes_back(columns):
    assert listed(packing.unpack(packing.pack(columns))) == listed(columns)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), columns=all_columns())
def test_bytes_that_were_changed_are_damaged_or_columns_and_nothing_else(data, columns):
    blob = bytearray(packing.pack(columns))
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(DamagedColumns):
        listed(packing.unpack(bytes(blob)))


@pytest.mark.parametrize("rows", [[-1], [1 << 40], [2]])
def test_a_table_that_says_it_has_other_rows_is_damaged(rows):
    columns = of_node(no_rows(BATCHES))
    packed = msgspec.msgpack.decode(zstandard.decompress(packing.pack(columns)))
    packed[1][0] = rows[0]
    with pytest.raises(DamagedColumns):
        packing.unpack(zstandard.compress(msgspec.msgpack.encode(packed)))


@pytest.mark.parametrize("place", [-1, 1])
@pytest.mark.parametrize("of", ["metrics", "wakers"])
def test_a_row_that_names_what_is_not_listed_is_damaged(of, place):
    told = details(
        wakings=[Waking(1, "futex", 2, 3, "w")],
        measured=[Measured("m", "ns", ())],
        **{of: Table(METRICS if of == "metrics" else WAKERS, np.array([[1], [2], [place], [4]]))},
    )
    read = packing.unpack(packing.pack(of_node(no_rows(BATCHES), told)))
    with pytest.raises(DamagedColumns):
        read.details()


def test_a_minute_of_the_version_before_is_read_as_it_was():
    read = packing.unpack(older.RECORDED_MINUTE_2)
    assert read.collectives["seq"].tolist() == [6, 7, 8, 9]
    driving, communication = ThreadKey(101, 0, 0), ThreadKey(0, 1, 9)
    assert {key: table.names for key, table in read.threads.items()} == {
        communication: THREAD,
        driving: THREAD,
    }
    assert read.threads[driving]["running_ns"].tolist() == [
        1_625_000_000,
        1_875_000_000,
        2_125_000_000,
        2_375_000_000,
    ]
    assert read.stolen[driving]["stolen_ns"].tolist() == [1003, 1004]
    assert read.details().occupants["took_ns"].tolist() == [30_000_000, 30_000_000]
    assert [len(told) for told in read.details()[2:]] == [0, 0, 0, 0, 0]
