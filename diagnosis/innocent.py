"""Ranks that stand out and may be victims: they sleep longer than their peers, and receives are not seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diagnosis import wording
from diagnosis.blame import Blame
from diagnosis.limits import EXPLAINS
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


def cleared_of(blame: Blame, innocent: dict[int, str]) -> Blame:
    """The same without some of its culprits."""
    if not innocent:
        return blame
    culprits = tuple(row for row in blame.culprits if row not in innocent)
    tests = {key: tested for key, tested in blame.tests.items() if key[1] not in innocent}
    return replace(blame, culprits=culprits, tests=tests)


def _excess(scene: Scene, blame: Blame, row: int, part: str) -> float:
    group = next(group for group in scene.groups if row in group)
    peers = [other for other in group if other not in blame.culprits]
    values = scene.now.own if part == "own" else scene.now.parts[part]
    means = values.mean(axis=1)
    return float(means[row] - np.mean(means[peers])) if peers else 0.0


def _share(scene: Scene, row: int, other: int) -> bool:
    """Whether two ranks meet in a communicator that not all ranks are in; in one that all are in, when there is no
    other."""
    pair = {scene.ranks[row], scene.ranks[other]}
    tables = list(scene.tables.joined.values())
    inner = [table for table in tables if not set(scene.ranks) <= set(table.ranks)]
    return any(pair <= set(table.ranks) for table in inner or tables)
