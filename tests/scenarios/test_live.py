"""Two real runs, short ones: a rank whose disk becomes slow, and none that does (all: `python -m bench faults`)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from probes.recording import read
from tests.scenarios import replayed
from tests.scenarios.catalogue import FAULTS
from tests.scenarios.ground import NoGround, control_group, disk, sweep
from tests.scenarios.runner import Ground, ground, names_the_culprits, run

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

BEFORE_S, AFTER_S = 6.0, 12.0


@pytest.fixture(scope="module")
def on(root_and_bpf: None) -> Iterator[Ground]:
    sweep()
    with ground() as started:
        yield started


def test_the_rank_whose_disk_becomes_slow_is_named_and_the_recording_says_the_same(
    on: Ground, tmp_path: Path
) -> None:
    try:
        with disk("try"), control_group("blkio", "try"):
            pass
    except NoGround as error:
        pytest.skip(str(error))
    seed = random.randrange(1_000_000)
    fault = replace(FAULTS["slow-reads"], after_s=2 * AFTER_S, after_steps=200)
    result = run(fault, seed, on, tmp_path / "run", before_s=BEFORE_S)
    assert result.bit, f"--seed {seed}: {result}"
    assert (result.status, result.culprits) == ("slow", result.ranks), f"--seed {seed}: {result.summary}"
    assert fault.expected.accepts(result.cause) or result.cause is None, f"--seed {seed}: {result.summary}"
    path = Path(result.recording)
    assert replayed.truth(path).ranks == result.ranks
    again = replayed.verdict(read(path), tmp_path / "store.db")
    assert names_the_culprits(fault, result.ranks, again), f"--seed {seed}: {again.summary}"
    assert sweep() == []


def test_nobody_is_named_where_nothing_is_put_in(on: Ground, tmp_path: Path) -> None:
    seed = random.randrange(1_000_000)
    result = run(replace(FAULTS["healthy"], after_s=AFTER_S), seed, on, tmp_path / "run", before_s=BEFORE_S)
    assert result.culprits == [], f"--seed {seed}: {result.summary}"
    assert result.status != "hang"
