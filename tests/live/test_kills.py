"""Agents killed at random moments beside a job that trains: the job does not notice, and nothing that was kept is
lost or stored twice. `python -m bench kills` does the same fifty times."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import kills

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_killing_agents_changes_nothing_for_the_job_and_loses_nothing_that_was_kept(
    root_and_bpf: None, tmp_path: Path
) -> None:
    out = kills.run(tmp_path, rounds=2, kills=4)
    assert (out.early, out.late) == (4, 4)
    assert set(out.words.splitlines()) == {"the first step is done"}, "a rank said something else"
    assert out.rows == len(out.numbers), "a batch is stored twice"
    # A kill between taking a number and writing its batch leaves the number unused; no other is missing.
    assert out.spooled - len(out.numbers) <= out.early + out.late
    assert len(out.numbers) >= out.late
    # Other work on this machine comes and goes; agents that slow the job do so in every window.
    assert min(out.killing) < 1.10 * max(*out.quiet, 1.05 * min(out.quiet)), out
