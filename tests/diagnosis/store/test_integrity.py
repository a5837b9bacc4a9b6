"""Files that are damaged: said before anything is written to them."""

import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from diagnosis.store import Keep, StoreError, integrity
from diagnosis.store.sqlite import SqliteStore
from tests.diagnosis.store.arrivals import add
from tests.probes.batches import a_batch, utc

KEEP = Keep(14, 20)
PAGE = 4096


@pytest.fixture
def written(path):
    """A closed store of some 40 pages."""
    store = SqliteStore(path)
    store._writer.execute("PRAGMA synchronous = OFF")
    add(store, *[a_batch(second) for second in range(150)])
    store.close()
    return path


def overwrite(path, page, content, offset=0):
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE + offset)
        file.write(content)


def root_page(path, table):
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]


def zeros_in_a_table(path):
    overwrite(path, root_page(path, "tail"), bytes(PAGE))


def noise_in_an_index(path):
    overwrite(path, root_page(path, "batch_time"), b"\xa5" * 200, offset=0)


def cut_off(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [zeros_in_a_table, noise_in_an_index, cut_off])
def test_a_damaged_file_is_refused_and_left_as_it_is(written, damage):
    damage(written)
    before = written.read_bytes()
    with pytest.raises(StoreError, match=r"the store .* is damaged.* restore it from a copy, or move it"):
        SqliteStore(written, keep=KEEP)
    assert written.read_bytes() == before


def test_a_sound_file_is_ok(written):
    store = SqliteStore(written, keep=KEEP)
    assert store.health().integrity == "ok"
    store.close()


def test_a_large_file_is_checked_beside_the_work_and_its_damage_stops_writing(written, monkeypatch):
    monkeypatch.setattr(integrity, "AT_ONCE_BYTES", 0)
    may_go_on = threading.Event()
    quick = integrity.quick

    def later(db):
        may_go_on.wait()
        return quick(db)

    monkeypatch.setattr(integrity, "quick", later)
    zeros_in_a_table(written)
    store = SqliteStore(written, keep=KEEP)
    assert store.health().integrity == "checking"
    may_go_on.set()
    store._check._thread.join()
    before = written.read_bytes()
    assert "malformed" in store.health().integrity
    for write in (lambda: add(store, a_batch(1000)), lambda: store.tidy(utc(10**9))):
        with pytest.raises(StoreError, match="is damaged"):
            write()
    store.close()
    assert written.read_bytes() == before


def test_closing_ends_a_check_that_runs(written, monkeypatch):
    monkeypatch.setattr(integrity, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(integrity, "STEPS_BETWEEN", 1)
    runs = threading.Event()

    def without_end(db):
        runs.set()
        return db.execute(
            "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
        ).fetchall()

    monkeypatch.setattr(integrity, "quick", without_end)
    store = SqliteStore(written, keep=KEEP)
    runs.wait()
    store.close()
    assert store._check.result == "unchecked"


def test_garbage_in_the_write_ahead_log_is_no_batch(path, tmp_path):
    """As after a power cut: what follows the last whole transaction is ignored."""
    store = SqliteStore(path)
    add(store, *[a_batch(second) for second in range(20)])
    copy = tmp_path / "copy.db"
    shutil.copy(path, copy)
    wal = tmp_path / "copy.db-wal"
    shutil.copy(f"{path}-wal", wal)
    store.close()
    with wal.open("ab") as file:
        file.write(b"\xa5" * 10_000)
    again = SqliteStore(copy, keep=KEEP)
    assert add(again, *[a_batch(second) for second in range(21)]) == [False] * 20 + [True]
    again.close()


def test_a_write_ahead_log_that_was_torn_gives_whole_batches(path, tmp_path):
    store = SqliteStore(path)
    add(store, *[a_batch(second) for second in range(20)])
    copy, wal = tmp_path / "copy.db", tmp_path / "copy.db-wal"
    shutil.copy(path, copy)
    content = Path(f"{path}-wal").read_bytes()
    store.close()
    wal.write_bytes(content[: len(content) - 5 * PAGE] + b"\xa5" * PAGE)
    again = SqliteStore(copy, keep=KEEP)
    with closing(sqlite3.connect(copy)) as db:
        kept = [seq for (seq,) in db.execute("SELECT seq FROM batch ORDER BY seq")]
    assert kept == list(range(len(kept)))
    assert 10 < len(kept) < 20
    assert len(again.evidence("job-1", utc(0), utc(60)).ranks[0].collectives.seq) == 2 * len(kept)
    again.close()


def test_an_emptied_file_beside_its_log_is_not_started_anew(path, tmp_path):
    store = SqliteStore(path)
    add(store, a_batch(0))
    copy, wal = tmp_path / "copy.db", tmp_path / "copy.db-wal"
    copy.touch()
    shutil.copy(f"{path}-wal", wal)
    store.close()
    before = wal.read_bytes()
    with pytest.raises(StoreError, match="is empty, and its write-ahead log is not"):
        SqliteStore(copy, keep=KEEP)
    assert wal.read_bytes() == before


def test_minutes_that_cannot_be_packed_are_said_and_stop_no_batch(store, path):
    add(store, *[a_batch(second) for second in range(10)])
    with sqlite3.connect(path) as db:
        db.execute("UPDATE tail SET columns = x'00' WHERE id = 1")
    assert add(store, *[a_batch(second) for second in range(60, 70)]) == [True] * 10
    assert any("damaged columns" in words for words in store.health().warnings)
    assert len(store.evidence("job-1", utc(60), utc(70)).ranks[0].collectives.seq) == 20
