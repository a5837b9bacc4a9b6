"""How long a verdict takes from evidence in memory, for jobs of up to 16,384 ranks, and its memory.

What is asked for is 1,024 ranks × 600 steps × 40 metrics. The evidence of agents makes eight metrics of each step
(the own time, its six parts, the lateness), so two things are measured: the whole engine, from agents' evidence of
four collectives, some four cuts of the driving thread and one of the communication thread a step; and the tests
alone, of 40 metrics given as arrays: of a healthy job, of one with a slow rank, of one with a slow node of eight.

Evidence of more than 256 ranks repeats the series of 256, under other numbers and on other nodes: to simulate all
would take longer than what is measured.
"""

from __future__ import annotations

import cProfile
import pstats
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from diagnosis.evidence import Evidence

STEPS, METRICS, ROUNDS = 600, 40, 3
RANKS = (64, 256, 1_024, 4_096, 16_384)
STAGES = 8
"""Peers of a job are the ranks of one pipeline stage (in the tests of arrays)."""
NODE = 8
SIMULATED = 256
BUCKETS = 4
SLOW = 3


def main() -> None:
    # One process each: the peak of memory is a process's own.
    for what in ("engine", "tests"):
        for ranks in RANKS:
            subprocess.run([sys.executable, "-m", "bench.verdicts", what, str(ranks)], check=True)
    subprocess.run([sys.executable, "-m", "bench.verdicts", "profile", "1024"], check=True)


def engine(ranks: int) -> None:
    """The whole engine, several times over one evidence."""
    from diagnosis.engine import diagnose

    begin = time.perf_counter()
    evidence = job_evidence(ranks)
    built = time.perf_counter() - begin
    before = _peak_mib()
    took, verdict = _timed(lambda: diagnose(evidence))
    print(
        f"{ranks:6} ranks × {STEPS} steps, the whole engine: {took}; peak +{_peak_mib() - before:.0f} MiB; "
        f"{verdict.status}, {len(verdict.culprits)} culprits (simulated in {built:.0f} s)",
        flush=True,
    )


def job_evidence(ranks: int) -> Evidence:
    """What agents saw of a crowded job with one slow rank."""
    from bench.synthetic import build, noisy

    count = min(ranks, SIMULATED)
    made = noisy(ranks=count, steps=STEPS)
    made.buckets = BUCKETS
    made.running[SLOW] += 120.0  # beyond the hiccups of the others
    evidence = build(made, nodes=[f"node-{rank // NODE}" for rank in range(count)], world_size=ranks)[0]
    return replace(
        evidence,
        ranks={
            rank: replace(
                one := evidence.ranks[rank if rank < count else SLOW + 1 + rank % (count - SLOW - 1)],
                rank=rank,
                node=f"node-{rank // NODE}",
                communicators=[msgspec.structs.replace(c, rank=rank) for c in one.communicators],
            )
            for rank in range(ranks)
        },
    )


def profile(ranks: int) -> None:
    """Where a whole diagnosis spends its time, by function."""
    from diagnosis.engine import diagnose

    evidence = job_evidence(ranks)
    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(diagnose, evidence)
    rows = [
        (cumulative, f"{file.rpartition('/')[2]}:{name}")
        for (file, _, name), (_, _, _, cumulative, _) in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
        if "/diagnosis/" in file
    ]
    print(f"Where the engine spends its time, {ranks} ranks (CPU, with what each calls, under the profiler):")
    for seconds, where in sorted(rows, reverse=True)[:24]:
        print(f"{seconds:8.2f} s {where}")


def _timed(run: Callable[[], Any]) -> tuple[str, Any]:
    """In words: median, spread, least CPU time; and what it gave."""
    seconds, cpu, given = [], [], None
    for _ in range(ROUNDS):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        given = run()
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
    words = (
        f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}; CPU {min(cpu):.2f} s)"
    )
    return words, given


def tests(ranks: int) -> None:
    from diagnosis.blame import by_peers
    from diagnosis.outliers import rank_outliers

    values = job(ranks)
    held = values.nbytes / 2**20
    before = _peak_mib()
    nodes = {"node": {f"node-{n}": list(range(n * NODE, (n + 1) * NODE)) for n in range(ranks // NODE)}}
    groups = [list(range(stage, ranks, STAGES)) for stage in range(STAGES)]
    for name, slow in (("healthy", []), ("a slow rank", [3]), ("a slow node", [*range(NODE)])):
        values[0, slow] += 12.0
        took, blame = _timed(lambda: by_peers(values, groups, 60.0, nodes))
        values[0, slow] -= 12.0
        found = f"{len(blame.culprits)} culprits in {len(blame.sets)} sets"
        print(
            f"{ranks:6} ranks × {STEPS} steps × {METRICS} metrics, the tests alone, {name:11}: {took}; {found}",
            flush=True,
        )
    print(f"{'':9}peak +{_peak_mib() - before:.0f} MiB over the evidence's {held:.0f} MiB", flush=True)
    if ranks <= 1_024:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        rank_outliers(values, 60.0)
        took, cpu_took = time.perf_counter() - begin, time.process_time() - begin_cpu
        print(f"{'':9}all metrics of all ranks in one test: {took:.2f} s (CPU {cpu_took:.2f} s)", flush=True)


def job(ranks: int) -> npt.NDArray[np.float32]:
    """Metrics × ranks × steps: autocorrelated noise around 60 ms, single precision as stored."""
    random = np.random.default_rng(ranks)
    values = np.empty((METRICS, ranks, STEPS), np.float32)
    for metric in values:
        random.standard_normal(out=metric, dtype=np.float32)
        metric[:, 1:] += metric[:, :-1]
        metric += 60
    return values


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    {"engine": engine, "tests": tests, "profile": profile}[sys.argv[1]](int(sys.argv[2]))
