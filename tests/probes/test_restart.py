"""An agent that is killed in the middle of a job and started again goes on where it was."""

from __future__ import annotations

import itertools
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bot.demo import job as demo_job
from bot.demo.job import TrainingJob
from diagnosis.store.sqlite import SqliteStore
from probes import in_kernel
from probes.bpf import Kernel
from probes.codec import decode
from probes.records import Batch, RankBatch
from tests.probes.processes import until

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

JOB = "restarted"
BATCHES = 6
GROUP_BYTES = 4000
"""The job all-reduces a thousand numbers of 4 bytes within halves of the world, and its gradients in the world."""
AGENT = """
import select, sys
from pathlib import Path
from probes.agent import to_batch
from probes.codec import encode
from probes.watch import Limits, NodeWatch
limits = Limits(cpu_share=1e3, memory_bytes=1 << 60, events_per_s=1e9)  # busy machines are no matter of this test
watch, seq = NodeWatch(Path(sys.argv[1]), limits=limits), int(sys.argv[2])
while True:
    select.select([], [], [], 0.5)
    batch = to_batch(watch.gather(), "node-a", "boot", "one-agent", seq)
    print(encode(batch).hex(), flush=True)
    seq += 1
"""
"""The agent's loop without its spool: each batch on a line, in hexadecimal."""


@pytest.fixture(scope="module")
def job(root_and_bpf: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingJob]:
    logs = tmp_path_factory.mktemp("job")
    training = demo_job.start(
        JOB, cpus=(-1, -1, -1, -1), options=("--groups", "--device-ms", "30"), logs=logs
    )
    try:
        steps = logs / "steps-0.jsonl"
        deadline = time.monotonic() + 180
        while not steps.exists() or steps.read_text().count("\n") < 5:
            assert training.running(), training.last_words()
            assert time.monotonic() < deadline, "the job makes no steps"
            select.select([], [], [], 0.2)
        yield training
    finally:
        training.stop()


def life(cache: Path, seq: int) -> list[Batch]:
    """Batches of an agent until it saw collectives for a while; then SIGKILL."""
    begun = time.monotonic()
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(cache), str(seq)], stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    batches: list[Batch] = []
    try:
        while sum(_sees(batch) for batch in batches) < BATCHES:
            assert time.monotonic() - begun < 200, "the agent sees no collectives"
            line = agent.stdout.readline()
            assert line, "the agent ended"
            batches.append(decode(bytes.fromhex(line)))
        mine = {program.id for program in in_kernel.programs() if agent.pid in program.holders}
        assert mine, "an agent that watches has programs loaded"
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.communicate()
    until(lambda: not mine & {p.id for p in in_kernel.programs()}, "the kernel takes all of it away")
    return batches


def _sees(batch: Batch) -> bool:
    return len(_ranks(batch)) == 4 and all(rank.collectives.seq for rank in _ranks(batch))


def _ranks(batch: Batch) -> list[RankBatch]:
    return [rank for rank in batch.ranks if rank.job == JOB]


def test_a_killed_agent_leaves_nothing_and_the_next_one_goes_on(job: TrainingJob, tmp_path: Path) -> None:
    first = life(tmp_path / "cache", 1)
    second = life(tmp_path / "cache", first[-1].seq + 1)
    assert job.running(), job.last_words()
    assert {rank.rank for rank in _ranks(second[0])} == {0, 1, 2, 3}

    for rank in range(4):
        lists = [r.communicators for batch in [*first, *second] for r in _ranks(batch) if r.rank == rank]
        for earlier, later in itertools.pairwise(lists):
            assert len(later) >= len(earlier)
            for old, new in zip(earlier, later, strict=False):
                assert (new.rank, new.size) == (old.rank, old.size), "each keeps its place"
                assert old.uid in ("", new.uid), "and its name, once it is known"
        since = [
            {
                t.since_ns
                for batch in part
                for r in _ranks(batch)
                if r.rank == rank
                for t in r.threads
                if t.tid
            }
            for part in (first, second)
        ]
        assert since[0].isdisjoint(since[1]), "thread times of the second life are counted anew"
        assert min(since[1]) > max(batch.end_ns for batch in first)

    store = SqliteStore(tmp_path / "store.db")
    for batch in [*second, *first]:  # in whatever order they come
        assert store.add(batch, batch.end_ns + batch.utc_offset_ns)
    offset = second[-1].utc_offset_ns
    evidence = store.evidence(JOB, first[0].start_ns + offset, second[-1].end_ns + offset + 1)
    store.close()
    for rank, seen in evidence.ranks.items():
        sizes = np.array([seen.communicators[place].size for place in seen.collectives.communicator])
        in_group = seen.collectives.bytes == GROUP_BYTES
        assert (sizes[in_group] == 2).all(), f"rank {rank}: the half's collectives are the half's"
        assert (sizes[~in_group] == 4).all(), f"rank {rank}: the world's are the world's"
        assert len({c.uid for c in seen.communicators}) == len(seen.communicators) == 2
        works = list(zip(seen.collectives.communicator, seen.collectives.seq, strict=True))
        assert len(works) == len(set(works)), "no collective is seen twice: nothing was attached twice"
