import errno
import os
import stat
from pathlib import Path

import pytest

from probes import records, spool
from probes.spool import Spool, SpoolError
from tests.probes.batches import a_batch


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "spool"


def put(spool, count=1):
    for _ in range(count):
        spool.put(a_batch(spool.next_seq, agent=spool.agent))


def reopened(spool, folder, **options):
    spool.close()
    return Spool(folder, **options)


def a_full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_batches_come_back_oldest_first_and_as_they_were(folder):
    kept = Spool(folder)
    put(kept, 3)
    assert kept.pending() == [0, 1, 2]
    assert records.decode(kept.read(1)) == a_batch(1, agent=kept.agent)
    kept.remove(0)
    assert (kept.pending(), kept.read(0)) == ([1, 2], None)


def test_a_restart_keeps_agent_numbers_batches_and_counts(folder):
    first = Spool(folder)
    put(first, 3)
    for seq in (0, 1, 2):
        first.remove(seq)
    put(first)
    first.refuse(3, "409 other_schema")
    put(first)
    second = reopened(first, folder)
    assert (second.agent, second.next_seq, second.pending()) == (first.agent, 5, [4])
    assert second.counts.refused == 1


def test_an_agent_that_is_killed_has_used_up_its_numbers(folder):
    first = Spool(folder)
    put(first, 2)
    os.close(first._guard)  # what a kill does: no close, no last save
    second = Spool(folder)
    assert (second.agent, second.next_seq, second.pending()) == (first.agent, 2, [0, 1])


def test_a_lost_folder_is_another_agent(folder, tmp_path):
    first, second = Spool(folder), Spool(tmp_path / "other")
    assert first.agent != second.agent


def test_a_state_that_cannot_be_read_is_another_agent_after_the_numbers_on_disk(folder):
    first = Spool(folder)
    put(first, 3)
    first.close()
    (folder / "state.json").write_text('{"agent": "x", "next_')
    second = Spool(folder)
    assert second.agent != first.agent
    assert (second.next_seq, second.pending(), second.counts.bad) == (3, [0, 1, 2], 1)
    assert (folder / "bad" / "state.json").exists()


def test_a_state_older_than_the_files_does_not_give_a_number_twice(folder):
    first = Spool(folder)
    put(first)
    older = (folder / "state.json").read_bytes()
    put(first, 2)
    first.close()
    (folder / "state.json").write_bytes(older)
    assert Spool(folder).next_seq == 3


def test_a_write_that_was_cut_off_by_a_kill_is_cleared_away(folder):
    first = Spool(folder)
    put(first)
    first.close()
    (folder / "00000000000000000001.tmp").write_bytes(records.encode(a_batch(1))[:100])
    second = Spool(folder)
    assert (second.pending(), second.next_seq, second.counts.bad) == ([0], 1, 0)
    assert list(folder.glob("*.tmp")) == []


@pytest.mark.parametrize("damage", [b"", b"noise", records.encode(a_batch(1))[:-9]])
def test_a_damaged_file_is_set_aside_and_blocks_nothing(folder, damage):
    kept = Spool(folder)
    put(kept, 3)
    (folder / "00000000000000000001.batch").write_bytes(damage)
    assert [kept.read(seq) is not None for seq in kept.pending()] == [True, False, True]
    assert (kept.pending(), kept.counts.bad) == ([0, 2], 1)
    assert (folder / "bad" / "00000000000000000001.batch").read_bytes() == damage
    assert (folder / "bad" / "00000000000000000001.why").read_text()
    assert reopened(kept, folder).counts.bad == 1


def test_over_the_limit_the_oldest_go_and_are_counted(folder):
    size = len(records.encode(a_batch(0, agent="0" * 16)))
    kept = Spool(folder, max_bytes=4 * size)
    put(kept, 10)
    assert kept.pending()[-1] == 9
    assert kept.size_bytes <= 4 * size
    assert kept.counts.dropped == 10 - len(kept.pending())
    assert kept.size_bytes == sum(path.stat().st_size for path in folder.glob("*.batch"))
    assert reopened(kept, folder, max_bytes=4 * size).counts == kept.counts


def test_a_full_disk_is_a_typed_error_and_the_next_batch_goes_on(folder, monkeypatch):
    kept = Spool(folder)
    put(kept)
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", a_full_disk)
        with pytest.raises(SpoolError, match=r"the disk under the spool .* is full: free some space"):
            put(kept)
    assert (kept.pending(), kept.counts.dropped, kept.next_seq) == ([0], 1, 2)
    put(kept)
    assert kept.pending() == [0, 2]
    assert list(folder.glob("*.tmp")) == []


def test_a_disk_that_filled_up_never_makes_a_number_come_twice(folder, monkeypatch):
    kept = Spool(folder)
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", a_full_disk)
        with pytest.raises(SpoolError):
            put(kept)
    os.close(kept._guard)
    # Number 0 was never written nor sent: it may be given again, and nothing else.
    again = Spool(folder)
    assert (again.agent, again.next_seq, again.pending()) == (kept.agent, 0, [])


def test_what_is_set_aside_is_bounded(folder, monkeypatch):
    monkeypatch.setattr(spool, "MAX_ASIDE_BYTES", 3000)
    kept = Spool(folder)
    put(kept, 20)
    for seq in kept.pending():
        kept.refuse(seq, "400 not_a_batch: because")
    assert (kept.pending(), kept.counts.refused) == ([], 20)
    files = list((folder / "refused").iterdir())
    assert sum(path.stat().st_size for path in files) <= 3000
    assert (folder / "refused" / "00000000000000000019.why").read_text() == "400 not_a_batch: because"


def test_only_its_owner_may_read_it(folder):
    kept = Spool(folder)
    put(kept)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "00000000000000000000.batch").stat().st_mode) == 0o600


def test_two_agents_cannot_use_one_folder(folder):
    first = Spool(folder)
    with pytest.raises(SpoolError, match="another agent uses the spool"):
        Spool(folder)
    first.close()
    Spool(folder).close()


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match="cannot be used"):
        Spool(tmp_path / "file" / "spool")


@pytest.mark.parametrize("changes", [{"seq": 5}, {"agent": "other"}])
def test_a_batch_of_another_agent_or_number_is_not_taken(folder, changes):
    kept = Spool(folder)
    with pytest.raises(ValueError, match="expects batch 0 of agent"):
        kept.put(a_batch(0, **{"agent": kept.agent} | changes))
