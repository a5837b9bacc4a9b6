"""A disk that is full, or soon will be: a real file system of a few MB."""

import os
import sqlite3
import subprocess
from contextlib import closing

import pytest

from diagnosis.store import Keep, StoreError, rows
from diagnosis.store.health import Growth, amount, disk_warning, duration, wal_warning
from diagnosis.store.sqlite import SqliteStore
from tests.diagnosis.store.arrivals import add
from tests.probes.batches import a_batch, a_rank, utc


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for 3 MB, and what makes it larger."""
    if os.geteuid():
        pytest.skip("needs root to mount a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # whatever a failed test still holds


def enlarge(folder):
    subprocess.run(["mount", "-o", "remount,size=40m", folder], check=True)


def fill(folder, *, but=0):
    """Another file takes what the disk has left."""
    disk = os.statvfs(folder)
    other = folder / "another file"
    other.write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - but)))
    return other


def large(second):
    return a_batch(second, ranks=[a_rank(second, rank=rank, env={"RANK": "0" * 300}) for rank in range(4)])


def test_minutes_that_could_not_be_packed_are_packed_by_the_next_tidying_and_no_warning_stays(
    tmp_path, monkeypatch
):
    """Also of an agent that never sends again."""

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    store = SqliteStore(tmp_path / "sysom.db", keep=Keep(10_000, 1))
    with monkeypatch.context() as patch:
        patch.setattr(rows, "pack_minute", full)
        add(store, large(0), large(61))
    assert [words for words in store.health().warnings if "disk is full" in words]
    store.tidy(utc(62))
    assert store.health().warnings == []
    with closing(sqlite3.connect(tmp_path / "sysom.db")) as db:
        assert db.execute("SELECT count(*) FROM chunk").fetchone() >= (4,)
    store.close()


def add_until_full(store, seconds):
    """The seconds whose batches were acknowledged before the disk was full, and what was said then."""
    stored = []
    for second in seconds:
        try:
            assert add(store, large(second)) == [True]
        except StoreError as error:
            return stored, str(error)
        stored.append(second)
    raise AssertionError("the disk was never full")


def seconds_in(path):
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [seq for (seq,) in db.execute("SELECT seq FROM batch ORDER BY seq")]


def test_on_a_disk_that_the_store_fills_everything_acknowledged_stays_and_the_rest_comes_later(small_disk):
    path = small_disk / "store" / "sysom.db"
    store = SqliteStore(path, keep=Keep(14, 20))
    stored, words = add_until_full(store, range(10_000))
    assert f"the disk under the store {path} is full: free some space; agents keep what they have" in words
    assert len(stored) > 20
    health = store.health()
    assert health.free_bytes < 100_000
    assert words in health.warnings
    assert seconds_in(path) == stored
    assert len(store.evidence("job-1", 0, utc(10_000)).ranks) == 4  # reading needs no room
    enlarge(small_disk)
    retried = [*stored, len(stored)]
    assert add(store, *map(large, retried)) == [False] * len(stored) + [True]
    assert words not in store.health().warnings
    store.close()
    assert seconds_in(path) == retried


def test_a_disk_that_others_fill_is_said_and_room_is_used_as_soon_as_there_is_some(small_disk):
    path = small_disk / "sysom.db"
    store = SqliteStore(path, keep=Keep(14, 20))
    assert add(store, large(0)) == [True]
    other = fill(small_disk)
    stored, _ = add_until_full(store, range(1, 1000))
    other.unlink()
    assert add(store, *map(large, range(5 + len(stored))))[-4:] == [True] * 4
    store.close()
    assert seconds_in(path) == list(range(5 + len(stored)))


def test_a_log_that_cannot_be_brought_into_the_file_loses_nothing(small_disk):
    """The write-ahead log is full of batches, and the file has no room to grow by them."""
    enlarge(small_disk)
    path = small_disk / "sysom.db"
    store = SqliteStore(path)
    assert all(add(store, *map(large, range(60))))
    held = sqlite3.connect(path)
    held.execute("BEGIN")
    held.execute("SELECT count(*) FROM batch").fetchone()  # keeps the log from being brought in
    more = 60
    while store.health().wal_bytes < 8_000_000:
        assert add(store, large(more)) == [True]
        more += 1
    other = fill(small_disk)
    held.close()
    stored, _ = add_until_full(store, range(more, more + 10_000))
    store.close()
    other.unlink()
    assert seconds_in(path) == list(range(more + len(stored)))
    again = SqliteStore(path, keep=Keep(14, 20))
    assert add(again, large(0), large(20_000)) == [False, True]
    again.close()


def test_a_store_on_a_full_disk_is_not_opened_and_opens_once_there_is_room(small_disk):
    path = small_disk / "sysom.db"
    store = SqliteStore(path)
    add(store, large(0))
    store.close()
    other = fill(small_disk)
    with pytest.raises(StoreError, match=r"the disk|no room") as error:
        SqliteStore(path, keep=Keep(14, 20)).close()
    assert str(path) in str(error.value)
    other.unlink()
    again = SqliteStore(path, keep=Keep(14, 20))
    assert add(again, large(0), large(1)) == [False, True]
    again.close()


# --- before it is full

GB = 1_000_000_000


def test_a_disk_with_room_for_all_that_is_kept_is_no_matter():
    assert disk_warning("/data", 30 * GB, 3 * GB, 1e6, Keep(14, 20)) is None
    assert disk_warning("/data", 5 * GB, 3 * GB, 0, Keep(14, 20)) is None  # nothing is growing


def test_a_disk_that_will_be_full_first_is_said_with_the_time_that_is_left():
    words = disk_warning("/data", int(1.2 * GB), 3 * GB, 1.2 * GB / (5.5 * 3600), Keep(14, 20))
    assert words == (
        "the disk under /data has 1.2 GB left, at the present rate for 5 hours: free some space, or lower "
        "SYSOM_KEEP_GB (now 20; 3.0 GB are used); when it is full, agents keep what they have, and drop their "
        "oldest once their spools are full"
    )
    assert disk_warning("/data", 15 * GB, 3 * GB, 15 * GB / 86_400, Keep(14, 20))
    assert disk_warning("/data", 15 * GB, 3 * GB, 15 * GB / (4 * 86_400), Keep(14, 20)) is None


def test_a_disk_that_is_nearly_full_is_said_whoever_fills_it():
    words = disk_warning("/data", 300_000_000, 3 * GB, 0, Keep(14, 20))
    assert words is not None
    assert "has 300 MB left: free some space" in words


def test_growth_is_what_came_whatever_went():
    growth, minute = Growth(), 60 * 10**9
    growth.measured(0, 100_000)
    growth.deleted(100_000)
    assert growth.bytes_per_s == 0
    growth.measured(minute, 160_000)
    assert growth.bytes_per_s == 1000
    growth.deleted(10_000)
    growth.measured(2 * minute, 70_000)
    assert growth.bytes_per_s == 1000
    growth.measured(minute, 70_000)  # the clock was set back
    assert growth.bytes_per_s == 0


def test_growth_is_that_of_the_last_hour():
    growth, minute = Growth(), 60 * 10**9
    for number in range(200):
        growth.measured(number * minute, number * 6_000_000 if number < 100 else 100 * 6_000_000)
    assert growth.bytes_per_s == 0


def test_a_write_ahead_log_without_end_is_said():
    assert wal_warning("/data/sysom.db", 100_000_000) is None
    words = wal_warning("/data/sysom.db", 300_000_000)
    assert words is not None
    assert words.startswith("the write-ahead log /data/sysom.db-wal has grown to 300 MB: something reads")


def test_sizes_and_times_are_said_in_three_digits():
    assert [amount(size) for size in (12, 1500, 25_000_000, 123_400_000, 1_230_000_000)] == [
        "12 bytes",
        "1.5 kB",
        "25.0 MB",
        "123 MB",
        "1.2 GB",
    ]
    assert [duration(s) for s in (59, 60, 7300, 200_000)] == [
        "less than a minute",
        "1 minute",
        "2 hours",
        "2 days",
    ]
