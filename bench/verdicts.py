"""How long it takes to tell who is slow, from arrays in memory, for jobs of up to 16,384 ranks, and its memory.

What is asked for is 1,024 ranks × 600 steps × 40 metrics. Three jobs are tried: a healthy one, one with a
slow rank, and one with a slow node of eight; then the test of all metrics of all ranks at once. What the engine
takes before that (steps, accounting) is measured per function, from simulated evidence.
"""

from __future__ import annotations

import cProfile
import pstats
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
import numpy.typing as npt

STEPS, METRICS, ROUNDS = 600, 40, 3
RANKS = (64, 256, 1_024, 4_096, 16_384)
STAGES = 8
"""Peers of a job are the ranks of one pipeline stage."""
NODE = 8
ENGINE_RANKS = 256


def main() -> None:
    for ranks in RANKS:
        # One process each: the peak of memory is a process's own.
        subprocess.run([sys.executable, "-m", "bench.verdicts", str(ranks)], check=True)
    subprocess.run([sys.executable, "-m", "bench.verdicts", "engine"], check=True)


def measure(ranks: int) -> None:
    from diagnosis.blame import by_peers
    from diagnosis.outliers import rank_outliers

    values = job(ranks)
    held = values.nbytes / 2**20
    before = _peak_mib()
    nodes = {"node": {f"node-{n}": list(range(n * NODE, (n + 1) * NODE)) for n in range(ranks // NODE)}}
    groups = [list(range(stage, ranks, STAGES)) for stage in range(STAGES)]
    for name, slow in (("healthy", []), ("a slow rank", [3]), ("a slow node", [*range(NODE)])):
        values[0, slow] += 12.0
        seconds, cpu, blame = [], [], None
        for _ in range(ROUNDS):
            begin, begin_cpu = time.perf_counter(), time.process_time()
            blame = by_peers(values, groups, 60.0, nodes)
            seconds.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - begin_cpu)
        values[0, slow] -= 12.0
        found = f"{len(blame.culprits)} culprits in {len(blame.sets)} sets" if blame else ""
        print(
            f"{ranks:6} ranks × {STEPS} steps × {METRICS} metrics, {name:11}: {statistics.median(seconds):.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f}; CPU {min(cpu):.2f} s); {found}",
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


def engine() -> None:
    """Where a whole diagnosis spends its time, by function."""
    from bench.synthetic import build, plan
    from diagnosis.engine import diagnose

    evidence = build(plan(ranks=ENGINE_RANKS, steps=STEPS))[0]
    profile = cProfile.Profile()
    begin = time.perf_counter()
    diagnose(evidence)
    took = time.perf_counter() - begin
    profile.runcall(diagnose, evidence)
    print(f"A whole diagnosis of {ENGINE_RANKS} ranks × {STEPS} steps from evidence in memory: {took:.2f} s")
    rows = [
        (cumulative, f"{file.rpartition('/')[2]}:{name}")
        for (file, _, name), (_, _, _, cumulative, _) in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
        if "/diagnosis/" in file
    ]
    for seconds, where in sorted(rows, reverse=True)[:24]:
        print(f"{seconds:8.2f} s {where} (with what it calls, under the profiler)")


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    engine() if sys.argv[1] == "engine" else measure(int(sys.argv[1]))
