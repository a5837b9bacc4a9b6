import errno
import os
import stat
from pathlib import Path

import pytest

from probes import codec, disk, spool
from probes.spool import MIN_BYTES, Counts, Spool, SpoolError, SpoolFull
from tests.probes.batches import a_batch

BLOCK = 4096


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "spool"


def put(spool, count=1):
    for _ in range(count):
        spool.put(a_batch(spool.next_seq, agent=spool.agent))


def fill(spool):
    """Put batches until one is given up; gives how many were kept."""
    for kept in range(10_000):
        try:
            put(spool)
        except SpoolFull:
            return kept
    raise AssertionError("the spool has no bound")


def killed(spool):
    """What a kill does: no close, no last save."""
    os.close(spool._guard)
    spool._guard = -1  # or it would close that number once more, which is another's by then


def on_disk(folder):
    """What du(1) says of the folder, in bytes."""
    return sum(path.lstat().st_blocks * 512 for path in [folder, *folder.rglob("*")])


def reopened(spool, folder, **options):
    spool.close()
    return Spool(folder, **options)


def failing(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_batch_that_is_too_large_to_send_is_given_up_and_the_next_is_kept(folder, monkeypatch):
    kept = Spool(folder)
    monkeypatch.setattr(codec, "MAX_PLAIN_BYTES", 100)
    with pytest.raises(SpoolError, match="is too large to send"):
        put(kept)
    monkeypatch.undo()
    put(kept)
    assert kept.pending() == [1]
    assert kept.untold() == Counts(dropped=1)


@pytest.mark.parametrize("where", ["bad", "refused"])
def test_words_that_a_power_cut_left_half_written_are_not_written_over(folder, where):
    kept = Spool(folder)
    put(kept)
    kept.refuse(0, "400")
    (folder / where / f"{7:020}.tmp").write_bytes(b"the server sa")
    again = reopened(kept, folder)
    assert not list((folder / where).glob("*.tmp"))
    assert again.next_seq == 8, "its number stays used"


def test_batches_come_back_oldest_first_and_as_they_were(folder):
    kept = Spool(folder)
    put(kept, 3)
    assert kept.pending() == [0, 1, 2]
    assert codec.decode(kept.read(1)) == a_batch(1, agent=kept.agent)
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
    killed(first)
    second = Spool(folder)
    assert (second.agent, second.next_seq, second.pending()) == (first.agent, 2, [0, 1])


def test_a_number_that_was_sent_is_not_given_again_after_a_kill(folder):
    first = Spool(folder)
    put(first, 3)
    for seq in (0, 1, 2):
        first.remove(seq)
    killed(first)
    second = Spool(folder)
    assert (second.agent, second.next_seq, second.pending()) == (first.agent, 3, [])
    put(second)
    second.remove(3)
    assert [path.name for path in folder.glob("*0*")] == ["00000000000000000003.sent"]


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


def test_a_write_that_was_cut_off_by_a_kill_is_set_aside_and_counted(folder):
    first = Spool(folder)
    put(first)
    killed(first)
    (folder / "00000000000000000001.tmp").write_bytes(codec.encode(a_batch(1))[:100])
    second = Spool(folder)
    assert [second.read(seq) is not None for seq in second.pending()] == [True, False]
    assert (second.pending(), second.next_seq, second.counts.bad) == ([0], 2, 1)
    assert list(folder.glob("*.tmp")) == []


def test_a_batch_whose_rename_was_lost_is_kept(folder):
    first = Spool(folder)
    killed(first)
    wire = codec.encode(a_batch(0))
    (folder / "00000000000000000000.tmp").write_bytes(wire)
    second = Spool(folder)
    assert (second.pending(), second.read(0), second.next_seq) == ([0], wire, 1)


@pytest.mark.parametrize("damage", [b"", b"noise", codec.encode(a_batch(1))[:-9]])
def test_a_damaged_file_is_set_aside_and_blocks_nothing(folder, damage):
    kept = Spool(folder)
    put(kept, 3)
    (folder / "00000000000000000001.batch").write_bytes(damage)
    assert [kept.read(seq) is not None for seq in kept.pending()] == [True, False, True]
    assert (kept.pending(), kept.counts.bad) == ([0, 2], 1)
    assert (folder / "bad" / "00000000000000000001.batch").read_bytes() == damage
    assert (folder / "bad" / "00000000000000000001.why").read_text()
    assert reopened(kept, folder).counts.bad == 1


def test_a_file_that_somebody_deleted_is_counted_and_blocks_nothing(folder):
    kept = Spool(folder)
    put(kept, 2)
    (folder / "00000000000000000000.batch").unlink()
    assert (kept.read(0), kept.pending(), kept.counts.bad) == (None, [1], 1)
    assert (kept.read(0), kept.counts.bad) == (None, 1)


def test_a_batch_that_cannot_be_read_now_stays(folder, monkeypatch):
    kept = Spool(folder)
    put(kept)
    with monkeypatch.context() as many:
        many.setattr(disk, "read", failing(errno.EMFILE))
        with pytest.raises(SpoolError, match="Too many open files"):
            kept.read(0)
    assert (kept.pending(), kept.counts.bad) == ([0], 0)
    assert kept.read(0)


def test_over_the_bound_the_newest_are_given_up_and_counted_and_the_oldest_stay(folder):
    kept = Spool(folder, max_bytes=MIN_BYTES)
    count = fill(kept)
    with pytest.raises(SpoolFull, match=r"full \(1 MB\): the newest batches are given up .*SYSOM_SPOOL_MB"):
        put(kept)
    assert kept.pending() == list(range(count))
    assert (kept.counts.dropped, kept.next_seq) == (2, count + 2)
    assert reopened(kept, folder, max_bytes=MIN_BYTES).counts.dropped == 2


def test_what_is_put_after_room_was_made_is_kept(folder):
    kept = Spool(folder, max_bytes=MIN_BYTES)
    count = fill(kept)
    kept.remove(0)
    put(kept)
    with pytest.raises(SpoolFull):
        put(kept)
    assert kept.pending() == [*range(1, count), count + 1]


def test_the_bound_is_of_the_disk_and_not_of_the_bytes_and_holds_for_everything(folder):
    kept = Spool(folder, max_bytes=MIN_BYTES)
    count = fill(kept)
    wire = len(codec.encode(a_batch(0, agent=kept.agent)))
    assert wire < BLOCK, "each takes a whole block"
    assert count > 0.9 * MIN_BYTES / BLOCK
    assert on_disk(folder) <= kept.size_bytes <= MIN_BYTES
    for seq in kept.pending()[: count // 2]:
        kept.refuse(seq, "400 not_a_batch: because")
        assert on_disk(folder) <= MIN_BYTES
    fill(kept)
    assert on_disk(folder) <= kept.size_bytes <= MIN_BYTES
    again = reopened(kept, folder, max_bytes=MIN_BYTES)
    assert on_disk(folder) <= again.size_bytes <= MIN_BYTES


@pytest.mark.parametrize("size", [-1, 0, MIN_BYTES - 1])
def test_a_spool_too_small_to_be_of_use_is_refused(folder, size):
    with pytest.raises(SpoolError, match=r"too small to be of use: give it 1 MB or more \(SYSOM_SPOOL_MB\)"):
        Spool(folder, max_bytes=size)
    assert not folder.exists()


def test_a_full_disk_is_a_typed_error_and_the_next_batch_goes_on(folder, monkeypatch):
    kept = Spool(folder)
    put(kept)
    with monkeypatch.context() as full:
        full.setattr(os, "write", failing(errno.ENOSPC))
        with pytest.raises(SpoolError, match=r"the disk under the spool .* is full: free some space"):
            put(kept)
    assert (kept.pending(), kept.counts.dropped, kept.next_seq) == ([0], 1, 2)
    put(kept)
    assert kept.pending() == [0, 2]
    assert list(folder.glob("*.tmp")) == []


def test_a_spool_opens_on_a_full_disk_and_takes_batches_once_there_is_room(folder, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(os, "write", failing(errno.ENOSPC))
        kept = Spool(folder)
        with pytest.raises(SpoolError, match="is full"):
            put(kept)
    put(kept)
    kept.settle(0.0)
    killed(kept)
    again = Spool(folder)
    assert (again.agent, again.pending(), again.counts.dropped) == (kept.agent, [1], 1)


def test_a_folder_that_vanished_is_made_anew(folder):
    kept = Spool(folder)
    put(kept, 2)
    folder.rename(folder.with_name("gone"))
    put(kept)
    assert [kept.read(seq) is not None for seq in kept.pending()] == [False, False, True]
    assert (kept.pending(), kept.counts) == ([2], Counts(bad=2))
    with pytest.raises(SpoolError, match="another agent uses"):
        Spool(folder)
    again = reopened(kept, folder)
    assert (again.agent, again.pending(), again.counts) == (kept.agent, [2], Counts(bad=2))


def test_what_is_set_aside_is_bounded(folder, monkeypatch):
    monkeypatch.setattr(spool, "MAX_ASIDE_BYTES", 5 * BLOCK)
    kept = Spool(folder)
    put(kept, 20)
    for seq in kept.pending():
        kept.refuse(seq, "400 not_a_batch: because")
    assert (kept.pending(), kept.counts.refused) == ([], 20)
    files = list((folder / "refused").iterdir())
    assert sum(path.stat().st_blocks * 512 for path in files) <= 5 * BLOCK
    assert (folder / "refused" / "00000000000000000019.why").read_text() == "400 not_a_batch: because"


def test_losses_are_told_when_a_batch_that_tells_them_is_kept_and_not_before(folder):
    kept = Spool(folder, max_bytes=MIN_BYTES)
    fill(kept)
    assert kept.untold() == Counts(dropped=1)
    with pytest.raises(SpoolFull):
        kept.put(a_batch(kept.next_seq, agent=kept.agent), tells=kept.untold())
    assert kept.untold() == Counts(dropped=2)
    kept.refuse(0, "400")
    again = reopened(kept, folder, max_bytes=MIN_BYTES)
    assert again.untold() == Counts(dropped=2, refused=1)
    for seq in (1, 2):
        again.remove(seq)
    again.put(a_batch(again.next_seq, agent=again.agent), tells=again.untold())
    assert again.untold() == Counts()
    assert reopened(again, folder, max_bytes=MIN_BYTES).untold() == Counts()


def batch_name(seq):
    return f"{seq:020}.batch"


def test_a_batch_that_the_server_has_and_whose_file_cannot_be_deleted_is_not_sent_again(folder, monkeypatch):
    kept = Spool(folder)
    put(kept, 2)
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "unlink", failing(errno.EROFS))
        with pytest.raises(SpoolError, match="Read-only file system"):
            kept.remove(0)
    assert kept.pending() == [1]
    assert (folder / batch_name(0)).exists()
    kept.settle(0.0)
    assert not (folder / batch_name(0)).exists()


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
