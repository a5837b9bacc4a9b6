"""Exposed time by phase and rank: which phase of the step moves its end, and which rank leads there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.evidence import Ints
from diagnosis.steps import Bools, Floats


@dataclass(frozen=True)
class Frontier:
    """Exposed time of the phases of a step (StageFrontier, arXiv 2606.06751)."""

    exposed: Floats
    """Phases × steps, ms: how far the slowest rank moves on in each phase. The sum over phases is the time that
    the slowest rank takes for the step, exactly."""
    leader: Ints
    """Phases × steps: the row that is last after the phase, the first of equals."""
    share: Floats
    """Phases × ranks: share of the phase's exposed time in steps that this rank leads."""
    co_critical: Bools
    """Phases × ranks: leads as often as the one that leads most, or nearly (``CO_CRITICAL``): which of them made
    the step long cannot be told."""


CO_CRITICAL = 0.8
"""A rank that leads for this share of what the first leads for is as critical as that."""


def frontier(durations: Floats) -> Frontier:
    """``durations``: ranks × phases × steps, ms, in the order in which a rank goes through the phases.

    F[s] is the largest sum of the first s phases of any rank, the exposed time of phase s is F[s] − F[s−1]. Each
    rank's times are by its own clock; no clocks are compared.
    """
    reached = np.cumsum(durations, axis=1)
    front = reached.max(axis=0)
    exposed = np.diff(front, axis=0, prepend=0.0)
    leader = reached.argmax(axis=0)
    led = np.stack(
        [np.where(leader == row, np.maximum(exposed, 0.0), 0.0).sum(axis=1) for row in range(len(durations))]
    ).T
    total = led.sum(axis=1, keepdims=True)
    share = np.divide(led, total, out=np.zeros_like(led), where=total > 0)
    most = share.max(axis=1, keepdims=True)
    return Frontier(exposed, leader, share, (share >= CO_CRITICAL * most) & (most > 0))
