"""Recorded runs of real faults, replayed: the truth is in each recording's note.

Made by ``python -m bench faults``; to add one, copy it from there into ``recorded/``. A cause is asked for where
there was a rule for it at that time; a wrong one is never right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.recording import read
from tests.scenarios import replayed
from tests.scenarios.catalogue import FAULTS
from tests.scenarios.runner import names_the_culprits

RECORDED = sorted(Path(__file__).with_name("recorded").glob("*.sysomrec"))
LARGEST_BYTES = 400_000


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_verdict_is_right(path: Path, tmp_path: Path) -> None:
    truth = replayed.truth(path)
    fault = FAULTS[truth.fault]
    verdict = replayed.verdict(read(path), tmp_path / "store.db")
    assert names_the_culprits(fault, truth.ranks, verdict), (truth, verdict.status, verdict.summary)
    assert verdict.cause is None or fault.expected.accepts(verdict.cause), verdict.summary
    if truth.cause:
        assert verdict.cause is not None, verdict.summary
        assert fault.expected.owner in (None, verdict.owner)
        said = f"{verdict.summary} {' '.join(culprit.detail for culprit in verdict.culprits)}"
        assert not [word for word in truth.words if word not in said], said


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_is_kept_bit_and_is_small(path: Path) -> None:
    assert replayed.truth(path).bit
    assert path.stat().st_size <= LARGEST_BYTES
    assert not read(path).cut_short


def test_healthy_and_faulty_runs_are_among_them() -> None:
    assert {replayed.truth(path).fault for path in RECORDED} >= {
        "cpu-hog",
        "healthy",
        "lock",
        "sigstop",
        "slow-reads",
    }
