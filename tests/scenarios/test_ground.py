"""What faults stand on leaves nothing behind, also when its process is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bot.processes import is_gone, wait_until
from tests.scenarios import ground
from tests.scenarios.ground import NoGround

pytestmark = pytest.mark.usefixtures("all_of_it")


@pytest.fixture(scope="module")
def all_of_it() -> Iterator[None]:
    """Skips where this machine has not all that faults stand on."""
    if os.geteuid():
        pytest.skip("needs root")
    try:
        with (
            ground.disk("try"),
            ground.namespaces([ground.named("try")]),
            ground.control_group("blkio", "try"),
        ):
            yield
    except NoGround as error:
        pytest.skip(str(error))


def left() -> set[str]:
    return {name for name in ground._names() if "-try" not in name}


MAKER = """
import sys, time
from tests.scenarios import ground
with (ground.control_group("cpu", "a") as group, ground.disk("b") as disk, ground.namespaces([ground.named("c")])):
    group.take(int(sys.argv[1]))
    print(group.path.name.rpartition("-")[0], disk.name, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_taken_away_and_what_ran_in_its_control_group_runs_on() -> None:
    with subprocess.Popen(["sleep", "60"]) as ranks:
        command = [sys.executable, "-c", MAKER, str(ranks.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as maker:
            assert maker.stdout is not None
            name, device = maker.stdout.readline().split()
            swept = set(ground.sweep())
            assert not {f"{name}-{kind}" for kind in "abc"} & swept, "its process runs"
            assert {f"{name}-{kind}" for kind in "abc"} <= left()
            maker.kill()
        assert set(ground.sweep()) >= {f"{name}-{kind}" for kind in "abc"}
        assert not {f"{name}-{kind}" for kind in "abc"} & left()
        assert not [line for line in Path("/proc/mounts").read_text().splitlines() if f"{name}-b" in line]
        wait_until(lambda: not Path(f"/sys/block/{device}/loop").exists(), "the loop device is free")
        assert ranks.poll() is None
        assert name not in Path(f"/proc/{ranks.pid}/cgroup").read_text()
        ranks.kill()


AGENT = """
import os, subprocess, time
from tests.scenarios import ground
with ground.own_folder("stack") as folder:
    agent = subprocess.Popen(["sleep", "60"], env=os.environ | {"SYSOM_STATE": str(folder / "agent")})
    print(folder.stem, agent.pid, flush=True)
    time.sleep(60)
"""


def test_an_agent_that_outlived_its_killed_run_is_ended_and_its_folder_goes() -> None:
    with subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        name, agent = maker.stdout.readline().split()
        maker.kill()
    assert not is_gone(int(agent))
    assert name in ground.sweep()
    wait_until(lambda: is_gone(int(agent)), "the agent's end")
    assert not (ground.TEMPORARY / f"{name}.folder").exists()


def test_a_group_takes_a_process_with_all_that_it_started() -> None:
    with (
        ground.control_group("blkio", "tree") as group,
        subprocess.Popen(
            ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
        ) as shell,
    ):
        assert shell.stdout is not None
        child = int(shell.stdout.readline())
        group.take(shell.pid)
        assert set(group.get("cgroup.procs").split()) == {str(shell.pid), str(child)}
        os.kill(child, 9)
        shell.kill()


def test_a_file_on_a_new_disk_is_in_no_cache_and_its_device_is_named() -> None:
    with ground.disk("fresh") as disk:
        path = disk.file("data", 1 << 20)
        assert path.stat().st_dev == os.makedev(*map(int, disk.device.split(":")))
        assert Path(f"/sys/block/{disk.name}/loop/backing_file").read_text().strip() == str(
            ground._image("fresh")
        )


def test_a_command_that_is_missing_or_fails_is_said() -> None:
    with pytest.raises(NoGround, match="there is no command no-such-command here"):
        ground.tell("no-such-command")
    with pytest.raises(NoGround, match="ip netns delete nobody says: Cannot remove"):
        ground.tell("ip", "netns", "delete", "nobody")
