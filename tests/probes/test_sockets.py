"""Which sockets a process has, without asking the file systems of its other files."""

from __future__ import annotations

from pathlib import Path

from probes.host.sockets import _sockets


def test_descriptors_are_told_by_their_links_alone(tmp_path: Path) -> None:
    """A file whose file system does not answer would hold up whoever asks for its state: here it is not there."""
    folder = tmp_path / "42" / "fd"
    folder.mkdir(parents=True)
    for number, target in enumerate(("socket:[123]", "/mnt/gone/file", "pipe:[9]", "socket:[77]")):
        (folder / str(number)).symlink_to(target)
    assert sorted(_sockets(tmp_path, 42)) == [77, 123]
    assert _sockets(tmp_path, 43) == []
