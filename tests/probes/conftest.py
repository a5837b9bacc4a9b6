"""What tests of discovery start from: a library to map, processes that map it, and a made-up /proc."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.probes import processes
from tests.probes.fake_proc import FakeProc
from tests.probes.processes import Child

Start = Callable[..., Child]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return processes.stand_in(tmp_path)


@pytest.fixture
def start(library: Path) -> Iterator[Start]:
    """Starts Python processes that end with the test; their first argument is the library."""
    children: list[Child] = []

    def begin(code: str, **env: str) -> Child:
        children.append(processes.python(code, str(library), env=env))
        return children[-1]

    yield begin
    for child in children:
        child.end()


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")
