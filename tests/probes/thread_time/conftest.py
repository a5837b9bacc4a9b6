"""The probe, loaded once for all tests here, and processes for it to watch."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from probes.bpf import Kernel
from probes.host.thread_time import ThreadTimeProbe
from probes.records import Role
from tests.probes import processes
from tests.probes.processes import Child
from tests.probes.thread_time.watched import Start


@pytest.fixture(scope="package", params=[None, False], ids=["states-told", "states-not-told"])
def loaded(root_and_bpf: Kernel, request: pytest.FixtureRequest) -> Iterator[ThreadTimeProbe]:
    """The probe as this kernel has it, and as kernels before 5.18 do: compiled once for all tests here."""
    probe = ThreadTimeProbe(root_and_bpf, prev_state=request.param)
    yield probe
    probe.close()


@pytest.fixture
def probe(loaded: ThreadTimeProbe) -> ThreadTimeProbe:
    """Nothing is watched yet."""
    loaded.pause()
    loaded.resume()
    loaded.name_occupants(True)
    loaded.name_reasons(list(Role))
    return loaded


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python processes on one CPU, which end with the test."""
    children: list[Child] = []

    def begin(code: str, *arguments: str, cpu: int | None = None, name: str = "") -> Child:
        rename = f"open('/proc/self/comm', 'w').write({name!r})\n" if name else ""
        child = processes.python(rename + code, *arguments)
        children.append(child)
        child.line()
        if cpu is not None:
            os.sched_setaffinity(child.pid, {cpu})
        return child

    yield begin
    for child in children:
        child.end()
