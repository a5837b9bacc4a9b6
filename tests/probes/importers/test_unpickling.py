"""Pickles: plain data is read as pickle reads it, and nothing in a file makes anything happen."""

from __future__ import annotations

import os
import pickle
import pickletools
from collections import OrderedDict
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.importers import unpickling
from probes.importers.unpickling import RefusedPickle, loads

KEYS = st.one_of(st.text(max_size=9), st.integers(-(2**63), 2**63 - 1))
PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text()
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=6),
    ),
    max_leaves=20,
)


@given(PLAIN, st.integers(2, 5))
def test_plain_data_comes_out_as_pickle_makes_it(value: object, protocol: int):
    assert loads(pickle.dumps(value, protocol)) == value


def test_shared_and_long_data_comes_out_whole():
    shared = ["x" * 300, 2**40]
    value = {str(number): [shared, (number,) * 5] for number in range(2000)}
    assert loads(pickle.dumps(value, 4)) == value


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("made-by-a-pickle",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "value",
    [
        Evil(),
        OrderedDict(a=1),
        datetime(2026, 1, 1, tzinfo=UTC),
        {1, 2},
        os.getpid,
        Evil,
        1j,
        bytearray(b"x"),
    ],
)
def test_classes_functions_and_calls_are_refused(value: object, protocol: int, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RefusedPickle, match=r"at byte \d+"):
        loads(pickle.dumps({"entries": [value]}, protocol))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00truetR.", "a class or function"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "a class or function"),
        (b"\x80\x02(ios\nsystem\n.", "an instance of a class"),
        (b"\x80\x02}}b.", "the state of an object"),
        (b"\x80\x02Pid\n.", "a persistent id"),
        (b"\x80\x02X\x02\x00\x00\x00idQ.", "a persistent id"),
        (b"\x80\x02\x82\x01.", "a class or function"),
        (b"\x80\x05\x97.", "a buffer outside the file"),
    ],
)
def test_what_a_program_asks_for_is_said(program: bytes, what: str):
    with pytest.raises(RefusedPickle, match=f"{what}.*only plain data"):
        loads(program)


def test_every_opcode_is_known_or_refused():
    plain = {chr(code) for code in unpickling._ACTIONS} | set(".(NKhjqr")  # these stand in the loop
    harmless = set("IFLSTUVgpd0120l") | {"\x8b", "\x8e", "\x8f", "\x90", "\x91", "\x96", "\x98"}
    assert {one.code for one in pickletools.opcodes} == plain | set(unpickling._REFUSED) | harmless


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b"\x80",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02(.",
        b"\x80\x02NN.",
        b"\x80\x02h\x07.",
        b"\x80\x02q\x00.",
        b"\x80\x02(q\x00.",
        b"\x80\x02t.",
        b"\x80\x02NNs.",
        b"\x80\x02](K\x01u.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02}(]Nu.",
        b"\x80\x02}Na.",
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc.",
        b"\x80\x02\x8a\xff" + b"\1" * 255 + b".",
        b"\x80\x02X\x01\x00\x00\x00\xff.",
        b"\x80\x09N.",
    ],
)
def test_damaged_pickles_are_said_to_be_damaged(program: bytes):
    with pytest.raises(RefusedPickle):
        loads(program)


def test_a_pickle_that_is_cut_short_says_so_wherever_it_is_cut():
    whole = pickle.dumps({"entries": [{"record_id": 1, "state": "scheduled", "sizes": [[1, 2]]}]}, 2)
    for length in range(len(whole)):
        with pytest.raises(RefusedPickle, match=r"cut short|more or less than one value"):
            loads(whole[:length])


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(noise: bytes):
    for data in (noise, b"\x80\x02" + noise, b"\x80\x04}(" + noise):
        with suppress(RefusedPickle):
            loads(data)


@given(PLAIN, st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_a_pickle_with_bytes_changed_is_read_or_refused(value: object, at: int, change: bytes):
    data = pickle.dumps(value, 4)
    at %= len(data)
    with suppress(RefusedPickle):
        loads(data[:at] + change + data[at + len(change) :])


def test_what_would_take_too_much_is_refused(monkeypatch):
    assert loads(b"\x80\x02Nr\xff\xff\xff\xff.") is None  # C's unpickler makes a table of that many places
    monkeypatch.setattr(unpickling, "MAX_OPCODES", 1000)
    with pytest.raises(RefusedPickle, match="more than 1,000 opcodes"):
        loads(b"\x80\x02" + b"]" * 2000)
    monkeypatch.setattr(unpickling, "MAX_BYTES", 10)
    with pytest.raises(RefusedPickle, match="at most 10 are read"):
        loads(b"\x80\x02" + b"]" * 20)


def test_a_key_nested_very_deep_does_not_end_the_process():
    deep = b"\x80\x02})" + b"\x85" * 200_000 + b"Ns."
    with pytest.raises(RefusedPickle, match="a key that is no text"):
        loads(deep)
