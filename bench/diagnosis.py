"""How long a verdict takes from evidence in memory, for simulated jobs of several sizes, and its memory."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

RANKS = (4, 64, 256)
STEPS = 600
ROUNDS = 3


def main() -> None:
    for ranks in RANKS:
        # One process each: the peak of memory is a process's own.
        subprocess.run([sys.executable, "-m", "bench.diagnosis", str(ranks)], check=True)


def measure(ranks: int) -> None:
    from bench.synthetic import build, plan
    from diagnosis.engine import diagnose

    evidence = build(plan(ranks=ranks, steps=STEPS))[0]
    before = _peak_mib()
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        verdict = diagnose(evidence)
        seconds.append(time.perf_counter() - begin)
    print(
        f"{ranks:4} ranks × {STEPS} steps: {statistics.median(seconds):.2f} s "
        f"({min(seconds):.2f} to {max(seconds):.2f}), peak +{_peak_mib() - before:.0f} MiB; {verdict.status}"
    )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    measure(int(sys.argv[1]))
