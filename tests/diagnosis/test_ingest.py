import pytest

from diagnosis.ingest import Counts, Ingest, Refusal
from probes import records
from probes.records import Reply
from tests.probes.batches import OFFSET, SECOND, a_batch


class Memory:
    """A store that only notes what it is given."""

    def __init__(self):
        self.added = []

    def add(self, batch, received_ns):
        self.added.append((batch, received_ns))
        return True


def test_a_batch_is_stored_with_the_time_of_its_arrival():
    store = Memory()
    ingest = Ingest(store, {"node-a": "t"}, clock_ns=lambda: 42)
    assert ingest.accept("node-a", records.encode(a_batch(3))) == Reply(stored=True)
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
    assert (caught.value.status, ingest.counts.read()) == (401, {"refused_unauthorised": 1})


@pytest.mark.parametrize("tokens", [{"node-a": ""}, {"node-a": "same", "node-b": "same"}])
def test_tokens_that_protect_nothing_are_not_accepted(tokens):
    with pytest.raises(ValueError, match="token"):
        Ingest(Memory(), tokens)


def test_without_tokens_nobody_may_send():
    with pytest.raises(Refusal):
        Ingest(Memory(), {}).authorise("Bearer x")


def test_a_clock_that_jumped_is_counted_and_a_reboot_is_not():
    ingest = Ingest(Memory(), {"node-a": "t"})
    for batch in (
        a_batch(1),
        a_batch(2, utc_offset_ns=OFFSET + SECOND // 2),
        a_batch(3, utc_offset_ns=OFFSET + 9 * SECOND),
        a_batch(4, utc_offset_ns=OFFSET + 9 * SECOND),
        a_batch(1, utc_offset_ns=OFFSET + 900 * SECOND, boot_id="boot-2"),
    ):
        ingest.accept("node-a", records.encode(batch))
    assert ingest.counts.read() == {"clock_jumped": 1, "stored": 5}


def test_counts_that_were_read_do_not_change():
    counts = Counts()
    counts.add("a")
    read = counts.read()
    counts.add("a")
    assert (read, counts.read()) == ({"a": 1}, {"a": 2})
