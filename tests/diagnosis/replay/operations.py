"""Timed operations for the tests of verdicts: recorded jobs, parts of them, and whom a verdict blames."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from diagnosis.evidence import Evidence
from diagnosis.replay.operations import diagnose_operations
from diagnosis.verdict import Verdict
from probes.importers import gather, read
from tests.diagnosis.replay.pipelines import bare, of_parts
from tests.recorded import WHAT_IF


@cache
def recorded(name: str) -> Evidence:
    path = WHAT_IF / f"trace-{name}.parquet"
    if not path.is_file():
        pytest.skip(f"the recorded trace is not at {path}")
    return of_parts(read(gather([path]), job="job-123"))


def without(evidence: Evidence, *gone: int) -> Evidence:
    ranks = {rank: one for rank, one in evidence.ranks.items() if rank not in gone}
    return dataclasses.replace(evidence, ranks=ranks)


def few_steps(evidence: Evidence, keep: list[int]) -> Evidence:
    """Only these steps (by their place in the order of steps)."""
    ranks = {}
    for rank, one in evidence.ranks.items():
        table = one.operations
        assert table is not None
        chosen = np.isin(table.step, np.unique(table.step)[keep])
        columns = {
            name: getattr(table, name)[chosen]
            for name in ("kind", "lane", "step", "start_ns", "duration_ns", "seq", "micro_batch", "chunk")
        }
        ranks[rank] = dataclasses.replace(one, operations=dataclasses.replace(table, **columns))
    return dataclasses.replace(evidence, ranks=ranks)


def verdict_of(evidence: Evidence) -> Verdict:
    verdict = diagnose_operations(evidence, bare(evidence))
    assert verdict is not None
    return verdict


def blamed(verdict: Verdict) -> list[int]:
    return sorted(culprit.rank for culprit in verdict.culprits)


def always(factor: float):
    return lambda step: factor
