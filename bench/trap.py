"""What one uprobe hit costs: a function called in a loop, with and without an empty probe on it, interleaved.

The kernel's BPF statistics do not contain the trap; this does. Prints µs per hit: median and range over rounds.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from pathlib import Path

from probes.bpf import Kernel

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
__attribute__((noinline)) void hit(int i) { __asm__ volatile("" : : "r"(i)); }
int main(void) {
  int calls;
  while (scanf("%d", &calls) == 1) {
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < calls; i++) hit(i);
    clock_gettime(CLOCK_MONOTONIC, &b);
    printf("%f\n", ((b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec)) / calls);
    fflush(stdout);
  }
}
"""
CALLS, ROUNDS = 20_000, 9


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="sysom-bench-") as folder:
        program = Kernel(Path(folder)).bcc.BPF(text="int empty(void *ctx) { return 0; }")
        source, binary = Path(folder) / "hit.c", Path(folder) / "hit"
        source.write_text(SOURCE)
        subprocess.run(["gcc", "-O1", "-o", binary, source], check=True)
        process = subprocess.Popen([binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin
        assert process.stdout

        def ns_per_call() -> float:
            print(CALLS, file=process.stdin, flush=True)
            return float(process.stdout.readline())

        costs = []
        for _ in range(ROUNDS):
            without = ns_per_call()
            program.attach_uprobe(name=str(binary), sym="hit", fn_name="empty", pid=process.pid)
            probed = ns_per_call()
            program.detach_uprobe(name=str(binary), sym="hit", pid=process.pid)
            costs.append((probed - without) / 1e3)
        process.stdin.close()
        process.wait()
    print(
        f"one hit: {statistics.median(costs):.2f} µs ({min(costs):.2f} to {max(costs):.2f}, {ROUNDS} rounds)"
    )


if __name__ == "__main__":
    main()
