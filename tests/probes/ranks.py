"""Stand-ins for ranks: Python processes that have a library of the collectives library's name mapped."""

from __future__ import annotations

from probes.discovery import Discovery, RankProcess

LOAD = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1]); "
WAIT = "print(os.getpid(), flush=True); sys.stdin.readline(); "
RANK = LOAD + WAIT
FORKS = (
    LOAD
    + """
reader, writer = os.pipe()
worker = os.fork()
if worker == 0:  # as a DataLoader's worker: forked, with RANK and the library inherited
    os.write(writer, b"x")
    sys.stdin.readline()
    os._exit(0)
os.read(reader, 1)
print(worker, flush=True)
os.waitpid(worker, 0)
"""
)
"""A rank with one worker, whose pid it writes."""


def environment(rank: int = 1, world: int = 4, **more: str) -> dict[str, str]:
    """What a launcher gives a rank."""
    return {"SYSOM_JOB_ID": "job-1", "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "1"} | more


def found(discovery: Discovery, *pids: int) -> dict[int, RankProcess]:
    """What a scan finds among these processes (others may train on this machine)."""
    return {pid: rank for pid, rank in discovery.scan().items() if pid in pids}
