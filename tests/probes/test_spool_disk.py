"""The spool on a real small disk: full, read-only, gone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes import codec
from probes.spool import Counts, Spool, SpoolError
from tests.probes.batches import a_batch
from tests.probes.test_spool import put


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=1m", "sysom-test", str(place))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk cannot be mounted here (that needs root): {error}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(spool: Spool) -> int:
    """Put batches until the disk is full; gives how many were kept."""
    for kept in range(10_000):
        try:
            put(spool)
        except SpoolError:
            return kept
    raise AssertionError("the disk has no end")


def assert_intact(spool: Spool, seqs: list[int]) -> None:
    assert spool.pending() == seqs
    for seq in seqs:
        wire = spool.read(seq)
        assert wire is not None
        assert codec.decode(wire) == a_batch(seq, agent=spool.agent)


def test_on_a_full_disk_what_was_kept_stays_whole_and_it_goes_on_when_there_is_room(disk: Path) -> None:
    other = disk / "other"
    other.write_bytes(bytes(512 << 10))
    kept = Spool(disk / "spool")
    count = fill(kept)
    assert count > 50
    for _ in range(4):
        with pytest.raises(SpoolError, match="is full: free some space"):
            put(kept)
    assert_intact(kept, list(range(count)))
    assert kept.counts == Counts(dropped=5)
    kept.remove(0)
    kept.remove(1)
    put(kept)
    seqs = [*range(2, count), count + 5]
    assert_intact(kept, seqs)
    other.unlink()
    put(kept, 20)
    kept.settle(100.0)
    kept.close()
    again = Spool(disk / "spool")
    assert_intact(again, [*seqs, *range(count + 6, count + 26)])
    assert again.counts == Counts(dropped=5)
    again.close()


def test_an_agent_that_starts_on_a_full_disk_has_what_was_kept_and_goes_on_when_there_is_room(
    disk: Path,
) -> None:
    first = Spool(disk / "spool")
    put(first, 3)
    first.close()
    with pytest.raises(OSError, match="No space left"):
        (disk / "other").write_bytes(bytes(2 << 20))
    kept = Spool(disk / "spool")
    assert_intact(kept, [0, 1, 2])
    with pytest.raises(SpoolError, match="is full"):
        put(kept)
    with pytest.raises(SpoolError, match="is full"):
        kept.refuse(0, "400 not_a_batch")  # its words have no room
    (disk / "other").unlink()
    put(kept)
    assert_intact(kept, [1, 2, 4])
    assert kept.counts == Counts(dropped=1, refused=1)
    kept.close()


def test_on_a_disk_that_turned_read_only_nothing_is_sent_twice_and_it_goes_on_after(disk: Path) -> None:
    kept = Spool(disk / "spool")
    put(kept, 4)
    mount("-o", "remount,ro", str(disk))
    for act in (lambda: put(kept), lambda: kept.remove(0), lambda: kept.refuse(1, "400")):
        with pytest.raises(SpoolError, match=r"cannot be used now: .*Read-only file system"):
            act()
    assert_intact(kept, [2, 3])
    with pytest.raises(SpoolError, match="cannot be used now"):
        kept.settle(0.0)
    mount("-o", "remount,rw", str(disk))
    put(kept)
    kept.settle(10.0)
    assert_intact(kept, [2, 3, 5])
    assert kept.counts == Counts(dropped=1, refused=1)
    assert [path.stem[-1] for path in sorted((disk / "spool").glob("*.batch"))] == ["2", "3", "5"]
    kept.close()


def test_a_disk_that_was_taken_away_and_came_back_is_used_again(disk: Path) -> None:
    kept = Spool(disk / "spool")
    put(kept, 2)
    subprocess.run(["rm", "-r", str(disk / "spool")], check=True)
    put(kept)
    assert [kept.read(seq) is None for seq in (0, 1)] == [True, True]
    assert_intact(kept, [2])
    assert kept.counts == Counts(bad=2)
    kept.close()
