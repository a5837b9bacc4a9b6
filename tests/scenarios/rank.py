"""One rank of the scenarios' job: the demo's training script with data loading, and with what goes wrong inside
the rank itself.

``--work NAME:ARGUMENT`` is done in each step from the first on, as the job's data loading;
``--fault NAME:ARGUMENT`` from the step on at which the file ``--when`` is there.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bot.demo import train

Step = Callable[[], object]
READ_BYTES = 64 << 10
"""Read per step."""
PAGE = mmap.PAGESIZE
CLONE_NEWNET = 0x40000000
"""include/uapi/linux/sched.h"""
LOCK_BYTES = 64
"""A pthread_mutex_t takes 40 bytes on x86-64, 48 on arm64; zeros are an open one."""


# --- what a job's data loading does ------------------------------------------------------------------------


def reads(path: str) -> Step:
    """Read on in a file that is in no cache."""
    file = os.open(path, os.O_RDONLY)
    size, at = os.fstat(file).st_size, 0

    def step() -> None:
        nonlocal at
        os.posix_fadvise(file, at, READ_BYTES, os.POSIX_FADV_DONTNEED)
        assert len(os.pread(file, READ_BYTES, at)) == READ_BYTES
        at = (at + READ_BYTES) % size

    return step


def reads_in_worker(path: str) -> Step:
    """The same in the worker process of a DataLoader."""
    from torch.utils.data import DataLoader, IterableDataset

    class Samples(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            read = reads(path)
            while True:
                read()
                yield 1

    loader = iter(DataLoader(Samples(), batch_size=1, num_workers=1))
    return lambda: next(loader)


def touches(argument: str) -> Step:
    """Touch pages of a mapped file, at random: ``PATH:PAGES``."""
    path, _, pages = argument.rpartition(":")
    with Path(path).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)  # no read-ahead: each page that is gone is a fault of its own
    draw, last = random.Random(path), len(mapped) // PAGE - 1

    def step() -> None:
        for _ in range(int(pages)):
            mapped[draw.randint(0, last) * PAGE]

    return step


def saves(path: str) -> Step:
    """Append to a file and have it on the disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def step() -> None:
        os.pwrite(file, bytes(4096), 0)
        os.fsync(file)

    return step


# --- what goes wrong ---------------------------------------------------------------------------------------


def slow_python(milliseconds: str) -> Step:
    """Pre-processing in plain Python, of so much CPU time."""
    text = json.dumps([{"token": number, "text": "word " * 8} for number in range(20)])

    def preprocess() -> None:
        until = time.thread_time() + float(milliseconds) / 1e3
        while time.thread_time() < until:
            [row["text"].upper().split() for row in json.loads(text)]

    return preprocess


def garbage(objects: str) -> Step:
    """Many objects, and a full collection in each step, as many training scripts call it."""
    kept = [{number: [number]} for number in range(int(objects))]

    def collect() -> None:
        assert kept
        gc.collect()

    return collect


def spinner(name: str) -> Step:
    """A Python thread that never sleeps, holding the GIL against the one that trains."""

    def spin() -> None:
        count = 0
        while True:
            count += 1

    threading.Thread(target=spin, name=name, daemon=True).start()
    return lambda: None


def locked(milliseconds: str) -> Step:
    """Another native thread holds a lock for so long, again and again, that each step needs once."""
    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(LOCK_BYTES)

    def hold() -> None:
        while True:
            libc.pthread_mutex_lock(lock)  # calls through ctypes let go of the GIL
            libc.usleep(int(float(milliseconds) * 1e3))
            libc.pthread_mutex_unlock(lock)
            libc.usleep(500)

    threading.Thread(target=hold, daemon=True).start()

    def need() -> None:
        libc.pthread_mutex_lock(lock)
        libc.pthread_mutex_unlock(lock)

    return need


def logs(argument: str) -> Step:
    """Write so much to a pipe in each step: ``PIPE:BYTES``."""
    pipe, _, size = argument.rpartition(":")
    text = b"x" * int(size)
    file = Path(pipe).open("wb", buffering=0)  # noqa: SIM115 - as long as the process
    return lambda: file.write(text)


def stats(argument: str) -> Step:
    """Ask for names that are not there, again and again, for so much time in the kernel: ``FOLDER:MS``."""
    folder, _, milliseconds = argument.rpartition(":")
    number = 0

    def storm() -> None:
        nonlocal number
        until = time.thread_time() + float(milliseconds) / 1e3
        while time.thread_time() < until:
            for _ in range(50):
                number += 1
                os.path.lexists(f"{folder}/none/{number % 4096}")
                os.access(f"{folder}/sub/../sub/../sub/../{number % 4096}", os.R_OK)

    return storm


def sleeps(milliseconds: str) -> Step:
    return lambda: time.sleep(float(milliseconds) / 1e3)


def now_and_then(argument: str) -> Step:
    """Each so many steps plain Python for so long: ``STEPS:MS``."""
    every, _, milliseconds = argument.partition(":")
    work, count = slow_python(milliseconds), 0

    def step() -> None:
        nonlocal count
        count += 1
        if count % int(every) == 0:
            work()

    return step


def never_comes(_argument: str) -> Step:
    """Waits for what does not happen."""
    return threading.Event().wait


WORK: dict[str, Callable[[str], Step]] = {
    "reads": reads,
    "reads-in-worker": reads_in_worker,
    "touches": touches,
    "saves": saves,
}
FAULTS: dict[str, Callable[[str], Step]] = {
    "slow-python": slow_python,
    "garbage": garbage,
    "spinner": spinner,
    "locked": locked,
    "logs": logs,
    "stats": stats,
    "sleeps": sleeps,
    "now-and-then": now_and_then,
    "never-comes": never_comes,
}


def loading(work: str, fault: str, when: Path | None) -> Step:
    """What a rank does for its data, and what goes wrong in it."""
    working = _made(WORK, work)
    going_wrong: Step | None = None

    def load() -> None:
        nonlocal going_wrong
        if working is not None:
            working()
        if going_wrong is None and when is not None and when.exists():
            going_wrong = _made(FAULTS, fault)
        if going_wrong is not None:
            going_wrong()

    return load


def _made(kinds: dict[str, Callable[[str], Step]], text: str) -> Step | None:
    name, _, argument = text.partition(":")
    return kinds[name](argument) if name else None


def enter(namespace: str) -> None:
    """Go into a network namespace, before there are other threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--work", default="")
    parser.add_argument("--fault", default="")
    parser.add_argument("--when", type=Path)
    parser.add_argument("--namespace", default="", help="network namespace")
    parser.add_argument("--interface", default="", help="network interface")
    parser.add_argument("--master", default="", help="address of rank 0 in the namespaces")
    options, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    if options.namespace:
        enter(options.namespace)
        os.environ |= {"MASTER_ADDR": options.master, "GLOO_SOCKET_IFNAME": options.interface}
    made: list[Step] = []

    def load() -> None:
        if not made:  # at the first step: after the import of PyTorch and the choice of a CPU
            made.append(loading(options.work, options.fault, options.when))
        made[0]()

    train.main(load)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:  # a peer died: say so as training scripts do, and end
        print(f"rank {os.environ.get('RANK')}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
