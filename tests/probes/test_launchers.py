"""What launchers' variables say: numbers and names, as each launcher sets them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from probes.launchers import (
    ENV_ALLOWED,
    LAUNCHERS,
    Claim,
    Grade,
    Place,
    claim,
    job_name,
    local_rank,
    names_job,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "3",
}
SBATCH = {
    "SLURM_JOB_ID": "1234",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
}
"""A batch script: Slurm sets SLURM_PROCID there, too."""
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMIX_NAMESPACE": "3236233217",
}
MPIEXEC = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
PYTORCHJOB = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
}
"""Of a worker's pod (PET_* beside it are for torchrun)."""


@pytest.mark.parametrize(
    ("env", "expected", "on_node"),
    [
        (TORCHRUN, Claim(5, 16, Grade.ELASTIC), 1),
        (PYTORCHJOB, Claim(1, 3, Grade.RANK), -1),
        (SRUN, Claim(3, 8, Grade.TASK), 3),
        (MPIRUN, Claim(2, 4, Grade.TASK), 0),
        (MPIEXEC, Claim(1, 4, Grade.TASK), 1),
        (SRUN | TORCHRUN, Claim(5, 16, Grade.ELASTIC), 1),
        (SRUN | PYTORCHJOB, Claim(1, 3, Grade.RANK), 3),
        (SRUN | MPIRUN, Claim(2, 4, Grade.TASK), 0),
        (SRUN | MPIEXEC, Claim(1, 4, Grade.TASK), 1),
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_NUM_TASKS"}, Claim(3, 8, Grade.TASK), 3),
        (SRUN | {"RANK": "1"}, Claim(3, 8, Grade.TASK), 3),
    ],
)
def test_numbers_are_those_of_the_innermost_launcher(
    env: dict[str, str], expected: Claim, on_node: int
) -> None:
    assert claim(env) == expected
    assert local_rank(env) == on_node


@pytest.mark.parametrize(
    "env",
    [
        {},
        SBATCH,
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA)},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"RANK": "0"},
        {"WORLD_SIZE": "4"},
        {"RANK": "١", "WORLD_SIZE": "4"},
    ],
)
def test_a_process_that_no_launcher_numbered_or_that_is_alone_is_no_rank(env: dict[str, str]) -> None:
    assert claim(env) is None


def test_a_single_rank_of_pytorch_s_own_variables_is_one() -> None:
    assert claim({"RANK": "0", "WORLD_SIZE": "1"}) == Claim(0, 1, Grade.RANK)


HERE = Place("node-7", 0, 41)
CONTAINER = Place("node-7", 4026532281, 41)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (TORCHRUN | SRUN | {"SYSOM_JOB_ID": "mine", "TORCHELASTIC_RUN_ID": "run-5"}, "mine"),
        (TORCHRUN | SRUN | {"SYSOM_JOB_ID": "", "TORCHELASTIC_RUN_ID": "run-5"}, "run-5"),
        (TORCHRUN | SRUN, "slurm-1234"),
        (SRUN | {"SLURM_STEP_ID": "2"}, "slurm-1234.2"),
        (SRUN | MPIRUN | {"SLURM_STEP_ID": "2"}, "slurm-1234"),
        (SBATCH, "slurm-1234"),
        (SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA)}, "slurm-1234"),
        (TORCHRUN, "10.0.0.1:29500"),
        (PYTORCHJOB, "train-master-0:23456"),
        (MPIRUN, "mpi-3236233217"),
        (MPIRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, "10.0.0.1:29500"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "node-7:launcher-41"),
        ({"MASTER_ADDR": "10.0.0.1"}, "node-7:launcher-41"),
    ],
)
def test_a_job_s_name_is_the_first_that_someone_gave_it(env: dict[str, str], name: str) -> None:
    assert job_name(env, HERE) == name


@pytest.mark.parametrize(
    "address",
    [
        "localhost",
        "LOCALHOST",
        "localhost.",
        "ip6-localhost",
        "a.localhost",
        "127.0.0.1",
        "127.1.2.3",
        "::1",
        "[::1]",
        "::ffff:127.0.0.1",
        "0.0.0.0",
        "::",
    ],
)
def test_a_rendezvous_that_every_node_has_is_named_by_the_node(address: str) -> None:
    env = {"MASTER_ADDR": address, "MASTER_PORT": "29500"}
    assert job_name(env, HERE) == "node-7:29500"
    assert job_name(env, CONTAINER) == "node-7:29500-net-4026532281"
    assert job_name(env, Place("node-8")) == "node-8:29500"


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "fe80::1", "node-3", "localhost.example.org", "127", "x" * 128]
)
def test_a_rendezvous_on_the_network_is_the_same_from_everywhere(address: str) -> None:
    env = {"MASTER_ADDR": address, "MASTER_PORT": "29500"}
    assert job_name(env, CONTAINER) == job_name(env, HERE) == f"{address}:29500"


@pytest.mark.parametrize("env", [TORCHRUN, SRUN, SBATCH, MPIRUN, PYTORCHJOB, {"SYSOM_JOB_ID": "x"}])
def test_an_environment_that_names_a_job_does_so(env: dict[str, str]) -> None:
    assert names_job(env)


@pytest.mark.parametrize(
    "env", [{}, {"RANK": "0", "WORLD_SIZE": "2"}, {"MASTER_ADDR": "a"}, {"TORCHELASTIC_RUN_ID": "none"}]
)
def test_an_environment_that_names_none_does_not(env: dict[str, str]) -> None:
    assert not names_job(env)


def test_a_name_with_control_characters_is_made_harmless() -> None:
    assert job_name({"SYSOM_JOB_ID": "a\nb\x1b[31m\u202e"}, HERE) == "a?b?[31m?"


def test_every_variable_that_is_looked_at_is_on_the_list() -> None:
    keys = {key for one in LAUNCHERS for key in (one.rank, *one.sizes, one.local, one.needs) if key}
    assert keys <= set(ENV_ALLOWED)


def test_the_documentation_lists_exactly_the_variables_that_may_leave_a_node() -> None:
    docs = Path(__file__).parents[2] / "docs"
    listed = (docs / "operations.md").read_text().partition("own environment:")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([A-Z_]+)`", listed)) == set(ENV_ALLOWED)
    assert f"{len(ENV_ALLOWED)} environment keys" in (docs / "probes/README.md").read_text()
