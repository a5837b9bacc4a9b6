"""`sysom store`: what is in the store, and whether it is sound."""

import json
import os
import sqlite3
from contextlib import closing

import pytest
from click.testing import CliRunner

from bot import cli
from bot.housekeeping import stats_text
from diagnosis.store import Keep
from diagnosis.store import stats as counting
from diagnosis.store.sqlite import SqliteStore
from tests.diagnosis.store.arrivals import add
from tests.probes.batches import SECOND, a_batch, a_rank, utc

GB = 1_000_000_000
DAY_NS = 86_400 * SECOND


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """No setting of the machine's reaches a test; the state folder is an empty one."""
    for name in list(os.environ):
        if name.startswith(("SYSOM_", "SLACK_")):
            monkeypatch.delenv(name)
    config = tmp_path / "sysom.toml"
    config.write_text("")
    monkeypatch.setenv("SYSOM_CONFIG", str(config))
    monkeypatch.setenv("SYSOM_STATE", str(tmp_path / "state"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "sysom.db"


@pytest.fixture
def store(path):
    """Two minutes of two nodes with two ranks each, and of one more job on one of them."""
    store = SqliteStore(path)
    store._writer.execute("PRAGMA synchronous = OFF")
    for second in range(120):
        for node, first in (("node-a", 0), ("node-b", 2)):
            ranks = [a_rank(second, rank=first + place) for place in range(2)]
            more = [a_rank(second, job="job-2")] if node == "node-b" else []
            add(store, a_batch(second, node=node, ranks=[*ranks, *more]))
    yield store
    store.close()


def ran(*arguments):
    return CliRunner().invoke(cli.main, arguments, prog_name="sysom")


def test_statistics_are_counted_while_the_store_is_in_use(store, path):
    found = json.loads(ran("store", "stats", "--json").output)
    assert (found["jobs"], found["nodes"], found["ranks"], found["batches"]) == (2, 2, 5, 240)
    assert (found["oldest_ns"], found["newest_ns"]) == (utc(1), utc(120))
    assert found["rank_seconds"] == 5 * 120
    assert found["integrity"] == "ok"
    assert found["schema"] == 6
    used = sum(found["tables"].values())
    with closing(sqlite3.connect(path)) as db:
        pages = (
            db.execute("PRAGMA page_count").fetchone()[0] - db.execute("PRAGMA freelist_count").fetchone()[0]
        )
    # All but the map of pages and the list of tables.
    assert used == pytest.approx(pages * 4096, abs=4 * 4096)
    assert found["bytes_per_rank_second"] == pytest.approx(pages * 4096 / 600)
    assert found["bytes_per_s"] == pytest.approx(pages * 4096 / 119)
    assert (found["goes_next"], found["goes_at_ns"]) == ("age", utc(1) + 14 * DAY_NS)
    assert found["tables_estimated"] is False


def test_statistics_are_one_screen_of_words(store, path):
    result = ran("store", "stats")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) == 10
    assert lines[0] == f"file       {path}, schema 6"
    assert lines[3].startswith("batches    240, from 2023-11-14 22:13:21 UTC to 2023-11-14 22:15:20 UTC (")
    assert lines[4] == "of         2 jobs, 2 nodes, 5 ranks, 0 events"
    assert lines[7] == "kept       14 days (SYSOM_KEEP_DAYS), 20 GB (SYSOM_KEEP_GB)"
    assert lines[8].endswith("with the server's next tidying: it is over age then")
    assert lines[9].startswith("integrity  all pages hang together")


def test_an_empty_store_has_statistics_too(path):
    SqliteStore(path).close()
    result = ran("store", "stats")
    assert "batches    0\n" in result.output
    assert "nothing: there is no batch" in result.output


def test_a_large_store_is_estimated_and_that_is_said(store, path, monkeypatch):
    exact = counting.stats(path, Keep(14, 20))
    monkeypatch.setattr(counting, "WALKED_BYTES", 0)
    monkeypatch.setattr(counting.integrity, "AT_ONCE_BYTES", 0)
    guess = counting.stats(path, Keep(14, 20))
    assert guess.tables_estimated
    assert guess.tables["tail"] == pytest.approx(exact.tables["tail"], rel=0.3)
    text = stats_text(guess, utc(130))
    assert "(estimated)" in text
    assert "integrity  not looked at, it would take long: sysom store check" in text


def test_the_size_goes_first_where_it_is_met_before_the_age(store, path):
    found = counting.stats(path, Keep(14, 0.01))
    assert found.goes_next == "size"
    used = found.bytes_per_s * 119
    assert found.goes_at_ns == pytest.approx(
        utc(120) + (0.0095 * GB - used) / found.bytes_per_s * 1e9, abs=1e6
    )
    assert "in " in stats_text(found, utc(121))


def test_there_is_no_store_yet(path):
    for command in ("stats", "check"):
        result = ran("store", command)
        assert result.exit_code == 2
        assert "there is no store at" in result.output


def test_a_sound_store_passes_the_check(store, path):
    result = ran("store", "check")
    assert result.exit_code == 0
    assert result.output == f"the store {path} is sound: all pages, all indexes, all columns\n"


def test_an_index_that_says_something_else_than_its_table_is_found(store, path):
    store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA writable_schema = ON")
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'event_time'").fetchone()
        db.execute("UPDATE sqlite_master SET rootpage = ? WHERE name = 'tail_minute'", (root,))
        db.commit()
    result = ran("store", "check")
    assert result.exit_code == 2
    assert "is damaged (" in result.output
    assert "restore it from a copy" in result.output


def test_columns_that_cannot_be_read_are_found(store, path):
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE chunk SET columns = x'00' WHERE id = (SELECT min(id) FROM chunk)")
        db.commit()
    result = ran("store", "check")
    assert result.exit_code == 2
    assert "chunk 1: damaged columns" in result.output


def test_a_damaged_store_is_called_so_before_anything_of_it_is_counted(store, path):
    store.close()
    with path.open("r+b") as file:
        for page in range(20, path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(b"Z" * 400)
    result = ran("store", "stats")
    assert result.exit_code == 2
    assert f"the store {path} is damaged" in result.output
    assert "disk under" not in result.output  # SQLite takes some damage for a full disk
