"""The file behind the store: opened, shared, full, locked, damaged, and not ours."""

import sqlite3
import threading
from pathlib import Path

import msgspec
import pytest
import zstandard
from sqlite_utils import Database

from diagnosis.evidence import Evidence
from diagnosis.store import StoreError, open_store, seconds
from diagnosis.store.migrations import APPLICATION_ID, MIGRATIONS
from diagnosis.store.sqlite import SqliteStore
from tests.diagnosis.store import older
from tests.diagnosis.store.arrivals import add
from tests.probes.batches import OFFSET, SECOND, WORLD, a_batch, a_rank, utc


def test_a_store_that_was_closed_goes_on_where_it_was(store, path):
    add(store, a_batch(3))
    store.close()
    again = open_store(f"sqlite://{path}")
    assert add(again, a_batch(3), a_batch(4)) == [False, True]
    again.close()


def test_reading_does_not_need_the_writer_and_never_writes(store, path):
    add(store, a_batch(3))
    reader = open_store(f"sqlite://{path}", read_only=True)
    assert list(reader.evidence("job-1", utc(0), utc(10)).ranks) == [0]
    add(store, a_batch(4))
    assert len(reader.evidence("job-1", utc(0), utc(10)).ranks[0].collectives.seq) == 4
    with pytest.raises(StoreError, match="reading only"):
        add(reader, a_batch(5))
    reader.close()


def test_a_store_that_is_not_there_yet_is_not_made_by_reading(path):
    with pytest.raises(StoreError, match="start the server"):
        SqliteStore(path, read_only=True)
    assert not path.exists()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_is_not_ours_is_left_alone(tmp_path, read_only):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be read as the header of one\n" * 20)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE theirs (a)")
    before = {path: path.read_bytes() for path in (text, foreign)}
    for path in before:
        with pytest.raises(StoreError, match="is not a store of sysom"):
            SqliteStore(path, read_only=read_only)
        assert path.read_bytes() == before[path]


def test_a_store_of_a_newer_version_says_so(store, path):
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    for read_only in (False, True):
        with pytest.raises(StoreError, match="schema 99; this version knows up to 6: upgrade sysom"):
            SqliteStore(path, read_only=read_only)


@pytest.mark.parametrize("url", ["", "sqlite:///", "mysql://x", "sqlite:relative", "clickhouse://h:1/d"])
def test_an_address_that_names_no_store_says_what_one_looks_like(url):
    with pytest.raises(StoreError, match=r"sqlite:///path/to/file\.db"):
        open_store(url)


def test_a_full_disk_stores_nothing_by_halves_and_is_said(store):
    add(store, a_batch(0))
    pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
    store._writer.execute(f"PRAGMA max_page_count = {pages}")
    big = a_batch(1, ranks=[a_rank(1, rank=rank, env={"RANK": "x" * 9000}) for rank in range(4)])
    with pytest.raises(StoreError, match=r"disk under the store .* is full: free some space"):
        add(store, big)
    assert len(store.evidence("job-1", utc(0), utc(10)).ranks) == 1
    store._writer.execute("PRAGMA max_page_count = 1000000")
    assert add(store, big) == [True]
    assert len(store.evidence("job-1", utc(0), utc(10)).ranks) == 4


def test_a_batch_that_fails_halfway_is_not_there_at_all(store, path, monkeypatch):
    batch = a_batch(1, ranks=[a_rank(1, rank=rank) for rank in range(3)])
    packed, pack = [], seconds.pack

    def fails_at_the_third(*arguments):
        packed.append(arguments)
        if len(packed) == 3:
            raise OSError(5, "Input/output error")
        return pack(*arguments)

    monkeypatch.setattr(seconds, "pack", fails_at_the_third)
    with pytest.raises(StoreError, match="Input/output error"):
        add(store, batch)
    with sqlite3.connect(path) as db:
        for table in ("boot", "sender", "batch", "watch", "tail"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    monkeypatch.undo()
    assert add(store, batch) == [True]


def test_a_file_that_another_process_holds_is_said(store, path):
    store._writer.execute("PRAGMA busy_timeout = 1")
    other = sqlite3.connect(path)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another process is writing"):
        add(store, a_batch(0))
    other.rollback()
    other.close()
    assert add(store, a_batch(0)) == [True]


def test_a_file_that_may_not_be_written_is_said(store):
    store._writer.execute("PRAGMA query_only = 1")
    with pytest.raises(StoreError, match="cannot be written: give this user the right"):
        add(store, a_batch(0))


def without_bytes(db):
    return b"\0"


def cut_short(db):
    (blob,) = db.execute("SELECT columns FROM chunk").fetchone()
    packed = msgspec.msgpack.decode(zstandard.decompress(blob))
    steps = packed[5][2]
    steps[2] = steps[2][:-1]  # one byte of the differences that take four
    return zstandard.compress(msgspec.msgpack.encode(packed))


def of_unequal_length(db):
    (blob,) = db.execute("SELECT columns FROM chunk").fetchone()
    packed = msgspec.msgpack.decode(zstandard.decompress(blob))
    packed[1][0] += 1  # the first table says that it has a row more
    return zstandard.compress(msgspec.msgpack.encode(packed))


def naming_a_type_that_is_not_there(db):
    (blob,) = db.execute("SELECT columns FROM chunk").fetchone()
    packed = msgspec.msgpack.decode(zstandard.decompress(blob))
    packed[2] = []
    return zstandard.compress(msgspec.msgpack.encode(packed))


def of_a_thread_of_no_role(db):
    (blob,) = db.execute("SELECT columns FROM chunk").fetchone()
    packed = msgspec.msgpack.decode(zstandard.decompress(blob))
    packed[3][0][1] = 99
    return zstandard.compress(msgspec.msgpack.encode(packed))


@pytest.mark.parametrize(
    "damaged",
    [without_bytes, cut_short, of_unequal_length, naming_a_type_that_is_not_there, of_a_thread_of_no_role],
)
def test_damaged_columns_are_said(store, path, damaged):
    add(store, *[a_batch(second) for second in range(61)])
    with sqlite3.connect(path) as db:
        db.execute("UPDATE chunk SET columns = ?", (damaged(db),))
    with pytest.raises(StoreError, match=r"damaged columns .*: restore it from a copy"):
        store.evidence("job-1", utc(0), utc(10))


def test_a_store_in_a_folder_that_may_not_be_read_is_said(path, monkeypatch):
    def refused(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refused)
    with pytest.raises(
        StoreError, match=r"cannot be opened \(Permission denied\): check that this user may read"
    ):
        SqliteStore(path, read_only=True)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_store_of_an_older_version_is_brought_up_to_date(tmp_path, version):
    path = tmp_path / "old.db"
    db = Database(sqlite3.connect(path))
    for step in MIGRATIONS[:version]:
        step(db)
    pack = msgspec.msgpack.encode
    clock = [
        "boot-1",
        4 * SECOND,
        OFFSET,
        *([0] if version == 1 else []),
        pack([]),
        *([""] if version > 3 else []),
    ]
    db.execute(f"INSERT INTO boot VALUES (1, 'node-a', ?, {', '.join('?' * (len(clock) - 1))})", clock)
    db.execute("INSERT INTO sender (id, boot, agent) VALUES (1, 1, 'agent-1')")
    db.execute("INSERT INTO batch VALUES (1, 3, ?, ?, ?, ?, NULL)", (3 * SECOND, 4 * SECOND, OFFSET, utc(4)))
    count_or_run = "communicator_count" if version < 3 else "run"
    db.execute(
        "INSERT INTO watch (id, job, rank, sender, pid, life_ns, world_size, local_rank, name, env,"
        f" communicators, {count_or_run}, communicators_ns, first_ns, last_ns, ended)"
        " VALUES (1, 'job-1', 0, 1, 100, 0, 4, 0, 'python', ?, ?, ?, ?, ?, ?, 0)",
        (pack({}), pack([WORLD]), int(version < 3), 4 * SECOND, 3 * SECOND, 4 * SECOND),
    )
    db.execute(
        "INSERT INTO tail VALUES (1, 1, 1, 0, ?, ?, ?)",
        (3 * SECOND, 4 * SECOND, older.second(3 * SECOND, 4 * SECOND, a_rank(3))),
    )
    minute = older.minute([SECOND, 2 * SECOND], [50, 30])
    db.execute("INSERT INTO chunk VALUES (1, 1, 0, 0, ?, ?)", (2 * SECOND, minute))
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {version}")
    db.conn.commit()
    db.close()
    with pytest.raises(StoreError, match="older than 6: start the server of this version once"):
        SqliteStore(path, read_only=True)
    again = SqliteStore(path)
    assert add(again, a_batch(3), a_batch(4)) == [False, True]
    rank = again.evidence("job-1", utc(0), utc(10)).ranks[0]
    assert (rank.collectives.seq.tolist(), rank.communicators) == ([6, 7, 8, 9], [WORLD])
    assert (rank.source, rank.timed_by, rank.operations, rank.progress) == ("agent", 0, None, [])
    (thread,) = rank.threads
    assert thread.at_ns.tolist()[:3] == [utc(1), utc(2), utc(3.25)]
    assert (thread.running_ns.tolist()[:2], thread.stolen_ns.tolist()[:2]) == ([50, 30], [7, 7])
    again.close()
    with sqlite3.connect(path) as raw:  # it can shrink, as files of this version can
        assert raw.execute("PRAGMA auto_vacuum").fetchone() == (2,)
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_closed_store_says_so(store):
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.jobs()
    with pytest.raises(StoreError, match="is closed"):
        add(store, a_batch(1))


def test_several_threads_may_write_and_read(store):
    added, faults = [], []
    seen: list[Evidence] = []
    add(store, a_batch(0))

    def work(node):
        try:
            for second in range(1, 30):
                added.extend(add(store, a_batch(second, node=node), a_batch(second, node="node-a")))
                seen.append(store.evidence("job-1", utc(0), utc(30)))
        except Exception as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(f"node-{name}",)) for name in "bcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert added.count(True) == 3 * 29 + 29
    assert len(seen) == 3 * 29
