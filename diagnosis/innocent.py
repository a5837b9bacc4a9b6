"""Ranks that stand out and are not what holds the job up: who may wait in receives that are not seen, and who
differs from its peers beside a culprit without making the job any slower than it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diagnosis import wording
from diagnosis.blame import Blame, cost_ms, matters
from diagnosis.limits import EXPLAINS, MIN_COST_SHARE, MIN_EFFECT_MS
from diagnosis.scene import Scene

_ALIKE = 1.3
"""A victim waits about as long as its culprit is late: its excess is at most this many times the culprit's."""


def victims_of_unseen_receives(scene: Scene, blame: Blame) -> dict[int, str]:
    """Rows of ``blame.culprits`` that nearly only sleep longer than their peers, while one of a stage that they
    share no communicator with is late by as much: in words, why each may be innocent. All of them, where all
    sleep and none can be told to be the first."""
    if scene.by != "threads" or blame.by != "peers" or len(blame.culprits) < 2 or scene.tables.pairs:
        return {}
    over = {row: _excess(scene, blame, row, "own") for row in blame.culprits}
    asleep = {row: _excess(scene, blame, row, "blocked") >= EXPLAINS * over[row] for row in blame.culprits}
    found: dict[int, str] = {}
    for row in blame.culprits:
        elsewhere = [
            other
            for other in blame.culprits
            if other != row and over[row] <= _ALIKE * over[other] and not _share(scene, row, other)
        ]
        awake = [other for other in elsewhere if not asleep[other]]
        if asleep[row] and elsewhere and (awake or all(asleep.values())):
            who = wording.ranks([scene.ranks[other] for other in awake or elsewhere])
            found[row] = (
                f"asleep {wording.ms(over[row])} per step longer than its peers, as long as {who} of another stage "
                "keeps it waiting: sends and receives are not seen here"
            )
    return found


def beside_a_culprit(scene: Scene, blame: Blame) -> dict[int, str]:
    """Rows of ``blame.culprits`` that are slower than their peers and are not to blame all the same: in words, why.

    With another culprit there, two things more are asked of each, so that a great fault does not drag in who only
    differs. Where the job has a past and some culprit turned slow since, who was as slow before is not what
    changed. And it must cost its peers something once all other culprits are cured (the frontier with and
    without it): else it only fills time in which all wait. A node or switch found as one is asked as one.
    """
    if blame.by != "peers" or len(blame.culprits) < 2:
        return {}
    step_ms = float(scene.now.wall.mean())
    found: dict[int, str] = {}
    grown = {row: _grown(scene, blame, row) for row in blame.culprits} if scene.before is not None else {}
    if any(matters(ms, step_ms) for ms in grown.values()):
        for row, ms in grown.items():
            if not matters(ms, step_ms):
                found[row] = (
                    f"{wording.ms(_excess(scene, blame, row, 'own'))} per step slower than its peers, but not what "
                    f"changed: {_was(scene, blame, row, ms)}; it waits for the culprit like the others"
                )
    left = [row for row in blame.culprits if row not in found]
    if len(left) < 2:
        return found
    least = max(MIN_COST_SHARE * step_ms, MIN_EFFECT_MS)
    units = _units(blame, left)
    costs = [_alone(scene, blame, unit) for unit in units]
    if max(costs) < least:
        return found  # each hides in the noise of the others; together they cost enough
    for unit, cost in zip(units, costs, strict=True):
        if cost < least:
            for row in unit:
                found[row] = (
                    f"{wording.ms(_excess(scene, blame, row, 'own'))} per step slower than its peers, which costs "
                    f"the job {wording.ms(cost)} only once the culprit runs like its peers"
                )
    return found


def _grown(scene: Scene, blame: Blame, row: int) -> float:
    """By how much a rank turned slower since the past, ms per step: of its own time, or against its innocent peers,
    whichever is less. A rank does not turn slow by others getting faster, nor with all others alike."""
    assert scene.before is not None
    before = scene.before.own.mean(axis=1)
    growth = scene.now.own.mean(axis=1) - before
    peers = _innocent_peers(scene, blame, row)
    return float(min(growth[row], growth[row] - np.median(growth[peers])) if peers else growth[row])


def _was(scene: Scene, blame: Blame, row: int, grown: float) -> str:
    """What it was before, for the sentence."""
    assert scene.before is not None
    own = scene.before.own.mean(axis=1)
    over = float(own[row] - np.mean(own[_innocent_peers(scene, blame, row)]))
    if over >= MIN_EFFECT_MS:
        return f"it was so before, by {wording.ms(over)}"
    return f"its own time grew by {wording.ms(max(grown, 0.0))} since"


def _units(blame: Blame, rows: list[int]) -> list[list[int]]:
    """Culprits that were found as one set (a node's, a switch's ranks), and each other one by itself."""
    units = [[row for row in one.rows if row in rows] for one in blame.sets]
    together = {row for unit in units for row in unit}
    return [unit for unit in units if unit] + [[row] for row in rows if row not in together]


def _alone(scene: Scene, blame: Blame, unit: list[int]) -> float:
    """What a set of culprits costs its peers per step when all other culprits are cured, ms."""
    costs = [0.0]
    for group in scene.groups:
        mine = [row for row in unit if row in group]
        peers = [row for row in group if row not in blame.culprits]
        if mine and peers:
            costs.append(cost_ms([scene.now.own[mine + peers]], tuple(range(len(mine)))))
    return max(costs)


def cleared_of(blame: Blame, innocent: dict[int, str]) -> Blame:
    """The same without some of its culprits."""
    if not innocent:
        return blame
    culprits = tuple(row for row in blame.culprits if row not in innocent)
    tests = {key: tested for key, tested in blame.tests.items() if key[1] not in innocent}
    return replace(blame, culprits=culprits, tests=tests)


def _excess(scene: Scene, blame: Blame, row: int, part: str) -> float:
    peers = _innocent_peers(scene, blame, row)
    values = scene.now.own if part == "own" else scene.now.parts[part]
    means = values.mean(axis=1)
    return float(means[row] - np.mean(means[peers])) if peers else 0.0


def _innocent_peers(scene: Scene, blame: Blame, row: int) -> list[int]:
    group = next(group for group in scene.groups if row in group)
    return [other for other in group if other not in blame.culprits]


def _share(scene: Scene, row: int, other: int) -> bool:
    """Whether two ranks meet in a communicator that not all ranks are in; in one that all are in, when there is no
    other."""
    pair = {scene.ranks[row], scene.ranks[other]}
    tables = list(scene.tables.joined.values())
    inner = [table for table in tables if not set(scene.ranks) <= set(table.ranks)]
    return any(pair <= set(table.ranks) for table in inner or tables)
