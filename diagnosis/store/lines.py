"""Columns of numbers in one line of bytes, in as few of them as written at once: for what comes every second."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from diagnosis.evidence import Ints
from diagnosis.store.columns import DamagedColumns, Table, no_rows

NARROW, WIDE = 4, 8
"""Bytes of a number. What happens within two seconds takes four, in ns."""


def packed(columns: Sequence[Sequence[int]]) -> tuple[bytes, bytes]:
    """The first number of each column, 8 bytes each, and all numbers of all columns, each less its column's first
    (beyond 64 bits it wraps around, and back), each ``NARROW`` or ``WIDE`` bytes; all little-endian. No column is
    empty."""
    if not columns:
        return b"", b""
    lengths = [len(column) for column in columns]
    values = np.fromiter(chain.from_iterable(columns), np.int64, sum(lengths))
    first = np.array([column[0] for column in columns], np.int64)
    rest = values - np.repeat(first, lengths)
    narrow = rest.astype(f"<i{NARROW}")
    fits = bool((narrow == rest).all())
    return first.astype("<i8").tobytes(), (narrow if fits else rest.astype(f"<i{WIDE}")).tobytes()


def tables(names: list[tuple[str, ...]], rows: Ints, first: list[bytes], rest: list[bytes]) -> list[Table]:
    """The rows of all seconds, one second after the other. ``rows``: of each second and table. Raises
    :class:`DamagedColumns`."""
    bytes_of_rest = np.array([len(one) for one in rest])
    if rows.shape[1] != len(names) or (rows < 0).any() or (rows > bytes_of_rest.max()).any():
        raise DamagedColumns("a table that cannot be")
    widths = np.array([len(of) for of in names], np.int64)
    sizes = rows * widths
    narrow = bytes_of_rest == NARROW * sizes.sum(axis=1)
    wide = bytes_of_rest == WIDE * sizes.sum(axis=1)
    lengths = np.repeat(rows, widths, axis=1)
    firsts = [len(one) for one in first]
    if not (narrow | wide).all() or (np.count_nonzero(lengths, axis=1) * 8 != firsts).any():
        raise DamagedColumns("columns of different lengths")
    line = np.repeat(np.frombuffer(b"".join(first), "<i8"), lengths[lengths > 0])
    if narrow.all():
        line += np.frombuffer(b"".join(rest), f"<i{NARROW}")
    else:
        line += np.concatenate(
            [
                np.frombuffer(one, f"<i{NARROW if is_narrow else WIDE}")
                for one, is_narrow in zip(rest, narrow, strict=True)
            ]
        )
    begins = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape)
    tables = []
    for place, of in enumerate(names):
        blocks = [
            line[begin : begin + len(of) * count].reshape(len(of), count)
            for begin, count in zip(begins[:, place].tolist(), rows[:, place].tolist(), strict=True)
            if count
        ]
        tables.append(Table(of, np.concatenate(blocks, axis=1)) if blocks else no_rows(of))
    return tables
