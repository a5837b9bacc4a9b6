"""A process that uses a CPU fully with several threads, under a name of one's choice: the demo's fault."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import threading

from probes.lifetime import end_with_parent

PR_SET_NAME = 15


def work(block: bytes) -> None:
    while True:
        hashlib.sha256(block).digest()  # hashlib lets go of the GIL for blocks of this size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--cpu", type=int, required=True)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--parent", type=int, help="pid of the process that starts this one, to end with it")
    options = parser.parse_args()
    end_with_parent(options.parent)
    os.sched_setaffinity(0, {options.cpu})
    ctypes.CDLL(None).prctl(PR_SET_NAME, options.name.encode()[:15])
    block = os.urandom(1 << 20)
    for _ in range(options.threads - 1):
        threading.Thread(target=work, args=(block,), daemon=True).start()
    work(block)


if __name__ == "__main__":
    main()
