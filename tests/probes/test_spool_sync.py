"""When the spool waits for the disk, for what, and that the watching thread never does."""

import errno
import os
import threading
from pathlib import Path

import pytest

from probes import spool
from probes.spool import MIN_BYTES, Counts, Spool, SpoolError, SpoolFull
from tests.probes.test_spool import batch_name, fill, killed, put


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "spool"


class Syncs:
    """What is fsynced, by name; ``hold`` makes the disk hang."""

    def __init__(self, monkeypatch):
        self.names = []
        self.hold = threading.Event()
        self.hold.set()
        self.reached = threading.Event()
        real = os.fsync

        def fsync(file):
            self.names.append(Path(f"/proc/self/fd/{file}").readlink().name)
            self.reached.set()
            assert self.hold.wait(30)
            real(file)

        monkeypatch.setattr(os, "fsync", fsync)

    def taken(self):
        names, self.names = self.names, []
        return names


def test_a_batch_that_is_sent_at_once_is_never_fsynced(folder, monkeypatch):
    kept = Spool(folder)
    syncs = Syncs(monkeypatch)
    for second in range(30):
        put(kept)
        kept.remove(second)
        kept.settle(float(second))
    assert syncs.taken() == []


def test_batches_that_wait_are_fsynced_in_groups_then_the_folder(folder, monkeypatch):
    kept = Spool(folder)
    syncs = Syncs(monkeypatch)
    put(kept, 3)
    kept.settle(10.0)
    assert syncs.taken() == [batch_name(2), batch_name(1), batch_name(0), folder.name]
    put(kept)
    kept.settle(19.9)
    assert syncs.taken() == []
    kept.settle(20.0)
    assert syncs.taken() == [batch_name(3), folder.name]
    kept.settle(30.0)
    assert syncs.taken() == []


def test_a_backlog_is_fsynced_a_part_at_a_time_the_newest_first(folder, monkeypatch):
    monkeypatch.setattr(spool, "SYNC_MOST", 4)
    first = Spool(folder)
    put(first, 7)
    killed(first)
    kept = Spool(folder)
    syncs = Syncs(monkeypatch)
    kept.settle(0.0)
    assert syncs.taken() == [*map(batch_name, (6, 5, 4, 3)), folder.name]
    kept.settle(10.0)
    assert syncs.taken() == [*map(batch_name, (2, 1, 0)), folder.name]


def test_counts_are_made_safe_too(folder, monkeypatch):
    kept = Spool(folder, max_bytes=MIN_BYTES)
    fill(kept)
    kept.settle(0.0)
    with pytest.raises(SpoolFull):
        put(kept)
    syncs = Syncs(monkeypatch)
    for now in range(100, 1000, 10):
        kept.settle(float(now))
    names = syncs.taken()
    assert (names.count("state.tmp"), names[0]) == (1, batch_name(kept.pending()[-65]))
    killed(kept)
    assert Spool(folder).counts.dropped == 2


def test_putting_waits_neither_for_the_disk_nor_for_the_thread_that_does(folder, monkeypatch):
    kept = Spool(folder)
    put(kept)
    syncs = Syncs(monkeypatch)
    syncs.hold.clear()
    settling = threading.Thread(target=kept.settle, args=(0.0,))
    settling.start()
    assert syncs.reached.wait(30)
    putting = threading.Thread(target=put, args=(kept, 50))
    putting.start()
    putting.join(30)
    assert not putting.is_alive()
    assert settling.is_alive()
    assert (len(kept.pending()), kept.counts) == (51, Counts())
    syncs.hold.set()
    settling.join()


def test_a_file_that_cannot_be_fsynced_does_not_keep_the_others_from_it(folder, monkeypatch):
    kept = Spool(folder)
    put(kept, 3)
    names = []

    def fsync(file):
        names.append(Path(f"/proc/self/fd/{file}").readlink().name)
        if names[-1] == batch_name(2):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SpoolError, match="Input/output error"):
        kept.settle(0.0)
    assert names == [*map(batch_name, (2, 1, 0)), folder.name]
    assert kept.pending() == [0, 1, 2]
