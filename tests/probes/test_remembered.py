"""Communicators over a restart of the agent: on disk, of this boot, and no harm when the file is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes import remembered
from probes.records import Communicator
from probes.remembered import Remembered

WORLD = Communicator(uid="0", desc="default_pg", rank=1, size=4)
HALF = Communicator(uid="2", desc="undefined", rank=1, size=2)


def test_the_next_agent_knows_them_in_the_same_places(tmp_path: Path) -> None:
    Remembered(tmp_path).keep({(7, 100): [HALF, WORLD]})
    assert Remembered(tmp_path).of(7, 100) == [HALF, WORLD]


def test_another_process_under_the_pid_has_none(tmp_path: Path) -> None:
    Remembered(tmp_path).keep({(7, 100): [WORLD]})
    assert Remembered(tmp_path).of(7, 900) == []


def test_those_not_seen_yet_again_stay_and_the_ended_go(tmp_path: Path) -> None:
    kept = Remembered(tmp_path)
    kept.keep({(7, 100): [WORLD, HALF], (8, 100): [WORLD]})
    kept.keep({(7, 100): []})
    assert kept.of(7, 100) == [WORLD, HALF]
    assert kept.of(8, 100) == []


def test_another_boot_is_another_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Remembered(tmp_path).keep({(7, 100): [WORLD]})
    (tmp_path / "boot").write_text("another\n")
    monkeypatch.setattr(remembered, "BOOT_ID", tmp_path / "boot")
    assert Remembered(tmp_path).of(7, 100) == []


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"\x81\xa4boot\x01"])
def test_a_damaged_file_is_not_used_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "communicators.msgpack").write_bytes(content)
    kept = Remembered(tmp_path)
    assert kept.of(7, 100) == []
    kept.keep({(7, 100): [WORLD]})
    assert Remembered(tmp_path).of(7, 100) == [WORLD]


def test_a_disk_that_takes_nothing_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    kept = Remembered(tmp_path / "file")  # a folder cannot be made there
    kept.keep({(7, 100): [WORLD]})
    kept.keep({(7, 100): [WORLD, HALF]})
    assert kept.of(7, 100) == [WORLD, HALF]
    assert caplog.text.count("cannot be kept for the next start") == 1
