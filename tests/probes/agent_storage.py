"""An agent's storage without its probes, as a process that can be killed: one thread puts real-size batches,
another ships them. All is imported once, and each of its lives is a fork:

    python -m tests.probes.agent_storage FOLDER SERVER TOKEN LIVES SEED
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from probes.pace import Backoff
from probes.shipper import open_client, ship_pending
from probes.spool import Spool
from tests.probes.batches import a_batch
from tests.probes.outage import a_real_rank

BOOT = "boot-of-kills"


def live(folder: Path, server: str, token: str, log: int, life: int) -> None:
    """Put and ship until killed. ``log`` gets each number whose put returned."""
    spool = Spool(folder)
    os.write(log, b"open\n")

    def ship() -> None:
        backoff = Backoff()
        with open_client(server, token) as client:
            while True:
                # A clock a thousand times as fast: waits and paces do not slow the test down.
                ship_pending(spool, client, backoff, budget_s=100.0, clock=lambda: time.monotonic() * 1000)

    threading.Thread(target=ship, daemon=True).start()
    while True:
        seq = spool.next_seq
        ranks = [a_real_rank(seq, rank, 4) for rank in range(4)]
        # Which life put it is in the batch: a number that came twice would show.
        spool.put(a_batch(seq, node="node-0", agent=spool.agent, boot_id=BOOT, ranks=ranks, start_ns=life))
        os.write(log, b"put %d\n" % seq)
        time.sleep(0.002)


def main() -> None:
    folder, server, token, rounds, seed = sys.argv[1:]
    chance = random.Random(int(seed))
    log = os.open(f"{folder}.log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for life in range(int(rounds)):
        before = os.fstat(log).st_size
        child = os.fork()
        if child == 0:
            try:
                live(Path(folder), server, token, log, life)
            finally:
                os.write(log, b"failed\n")
                os._exit(1)
        # At a random moment, counted in its own work, so that a slow machine sees as much of it; every fifth while
        # it starts, or is not yet at work.
        work = before + len(b"open\n") + chance.randrange(12) * len(b"put 000\n") if life % 5 else before
        while os.fstat(log).st_size < work:
            time.sleep(0.0005)
        time.sleep(chance.uniform(0.0, 0.006))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
