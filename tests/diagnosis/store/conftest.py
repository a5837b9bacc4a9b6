"""An empty store in a file of its own."""

import pytest

from diagnosis.store.sqlite import SqliteStore


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data" / "sysom.db"


@pytest.fixture
def store(path):
    store = SqliteStore(path)
    yield store
    store.close()
