"""Ranks that number themselves late, or that only a communicator numbers; and who stands above and below."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from probes.discovery import Discovery
from probes.nccl.gloo import LIBRARY
from tests.probes.conftest import Start
from tests.probes.fake_proc import Clock, FakeProc
from tests.probes.processes import Child, until
from tests.probes.ranks import FORKS, LOAD, RANK, WAIT, environment, found

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another process's memory is read as root only")


# --- what a process sets after its program has started

LATE = (
    LOAD
    + "import json; "
    + WAIT
    + """
for line in sys.stdin:
    os.environ.update(json.loads(line))
    print("set", flush=True)
"""
)


def sets(child: Child, **env: str) -> None:
    child.tell(json.dumps(env))
    assert child.line() == "set"


@needs_root
def test_a_rank_that_sets_its_own_variables_is_found(start: Start, library: Path) -> None:
    """As a child of mp.spawn does."""
    discovery = Discovery(LIBRARY, host="node-7")
    child = start(LATE)
    child.line()
    assert not found(discovery, child.pid)
    child.tell("begin")
    sets(child, RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29500", SECRET="hunter2")
    until(lambda: child.pid in discovery.scan(), "the rank is found by what it has set")
    rank = found(discovery, child.pid)[child.pid]
    assert (rank.job, rank.rank, rank.world_size) == ("node-7:29500", 1, 2)
    assert rank.library.samefile(library)
    assert "hunter2" not in repr(rank)
    assert rank.env.keys() == {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@needs_root
def test_a_rank_is_not_told_before_it_has_set_everything(start: Start) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, clock=clock)
    child = start(LATE)
    child.line()
    child.tell("begin")
    sets(child, RANK="1", WORLD_SIZE="2")
    assert not found(discovery, child.pid)
    clock.now += 1
    sets(child, MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    assert found(discovery, child.pid)[child.pid].job == "10.0.0.1:29500"


@needs_root
def test_numbers_that_a_pod_gave_are_replaced_by_those_a_process_sets(start: Start) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, clock=clock)
    child = start(LATE, **environment(0, 2))
    child.line()
    assert found(discovery, child.pid)[child.pid].rank == 0
    child.tell("begin")
    sets(child, RANK="5", WORLD_SIZE="16")
    clock.now += 1
    rank = found(discovery, child.pid)[child.pid]
    assert (rank.rank, rank.world_size) == (5, 16)


@needs_root
def test_a_rank_that_has_run_for_long_keeps_its_numbers_while_it_starts_another_program(start: Start) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, clock=clock)
    child = start(LATE, **environment(3, 4))
    child.line()
    child.tell("begin")
    for _ in range(10):
        clock.now += 30
        found(discovery, child.pid)
    sets(child, RANK="0", WORLD_SIZE="1")  # for the program it starts now
    clock.now += 30
    assert found(discovery, child.pid)[child.pid].rank == 3
    sets(child, RANK="3", WORLD_SIZE="4")
    clock.now += 30
    assert found(discovery, child.pid)[child.pid].rank == 3
    sets(child, RANK="1", WORLD_SIZE="2")  # and stays so
    for _ in range(2):
        clock.now += 30
        rank = found(discovery, child.pid)[child.pid]
    assert (rank.rank, rank.world_size) == (1, 2)


@needs_root
def test_a_rank_that_takes_its_variables_away_again_stays_one(start: Start) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, clock=clock)
    child = start(LATE.replace("update(", "clear() or os.environ.update("), **environment(3, 4))
    child.line()
    assert found(discovery, child.pid)
    child.tell("begin")
    sets(child)
    clock.now += 1
    assert found(discovery, child.pid)[child.pid].rank == 3


# --- ranks that no environment numbers


RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def candidates(discovery: Discovery, *pids: int) -> dict[int, str]:
    """Process → job of the candidates among these."""
    discovery.scan()
    return {pid: one.job for pid, one in discovery.unnumbered().items() if pid in pids}


@needs_root
def test_a_process_with_a_rendezvous_and_no_number_is_a_candidate_until_it_is_numbered(
    start: Start, library: Path
) -> None:
    discovery = Discovery(LIBRARY, host="node-7")
    child = start(LATE)
    child.line()
    assert candidates(discovery, child.pid) == {}, "it may be any program that loads PyTorch"
    child.tell("begin")
    sets(child, **RENDEZVOUS)
    until(lambda: bool(candidates(discovery, child.pid)), "it is a candidate")
    (candidate,) = (one for pid, one in discovery.unnumbered().items() if pid == child.pid)
    assert (candidate.pid, candidate.job, candidate.env) == (child.pid, "node-7:29500", RENDEZVOUS)
    assert candidate.library.samefile(library)
    assert candidate.process.pid == child.pid
    assert not found(discovery, child.pid)
    assert discovery.rank_of(child.pid) is None

    discovery.number(child.pid, 1, 2)
    rank = found(discovery, child.pid)[child.pid]
    assert (rank.job, rank.rank, rank.world_size, rank.local_rank) == ("node-7:29500", 1, 2, -1)
    assert candidates(discovery, child.pid) == {}
    assert discovery.rank_of(child.pid) == ("node-7:29500", 1)


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0), (0, 1 << 30)])
def test_numbers_that_cannot_be_make_no_rank(start: Start, rank: int, world: int) -> None:
    discovery = Discovery(LIBRARY)
    child = start(RANK, **RENDEZVOUS)
    child.line()
    assert candidates(discovery, child.pid)
    discovery.number(child.pid, rank, world)
    discovery.number(1 << 23, 0, 2)  # no such process
    assert not found(discovery, child.pid)


def test_a_number_lasts_as_long_as_the_program(start: Start) -> None:
    discovery = Discovery(LIBRARY)
    again = (
        f"os.execve(sys.executable, [sys.executable, '-S', '-c', {RANK!r}, *sys.argv[1:]], dict(os.environ))"
    )
    child = start(RANK + again, **RENDEZVOUS)
    child.line()
    assert candidates(discovery, child.pid)
    discovery.number(child.pid, 0, 2)
    assert found(discovery, child.pid)
    child.tell("exec")
    child.line()
    assert not found(discovery, child.pid)
    until(lambda: bool(candidates(discovery, child.pid)), "the new program is a candidate again")


def test_a_worker_of_a_numbered_rank_is_its_helper_and_no_candidate(start: Start) -> None:
    discovery = Discovery(LIBRARY, host="node-7")
    child = start(FORKS, **RENDEZVOUS)
    worker = int(child.line())
    assert candidates(discovery, child.pid, worker) == {child.pid: "node-7:29500"}, "it was forked"
    discovery.number(child.pid, 1, 2)
    assert set(found(discovery, child.pid, worker)) == {child.pid}
    assert candidates(discovery, child.pid, worker) == {}
    assert discovery.rank_of(worker) == ("node-7:29500", 1)


@needs_root
def test_a_worker_of_a_rank_that_was_numbered_before_it_set_its_variables_is_its_helper(start: Start) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, clock=clock)
    late = "os.environ.update(RANK='1', WORLD_SIZE='2')\n"
    child = start(LOAD + WAIT + late + FORKS.removeprefix(LOAD), **RENDEZVOUS)
    child.line()
    assert candidates(discovery, child.pid)
    discovery.number(child.pid, 1, 2)
    clock.now += 40
    assert found(discovery, child.pid)  # its variables are looked at in five seconds again
    child.tell("go on")
    worker = int(child.line())
    for _ in range(3):  # the worker is seen before and after the rank's own variables are looked at again
        assert set(found(discovery, child.pid, worker)) == {child.pid}
        assert candidates(discovery, child.pid, worker) == {}
        clock.now += 5
    assert discovery.rank_of(worker) == discovery.rank_of(child.pid)


# --- who stands above and below


def test_ranks_that_a_process_spawns_are_candidates_beside_it_and_its_forks_are_not(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, RENDEZVOUS, image=1000)
    proc.put(8, RENDEZVOUS, parent=7, image=2000)
    proc.put(9, RENDEZVOUS, parent=7, image=3000)
    proc.put(10, RENDEZVOUS, parent=8, image=2000)
    assert set(candidates(discovery, 7, 8, 9, 10)) == {7, 8, 9}
    discovery.number(8, 0, 2)
    discovery.number(9, 1, 2)
    assert set(discovery.scan()) == {8, 9}
    assert set(candidates(discovery, 7, 8, 9, 10)) == {7}
    assert discovery.rank_of(10) == discovery.rank_of(8) != discovery.rank_of(9)


def test_ranks_whose_parent_is_rank_0_are_candidates_still_when_that_is_numbered(proc: FakeProc) -> None:
    """As Lightning starts them: with a LOCAL_RANK of their own."""
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, RENDEZVOUS, image=1000)
    proc.put(8, RENDEZVOUS | {"LOCAL_RANK": "1"}, parent=7, image=2000)
    proc.put(9, RENDEZVOUS, parent=7, image=3000)  # a worker that was spawned, not forked
    discovery.scan()
    discovery.number(7, 0, 2)
    assert set(candidates(discovery, 7, 8, 9)) == {8}


def test_a_candidate_s_pid_used_again_is_none(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, RENDEZVOUS)
    assert candidates(discovery, 7)
    discovery.number(7, 0, 2)
    assert set(discovery.scan()) == {7}
    proc.put(7, {}, start=900)
    assert discovery.scan() == {}
    assert candidates(discovery, 7) == {}


SRUN = {"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


def test_a_task_of_slurm_is_a_rank_when_its_communicator_says_so(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, SRUN, image=1000)
    proc.put(8, SRUN, parent=7, image=1000)
    assert discovery.scan() == {}, "it may be about to start ranks"
    assert candidates(discovery, 7, 8) == {7: "slurm-1234"}
    discovery.number(7, 1, 2)
    (rank,) = discovery.scan().values()
    assert (rank.process.pid, rank.job, rank.rank, rank.world_size) == (7, "slurm-1234", 1, 2)
    assert discovery.rank_of(8) == ("slurm-1234", 1)
    assert candidates(discovery, 7, 8) == {}


def test_a_task_of_slurm_that_starts_no_ranks_is_one_after_a_while(proc: FakeProc) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, proc=proc.root, clock=clock)
    proc.put(7, SRUN, image=1000)
    proc.put(8, SRUN, parent=7, image=1000)
    discovery.scan()
    clock.now += 30
    (rank,) = discovery.scan().values()
    assert (rank.process.pid, rank.job, rank.rank, rank.world_size) == (7, "slurm-1234", 1, 2)
    assert discovery.rank_of(8) == ("slurm-1234", 1)
    assert candidates(discovery, 7, 8) == {}


def test_a_task_of_slurm_that_starts_torchrun_s_ranks_is_none_itself(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    torchrun = SRUN | {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}
    proc.put(7, SRUN, image=1000)
    proc.put(8, torchrun | {"RANK": "2", "LOCAL_RANK": "0"}, parent=7, image=2000)
    proc.put(9, torchrun | {"RANK": "3", "LOCAL_RANK": "1"}, parent=7, image=3000)
    ranks = discovery.scan()
    assert {pid: (r.job, r.rank, r.world_size) for pid, r in ranks.items()} == {
        8: ("slurm-1234", 2, 4),
        9: ("slurm-1234", 3, 4),
    }
    assert discovery.rank_of(7) is None


def test_a_task_of_slurm_that_spawns_ranks_is_none_once_they_are_numbered(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, SRUN, image=1000)
    proc.put(8, SRUN, parent=7, image=2000)
    proc.put(9, SRUN, parent=7, image=3000)
    proc.put(10, SRUN, parent=8, image=2000)
    assert set(candidates(discovery, 7, 8, 9, 10)) == {7, 8, 9}
    discovery.number(8, 2, 4)
    discovery.number(9, 3, 4)
    assert {pid: rank.rank for pid, rank in discovery.scan().items()} == {8: 2, 9: 3}
    assert candidates(discovery, 7, 8, 9, 10) == {}


def test_torchrun_in_a_pod_of_one_gpu_is_no_rank_though_its_numbers_are_the_same(proc: FakeProc) -> None:
    """Kubeflow gives each pod RANK and WORLD_SIZE; with one process per pod torchrun gives the same."""
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"}
    proc.put(7, pod, image=1000)
    proc.put(8, pod | {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"}, parent=7, image=2000)
    proc.put(9, pod | {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"}, parent=8, image=2000)
    (rank,) = discovery.scan().values()
    assert (rank.process.pid, rank.job, rank.rank) == (8, "train-master-0:23456", 1)
    assert discovery.rank_of(9) == ("train-master-0:23456", 1)


def test_torchrun_in_a_pod_is_no_rank_before_it_has_started_any(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, environment(), name="torchrun")
    assert discovery.scan() == {}
    assert discovery.rank_of(7) is None


def test_a_rank_below_which_another_job_s_ranks_are_numbered_stays_one(proc: FakeProc) -> None:
    """As when a training rank starts processes that sample."""
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, environment(rank=0), image=1000)
    proc.put(8, RENDEZVOUS, parent=7, image=2000)
    assert set(candidates(discovery, 7, 8)) == {8}
    discovery.number(8, 0, 1)
    assert {rank.job for rank in discovery.scan().values()} == {"job-1", discovery.scan()[8].job}
    assert discovery.scan()[8].job != "job-1"
