"""Batches on their way into the store: whose they are, what is wrong with them, and what goes back."""

import msgspec
import pytest
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diagnosis.ingest import Ingest, Refusal
from diagnosis.orders import Signer
from diagnosis.store import StoreError
from probes import codec
from probes.records import ORDERS_CONTEXT, Command, CommandKind, Event, Orders, Reply
from tests.probes.batches import OFFSET, SECOND, a_batch


class Memory:
    """A store that only notes what it is given, each batch once, and keeps commands as the real one does."""

    def __init__(self):
        self.added = []
        self.commands = []
        self.settled = []
        self.asked = 0
        self.failing = False

    def add(self, batch, received_ns):
        new = all(batch.seq != other.seq for other, _ in self.added)
        if new:
            self.added.append((batch, received_ns))
        return new

    def pending_commands(self, now_ns):
        self.asked += 1
        done = {id for id, *_ in self.settled}
        found = {}
        for node, command, expires_ns in self.commands:
            if command.id not in done and now_ns < expires_ns:
                found.setdefault(node, []).append(command)
        return found

    def settle_command(self, id, outcome, words, at_ns):
        if self.failing:
            raise StoreError("the disk is full")
        self.settled.append((id, outcome, words, at_ns))


def test_a_batch_is_stored_with_the_time_of_its_arrival():
    store = Memory()
    ingest = Ingest(store, {"node-a": "t"}, clock_ns=lambda: 42)
    assert ingest.accept("node-a", codec.encode(a_batch(3))) == Reply(stored=True)
    assert store.added == [(a_batch(3), 42)]


@pytest.mark.parametrize("header", ["Bearer token-b", "bearer token-b", "Bearer  token-b "])
def test_a_token_names_its_node(header):
    assert Ingest(Memory(), {"node-a": "token-a", "node-b": "token-b"}).authorise(header) == "node-b"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic token-a", "token-a", "Bearer token-a2", "Bearer tökén"]
)
def test_anything_else_names_none_and_says_where_a_token_comes_from(header):
    ingest = Ingest(Memory(), {"node-a": "token-a"})
    with pytest.raises(Refusal, match="SYSOM_NODE_TOKENS") as caught:
        ingest.authorise(header)
    assert (caught.value.status, caught.value.reason) == (401, "unauthorised")


def test_without_tokens_nobody_may_send():
    with pytest.raises(Refusal):
        Ingest(Memory(), {}).authorise("Bearer x")


def test_a_clock_that_jumped_is_told_and_a_reboot_is_none():
    ingest = Ingest(Memory(), {"node-a": "t"})
    batches = (
        a_batch(1),
        a_batch(2, utc_offset_ns=OFFSET + SECOND // 2),
        a_batch(3, utc_offset_ns=OFFSET + 9 * SECOND),
        a_batch(4, utc_offset_ns=OFFSET + 9 * SECOND),
        a_batch(5, utc_offset_ns=OFFSET + 900 * SECOND, boot_id="boot-2"),
    )
    jumped = [ingest.take("node-a", codec.encode(batch)).clock_jumped for batch in batches]
    assert jumped == [False, False, True, False, False]


def test_the_lag_is_from_the_batchs_end_in_utc():
    now = OFFSET + 10 * SECOND
    taken = Ingest(Memory(), {}, clock_ns=lambda: now).take("node-a", codec.encode(a_batch(3)))
    assert taken.lag_s == 6.0  # second 3 ends at 4


# --- whatever comes


unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
GOOD = codec.encode(a_batch(3))
PLAIN = msgspec.msgpack.encode(a_batch(3))


def outcome(wire):
    """Stored, or why not; any other exception is a fault."""
    try:
        return Ingest(Memory(), {}).accept("node-a", wire).stored
    except Refusal as error:
        refusal = error
    assert str(refusal)
    assert refusal.status in (400, 403, 409, 413)
    return refusal.reason


@unhurried
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(wire):
    assert outcome(wire) in {"not_zstd", "truncated", "not_a_batch", "bomb"}


@unhurried
@given(st.data())
def test_a_batch_with_changed_bytes_is_stored_or_refused(data):
    plain = bytearray(PLAIN)
    for _ in range(data.draw(st.integers(1, 4))):
        plain[data.draw(st.integers(0, len(plain) - 1))] = data.draw(st.integers(0, 255))
    wire = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(plain))
    assert outcome(wire) in {True, "not_a_batch", "inconsistent", "other_schema", "wrong_node"}


@unhurried
@given(st.data())
def test_a_frame_with_changed_bytes_is_never_stored_as_something_else(data):
    wire = bytearray(GOOD)
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] ^= data.draw(st.integers(1, 255))
    assert outcome(bytes(wire)) in {True, "not_zstd", "truncated", "bomb", "not_a_batch"}
    assert outcome(bytes(wire[:at])) in {"not_zstd", "truncated"}


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


@unhurried
@given(st.sampled_from(list(msgspec.msgpack.decode(PLAIN))), _json)
def test_a_batch_with_any_value_in_a_field_is_stored_or_refused(field, value):
    fields = msgspec.msgpack.decode(PLAIN) | {field: value}
    wire = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(fields))
    assert outcome(wire) in {True, "not_a_batch", "inconsistent", "other_schema", "wrong_node"}


@unhurried
@given(st.none() | st.text() | st.text().map("Bearer {}".format) | st.just("Bearer token-a"))
def test_any_header_names_the_node_or_is_refused(header):
    try:
        node = Ingest(Memory(), {"node-a": "token-a"}).authorise(header)
    except Refusal as error:
        node = error.status
    assert node == ("node-a" if header == "Bearer token-a" else 401)


# --- commands

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
CAPTURE = Command(id="c1", kind=CommandKind.CAPTURE_START, job="job-1", seconds=30)
NOW = OFFSET + 100 * SECOND
FOREVER = NOW + 10**15


class Moved:
    """A clock in seconds that is moved by hand."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Moved()


@pytest.fixture
def store():
    return Memory()


@pytest.fixture
def ingest(store, clock):
    return Ingest(store, {}, signer=Signer(KEY), clock_ns=lambda: NOW, clock=clock)


def sent(ingest, seq, *, node="node-a", **changes):
    """The reply to a batch, and the commands in it; its signature holds."""
    reply = ingest.accept(node, codec.encode(a_batch(seq, node=node, **changes)))
    if not reply.orders:
        assert reply.signature == ""
        return reply, []
    public = Ed25519PublicKey.from_public_bytes(KEY.public_key().public_bytes_raw())
    public.verify(bytes.fromhex(reply.signature), ORDERS_CONTEXT + reply.orders.encode())
    orders = msgspec.json.decode(reply.orders, type=Orders)
    assert (orders.node, orders.boot_id, orders.agent, orders.seq) == (node, "boot-1", "agent-1", seq)
    return reply, orders.commands


def told(kind, detail):
    return {"events": [Event(kind=kind, at_ns=5 * SECOND, detail=detail)]}


def test_the_reply_carries_the_nodes_commands_signed_until_one_is_settled(ingest, store):
    store.commands.append(("node-a", CAPTURE, FOREVER))
    assert sent(ingest, 1)[1] == [CAPTURE]
    assert sent(ingest, 2)[1] == [CAPTURE]
    assert sent(ingest, 3, **told("command-done", "c1 until 12:00"))[1] == []
    assert store.settled == [("c1", "done", "until 12:00", OFFSET + 5 * SECOND)]
    assert sent(ingest, 4)[1] == []


def test_a_refused_command_is_settled_as_one_with_the_agents_words(ingest, store):
    store.commands.append(("node-a", CAPTURE, FOREVER))
    sent(ingest, 1, **told("command-refused", "c1 no such job here"))
    assert store.settled == [("c1", "refused", "no such job here", OFFSET + 5 * SECOND)]


def test_other_nodes_get_none_of_it_and_settle_none_of_it(ingest, store):
    store.commands.append(("node-a", CAPTURE, FOREVER))
    assert sent(ingest, 1, node="node-b", **told("command-done", "c1 done"))[1] == []
    assert store.settled == []
    assert sent(ingest, 2)[1] == [CAPTURE]


def test_the_store_is_asked_once_a_second_however_many_batches_come(ingest, store, clock):
    for seq in range(20):
        sent(ingest, seq)
    assert store.asked == 1
    store.commands.append(("node-a", CAPTURE, FOREVER))
    assert sent(ingest, 20)[1] == []
    clock.now += 1.0
    assert sent(ingest, 21)[1] == [CAPTURE]
    assert store.asked == 2


def test_what_came_of_a_command_is_kept_though_it_has_expired_meanwhile(ingest, store, clock):
    store.commands.append(("node-a", CAPTURE, FOREVER))
    sent(ingest, 1)
    store.commands[:] = [("node-a", CAPTURE, NOW)]
    clock.now += 1.0
    assert sent(ingest, 2, **told("command-done", "c1 "))[1] == []
    assert [id for id, *_ in store.settled] == ["c1"]


def test_an_outcome_that_could_not_be_kept_has_the_batch_sent_again(ingest, store):
    store.commands.append(("node-a", CAPTURE, FOREVER))
    store.failing = True
    with pytest.raises(Refusal, match="disk is full") as caught:
        sent(ingest, 1, **told("command-done", "c1 "))
    assert (caught.value.status, caught.value.reason) == (503, "store")
    store.failing = False
    reply, commands = sent(ingest, 1, **told("command-done", "c1 "))
    assert (reply.stored, commands, len(store.settled)) == (False, [], 1)


def test_without_a_signer_no_commands_go_out(store):
    store.commands.append(("node-a", CAPTURE, FOREVER))
    assert Ingest(store, {}).accept("node-a", GOOD) == Reply(stored=True)
