"""Recorded runs of real faults, replayed: the truth is in each recording's note.

Made by ``python -m bench faults``; to add one, copy it from there into ``recorded/``. A cause is asked for where
there was a rule for it at that time; a wrong one is never right.
"""

from __future__ import annotations

import re
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
    stood_still = [one.rank for one in verdict.evidence if one.metric == "stall"]
    assert stood_still == (truth.ranks if truth.fault == "sigstop" else [])
    assert verdict.cause is None or fault.expected.accepts(verdict.cause), verdict.summary
    if truth.cause:
        assert verdict.cause is not None, verdict.summary
        assert fault.expected.owner in (None, verdict.owner)
        said = f"{verdict.summary} {' '.join(culprit.detail for culprit in verdict.culprits)}"
        assert not [word for word in truth.words if word not in said], said


def test_a_stop_of_seconds_is_named_with_who_stopped_whom_how_long_and_when(tmp_path: Path) -> None:
    """The job's log has a step of 6.5 s; the agent was told of SIGSTOP and SIGCONT 6,545 ms apart."""
    path = Path(__file__).with_name("recorded") / "sigstop.sysomrec"
    verdict = replayed.verdict(read(path), tmp_path / "store.db")
    (culprit,) = verdict.culprits
    assert (verdict.cause, culprit.cause, culprit.layer) == ("process-stopped", "process-stopped", "os")
    assert culprit.share_explained >= 0.95
    assert "was stopped by python (pid 392)" in culprit.detail
    assert re.search(
        r"stood still once, for 6\.5 s from \S+Z to \S+Z; .* the job lost 6\.5 s", verdict.summary
    )
    assert sorted(one.rank for one in verdict.cleared) == [0, 1, 2]


def test_a_job_that_is_well_but_for_a_stop_is_said_to_be(tmp_path: Path) -> None:
    path = Path(__file__).with_name("recorded") / "sigstop-alone.sysomrec"
    verdict = replayed.verdict(read(path), tmp_path / "store.db")
    assert [(one.rank, one.cause) for one in verdict.culprits] == [(0, "process-stopped")]
    assert "the job lost 5.3 s" in verdict.culprits[0].detail
    assert "Apart from that, the median step takes 5" in verdict.summary
    assert (verdict.since, verdict.cost_ms_per_step) == (None, 0.0)


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
