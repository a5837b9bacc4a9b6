"""Signing what agents are asked to do: the key's file, and what a signature covers."""

import stat

import msgspec
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.orders import Signer, SigningError, signer
from probes.records import MAX_COMMANDS, ORDERS_CONTEXT, Command, CommandKind, Orders
from tests.probes.batches import a_batch

# RFC 8032, 7.1, test 1.
PRIVATE = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
PUBLIC = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"


@pytest.fixture
def one():
    return Signer(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(PRIVATE)))


def test_the_public_key_is_the_private_ones(one):
    assert one.public == PUBLIC


def test_a_reply_without_commands_is_not_signed(one):
    reply = one.reply(a_batch(1), stored=True)
    assert (reply.stored, reply.orders, reply.signature) == (True, "", "")


def test_a_signature_covers_the_orders_and_what_they_are_for(one):
    command = Command(id="c1", kind=CommandKind.PROBE_OFF, probe="gloo")
    reply = one.reply(a_batch(7), stored=False, commands=[command])
    assert msgspec.json.decode(reply.orders, type=Orders) == Orders(
        node="node-a", boot_id="boot-1", agent="agent-1", seq=7, commands=[command]
    )
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(PUBLIC))
    signature = bytes.fromhex(reply.signature)
    public.verify(signature, ORDERS_CONTEXT + reply.orders.encode())
    for other in (reply.orders.encode(), ORDERS_CONTEXT + reply.orders.replace("node-a", "node-b").encode()):
        with pytest.raises(InvalidSignature):
            public.verify(signature, other)


def test_a_reply_carries_the_oldest_commands_that_fit(one):
    commands = [Command(id=str(number), kind=CommandKind.CAPTURE_END, job="j") for number in range(40)]
    reply = one.reply(a_batch(1), stored=True, commands=commands)
    assert msgspec.json.decode(reply.orders, type=Orders).commands == commands[:MAX_COMMANDS]


def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path):
    path = tmp_path / "state" / "command.key"
    first = signer(path)
    assert signer(path).public == first.public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_holds_no_key_is_said_and_left(tmp_path):
    path = tmp_path / "command.key"
    path.write_text("hush")
    with pytest.raises(SigningError, match=r"does not hold a key .* restore it, or delete it") as caught:
        signer(path)
    assert (path.read_text(), "hush" in str(caught.value)) == ("hush", False)


def test_a_key_that_cannot_be_had_is_said(tmp_path):
    (tmp_path / "command.key").mkdir()
    with pytest.raises(SigningError, match=r"cannot be used: .*Is a directory"):
        signer(tmp_path / "command.key")


@given(st.binary(max_size=80) | st.text("0123456789abcdef \n", max_size=70).map(str.encode))
def test_whatever_is_in_the_keys_file_it_is_a_key_or_refused_unseen(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.key"
    path.write_bytes(content)
    try:
        public, words = signer(path).public, ""
    except SigningError as error:
        public, words = "", str(error)
    assert bool(words) == (len(public) != 64)
    if len(content) > 8:
        assert content.decode("latin-1").strip() not in words
    assert path.read_bytes() == content
