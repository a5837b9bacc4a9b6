"""What a launcher's environment variables say: a process's rank, and the name of its job.

    numbers                     rank                    size                                    rank on its node
    PyTorch (torchrun, DDP)     RANK                    WORLD_SIZE                              LOCAL_RANK
    Open MPI (mpirun)           OMPI_COMM_WORLD_RANK    OMPI_COMM_WORLD_SIZE                    …_LOCAL_RANK
    MPICH, Intel MPI (mpiexec)  PMI_RANK                PMI_SIZE                                MPI_LOCALRANKID
    Slurm (srun)                SLURM_PROCID            SLURM_STEP_NUM_TASKS, SLURM_NTASKS      SLURM_LOCALID

The first row that is whole wins: torchrun and mpirun start below srun and leave its variables in place. Slurm's
count only in a step (SLURM_STEP_ID): a batch script has SLURM_PROCID=0 and is no task. A task that is alone has no
peers and is no rank by Slurm or MPI alone. Kubeflow's PyTorchJob sets the first row, per pod.

    job's name                          from
    as given                            SYSOM_JOB_ID
    as given, unless "none"             TORCHELASTIC_RUN_ID (torchrun --rdzv-id; "none" is its default)
    slurm-1234, slurm-1234.2            SLURM_JOB_ID, and a step beyond the first (0)
    10.0.0.1:29500, train-master-0:…    MASTER_ADDR, MASTER_PORT
    node-7:29500                        the same where the address is loopback's: by the node's name
    node-7:29500-net-4026532281         the same in a network namespace of its own (a container)
    mpi-3236233217                      PMIX_NAMESPACE, where there is no rendezvous
    node-7:launcher-1234                none of them: by the process that started it
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

MAX_WORLD = 1 << 20


class Grade(enum.IntEnum):
    """How sure it is that a process with these numbers is a rank, and not what starts ranks."""

    TASK = 0
    """Numbers of a task of Slurm or MPI: it may start ranks of its own."""
    RANK = 1
    """RANK and WORLD_SIZE: so has a pod of Kubeflow's in which torchrun starts."""
    ELASTIC = 2
    """The same, set by torchrun for the processes it starts."""
    SEEN = 3
    """Told by its own communicator."""


@dataclass(frozen=True)
class Launcher:
    """The variables of one kind of launcher."""

    rank: str
    sizes: tuple[str, ...]
    local: str
    needs: str = ""
    grade: Grade = Grade.TASK


LAUNCHERS = (
    Launcher("RANK", ("WORLD_SIZE",), "LOCAL_RANK", grade=Grade.RANK),
    Launcher("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID"),
    Launcher(
        "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID", needs="SLURM_STEP_ID"
    ),
)
"""Open MPI: docs.open-mpi.org, "Environment variables set for MPI applications"; Slurm: srun(1), "OUTPUT
ENVIRONMENT VARIABLES"; Kubeflow: pkg/controller.v1/pytorch/envvar.go of its training operator."""

ENV_ALLOWED = (
    "SYSOM_JOB_ID",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "PMIX_NAMESPACE",
)
"""Environment keys that the agent may read and send; never the whole environment or the command line."""

SLURM_SPECIAL_STEP = 0xFFFFFF00
"""Ids from here on are not of srun's steps (slurm.h: SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP …)."""
LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback")


@dataclass(frozen=True)
class Claim:
    """Who a process's environment says it is."""

    rank: int
    world_size: int
    grade: Grade


@dataclass(frozen=True)
class Place:
    """Where a process runs: what makes a name unique that means something on one node only."""

    host: str
    network: int = 0
    """Number of its network namespace; 0: the node's own."""
    parent: int = 0
    """The process that started it."""


def claim(env: Mapping[str, str]) -> Claim | None:
    """Rank and size, when the environment is that of a rank."""
    for launcher in LAUNCHERS:
        if launcher.needs and _step(env, launcher.needs) is None:
            continue
        rank = _number(env.get(launcher.rank, ""))
        size = next((n for key in launcher.sizes if (n := _number(env.get(key, ""))) is not None), None)
        if rank is None or size is None or not rank < size <= MAX_WORLD:
            continue
        if launcher.grade == Grade.TASK and size == 1:
            continue
        elastic = launcher.grade == Grade.RANK and "TORCHELASTIC_RUN_ID" in env
        return Claim(rank, size, Grade.ELASTIC if elastic else launcher.grade)
    return None


def local_rank(env: Mapping[str, str]) -> int:
    """The rank's number on its node; −1 when it is not said."""
    for launcher in LAUNCHERS:
        number = _number(env.get(launcher.local, ""))
        if number is not None and number < MAX_WORLD:
            return number
    return -1


def names_job(env: Mapping[str, str]) -> bool:
    """Whether the environment alone tells one job of this node from another."""
    return bool(_given(env) or _rendezvous(env) or env.get("PMIX_NAMESPACE"))


def job_name(env: Mapping[str, str], place: Place) -> str:
    """The job's name; the module's table says from what. Unprintable characters become ``?``."""
    name = _given(env)
    if not name and (rendezvous := _rendezvous(env)):
        address, port = rendezvous
        name = f"{address}:{port}"
        if _is_loopback(address):  # every node and every container has one
            name = f"{place.host}:{port}" + (f"-net-{place.network}" if place.network else "")
    if not name and (namespace := env.get("PMIX_NAMESPACE")):
        name = f"mpi-{namespace}"
    if not name:
        name = f"{place.host}:launcher-{place.parent}"
    return "".join(c if c.isprintable() else "?" for c in name)


def is_local(env: Mapping[str, str]) -> bool:
    """Whether the name needs a :class:`Place`."""
    if _given(env):
        return False
    rendezvous = _rendezvous(env)
    return _is_loopback(rendezvous[0]) if rendezvous else not env.get("PMIX_NAMESPACE")


def _given(env: Mapping[str, str]) -> str:
    if name := env.get("SYSOM_JOB_ID", ""):
        return name
    run = env.get("TORCHELASTIC_RUN_ID", "")
    if run not in ("", "none"):
        return run
    job = env.get("SLURM_JOB_ID", "")
    if not job:
        return ""
    # mpirun starts its ranks on the first node itself and on others through a step: their step says nothing.
    by_mpi = "OMPI_COMM_WORLD_RANK" in env or "PMI_RANK" in env
    step = None if by_mpi else _step(env)
    return f"slurm-{job}.{step}" if step else f"slurm-{job}"


def _step(env: Mapping[str, str], key: str = "SLURM_STEP_ID") -> int | None:
    """The number of a step that srun started."""
    step = _number(env.get(key, ""))
    return step if step is not None and step < SLURM_SPECIAL_STEP else None


def _rendezvous(env: Mapping[str, str]) -> tuple[str, str] | None:
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    return (address, port) if address and port else None


def _is_loopback(address: str) -> bool:
    name = address.strip("[]").rstrip(".").lower()
    if name in LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    try:
        ip = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback or ip.is_unspecified


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None
