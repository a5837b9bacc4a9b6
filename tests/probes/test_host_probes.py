"""The probes of the host as a group: one by one, and each failing alone."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.stack import until
from probes import in_kernel
from probes.bpf import BpfUnavailable, Kernel
from probes.discovery import RankProcess
from probes.host.reading import Reading
from probes.host.signals import SignalsProbe
from probes.host_probes import KINDS, RETRY_S, HostProbe, HostProbes, Kind
from probes.records import Event, Metric


class Stub:
    """Says what it is told to say."""

    def __init__(self, reading: Reading | Exception) -> None:
        self.reading = reading
        self.rows_read, self.lost, self.ticks_per_s = 7, 2, 0.0
        self.missing: list[str] = []
        self.closed = False

    def read(self, ranks: Mapping[int, RankProcess]) -> Reading:
        if isinstance(self.reading, Exception):
            raise self.reading
        return self.reading

    def programs(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        self.closed = True


Make = Callable[..., HostProbes]


@pytest.fixture
def group(tmp_path: Path) -> Make:
    def make(**probes: HostProbe | Exception) -> HostProbes:
        def maker(probe: HostProbe | Exception) -> Callable[[Kernel], HostProbe]:
            def made(kernel: Kernel) -> HostProbe:
                if isinstance(probe, Exception):
                    raise probe
                return probe

            return made

        kinds = [Kind(name, maker(probe)) for name, probe in probes.items()]
        return HostProbes(Kernel(tmp_path), kinds)

    return make


def metric(value: float) -> Metric:
    return Metric(name="a", value=value, unit="ns")


def test_one_is_loaded_with_each_call_and_what_is_not_wanted_goes(group: Make) -> None:
    first, second = Stub(Reading()), Stub(Reading())
    probes = group(first=first, second=second)
    probes.keep(["first", "second"], 0.0)
    assert list(probes.loaded) == ["first"]
    probes.keep(["first", "second"], 1.0)
    assert list(probes.loaded) == ["first", "second"]
    probes.keep(["second"], 2.0)
    assert list(probes.loaded) == ["second"]
    assert (first.closed, second.closed) == (True, False)
    assert (probes.rows(), probes.rows("first"), probes.lost("first")) == (14, 0, 2), "what went still counts"


def test_what_has_to_be_compiled_waits_until_it_may(group: Make) -> None:
    probes = group(program=Stub(Reading()), files=Stub(Reading()))
    probes.kinds["files"] = replace(probes.kinds["files"], compiles=False)
    for now in (0.0, 1.0, 2.0):
        probes.keep(["program", "files"], now, compiling=False)
    assert list(probes.loaded) == ["files"]
    probes.keep(["program", "files"], 3.0)
    assert list(probes.loaded) == ["files", "program"]


def test_what_they_say_is_put_together_by_rank(group: Make) -> None:
    event = Event(kind="signal", at_ns=1, detail="")
    probes = group(
        first=Stub(
            Reading(
                node=[metric(1), metric(math.nan)], ranks={7: [metric(2)], 8: [metric(3), metric(-math.inf)]}
            )
        ),
        second=Stub(Reading(node=[metric(4)], ranks={7: [metric(5)]}, events=[event])),
    )
    for now in (0.0, 1.0):
        probes.keep(["first", "second"], now)
    reading = probes.read({}, 2.0)
    assert reading.node == [metric(1), metric(4)]
    assert reading.ranks == {7: [metric(2), metric(5)], 8: [metric(3)]}
    assert reading.events == [event]


def test_one_that_cannot_be_loaded_is_told_once_and_tried_again_and_the_others_work(group: Make) -> None:
    probes = group(broken=BpfUnavailable("no such tracepoint"), whole=Stub(Reading(node=[metric(1)])))
    assert probes.keep(["broken", "whole"], 0.0) == "broken: no such tracepoint"
    assert probes.keep(["broken", "whole"], 1.0) == ""
    assert list(probes.loaded) == ["whole"]
    assert probes.keep(["broken", "whole"], RETRY_S + 1) == "", "no news"
    assert probes.why == {"broken": "broken: no such tracepoint"}
    assert probes.read({}, 2.0).node == [metric(1)]


def test_one_that_breaks_in_a_way_nobody_thought_of_keeps_nobody_from_watching(group: Make) -> None:
    probes = group(broken=Exception("Failed to load program"), whole=Stub(Reading(node=[metric(1)])))
    assert probes.keep(["broken", "whole"], 0.0) == "broken: Failed to load program"
    probes.keep(["broken", "whole"], 1.0)
    assert list(probes.loaded) == ["whole"]


def ours() -> set[int]:
    """Programs in the kernel that this process holds."""
    return {program.id for program in in_kernel.programs() if os.getpid() in program.holders}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.compiles], ids=lambda kind: kind.name)
def test_nothing_of_one_that_is_closed_stays_in_the_kernel(root_and_bpf: Kernel, kind: Kind) -> None:
    before = ours()
    probe = kind.make(root_and_bpf)
    its = ours() - before
    assert len(its) == len(probe.programs()) > 0
    probe.close()
    until(lambda: not its & {program.id for program in in_kernel.programs()}, "the programs' end", 60)


def test_what_was_loaded_of_one_that_fails_is_taken_out_of_the_kernel(root_and_bpf: Kernel) -> None:
    class Half(SignalsProbe):
        def __init__(self, kernel: Kernel) -> None:
            super().__init__(kernel)
            assert ours() - before
            raise KeyError("no such field")

    before = ours()
    assert "no such field" in HostProbes(root_and_bpf, [Kind("half", Half)]).keep(["half"], 0.0)
    assert ours() == before


def test_one_that_cannot_be_detached_in_order_is_gone_all_the_same(group: Make) -> None:
    class Stuck(Stub):
        def close(self) -> None:
            raise OSError("busy")

    stuck, other = Stuck(Reading()), Stub(Reading())
    probes = group(stuck=stuck, other=other)
    for now in (0.0, 1.0):
        probes.keep(["stuck", "other"], now)
    probes.close()
    assert (probes.loaded, other.closed) == ({}, True)


def test_one_that_fails_while_it_is_read_is_detached_and_loaded_anew(group: Make) -> None:
    failing = Stub(ValueError("odd row"))
    probes = group(failing=failing, whole=Stub(Reading(node=[metric(1)])))
    for now in (0.0, 1.0):
        probes.keep(["failing", "whole"], now)
    assert probes.read({}, 2.0).node == [metric(1)]
    assert failing.closed
    assert "failing failed: odd row" in probes.why["failing"]
    failing.reading = Reading(node=[metric(2)])
    probes.keep(["failing", "whole"], 3.0)
    assert list(probes.loaded) == ["whole"], "not at once"
    probes.keep(["failing", "whole"], 3.0 + RETRY_S)
    assert probes.why == {}
    assert len(probes.read({}, 4.0 + RETRY_S).node) == 2
