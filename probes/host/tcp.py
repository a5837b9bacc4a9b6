"""The tcp probe: what had to be sent again, was reset or dropped, of which rank's connection and to whom.

User space's side of bpf/tcp.bpf.c. The kernel tells connections by their addresses; whose they are is looked up in
/proc now and then.
"""

from __future__ import annotations

import re
import struct
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from probes.bpf import TRACEFS, BpfUnavailable, Kernel, has_tracepoint
from probes.discovery import RankProcess
from probes.host.connections import Connections
from probes.host.labels import OTHERS
from probes.host.queues import Queues
from probes.host.reading import Reading
from probes.host.sockets import Flow, address, owners
from probes.host.tcp_info import Sent
from probes.host.tracepoints import TracepointProbe
from probes.records import Metric

POINTS = {
    ("tcp", "tcp_retransmit_skb"): ("HAVE_RETRANSMIT", "segments sent again are not told by connection"),
    ("tcp", "tcp_receive_reset"): ("HAVE_RECEIVE_RESET", "resets that came are not told by connection"),
    ("tcp", "tcp_send_reset"): ("HAVE_SEND_RESET", "resets that were sent are not told by connection"),
    ("tcp", "tcp_cong_state_set"): ("HAVE_CONGESTION", "that connections recover from losses is not told"),
}
"""Tracepoint → what is compiled in for it, and what is missing without it."""
NO_REASONS = "skb:kfree_skb with a reason (Linux 5.17): why packets were dropped is not told"
REASONS = 256
"""As in bpf/tcp.bpf.c."""
OTHER = "OTHER"
"""Reasons of subsystems (Wi-Fi, Open vSwitch), and those that are not known by name."""
NOT_SPECIFIED = "NOT_SPECIFIED"
METRICS = {
    "retransmits": "tcp_retransmits",
    "failed": "tcp_failed_retransmits",
    "resets_received": "tcp_resets_received",
    "resets_sent": "tcp_resets_sent",
    "recoveries": "tcp_recoveries",
    "losses": "tcp_losses",
}
"""Field of ``struct counts`` → metric."""
OWNERS_S = (5.0, 60.0)
"""Whose connections are is looked up when there are other ranks, then after 5 s, 10 s … at most 60 s, since ranks
connect when they begin; and 5 s after the last time when something happened to a connection not seen before."""
LISTED = 8
"""Peers told per metric and rank, the largest; the rest is one sum."""
LISTED_SENDING = 4
"""Peers told per rank of which data was on its way longest."""
QUEUES_EVERY = 5
"""Readings in which interfaces' queues are looked at once."""
_DROPS = struct.Struct(f"={REASONS}Q")


class _What(NamedTuple):
    """What is counted, of whom, towards whom."""

    pid: int
    """The rank's process; 0: of nobody that is known."""
    name: str
    peer: str
    peer_rank: str


class TcpProbe(TracepointProbe):
    """Loads the probe; it is attached from then on. Not safe for several threads."""

    def __init__(self, kernel: Kernel, proc: Path = Path("/proc")) -> None:
        """Raises :class:`BpfUnavailable`."""
        self._proc = proc
        self._lacks: list[str] = []
        defines: dict[str, int | None] = {}
        for (category, event), (define, words) in POINTS.items():
            if has_tracepoint(category, event):
                defines[define] = None
            else:
                self._lacks.append(f"{category}:{event}: {words}")
        if "int err;" in _format("tcp", "tcp_retransmit_skb"):
            defines["HAVE_RETRANSMIT_ERROR"] = None
        if "saddr[28]" in _format("tcp", "tcp_send_reset"):
            defines["SEND_RESET_SOCKADDR"] = None
        self._reasons = drop_reasons(_format("skb", "kfree_skb"))
        if self._reasons:
            none = next((number for number, name in self._reasons.items() if name == NOT_SPECIFIED), 0)
            defines["NOT_SPECIFIED"] = none
        else:
            self._lacks.append(NO_REASONS)
        if not defines:
            raise BpfUnavailable("this kernel has no tracepoints of TCP (CONFIG_FTRACE, CONFIG_NET)")
        self.lost = 0
        """Always 0: when more than 2,048 connections lose packets within a second, the oldest make room."""
        super().__init__(kernel, "tcp.bpf.c", defines)
        self._flows = self._bpf[b"tcp_flows"]
        self._drops = self._bpf[b"packet_drops"]
        self._dropped = self._read_drops()
        self._owners: dict[Flow, set[int]] = {}
        self._latest: dict[Flow, set[int]] = {}
        self._looked_for: set[int] = set()
        self._strangers: set[Flow] = set()
        """Connections of no rank, as they were looked up last."""
        self._every_s = OWNERS_S[0]
        self._owners_at = float("-inf")
        self._connections = Connections(proc)
        self._queues = Queues(proc)
        self._turn = 0

    @property
    def missing(self) -> list[str]:
        """What this kernel does not have, in words."""
        said = [why for why in (self._connections.missing, self._queues.missing) if why]
        if self._connections.left_out:
            said.append(
                f"{self._connections.left_out:,} of ranks' connections are too many to be looked through"
            )
        return [*self._lacks, *said]

    def read(self, ranks: Mapping[int, RankProcess]) -> Reading:
        """What happened to connections since the last call: those of ranks by rank, the others of the node."""
        counted: Counter[_What] = Counter()
        flows = {_flow(key): counts for key, counts in self._flows.items_lookup_and_delete_batch()}
        self.rows_read += len(flows)
        self._find_owners(flows.keys() - self._owners.keys(), ranks)
        for flow, counts in flows.items():
            pid = self._owner(flow, ranks)
            peer_rank = self._peer_rank(flow, pid, ranks)
            for field, name in METRICS.items():
                counted[_What(pid, name, address(flow.peer), peer_rank)] += int(getattr(counts, field))
        told: dict[int, list[Metric]] = {}
        for pid, metric in _largest(counted):
            told.setdefault(pid, []).append(metric)
        node = told.pop(0, [])
        for pid, sent in self._connections.read(ranks).items():
            told.setdefault(pid, []).extend(self._on_its_way(pid, sent, ranks))
        self._turn += 1
        if self._turn % QUEUES_EVERY == 1:
            of_node, of_ranks = self._queues.read(ranks)
            node += of_node
            for pid, metrics in of_ranks.items():
                told.setdefault(pid, []).extend(metrics)
        return Reading(node=[*node, *self._new_drops()], ranks=told)

    # --- whose a connection is

    def _find_owners(self, flows: Iterable[Flow], ranks: Mapping[int, RankProcess]) -> None:
        now = time.monotonic()
        since = now - self._owners_at
        if self._looked_for != ranks.keys():
            self._every_s = OWNERS_S[0]
        elif since >= self._every_s:
            self._every_s = min(OWNERS_S[1], 2 * self._every_s)
        elif since < OWNERS_S[0] or self._strangers.issuperset(flows):
            return
        before, self._latest = self._latest, owners(ranks, self._proc)
        # A connection that was reset has left the tables by the time that it is told of.
        self._owners = before | self._latest
        self._looked_for, self._owners_at = set(ranks), now
        self._strangers = set(flows) - self._owners.keys()
        self._connections.choose(self._latest, ranks)

    def _owner(self, flow: Flow, ranks: Mapping[int, RankProcess]) -> int:
        """The one rank whose connection it is; 0 when it is nobody's that is known, or of two alike."""
        whose = [pid for pid in self._owners.get(flow, ()) if pid in ranks]
        return whose[0] if len(whose) == 1 else 0

    def _peer_rank(self, flow: Flow, pid: int, ranks: Mapping[int, RankProcess]) -> str:
        """The other end's rank where it runs on this node, too."""
        other = self._owner(flow.turned, ranks)
        return str(ranks[other].rank) if pid and other and ranks[other].job == ranks[pid].job else ""

    # --- how long data is on its way

    def _on_its_way(
        self, pid: int, sent: Mapping[Flow, Sent], ranks: Mapping[int, RankProcess]
    ) -> Iterator[Metric]:
        """Per peer of a rank: the longest of its connections, and the sum of what they carried."""
        by_peer: dict[tuple[str, str, str], list[Sent]] = {}
        for flow, one in sent.items():
            if one.segments or one.sending_ns or one.held_up_ns:
                ends = address(flow.local), address(flow.peer), self._peer_rank(flow, pid, ranks)
                by_peer.setdefault(ends, []).append(one)
        self.rows_read += len(sent)
        busiest = sorted(by_peer, key=lambda ends: -max(one.sending_ns for one in by_peer[ends]))
        for ends in busiest[:LISTED_SENDING]:
            local, peer, peer_rank = ends
            labels = {"local": local, "peer": peer} | ({"peer_rank": peer_rank} if peer_rank else {})
            of = by_peer[ends]
            for name, value, unit in (
                ("tcp_sending_ns", max(one.sending_ns for one in of), "ns"),
                ("tcp_held_up_ns", max(one.held_up_ns for one in of), "ns"),
                ("tcp_acknowledged_bytes", sum(one.acknowledged_bytes for one in of), "B"),
                ("tcp_data_segments", sum(one.segments for one in of), "1"),
                ("tcp_segments_again", sum(one.again for one in of), "1"),
                ("tcp_round_trip_ns", max(one.round_trip_ns for one in of), "ns"),
            ):
                if value:
                    yield Metric(name=name, value=value, unit=unit, labels=labels)

    # --- dropped packets

    def _read_drops(self) -> tuple[int, ...]:
        raw = self._drops[self._drops.Key(0)]
        return _DROPS.unpack(bytes(raw))

    def _new_drops(self) -> Iterator[Metric]:
        before, self._dropped = self._dropped, self._read_drops()
        by_name: Counter[str] = Counter()
        for number, (now, then) in enumerate(zip(self._dropped, before, strict=True)):
            if now != then:
                by_name[self._reasons.get(number, OTHER)] += now - then
        self.rows_read += len(by_name)
        for reason, count in by_name.most_common():
            yield Metric(name="packet_drops", value=count, unit="1", labels={"reason": reason[:64]})


def drop_reasons(format_: str) -> dict[int, str]:
    """Number → name, from the text of skb:kfree_skb's format, whose numbers are the running kernel's own; empty
    when it has none."""
    if "skb_drop_reason reason;" not in format_:
        return {}
    symbols = format_.partition("__print_symbolic(REC->reason,")[2]
    found = {int(number): name for number, name in re.findall(r'\{ (\d+), "(\w+)" \}', symbols)}
    return {number: name for number, name in found.items() if number < REASONS - 1}


def _format(category: str, event: str) -> str:
    for root in (TRACEFS, Path("/sys/kernel/debug/tracing")):
        file = root / "events" / category / event / "format"
        if file.exists():
            return file.read_text()
    return ""


def _flow(key: Any) -> Flow:
    return Flow(bytes(key.local), int(key.local_port), bytes(key.peer), int(key.peer_port))


def _largest(counted: Mapping[_What, int]) -> Iterator[tuple[int, Metric]]:
    """(rank's process or 0, metric), per rank and name the largest first, beyond ``LISTED`` as one sum."""
    listed: Counter[tuple[int, str]] = Counter()
    rest: Counter[tuple[int, str]] = Counter()
    for what, count in sorted(counted.items(), key=lambda item: -item[1]):
        if not count:
            continue
        if listed[what.pid, what.name] >= LISTED:
            rest[what.pid, what.name] += count
            continue
        listed[what.pid, what.name] += 1
        labels = {"peer": what.peer} | ({"peer_rank": what.peer_rank} if what.peer_rank else {})
        yield what.pid, Metric(name=what.name, value=count, unit="1", labels=labels)
    for (pid, name), count in rest.items():
        yield pid, Metric(name=name, value=count, unit="1", labels={"peer": OTHERS})
