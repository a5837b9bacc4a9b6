"""Those of ranks' connections that carry most, followed: how long data was on its way, reading by reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from probes import procfs
from probes.discovery import RankProcess
from probes.host import tcp_info
from probes.host.sockets import Flow
from probes.host.tcp_info import NotToldError, Sent

FOLLOWED = 8
"""Connections per rank: a ring has one or two that carry something, a job over many nodes hundreds that do not."""
COUNTED = 1 << 32
"""Segments, and then from 0 again: at 100 Gbit/s after ten minutes."""
LOOKED_THROUGH = 4096
"""Connections of which the followed ones are chosen, at a few microseconds each."""


class Connections:
    """Not safe for several threads."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self.missing = ""
        """Why of some ranks nothing is told, in words; empty while of all something is."""
        self.left_out = 0
        """Connections of ranks beyond those that were looked through last."""
        self._followed: dict[int, dict[Flow, Sent]] = {}
        """By pid, with what was known at the last reading."""
        self._passed: dict[Flow, int] = {}
        """Bytes that each connection had carried when it was looked through last."""
        self._answered = True
        try:
            tcp_info.check()
        except NotToldError as error:
            self._answered, self.missing = False, str(error)

    def choose(self, owners: Mapping[Flow, set[int]], ranks: Mapping[int, RankProcess]) -> None:
        """Look through all connections of ranks, and follow those that have carried most since the last time."""
        if not self._answered:
            return
        mine: dict[int, list[Flow]] = {}
        for flow, pids in owners.items():
            if len(pids) == 1 and (pid := next(iter(pids))) in ranks and flow.peer_port:
                mine.setdefault(pid, []).append(flow)
        each = LOOKED_THROUGH // max(1, len(mine))
        self.left_out = sum(max(0, len(flows) - each) for flows in mine.values())
        before, self._passed = self._passed, {}
        followed: dict[int, dict[Flow, Sent]] = {}
        for pid, told in self._ask({pid: flows[:each] for pid, flows in mine.items()}):
            carried = {flow: sent.acknowledged_bytes - before.get(flow, 0) for flow, sent in told.items()}
            self._passed |= {flow: sent.acknowledged_bytes for flow, sent in told.items()}
            already = self._followed.get(pid, {})
            most = sorted(told, key=lambda flow: -carried[flow])[:FOLLOWED]
            followed[pid] = {flow: already.get(flow, told[flow]) for flow in most}
        self._followed = followed

    def read(self, ranks: Mapping[int, RankProcess]) -> dict[int, dict[Flow, Sent]]:
        """By pid: what each connection that is followed has done since the last reading."""
        asked = {pid: list(flows) for pid, flows in self._followed.items() if pid in ranks}
        grown: dict[int, dict[Flow, Sent]] = {}
        for pid, told in self._ask(asked):
            before = self._followed[pid]
            grown[pid] = {flow: _since(before[flow], sent) for flow, sent in told.items()}
            self._followed[pid] = told
        return grown

    def _ask(self, flows: Mapping[int, list[Flow]]) -> Iterator[tuple[int, dict[Flow, Sent]]]:
        """(pid, what is told of its connections): a question per network namespace."""
        together: dict[int, list[int]] = {}
        for pid in flows:
            together.setdefault(procfs.network_namespace(self._proc, str(pid)), []).append(pid)
        together.pop(0, None)  # they have ended
        failed = ""
        for pids in together.values():
            try:
                told = tcp_info.ask([flow for pid in pids for flow in flows[pid]], pids[0], self._proc)
            except NotToldError as error:
                if procfs.network_namespace(self._proc, str(pids[0])):  # else it has ended meanwhile
                    failed = str(error)
                continue
            for pid in pids:
                yield pid, {flow: told[flow] for flow in flows[pid] if flow in told}
        if together:
            self.missing = failed


def _since(before: Sent, now: Sent) -> Sent:
    if now.acknowledged_bytes < before.acknowledged_bytes:  # a new one between the same ends
        before = Sent(0, 0, 0, 0, 0, 0)
    return Sent(
        # What is going on counts in both, as of when it was asked for, so this never shrinks but by rounding.
        max(0, now.sending_ns - before.sending_ns),
        max(0, now.held_up_ns - before.held_up_ns),
        now.acknowledged_bytes - before.acknowledged_bytes,
        (now.segments - before.segments) % COUNTED,
        (now.again - before.again) % COUNTED,
        now.round_trip_ns,
    )
