"""From the kernel's events to collectives: what the gloo probe makes of them, without a kernel."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from probes.bpf import BpfUnavailable
from probes.host.reasons import REASONS
from probes.host.thread_time import CUT
from probes.nccl.gloo import ARRIVAL, END, FAILED, GROUP, HEAD, OWN, PENDING_LIMIT, Call, GlooProbe, Traffic
from probes.records import Communicator, Op, Role

RANK_PID = 4242
FLOAT32 = 6
BLOCKED_BY = (1, *[0] * (len(REASONS) - 2), 9)


class Detailed(dict[int, int]):
    """Stands where the map of captured processes does."""

    Key = Leaf = int


class Ring:
    """Stands where BCC's object does: keeps the callback, attaches nothing."""

    def __init__(self) -> None:
        self.on_event: Callable[[object, int, int], None] | None = None
        self.detailed = Detailed()
        self.lost = SimpleNamespace(values=lambda: [SimpleNamespace(value=0)])

    def __getitem__(self, table: bytes) -> Any:
        return {
            b"gloo_events": SimpleNamespace(open_ring_buffer=self._open),
            b"lost": self.lost,
            b"detailed": self.detailed,
        }[table]

    def _open(self, callback: Callable[[object, int, int], None]) -> None:
        self.on_event = callback

    def send(
        self,
        kind: int,
        work: int,
        *,
        at: int,
        seq: int = 1,
        context: int = 0xC0,
        rank: int = 1,
        size: int = 4,
        uid: str = "",
        desc: str = "",
        elements: int = 6,
        sizes: tuple[int, ...] = (2, 3),
        op: int = Op.ALLREDUCE,
        cuts: int = 0,
    ) -> None:
        padded = [*sizes, *[0] * (5 - len(sizes))]
        head = HEAD.pack(at, work, kind, RANK_PID, cuts, RANK_PID, context, seq, elements, len(sizes), *padded,
                         elements, 1, FLOAT32, op, 0, rank, size)  # fmt: skip
        driving = (100, at, max(0, at - 130), 20, 10, 5, 1, RANK_PID, Role.DRIVING, *BLOCKED_BY)
        rows = [CUT.pack(*driving), CUT.pack(*[0] * len(driving))]
        group = GROUP.pack(0xBAC0 if uid else 0, rank, size, len(uid), uid.encode(), len(desc), desc.encode())
        self.send_raw(head + b"".join(rows) + group)

    def send_raw(self, raw: bytes) -> None:
        buffer = ctypes.create_string_buffer(raw, len(raw))
        assert self.on_event is not None
        self.on_event(None, ctypes.addressof(buffer), len(raw))


@pytest.fixture
def ring() -> Ring:
    return Ring()


@pytest.fixture
def probe(ring: Ring) -> GlooProbe:
    kernel: Any = SimpleNamespace(compile=lambda *_: ring)
    return GlooProbe(kernel, 1)


def test_a_collective_is_told_when_it_has_ended(probe: GlooProbe, ring: Ring) -> None:
    ring.send(ARRIVAL, 0xA, at=1000, seq=7, uid="0")
    assert probe.traffic[RANK_PID].take() == ([], [])
    ring.send(END, 0xA, at=5000)
    (call,), _ = probe.traffic[RANK_PID].take()
    assert (call.seq, call.op, call.enter_ns, call.duration_ns, call.failed) == (
        7,
        Op.ALLREDUCE,
        1000,
        4000,
        False,
    )
    assert (call.bytes, call.dtype) == (24, "float32")
    assert probe.traffic[RANK_PID].communicators == [Communicator(uid="0", desc="", rank=1, size=4)]


def test_a_collective_that_failed_is_told_as_failed(probe: GlooProbe, ring: Ring) -> None:
    ring.send(ARRIVAL, 0xA, at=1000)
    ring.send(FAILED, 0xA, at=1500)
    (call,), _ = probe.traffic[RANK_PID].take()
    assert (call.duration_ns, call.failed) == (500, True)


def test_an_end_whose_arrival_was_not_seen_is_counted_and_left_out(probe: GlooProbe, ring: Ring) -> None:
    ring.send(END, 0xA, at=5000)
    assert probe.traffic[RANK_PID].take()[0] == []
    assert probe.unmatched == 1


def test_a_tensor_whose_layout_does_not_hold_has_unknown_bytes(probe: GlooProbe, ring: Ring) -> None:
    ring.send(ARRIVAL, 0xA, at=1000, elements=7, sizes=(2, 3))
    ring.send(END, 0xA, at=1001)
    (call,), _ = probe.traffic[RANK_PID].take()
    assert (call.bytes, call.dtype) == (-1, "")


def test_a_group_keeps_its_index_when_its_name_becomes_known(probe: GlooProbe, ring: Ring) -> None:
    ring.send(ARRIVAL, 0xA, at=1001)
    ring.send(ARRIVAL, 0xB, at=1002, uid="5")
    assert probe.traffic[RANK_PID].communicators == [Communicator(uid="5", desc="", rank=1, size=4)]


def test_a_group_at_the_address_of_one_that_is_gone_is_another(probe: GlooProbe, ring: Ring) -> None:
    ring.send(ARRIVAL, 0xA, at=1001, uid="5")
    ring.send(ARRIVAL, 0xB, at=1002, rank=0, size=2, uid="6")
    ring.send(ARRIVAL, 0xC, at=1003, rank=0, size=2, uid="7")
    traffic = probe.traffic[RANK_PID]
    assert [(one.uid, one.size) for one in traffic.communicators] == [("5", 4), ("6", 2), ("7", 2)]
    assert [call.communicator for call in traffic.pending.values()] == [0, 1, 2]


def test_groups_known_from_before_keep_their_places_in_whatever_order_they_come(
    probe: GlooProbe, ring: Ring
) -> None:
    world = Communicator(uid="0", desc="default_pg", rank=1, size=4)
    half = Communicator(uid="2", desc="undefined", rank=1, size=2)
    probe.recall(RANK_PID, [world, half])
    ring.send(ARRIVAL, 0xA, at=1001, context=0xC2, size=2, uid="2", desc="undefined")
    ring.send(ARRIVAL, 0xB, at=1002, context=0xC1, uid="0", desc="default_pg")
    ring.send(ARRIVAL, 0xC, at=1003, context=0xC3, size=2, uid="3", desc="undefined")
    traffic = probe.traffic[RANK_PID]
    assert [call.communicator for call in traffic.pending.values()] == [1, 0, 2]
    assert traffic.communicators == [
        world,
        half,
        Communicator(uid="3", desc="undefined", rank=1, size=2),
    ]


def test_names_are_asked_for_until_groups_known_from_before_have_come_again(
    probe: GlooProbe, ring: Ring
) -> None:
    probe.recall(RANK_PID, [Communicator(uid=uid, desc="", rank=1, size=4) for uid in ("0", "2")])
    traffic = probe.traffic[RANK_PID]
    ring.send(ARRIVAL, 0xA, at=1001, context=0xC2, uid="2")
    assert traffic.names_wanted(traffic.relearn_until - 1)
    assert not traffic.names_wanted(traffic.relearn_until + 1), "the other is held to be gone"
    ring.send(ARRIVAL, 0xB, at=1002, context=0xC1, uid="0")
    assert not traffic.names_wanted(traffic.relearn_until - 1)


def test_a_group_that_never_had_a_name_and_is_gone_is_not_waited_for(probe: GlooProbe, ring: Ring) -> None:
    probe.recall(RANK_PID, [Communicator(uid="", desc="", rank=0, size=2)])
    ring.send(ARRIVAL, 0xA, at=1001, uid="0")
    traffic = probe.traffic[RANK_PID]
    assert not traffic.names_wanted(traffic.relearn_until + 1)


def test_a_group_of_which_only_one_of_two_texts_could_be_read(probe: GlooProbe, ring: Ring) -> None:
    ring.send(ARRIVAL, 0xA, at=1001, uid="u" * 64, desc="default_pg")
    ring.send(ARRIVAL, 0xB, at=1002, context=0xC1, uid="0", desc="d" * 32)
    assert [(one.uid, one.desc) for one in probe.traffic[RANK_PID].communicators] == [("", ""), ("0", "")]


def test_a_captured_process_s_threads_come_each_by_itself(probe: GlooProbe, ring: Ring) -> None:
    none = (0,) * 8 + (9,) + (0,) * len(REASONS)
    rows = [(100, 900, 500, 200, 100, 0, 0, 77, Role.COMMUNICATION, *BLOCKED_BY), none, none]
    raw = struct.pack("<2Q4I", 900, 0, OWN, RANK_PID, len(rows), 0) + b"".join(CUT.pack(*row) for row in rows)
    ring.send_raw(raw)
    calls, (cut,) = probe.traffic[RANK_PID].take()
    assert calls == []
    assert (cut.tid, cut.role, cut.since_ns, cut.at_ns) == (77, Role.COMMUNICATION, 100, 900)
    assert (cut.running_ns, cut.runnable_ns, cut.blocked_ns) == (500, 200, 100)
    assert cut.blocked_by == BLOCKED_BY


def test_cuts_come_with_the_events(probe: GlooProbe, ring: Ring) -> None:
    ring.send(ARRIVAL, 0xA, at=1000, cuts=1)
    _, (cut,) = probe.traffic[RANK_PID].take()
    assert (cut.since_ns, cut.at_ns, cut.running_ns, cut.runnable_ns, cut.blocked_ns) == (
        100,
        1000,
        870,
        20,
        10,
    )
    assert (cut.tid, cut.role, cut.blocked_by) == (RANK_PID, Role.DRIVING, BLOCKED_BY)


def test_collectives_that_never_end_do_not_pile_up(probe: GlooProbe, ring: Ring) -> None:
    for work in range(PENDING_LIMIT + 3):
        ring.send(ARRIVAL, work, at=work)
    assert len(probe.traffic[RANK_PID].pending) == PENDING_LIMIT
    assert probe.unmatched == 3


def test_what_was_in_flight_when_watching_stopped_is_not_waited_for(probe: GlooProbe, ring: Ring) -> None:
    ring.send(ARRIVAL, 0xA, at=1000)
    probe.detach(RANK_PID)
    ring.send(END, 0xA, at=9000)  # of another work, later, at the same address
    assert probe.traffic[RANK_PID].take()[0] == []


def test_a_library_without_gloo_is_refused_in_words(probe: GlooProbe, tmp_path: Any) -> None:
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(b"no library")
    with pytest.raises(BpfUnavailable, match="cannot read the symbols"):
        probe.attach(RANK_PID, library)
    assert probe.attached() == set()


S = 1_000_000_000


def pending(**calls: tuple[int, int, int]) -> Traffic:
    """Work → (communicator, sequence number, entered at second)."""
    works = {
        int(work[1:]): Call(index, seq, 1, 8, "float32", at * S) for work, (index, seq, at) in calls.items()
    }
    return Traffic(pending=works)


def test_what_stands_still_is_told_after_five_seconds_and_again_each_minute() -> None:
    traffic = pending(w1=(0, 7, 100), w2=(0, 8, 103))

    def told(second: int) -> list[int]:
        return [call.seq for call in traffic.standing(second * S)]

    assert told(104) == []
    assert told(105) == [7]
    assert told(106) == []
    assert told(110) == [8]
    assert told(165) == [7], "a minute later"
    del traffic.pending[1]
    assert told(300) == [8]


def test_what_many_later_ones_of_its_communicator_have_outlived_does_not_stand_still() -> None:
    """Its end was lost. A few may overtake it: several threads run them."""
    traffic = pending(w1=(0, 7, 100), w2=(1, 7, 100), w3=(2, 7, 100))
    traffic.last_ended = {0: 7 + 16, 1: 7 + 15}
    assert [call.communicator for call in traffic.standing(110 * S)] == [1, 2]


def test_an_address_that_is_used_again_is_another_collective() -> None:
    traffic = pending(w1=(0, 7, 100))
    assert [call.seq for call in traffic.standing(106 * S)] == [7]
    traffic.end(1)
    traffic.pending[1] = Call(0, 8, 1, 8, "float32", 107 * S)
    assert [call.seq for call in traffic.standing(113 * S)] == [8]
