"""Orders are followed when they are signed, meant for the batch just sent, and on the fixed list; never else."""

from __future__ import annotations

import string
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from probes.orders import OrdersRefused, commands, public_key
from probes.records import MAX_COMMANDS, ORDERS_CONTEXT, Command, CommandKind, Orders, Reply
from tests.probes.batches import a_batch

SERVER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEY = SERVER.public_key()
BATCH = a_batch(7)
OFF = Command(id="c-1", kind=CommandKind.PROBE_OFF, probe="gloo")


def signed(text: str, *, key: Ed25519PrivateKey = SERVER, context: bytes = ORDERS_CONTEXT) -> Reply:
    return Reply(stored=True, orders=text, signature=key.sign(context + text.encode()).hex())


def orders(*asked: Command, **changes: Any) -> str:
    fields: dict[str, Any] = {
        "node": "node-a",
        "boot_id": "boot-1",
        "agent": "agent-1",
        "seq": 7,
        "commands": list(asked),
    }
    return msgspec.json.encode(Orders(**fields | changes)).decode()


def test_signed_orders_for_this_batch_are_followed() -> None:
    assert commands(signed(orders(OFF)), BATCH, KEY) == [OFF]
    assert commands(Reply(stored=True), BATCH, KEY) == []
    assert commands(Reply(stored=True), BATCH, None) == []


def test_without_a_key_no_orders_are_followed_and_the_way_out_is_said() -> None:
    with pytest.raises(OrdersRefused, match="SYSOM_COMMAND_KEY"):
        commands(signed(orders(OFF)), BATCH, None)


@pytest.mark.parametrize(
    "reply",
    [
        signed(orders(OFF), key=Ed25519PrivateKey.from_private_bytes(bytes(32))),
        signed(orders(OFF), context=b""),
        signed(orders(OFF), context=b"sysom orders 2\0"),
        Reply(stored=True, orders=orders(OFF)),
        Reply(stored=True, orders=orders(OFF), signature="no hexadecimal"),
        Reply(stored=True, orders=orders(OFF), signature="ü" * 128),
        Reply(stored=True, orders="\ud800", signature="00" * 64),
    ],
    ids=["another key", "no context", "another context", "none", "no hex", "not ASCII", "no text"],
)
def test_a_signature_that_does_not_fit_is_refused(reply: Reply) -> None:
    with pytest.raises(OrdersRefused, match="signature does not fit"):
        commands(reply, BATCH, KEY)


@pytest.mark.parametrize(
    "changes", [{"node": "node-b"}, {"boot_id": "boot-2"}, {"agent": "agent-2"}, {"seq": 6}, {"seq": 1 << 80}]
)
def test_signed_orders_for_another_batch_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(OrdersRefused):
        commands(signed(orders(OFF, **changes)), BATCH, KEY)


@pytest.mark.parametrize(
    "text",
    [
        orders(OFF).replace("probe-off", "run-shell"),
        orders(OFF).replace('"probe"', '"shell":"rm","probe"'),
        orders(*[OFF] * (MAX_COMMANDS + 1)),
        orders(Command(id="", kind=CommandKind.PROBE_ON, probe="gloo")),
        orders(Command(id="two words", kind=CommandKind.PROBE_ON, probe="gloo")),
        orders(Command(id="x" * 129, kind=CommandKind.PROBE_ON, probe="gloo")),
        "[" * 100_000,
        "null",
    ],
    ids=["not listed", "more fields", "too many", "no id", "id of words", "long id", "deep", "null"],
)
def test_signed_orders_beyond_the_fixed_list_are_refused(text: str) -> None:
    with pytest.raises(OrdersRefused):
        commands(signed(text), BATCH, KEY)


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(Orders.__struct_fields__), inner)
    ),
)


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1)
    | json.map(lambda v: msgspec.json.encode(v).decode())
)
def test_garbage_under_a_valid_signature_is_refused_in_words(text: str) -> None:
    with pytest.raises(OrdersRefused, match=r"."):
        commands(signed(text), BATCH, KEY)


@given(
    st.lists(
        st.fixed_dictionaries(
            {"id": st.text(max_size=3), "kind": st.sampled_from([*CommandKind, "capture", ""])},
            optional={"job": st.text(), "seconds": st.integers(), "probe": st.text(), "x": st.integers()},
        ),
        max_size=MAX_COMMANDS + 2,
    )
)
def test_signed_commands_are_well_formed_or_refused(asked: list[dict[str, Any]]) -> None:
    text = msgspec.json.encode(
        msgspec.to_builtins(msgspec.json.decode(orders())) | {"commands": asked}
    ).decode()
    try:
        followed = commands(signed(text), BATCH, KEY)
    except OrdersRefused:
        return
    assert len(followed) == len(asked) <= MAX_COMMANDS
    assert all(set(one.id) <= set(string.printable) - set(string.whitespace) for one in followed)


@given(st.integers(min_value=0, max_value=8 * (len(orders(OFF)) + 64) - 1))
def test_one_flipped_bit_is_refused(bit: int) -> None:
    good = signed(orders(OFF))
    raw = bytearray(good.orders.encode() + bytes.fromhex(good.signature))
    raw[bit // 8] ^= 1 << bit % 8
    text = raw[:-64].decode("latin-1")
    with pytest.raises(OrdersRefused):
        commands(Reply(stored=True, orders=text, signature=raw[-64:].hex()), BATCH, KEY)


def test_a_key_is_64_hexadecimal_digits() -> None:
    text = KEY.public_bytes_raw().hex()
    assert public_key(f" {text}\n").public_bytes_raw() == KEY.public_bytes_raw()
    for wrong in ("", text[:-2], text + "00", "g" * 64, "ü" * 64):
        with pytest.raises(ValueError, match="sysom key"):
            public_key(wrong)
