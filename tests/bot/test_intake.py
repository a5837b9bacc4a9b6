"""The way of a batch to the process that writes, when that ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from bot.intake import DEADLY_TIMES, InProcess
from bot.worker import WorkerDied
from diagnosis.ingest import Refusal
from diagnosis.store import Keep
from diagnosis.tokens import Tokens
from diagnosis.writer import Place


@pytest.fixture
def intake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """An intake whose writer ends at each batch that says so."""
    made = InProcess(Place(f"sqlite://{tmp_path}/a.db", tmp_path / "key", Keep(14, 20)), Tokens({}))

    async def call(function: object, place: Place, node: str, wire: bytes) -> str:
        if wire.startswith(b"deadly"):
            raise WorkerDied("the process for storing batches ended 2 times")
        return "stored"

    monkeypatch.setattr(made._worker, "call", call)
    return made


async def refused(intake: InProcess, wire: bytes) -> int:
    with pytest.raises(Refusal) as caught:
        await intake.take("node-a", wire)
    return caught.value.status


async def test_a_batch_that_ends_the_writer_again_and_again_does_not_block_its_node_for_ever(
    intake: InProcess,
) -> None:
    statuses = [await refused(intake, b"deadly") for _ in range(DEADLY_TIMES)]
    assert statuses == [503] * (DEADLY_TIMES - 1) + [400]
    assert await intake.take("node-a", b"another") == "stored"


async def test_batches_that_came_when_the_writer_was_ended_by_something_else_are_asked_for_again(
    intake: InProcess,
) -> None:
    assert [await refused(intake, b"deadly %d" % number) for number in range(100)] == [503] * 100
    assert len(intake._deadly) <= 64
