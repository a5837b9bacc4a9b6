"""Nodes, stages, switches: ranks that are slow together are one finding, of the smallest set that explains them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diagnosis.limits import ALPHA, LEVEL_MEMBERS
from diagnosis.outliers import set_outliers, set_series
from diagnosis.permutation import TooFewBlocksError, block_means, shortest_block
from diagnosis.shift import Numbers, Shift, hodges_lehmann

Partitions = Mapping[str, Mapping[str, Sequence[int]]]
"""Kind of set ("node", "stage", "switch") → name → rows of its ranks."""


@dataclass(frozen=True)
class SetFinding:
    """A set of ranks that is slow as a whole."""

    level: str
    """The kind of set, as the caller named it."""
    name: str
    rows: tuple[int, ...]
    """All its ranks that were compared."""
    effect: float
    """Mean over its ranks, ms per step, against their peers elsewhere."""
    q: float
    shift: Shift


def comparable(partitions: Partitions, groups: Sequence[Sequence[int]]) -> Partitions:
    """What of the partitions can be tested: sets of which every rank has peers outside the set; of each kind at
    least two, one of them with more than one rank. A node that holds a whole stage has nothing to compare with."""
    group_of = {row: place for place, group in enumerate(groups) for row in group}
    usable: dict[str, dict[str, list[int]]] = {}
    for level, sets in partitions.items():
        kept = {}
        for name, members in sets.items():
            rows = sorted(row for row in members if row in group_of)
            touched = {group_of[row] for row in rows}
            if rows and all(set(groups[place]) - set(rows) for place in touched):
                kept[name] = rows
        if len(kept) > 1 and max(len(rows) for rows in kept.values()) > 1:
            usable[level] = kept
    return usable


def found_sets(
    differences: Numbers,
    partitions: Partitions,
    step_ms: float,
    matters_ms: float,
    levels: int,
    slow: Mapping[int, float],
) -> list[SetFinding]:
    """Sets whose ranks are slow together: because the set differs from the other sets of its kind, most of its
    ranks alike, or because most of its ranks were found one by one.

    ``differences``: ranks × steps, of each rank to its peers. ``partitions``: as :func:`comparable` left them.
    ``matters_ms``: the least effect. ``levels``: how many tests share the error. ``slow``: row → q of the ranks
    that were found.
    """
    found = []
    for level, sets in partitions.items():
        names = sorted(sets, key=lambda name: min(sets[name]))
        series = set_series(differences, [sets[name] for name in names])
        try:
            tested = np.minimum(1.0, levels * set_outliers(series, step_ms))
        except TooFewBlocksError:
            tested = np.ones(len(names))  # few sets need more blocks than many ranks do
        blocks, _ = block_means(series, shortest_block(series.shape[1], step_ms))
        effects = np.nanmean(series, axis=1)
        for place, name in enumerate(names):
            rows = sets[name]
            if len(rows) < 2 or not effects[place] >= matters_ms:
                continue
            members = np.nanmean(differences[list(rows)], axis=1)
            alike = float(np.mean(members >= effects[place] / 2))
            whole = float(tested[place]) if alike >= LEVEL_MEMBERS else 1.0
            singly = [slow[row] for row in rows if row in slow]
            each = max(singly) if len(singly) >= LEVEL_MEMBERS * len(rows) else 1.0
            if min(whole, each) <= ALPHA:
                shift = hodges_lehmann(blocks[place])
                found.append(
                    SetFinding(level, name, tuple(rows), float(effects[place]), min(whole, each), shift)
                )
    return found


def explaining(found: Sequence[SetFinding], slow: Collection[int]) -> tuple[SetFinding, ...]:
    """The fewest of the sets that explain slow ranks: always the one that explains most of what is left, of equal
    ones the one with the fewest others in it. Sets that add less than two ranks explain nothing new."""
    left, chosen = set(slow), []
    candidates = [one for one in found if len(left & set(one.rows)) >= LEVEL_MEMBERS * len(one.rows)]
    while candidates:
        best = max(candidates, key=lambda one: (len(left & set(one.rows)), -len(one.rows)))
        if len(left & set(best.rows)) < 2:
            break
        chosen.append(best)
        left -= set(best.rows)
    return tuple(chosen)
