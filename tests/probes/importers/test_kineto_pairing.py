"""Which collective of one rank is which of another: by the traces' numbers, else by their steps, else none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from probes.importers import Note
from probes.records import RankBatch
from tests.probes.importers.kineto_traces import all_reduce, event, imported, step, written


def _steps(sizes: dict[int, list[int]], begin: float = 0, **more: Any) -> list[dict[str, Any]]:
    """Steps of 10 ms, each with all-reduces of so many elements."""
    events = []
    for place, (number, elements) in enumerate(sizes.items()):
        at = begin + place * 10_000
        events.append(step(number, at, 9_900))
        for index, count in enumerate(elements):
            correlation = 1 + number * 100 + index
            events += all_reduce(at + 1_000 * (index + 1), 500, correlation, count, **more)
    return events


def _two(folder: Path, *ranks: list[dict[str, Any]], **more: Any) -> tuple[list[RankBatch], str]:
    paths = [written(folder / f"{rank}.json", events, rank, **more) for rank, events in enumerate(ranks)]
    parts, notes = imported(*paths)
    return [part.rank_batch for part in parts], _texts(notes)


def _texts(notes: list[Note]) -> str:
    return " ".join(note.text for note in notes)


def _numbered(rank: RankBatch) -> list[tuple[str, int, int]]:
    """(communicator, sequence number, bytes)."""
    table = rank.collectives
    uids = [rank.communicators[index].uid for index in table.communicator]
    return list(zip(uids, table.seq, table.bytes, strict=True))


def test_numbers_of_the_trace_are_taken(tmp_path: Path) -> None:
    first, second = all_reduce(0, 1, 1, Seq=71), all_reduce(900, 1, 2, Seq=73)
    ranks, said = _two(tmp_path, [*first, *second], second)
    assert [rank.collectives.seq for rank in ranks] == [[71, 73], [73]]
    assert said == ""


def test_without_numbers_the_order_within_the_steps_pairs(tmp_path: Path) -> None:
    """Rank 1 began to record a step later, and its clock is off by a minute."""
    ranks, said = _two(
        tmp_path, _steps({4: [1, 2], 5: [3, 4], 6: [5]}), _steps({5: [3, 4], 6: [5], 7: [6]}, begin=60e6)
    )
    assert _numbered(ranks[0])[2:] == [("0", 0, 12), ("0", 1, 16), ("0", 2, 20)]
    assert _numbered(ranks[1])[:3] == [("0", 0, 12), ("0", 1, 16), ("0", 2, 20)]
    outside = {_numbered(ranks[0])[0][0], _numbered(ranks[1])[3][0]}
    assert outside == {"0, as rank 0 alone recorded it", "0, as rank 1 alone recorded it"}
    assert said == ""


def test_a_step_that_one_rank_lacks_leaves_a_hole(tmp_path: Path) -> None:
    ranks, _ = _two(tmp_path, _steps({4: [1], 5: [2], 6: [3]}), _steps({4: [1], 6: [3]}))
    assert [one for one in _numbered(ranks[0]) if one[0] == "0"] == [("0", 0, 4), ("0", 2, 12)]
    assert _numbered(ranks[1]) == [("0", 0, 4), ("0", 2, 12)]


def test_sampled_kernels_are_paired_with_nobody_s(tmp_path: Path) -> None:
    ranks, said = _two(tmp_path, _steps({4: [1, 2, 3]}), _steps({4: [1, 3]}))
    uids = [{uid for uid, _, _ in _numbered(rank)} for rank in ranks]
    assert uids[0].isdisjoint(uids[1])
    assert "process group 0 the ranks show different collectives in step 4" in said
    assert "its 5 collectives are not compared across ranks" in said
    assert [one.size for one in ranks[0].communicators] == [2, 1]


def test_recordings_of_different_steps_are_not_paired(tmp_path: Path) -> None:
    ranks, said = _two(tmp_path, _steps({4: [1, 2]}), _steps({8: [1, 2]}))
    assert {uid for uid, _, _ in _numbered(ranks[0])}.isdisjoint({uid for uid, _, _ in _numbered(ranks[1])})
    assert "no profiler step in common" in said


@pytest.mark.parametrize(("late", "paired"), [(200, True), (10_000, False)])
def test_without_steps_only_what_ends_at_one_time_is_paired(
    tmp_path: Path, late: float, paired: bool
) -> None:
    """The pattern repeats every 10 ms: a recording that begins a repetition later looks the same."""
    plain = [one for one in _steps({1: [1], 2: [1], 3: [1]}) if "Profiler" not in one["name"]]
    shifted = [{**one, "ts": one["ts"] + late} for one in plain]
    ranks, said = _two(tmp_path, plain, shifted)
    together = {uid for uid, _, _ in _numbered(ranks[0])} & {uid for uid, _, _ in _numbered(ranks[1])}
    assert bool(together) == paired
    assert ("nothing says where the recordings of the ranks begin" in said) != paired


def test_groups_of_one_name_and_other_ranks_are_told_apart(tmp_path: Path) -> None:
    mine = [
        all_reduce(0, 1, 1, Seq=1, **{"Process Group Name": "tp", "Process Group Ranks": ranks})
        for ranks in ("[0, 2]", "[1, 3]")
    ]
    ranks, _ = _two(tmp_path, *mine)
    assert [_numbered(rank)[0][0] for rank in ranks] == ["tp of 0,2", "tp of 1,3"]


def test_calls_of_gloo_are_paired_where_all_groups_have_the_same_ranks(tmp_path: Path) -> None:
    """gloo's annotations name no group; in which of two groups of the same ranks a call is makes no difference."""
    both = [{"pg_name": name, "pg_size": 2, "ranks": [0, 1]} for name in ("0", "1")]

    def events(begin: float) -> list[dict[str, Any]]:
        shapes = {"Input Dims": [[4160]], "Input type": ["float"]}
        calls = [event("user_annotation", "gloo:all_reduce", begin + at, 50, **shapes) for at in (100, 300)]
        return [step(2, begin, 900), *calls, event("user_annotation", "gloo:barrier", begin + 500, 9)]

    paths = []
    for rank in (0, 1):
        info = {"backend": "gloo", "rank": rank, "world_size": 2, "pg_config": both}
        paths.append(written(tmp_path / f"{rank}.json", events(rank * 30), rank, distributedInfo=info))
    parts, _ = imported(*paths)
    assert [part.rank_batch.collectives.seq for part in parts] == [[0, 1, 2], [0, 1, 2]]
    last = [part.rank_batch.communicators[-1] for part in parts]
    assert [(one.uid, one.rank, one.size) for one in last] == [("", 0, 2), ("", 1, 2)]


def test_sends_and_receives_of_two_ranks_are_paired_by_their_place_in_the_step(tmp_path: Path) -> None:
    def events(names: list[str]) -> list[dict[str, Any]]:
        sent = [
            all_reduce(
                100 + 50 * place, 5, 1 + place, **{"Collective name": name, "Process Group Name": "pp"}
            )
            for place, name in enumerate(names)
        ]
        for pair in sent:
            pair[1]["name"] = "ncclDevKernel_SendRecv(ncclDevComm*)"
        return [step(1, 0, 900), *(one for pair in sent for one in pair)]

    ranks, _ = _two(tmp_path, events(["send", "recv"]), events(["recv", "send"]))
    assert [_numbered(rank) for rank in ranks] == [[("pp", 0, 4000), ("pp", 1, 4000)]] * 2


def test_a_rank_may_have_several_recordings(tmp_path: Path) -> None:
    """The profiler of each rank recorded steps 4 and 8; the second file knows one group more, named first."""
    other = all_reduce(95_000, 1, 77, 9, **{"Process Group Name": "tp"})
    paths = [
        written(tmp_path / f"{rank}-{name}.json", events, rank)
        for rank in (0, 1)
        for name, events in (("b", _steps({4: [1, 2]})), ("a", [*other, *_steps({8: [3]}, begin=90_000)]))
    ]

    parts, notes = imported(*sorted(paths))

    assert [(part.rank_batch.rank, part.path.name) for part in parts] == [
        (0, "0-b.json"),
        (0, "0-a.json"),
        (1, "1-b.json"),
        (1, "1-a.json"),
    ]
    assert [part.rank_batch.communicators for part in parts[1:2]] == [parts[0].rank_batch.communicators]
    assert _numbered(parts[0].rank_batch) == [("0", 0, 4), ("0", 1, 8)]
    assert [row for row in _numbered(parts[1].rank_batch) if row[0] == "0"] == [("0", 3, 12)]
    assert _numbered(parts[2].rank_batch) == _numbered(parts[0].rank_batch)
    assert notes == []


def test_a_copy_of_a_file_is_no_second_recording(tmp_path: Path) -> None:
    """Whether it is a copy or contradicts the other, `sysom import` says; the ranks stay paired without it."""
    events = _steps({4: [1, 2]})
    paths = [
        written(tmp_path / f"{rank}{name}.json", events, rank)
        for rank, name in ((0, ""), (0, " copy"), (1, ""))
    ]
    parts, _ = imported(*paths)
    of_rank = {part.path.name: _numbered(part.rank_batch) for part in parts}
    assert of_rank["0.json"] == of_rank["1.json"] == [("0", 0, 4), ("0", 1, 8)]
