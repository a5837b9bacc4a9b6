"""Real jobs, started the ways that people start them: the collectives of every rank are seen."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from bench.stack import until
from bot.demo.job import free_port
from probes.budget import Limits
from probes.records import RankBatch
from probes.watch import NodeWatch

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader


def work(rank, size, port, form):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    if form == "variables":
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=rank, world_size=size)
    pair = dist.new_group(list(range(size)))  # another communicator of the same ranks
    loader = DataLoader(torch.ones(1 << 20, 1), batch_size=1000, num_workers=1)  # whose worker is no rank
    for batch in loader:
        dist.all_reduce(batch, group=pair)
        dist.all_reduce(batch)
        time.sleep(0.05)


if __name__ == "__main__":
    form, port, *rank = sys.argv[1:]
    if rank:
        work(int(rank[0]), 2, port, form)
    else:
        mp.spawn(work, args=(2, port, form), nprocs=2)
"""

START_S = 240.0
"""A launcher imports PyTorch, and then its ranks do: seconds, on a machine full of other work minutes."""

Launch = Callable[..., subprocess.Popen[bytes]]
Seen = dict[tuple[int, int], set[int]]
"""(rank, world size) → processes of which collectives were seen."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts a launcher; it ends with the test, and so does all that it started."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*command: str, **env: str) -> subprocess.Popen[bytes]:
        bare = {key: value for key, value in os.environ.items() if not key.startswith(("SYSOM_", "SLURM_"))}
        process = subprocess.Popen(
            command,
            env=bare | {"OMP_NUM_THREADS": "1"} | env,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.terminate()  # torchrun ends its workers, which have process groups of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def watch(root_and_bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeWatch]:
    """One for all tests here: compiling its programs takes seconds."""
    # Looked at many times a second, in a process of any size: a budget would shed what is asked for here.
    generous = Limits(cpu_share=1e3, memory_bytes=1 << 60, events_per_s=1e9)
    node = NodeWatch(tmp_path_factory.mktemp("cache"), limits=generous)
    yield node
    node.close()


def collectives_of(watch: NodeWatch, job: str, launchers: list[subprocess.Popen[bytes]]) -> Seen:
    """Watch until collectives of both ranks were seen; which processes they were."""
    seen: Seen = {}
    batches: list[RankBatch] = []

    def both() -> bool:
        assert all(one.poll() is None for one in launchers), "the job ended"
        for batch in watch.gather().ranks:
            if batch.job == job:
                batches.append(batch)
                if batch.collectives.seq and batch.threads:
                    seen.setdefault((batch.rank, batch.world_size), set()).add(batch.pid)
        return len(seen) >= 2

    until(both, f"collectives and thread times of both ranks of {job}", START_S)
    assert {batch.pid for batch in batches} == set().union(*seen.values()), "something was taken for a rank"
    return seen


def each_is_one_process_that_trains(seen: Seen, launcher: subprocess.Popen[bytes]) -> None:
    assert set(seen) == {(0, 2), (1, 2)}
    assert all(len(pids) == 1 for pids in seen.values())
    assert launcher.pid not in set().union(*seen.values())


@pytest.mark.parametrize("form", ["variables", "arguments"])
def test_ranks_of_mp_spawn_are_seen_whether_they_set_variables_or_pass_arguments(
    watch: NodeWatch, launch: Launch, script: Path, form: str
) -> None:
    port = str(free_port())
    launcher = launch(sys.executable, str(script), form, port)
    seen = collectives_of(watch, f"{socket.gethostname()}:{port}", [launcher])
    each_is_one_process_that_trains(seen, launcher)


def test_ranks_of_torchrun_are_seen(watch: NodeWatch, launch: Launch) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-id",
        "run-launch",
    ]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    launcher = launch(*torchrun, *rendezvous, "-m", "bot.demo.train")
    each_is_one_process_that_trains(collectives_of(watch, "run-launch", [launcher]), launcher)


def srun(task: int, job: str) -> Mapping[str, str]:
    """What srun sets for one of two tasks."""
    numbers = {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NTASKS": "2"}
    return numbers | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


def test_tasks_of_slurm_that_pass_arguments_are_seen(watch: NodeWatch, launch: Launch, script: Path) -> None:
    port, job = str(free_port()), str(secrets.randbelow(10**6))
    tasks = [
        launch(sys.executable, str(script), "arguments", port, str(task), **srun(task, job))
        for task in (0, 1)
    ]
    seen = collectives_of(watch, f"slurm-{job}", tasks)
    assert seen == {(task, 2): {process.pid} for task, process in enumerate(tasks)}


def test_torchrun_within_a_task_of_slurm_is_seen(watch: NodeWatch, launch: Launch) -> None:
    job = str(secrets.randbelow(10**6))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launcher = launch(*torchrun, *rendezvous, "-m", "bot.demo.train", **srun(1, job))
    each_is_one_process_that_trains(collectives_of(watch, f"slurm-{job}", [launcher]), launcher)


def test_ranks_in_namespaces_whose_library_is_nowhere_outside_are_seen(
    watch: NodeWatch, launch: Launch, script: Path, tmp_path: Path
) -> None:
    """As in a container: processes, mounts and network of its own."""
    packages, inside, port = Path(torch.__file__).parents[1], tmp_path / "inside", str(free_port())
    inside.mkdir()
    enters = f"ip link set lo up && mount --bind {packages} {inside} && "
    enters += f"exec {sys.executable} {script} arguments {port}"
    launcher = launch(
        *("unshare", "--pid", "--mount", "--net", "--fork", "--kill-child", "--mount-proc"),
        *("sh", "-c", enters),
        PYTHONPATH=str(inside),
    )
    until(
        lambda: network_of_children(launcher.pid) or launcher.poll() is not None,
        "the namespaces are made",
        60,
    )
    if launcher.poll() is not None:
        pytest.skip("no namespaces can be made here")
    job = f"{socket.gethostname()}:{port}-net-{network_of_children(launcher.pid)}"
    seen = collectives_of(watch, job, [launcher])
    each_is_one_process_that_trains(seen, launcher)
    for pids in seen.values():
        for pid in pids:
            assert str(inside) in Path(f"/proc/{pid}/maps").read_text(), (
                "the library is not where it was meant to be"
            )
    assert not list(inside.iterdir())
    launcher.kill()  # unshare(1) ignores a request to end


def network_of_children(pid: int) -> int:
    """Number of the network namespace that a process's first child runs in; 0 while there is none."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return Path(f"/proc/{children[0]}/ns/net").stat().st_ino if children else 0
