"""What agents tell on their node: whole files, in a folder that nobody else writes, no dead agent among them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from probes import status
from probes.discovery import read_process
from probes.status import AgentStatus, RuntimeFolderError


def me(**changes: Any) -> AgentStatus:
    """The status that this process would write as an agent."""
    itself = read_process(Path("/proc"), os.getpid())
    assert itself
    now = time.monotonic_ns()
    fields: dict[str, Any] = {
        "pid": os.getpid(),
        "start_ticks": itself.start_ticks,
        "node": "node-a",
        "state": "/s",
        "server": "http://server",
        "started_ns": now,
        "at_ns": now,
    }
    return AgentStatus(**fields | changes)


def test_a_status_is_read_as_it_was_written_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    told = me(ranks=["job-1 rank 0 (pid 7)"], captures={"job-1": 12.5})
    status.write(tmp_path, told)
    status.write(tmp_path, told)
    assert status.read_all(tmp_path) == [told]
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644
    status.remove(tmp_path, told.pid)
    assert status.read_all(tmp_path) == []


def test_a_status_of_a_process_that_ended_is_no_agent_and_is_swept_away(tmp_path: Path) -> None:
    status.write(tmp_path, me())
    reused = me(start_ticks=1)  # the pid is another process's by now
    (tmp_path / "agent-1.json").write_bytes(msgspec.json.encode(reused))
    status.write(tmp_path, msgspec.structs.replace(me(), pid=(1 << 22) - 1))
    assert [agent.start_ticks for agent in status.living(tmp_path)] == [me().start_ticks]
    (tmp_path / "agent-1.json").unlink()
    status.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"agent-{os.getpid()}.json"]


def test_files_that_are_no_status_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "agent-5.json").write_text("{")
    (tmp_path / "agent-6.json").write_bytes(b"\xff\xfe")
    (tmp_path / "agent-7.json").mkdir()
    assert status.read_all(tmp_path) == []
    assert status.read_all(tmp_path / "nowhere") == []


def test_a_status_of_ten_seconds_ago_is_stale() -> None:
    assert status.is_fresh(me())
    assert not status.is_fresh(me(at_ns=time.monotonic_ns() - 10_100_000_000))


def test_the_folder_is_made_for_all_to_read_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        status.prepare(tmp_path / "run")
    finally:
        os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755


def test_a_folder_that_others_can_write_decides_over_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RuntimeFolderError, match="can be written by others"):
        status.prepare(folder)
    folder.chmod(0o755)
    status.prepare(folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(RuntimeFolderError, match="SYSOM_RUNTIME"):
        status.prepare(link)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RuntimeFolderError, match="SYSOM_RUNTIME"):
        status.prepare(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(0o755)
    os.chown(folder, 12345, 12345)
    with pytest.raises(RuntimeFolderError, match="owner 12345"):
        status.prepare(folder)


def test_a_link_in_the_way_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / f"state.{os.getpid()}.tmp").symlink_to(precious)
    (tmp_path / "state").symlink_to(precious)
    status.replace(tmp_path / "state", b"new", 0o644)
    assert precious.read_text() == "keep"
    assert (tmp_path / "state").read_text() == "new"
    assert not (tmp_path / "state").is_symlink()


def test_the_kill_switch_gives_its_reason_and_in_doubt_it_is_on(tmp_path: Path) -> None:
    assert status.detached(tmp_path) == ""
    (tmp_path / "detached").write_text("")
    assert status.detached(tmp_path) == "no reason was given"
    (tmp_path / "detached").write_bytes(b"job-1 crashes \xff\n")
    assert status.detached(tmp_path) == "job-1 crashes \N{REPLACEMENT CHARACTER}"
    (tmp_path / "detached").unlink()
    (tmp_path / "detached").mkdir()
    assert "cannot be read" in status.detached(tmp_path)
