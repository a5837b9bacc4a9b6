"""Traces of a few steps: what is the same in each of them. Too few for blocks, so each counts for itself."""

from __future__ import annotations

from collections.abc import Sequence

from diagnosis.blame import Blame, Tested, matters
from diagnosis.limits import ALPHA
from diagnosis.shift import peer_difference
from diagnosis.steps import Floats

_FEWEST_RANKS = 3


def in_all_steps(own: Floats, groups: Sequence[Sequence[int]], step_ms: float) -> Blame:
    """Ranks that take longest of their peers in every single step, by what matters.

    ``own``: ranks × steps, ms. Were peers alike, one of R would be last in all n steps with a chance of R^(1−n),
    if steps were independent; they are not quite, and a disturbance that lasts for the whole trace looks the same.
    """
    found: dict[int, Tested] = {}
    tested = [list(group) for group in groups if len(group) >= _FEWEST_RANKS]
    for group in tested:
        differences = peer_difference(own[group])
        steps = differences.shape[1]
        q = min(1.0, len(tested) * float(len(group)) ** (1 - steps))
        last = differences.argmax(axis=0)
        place = int(last[0])
        if q > ALPHA or (last != place).any():
            continue
        effect = float(differences[place].mean())
        if matters(effect, step_ms) and float(differences[place].min()) >= effect / 2:
            found[group[place]] = Tested(effect, q)
    return Blame(tuple(sorted(found)), "peers", {(0, row): tested for row, tested in found.items()})
