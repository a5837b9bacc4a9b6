"""A real run, recorded by the agent, through the ingest and the store to a verdict; the truth is in its note."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import pytest

from bot.demo import show
from diagnosis.engine import diagnose
from diagnosis.evidence import Evidence
from diagnosis.ingest import Ingest
from diagnosis.store.sqlite import SqliteStore
from diagnosis.verdict import to_json
from probes.replay import end_utc_ns, play, retimed

MINUTE_NS = 60_000_000_000


def evidence(path: Path, end_ns: int) -> Evidence:
    store = SqliteStore(path)
    try:
        ingest = Ingest(store, {})

        def deliver(node: str, wire: bytes) -> None:
            ingest.accept(node, wire)

        play(retimed([show.recording()], end_ns), deliver, live=False, wait=pytest.fail)
        return store.evidence(show.JOB, end_ns - 10 * MINUTE_NS, end_ns + 1)
    finally:
        store.close()


def test_the_process_that_was_put_beside_a_rank_is_named(tmp_path: Path) -> None:
    """updatedb-4c1e came 25 s after the beginning, to rank 2; other work there disturbed all ranks."""
    end = time.time_ns()
    verdict = diagnose(evidence(tmp_path / "store.db", end))
    (culprit,) = verdict.culprits
    assert (verdict.status, culprit.rank, culprit.node) == ("slow", 2, "node-1")
    assert (culprit.cause, culprit.layer, culprit.owner) == ("cpu-contention", "os", "node")
    assert "updatedb-4c1e (pid " in verdict.summary
    assert {cleared.rank for cleared in verdict.cleared} == {0, 1, 3}
    # Its network thread was starved too, so transfers took longer: that is the CPU's doing, and no link's.
    assert not [found for found in verdict.evidence if found.metric == "transfer"]
    assert not [action for action in verdict.actions if "link" in action]


def test_since_when_is_when_the_process_came(tmp_path: Path) -> None:
    batches = show.recording().batches
    length = end_utc_ns(batches[-1]) - end_utc_ns(batches[0])
    end = time.time_ns()
    verdict = diagnose(evidence(tmp_path / "store.db", end))
    assert verdict.since is not None
    since = datetime.datetime.fromisoformat(verdict.since).timestamp()
    begun = (end - length) / 1e9
    assert since - begun == pytest.approx(25, abs=5)


def test_the_same_recording_gives_the_same_verdict(tmp_path: Path) -> None:
    end = time.time_ns()
    first, second = (diagnose(evidence(tmp_path / name, end)) for name in ("a.db", "b.db"))
    assert to_json(first) == to_json(second)


def test_the_slowdown_is_split_into_parts_that_add_up_to_it(tmp_path: Path) -> None:
    verdict = diagnose(evidence(tmp_path / "store.db", time.time_ns()))
    assert verdict.baseline is not None
    parts = {line.part: line.ms for line in verdict.slowdown}
    whole = sum(parts.values()) + verdict.slowdown_unexplained_ms
    # Means here, medians there: both say what the steps grew by.
    assert verdict.step_ms is not None
    assert whole == pytest.approx(verdict.step_ms - verdict.baseline.step_ms, rel=0.15)
    # Three of four ranks wait for the one beside the process, which itself waits for its CPU.
    assert sorted(parts, key=lambda part: -parts[part])[0] == "waiting"
    assert parts["waiting"] + parts["runnable"] + parts["communication"] >= 0.9 * whole
