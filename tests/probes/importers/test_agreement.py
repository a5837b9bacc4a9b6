"""Files of one job fit together; of those that do not, what does no harm is left out, the rest refused by name."""

from pathlib import Path

import msgspec
import pytest

from probes.importers import Note, Part, Unusable
from probes.importers.agreement import agreed
from probes.records import Collectives, Communicator, Operations
from tests.probes.batches import SECOND, a_rank

NEVER = (lambda one, other: False, lambda one, other: True)


def part(rank, file="", *, world=8, start=0, end=SECOND, utc=True, **changes):
    rows = {} if start == 0 else {"collectives": Collectives()}
    about = a_rank(0, **({"rank": 0, "world_size": 8} | rows | changes))
    return Part(
        rank_batch=msgspec.structs.replace(about, rank=rank, world_size=world),
        start_ns=start,
        end_ns=end,
        path=Path(file or f"trace-{rank}"),
        utc=utc,
    )


def checked(*items, same=False):
    return list(agreed(items, job="job-9", same=NEVER[same]))


def ranks(items):
    return [item.rank_batch.rank for item in items if isinstance(item, Part)]


def notes(items):
    return [item.text for item in items if isinstance(item, Note)]


def test_parts_that_fit_pass_under_the_jobs_name():
    items = checked(part(0), part(3), part(0, start=SECOND, end=2 * SECOND))
    assert ranks(items) == [0, 3, 0]
    assert {item.rank_batch.job for item in items} == {"job-9"}


def test_a_rank_beyond_the_world_is_left_out_once_said_and_named():
    items = checked(*(part(rank) for rank in (0, 1, 2, 3, 12)), part(12, start=SECOND, end=2 * SECOND))
    assert ranks(items) == [0, 1, 2, 3]
    assert notes(items) == ["trace-12 is of rank 12, beyond a job of 8 ranks: it is left out"]


def test_world_sizes_that_differ_are_refused_and_both_files_named():
    with pytest.raises(Unusable, match=r"trace-1 is of a job of 16 ranks, trace-0 of one of 8: import"):
        checked(part(0), part(1, world=16))


def test_two_files_that_claim_one_rank_at_one_time_are_refused_and_both_named():
    with pytest.raises(Unusable, match=r"a\.json and b\.json both tell what rank 0 did at one time"):
        checked(part(0, "a.json"), part(1), part(0, "b.json", start=SECOND // 2))


def test_two_files_that_claim_one_rank_are_found_also_when_the_first_goes_on_later():
    with pytest.raises(Unusable, match=r"both tell what rank 0 did"):
        checked(
            part(0, "a", start=1, end=5),
            part(0, "b", start=10, end=20),
            part(0, "a", start=15, end=30),
        )


def test_a_rank_that_was_profiled_twice_one_after_the_other_is_fine():
    items = checked(part(0, "cycle-1"), part(0, "cycle-2", start=2 * SECOND, end=3 * SECOND))
    assert (ranks(items), notes(items)) == ([0, 0], [])


def test_a_copy_is_read_once_and_said():
    items = checked(
        part(0, "a"), part(0, "copy"), part(0, "copy", start=SECOND + 1, end=9 * SECOND), same=True
    )
    assert ranks(items) == [0]
    assert notes(items) == ["copy is the same as a: read once"]


def test_a_world_size_that_nobody_tells_is_that_of_the_rank_for_now():
    assert [item.rank_batch.world_size for item in checked(part(0, world=0), part(5, world=0))] == [1, 6]


def test_a_rank_beyond_a_world_that_is_told_later_is_refused():
    with pytest.raises(Unusable, match="trace-9 is of rank 9, beyond the job of 8 ranks of trace-1"):
        checked(part(9, world=0), part(1))


def test_a_part_reaches_over_all_its_instants():
    operations = Operations(
        names=["a"],
        kind=[0],
        lane=[0],
        step=[0],
        start_ns=[7 * SECOND],
        duration_ns=[1],
        seq=[0],
        micro_batch=[0],
        chunk=[0],
    )
    (only,) = checked(part(0, operations=operations))
    assert (only.start_ns, only.end_ns) == (0, 7 * SECOND)


def test_instants_without_a_date_are_said_once():
    items = checked(part(0, utc=False), part(1, utc=False))
    assert notes(items) == ["the files tell no date: instants are counted from 1970-01-01"]


def test_a_note_that_is_told_again_is_said_once():
    assert checked(Note("odd"), Note("odd"), Note("odd", rank=1)) == [Note("odd"), Note("odd", rank=1)]


@pytest.mark.parametrize(
    "changes",
    [
        {"communicators": []},
        {"start_ns": 1 << 70},
        {"communicators": [Communicator(uid="", desc="", rank=0, size=1 << 64)]},
    ],
)
def test_what_no_batch_may_hold_is_refused_with_its_file(changes):
    with pytest.raises(Unusable, match="trace-0: what it says of rank 0 cannot be used") as caught:
        checked(part(0, **changes))
    assert caught.value.path == Path("trace-0")
