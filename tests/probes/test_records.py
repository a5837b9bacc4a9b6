import random

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from probes import codec, records
from probes.codec import RecordError
from probes.records import Collectives, Event, Metric, Occupant, Role, ThreadTime, Waker
from tests.probes.batches import a_batch, a_rank


def reason(wire: bytes) -> str:
    with pytest.raises(RecordError) as caught:
        codec.decode(wire)
    return caught.value.reason


def zstd(plain: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(plain)


def test_a_batch_comes_out_as_it_went_in():
    batch = a_batch(3, events=[Event(kind="rank-ended", at_ns=5, detail="pid 100")])
    assert codec.decode(codec.encode(batch)) == batch


def test_a_batch_cut_short_is_refused_wherever_the_cut_is():
    wire = codec.encode(a_batch(3))
    for length in range(len(wire)):
        assert reason(wire[:length]) in ("truncated", "not_zstd")


def test_a_changed_byte_never_gives_another_batch():
    batch = a_batch(3)
    wire = codec.encode(batch)
    refused = 0
    for place in range(len(wire)):
        damaged = bytearray(wire)
        damaged[place] ^= 0x10
        try:
            assert codec.decode(bytes(damaged)) == batch, "a bit that zstd leaves unused"
        except RecordError:
            refused += 1
    assert refused > 0.9 * len(wire)


def metric(**changes) -> Metric:
    return Metric(**{"name": "softirq_ns", "value": 1.5, "unit": "ns", "labels": {"cpu": "3"}} | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value": float("nan")}, "metric 'softirq_ns' is nan, which is no number"),
        ({"value": float("inf")}, "is inf, which is no number"),
        ({"value": float("-inf")}, "is -inf, which is no number"),
        ({"name": ""}, "a metric's name must be a name of 1 to 512 characters"),
        ({"name": "x" * 513}, "a metric's name must be a name of 1 to 512 characters"),
    ],
)
@pytest.mark.parametrize("whose", ["node", "rank"])
def test_a_metric_that_no_store_could_keep_is_refused_in_words(changes, words, whose):
    metrics = [metric(), metric(**changes)]
    batch = a_batch(3, metrics=metrics) if whose == "node" else a_batch(3, ranks=[a_rank(3, metrics=metrics)])
    with pytest.raises(RecordError, match=words) as caught:
        codec.decode(codec.encode(batch))
    assert caught.value.reason == "inconsistent"
    assert ("node 'node-a'" if whose == "node" else "job 'job-1' rank 0") in str(caught.value)


def test_metrics_of_any_number_come_out_as_they_went_in():
    values = [0.0, -0.0, 5e-324, -1.7976931348623157e308, 1e15 + 1]
    metrics = [metric(value=value, labels={"\0": "\n'\U0001f980"}) for value in values]
    batch = a_batch(3, metrics=metrics, ranks=[a_rank(3, metrics=metrics)])
    found = codec.decode(codec.encode(batch))
    assert found == batch
    assert [repr(one.value) for one in found.metrics] == [repr(value) for value in values]


def test_a_thread_that_blocks_for_more_reasons_than_there_are_is_refused():
    def told(reasons: int) -> bytes:
        (thread,) = a_rank(3).threads
        blocked_by = {f"reason-{number}": [1, 2] for number in range(reasons)}
        thread = msgspec.structs.replace(thread, blocked_by=blocked_by)
        return codec.encode(a_batch(3, ranks=[a_rank(3, threads=[thread])]))

    assert len(codec.decode(told(codec.MAX_REASONS)).ranks[0].threads[0].blocked_by) == codec.MAX_REASONS
    assert reason(told(codec.MAX_REASONS + 1)) == "inconsistent"


def test_bytes_after_the_frame_are_refused():
    assert reason(codec.encode(a_batch(3)) + b"more") == "truncated"


def test_a_wire_above_the_limit_is_refused_unread():
    assert reason(b"\0" * (codec.MAX_WIRE_BYTES + 1)) == "too_large"


CUTS = 100


def a_thread(role: Role) -> ThreadTime:
    at = [10**12 + cut for cut in range(CUTS)]
    names = ("at_ns", "running_ns", "runnable_ns", "blocked_ns", "uninterruptible_ns", "interrupted_ns")
    columns = dict.fromkeys(names, at)
    return ThreadTime(tid=int(role), role=role, since_ns=7, stolen_ns=8, blocked_by={"futex": at}, **columns)


def stages() -> list[records.Batch]:
    """A batch, and what is left of it, made by hand, as it has to become smaller and smaller."""
    driving, communication = a_thread(Role.DRIVING), a_thread(Role.COMMUNICATION)
    waker = Waker(tid=1, reason="futex", pid=2, waker_tid=3, name="python", slept_ns=4)
    rank = a_rank(3, wakers=[waker] * 50, metrics=[metric()] * 30, threads=[driving, communication])
    event = Event(kind="rank-ended", at_ns=5, detail="pid 100")
    told = {"futex": [0] * (CUTS - 1) + [10**12 + CUTS - 1]}
    parts = [{"wakers": []}, {"metrics": []}]
    parts += [{"threads": [replace(one, blocked_by=told) for one in (driving, communication)]}]
    last = [10**12 + CUTS - 1]
    names = ("at_ns", "running_ns", "runnable_ns", "blocked_ns", "uninterruptible_ns", "interrupted_ns")
    one_cut = replace(communication, blocked_by={"futex": last}, **dict.fromkeys(names, last))
    parts += [{"threads": [replace(driving, blocked_by=told), one_cut]}]
    found = [a_batch(3, ranks=[rank], metrics=[metric()] * 20, events=[event])]
    for number, part in enumerate(parts):
        rank = replace(rank, **part)
        of_node = {"metrics": []} if number else {}
        found.append(replace(found[-1], ranks=[rank], **of_node))
    return found


ROOM_FOR_THE_EVENT = 400


@pytest.mark.parametrize(
    ("stage", "without"),
    [
        (1, "50 wakers"),
        (2, "50 wakers, 50 metrics"),
        (3, "50 wakers, 50 metrics, 198 cuts' reasons for blocking"),
        (4, "50 wakers, 50 metrics, 198 cuts' reasons for blocking, 99 cuts of communication threads"),
    ],
)
def test_a_batch_that_is_too_large_goes_without_what_is_missed_least_and_says_so(
    monkeypatch: pytest.MonkeyPatch, stage: int, without: str
):
    made = stages()
    sizes = [len(codec.to_plain(batch)) for batch in made]
    limit = sizes[stage] + ROOM_FOR_THE_EVENT
    assert limit < sizes[stage - 1]
    monkeypatch.setattr(codec, "MAX_PLAIN_BYTES", limit)
    sent = codec.decode(codec.encode(made[0]))
    *events, told = sent.events
    assert replace(sent, events=events) == made[stage]
    assert (told.kind, told.at_ns) == ("events-lost", made[0].end_ns)
    limits = f"limits: {limit:,} bytes, and {codec.MAX_WIRE_BYTES:,} compressed"
    assert told.detail == f"a batch of {sizes[0]:,} bytes is too large ({limits}): sent without {without}"


def test_a_batch_within_the_limit_is_whole(monkeypatch: pytest.MonkeyPatch):
    batch = stages()[0]
    monkeypatch.setattr(codec, "MAX_PLAIN_BYTES", len(codec.to_plain(batch)))
    assert codec.decode(codec.encode(batch)) == batch


def test_a_batch_that_is_too_large_compressed_becomes_smaller_likewise(monkeypatch: pytest.MonkeyPatch):
    noise = random.Random(1)
    metrics = [metric(value=noise.random()) for _ in range(1000)]
    monkeypatch.setattr(codec, "MAX_WIRE_BYTES", 4000)
    sent = codec.decode(codec.encode(a_batch(3, metrics=metrics)))
    assert sent.metrics == []
    assert sent.events[-1].detail.endswith(": sent without 1,000 metrics")


def test_a_batch_that_is_too_large_whatever_is_left_out_is_refused_before_it_is_sent():
    batch = a_batch(3, events=[Event(kind="rank-ended", at_ns=5, detail="x" * codec.MAX_PLAIN_BYTES)])
    with pytest.raises(RecordError, match=r"\(ranks: 1, events: 1\) is too large to send") as caught:
        codec.encode(batch)
    assert caught.value.reason == "too_large"


def test_a_bomb_that_states_its_size_is_refused_before_it_is_unpacked():
    assert reason(zstd(bytes(codec.MAX_PLAIN_BYTES + 1))) == "bomb"


def test_a_bomb_that_hides_its_size_is_refused():
    wire = zstd(bytes(codec.MAX_PLAIN_BYTES + 1), write_content_size=False)
    assert len(wire) < 4096
    assert reason(wire) == "not_zstd"


def test_a_bomb_that_states_a_smaller_size_is_refused():
    honest = zstandard.ZstdCompressor(write_checksum=False).compress(bytes(1 << 20))
    # The four bytes of the stated size follow the magic number and the frame descriptor.
    assert honest[5:9] == (1 << 20).to_bytes(4, "little")
    assert reason(honest[:5] + (1 << 10).to_bytes(4, "little") + honest[9:]) == "truncated"


def test_a_list_that_claims_four_billion_entries_is_refused():
    plain = msgspec.msgpack.encode({"schema": records.SCHEMA, "node": "n", "probes": None})
    assert reason(zstd(plain[:-1] + b"\xdd\xff\xff\xff\xff")) == "not_a_batch"


def test_deep_nesting_is_refused():
    assert reason(zstd(b"\x81\xa1x" + b"\x91" * 1_000_000)) == "not_a_batch"


@pytest.mark.parametrize(("schema", "who"), [(records.SCHEMA + 1, "server"), (records.SCHEMA - 1, "agent")])
def test_another_schema_is_refused_with_who_is_to_be_upgraded(schema, who):
    plain = msgspec.msgpack.encode({"schema": schema, "fields": "of that version"})
    with pytest.raises(RecordError, match=f"upgrade the {who}") as caught:
        codec.decode(zstd(plain))
    assert caught.value.reason == "other_schema"


COLLECTIVE = {
    "communicator": [0],
    "seq": [1],
    "op": [1],
    "bytes": [1],
    "dtype": [""],
    "enter_ns": [1],
    "duration_ns": [1],
    "failed": [False],
}
BEYOND = 1 << 63


@pytest.mark.parametrize(
    "changes",
    [
        {"node": ""},
        {"node": "n" * 513},
        {"agent": ""},
        {"boot_id": ""},
        {"seq": -1},
        {"seq": BEYOND},
        {"start_ns": 5 << 60},
        {"end_ns": 1},
        {"utc_offset_ns": 1 << 62},
        {"events": [Event(kind="x", at_ns=BEYOND, detail="")]},
        {"ranks": [a_rank(3, job="")]},
        {"ranks": [a_rank(3, rank=4)]},
        {"ranks": [a_rank(3, rank=-1)]},
        {"ranks": [a_rank(3, pid=BEYOND)]},
        {"ranks": [a_rank(3, start_ns=1 << 62)]},
        {"ranks": [a_rank(3, collectives=Collectives(**COLLECTIVE | {"seq": [1, 2]}))]},
        {"ranks": [a_rank(3, collectives=Collectives(**COLLECTIVE | {"seq": []}))]},
        {"ranks": [a_rank(3, collectives=Collectives(**COLLECTIVE | {"communicator": [1]}))]},
        {"ranks": [a_rank(3, collectives=Collectives(**COLLECTIVE | {"communicator": [-1]}))]},
        {"ranks": [a_rank(3, collectives=Collectives(**COLLECTIVE | {"bytes": [BEYOND]}))]},
        {"ranks": [a_rank(3, threads=[ThreadTime(tid=1, role=Role.DRIVING, since_ns=0, at_ns=[1])])]},
        {"ranks": [a_rank(3, threads=[ThreadTime(tid=BEYOND, role=Role.DRIVING, since_ns=0)])]},
        {
            "ranks": [
                a_rank(3, occupants=[Occupant(role=Role.DRIVING, pid=1, name="", cgroup="", took_ns=BEYOND)])
            ]
        },
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_batch_that_contradicts_itself_or_does_not_fit_the_store_is_refused(changes):
    assert reason(codec.encode(a_batch(3, **changes))) == "inconsistent"


@given(st.binary(max_size=300))
def test_random_bytes_give_a_record_error_and_nothing_else(noise):
    for wire in (noise, zstd(noise), b"\x28\xb5\x2f\xfd" + noise):
        with pytest.raises(RecordError):
            codec.decode(wire)


@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_a_mutated_batch_gives_a_record_error_or_a_batch_that_is_sound(chance: random.Random, changes):
    plain = bytearray(msgspec.msgpack.encode(a_batch(3)))
    for _ in range(changes):
        place = chance.randrange(len(plain))
        match chance.randrange(3):
            case 0:
                plain[place] = chance.randrange(256)
            case 1:
                del plain[place : place + chance.randrange(1, 9)]
            case _:
                plain[place:place] = chance.randbytes(chance.randrange(1, 9))
    try:
        batch = codec.decode(zstd(bytes(plain)))
    except RecordError:
        return
    assert codec.decode(codec.encode(batch)) == batch
