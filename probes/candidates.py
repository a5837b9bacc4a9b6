"""Processes that could be ranks but whose environment does not say which one, as with mp.spawn, where the rank is
an argument: gloo is attached to them, and the default group's communicator tells."""

from __future__ import annotations

import logging

from probes.discovery import Discovery
from probes.loaded import LoadedProbes
from probes.nccl.gloo import Traffic
from probes.records import Communicator

log = logging.getLogger(__name__)

MOST = 64
"""Candidates that are attached to at once: a machine full of notebooks must not be a machine full of probes."""
DEFAULT_GROUP = "default_pg"
"""How PyTorch describes the group of all ranks (torch/distributed/distributed_c10d.py, init_process_group)."""


class Candidates:
    """Those that are attached to now. Not safe for several threads."""

    def __init__(self, discovery: Discovery, probes: LoadedProbes) -> None:
        self._discovery = discovery
        self._probes = probes
        self._watched: set[int] = set()

    def any(self) -> bool:
        """Whether there are any, as the last scan found them."""
        return bool(self._discovery.unnumbered())

    def attach(self, ranks: set[int], now: float) -> None:
        """Attach to those that came, and leave those that are gone; those that are ``ranks`` now stay attached."""
        found = self._discovery.unnumbered()
        for pid in self._watched - found.keys() - ranks:
            self._probes.leave(pid)
        first = sorted(found.values(), key=lambda one: (one.pid not in self._watched, one.pid))[:MOST]
        self._watched = {candidate.pid for candidate in first}
        for candidate in first:
            trouble = self._probes.attach(candidate.process, candidate.library, [], now)
            if trouble:
                log.info("process %d, which could be a rank: %s", candidate.pid, trouble)

    def number(self) -> None:
        """After the probes were read: number those whose traffic shows which rank they are."""
        gloo = self._probes.gloo
        if gloo is None:
            return
        for pid in self._watched:
            traffic = gloo.traffic.get(pid)
            if traffic is None:
                continue
            group = default_group(traffic)
            if group is None:
                traffic.take()  # of nobody that is told
            else:
                self._discovery.number(pid, group.rank, group.size)


def default_group(traffic: Traffic) -> Communicator | None:
    """The communicator of all ranks of a job, if it was used."""
    return next((known for known in traffic.communicators if known.desc == DEFAULT_GROUP), None)
