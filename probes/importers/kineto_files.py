"""Several files of one rank (a profiler that records again and again) as one rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from probes.importers.kineto_columns import Group
from probes.importers.kineto_pairing import Recorded
from probes.importers.kineto_rows import Rows


def recorded(files: Sequence[Rows]) -> list[Recorded]:
    """The ranks of files that are in order of rank and time. Files of one rank get one list of groups, one process
    and one clock that timed their collectives.

    A file that overlaps an earlier one of its rank is another's copy, or contradicts it: which, ``sysom import``
    finds out. It takes no part here.
    """
    ranks = []
    for rank, of_rank in groupby(files, key=lambda rows: rows.rank):
        mine: list[Rows] = []
        for rows in of_rank:
            if not mine or rows.first_ns > mine[-1].last_ns:
                mine.append(rows)
        groups = _one_list(mine)
        _one_process(mine)
        collectives = [row for rows in mine for row in rows.collectives]
        ranks.append(Recorded(rank, all(rows.utc for rows in mine), groups, collectives))
    return ranks


def _one_list(mine: list[Rows]) -> list[Group]:
    if len(mine) == 1:
        return mine[0].groups
    groups: list[Group] = []
    places: dict[tuple[str, int, str], int] = {}
    for rows in mine:
        at = []
        for group in rows.groups:
            key = (group.name, group.size, "" if group.name else group.desc)
            place = places.setdefault(key, len(groups))
            if place == len(groups):
                groups.append(group)
            elif not groups[place].ranks:
                groups[place] = group
            at.append(place)
        for row in rows.collectives:
            row.group = at[row.group]
        rows.groups = groups
    return groups


def _one_process(mine: list[Rows]) -> None:
    timed_by = max(rows.timed_by for rows in mine)
    for rows in mine:
        if rows.timed_by != timed_by:
            rows.notes.append(
                f"{rows.path.name} has no kernels of collectives and other files of its rank have: its"
                f" {len(rows.collectives)} collectives, timed on the host, are left out"
            )
            rows.collectives.clear()
            rows.timed_by = timed_by
        if rows.pid and mine[0].pid and rows.pid != mine[0].pid:
            rows.notes.append(
                f"{rows.path.name} is of another process of rank {rows.rank} than {mine[0].path.name}: the rank"
                " was started again in between"
            )
        rows.pid = mine[0].pid
