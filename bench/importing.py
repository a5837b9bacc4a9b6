"""Importing Kineto traces: time and memory beside HolisticTraceAnalysis on the same file, and a file above 1 GB.

HolisticTraceAnalysis (Meta, PyPI) is installed into a folder of its own. Every measurement is a process of its own,
the tools take turns, and the middle of the rounds counts. Time is that of reading alone, without starting Python
and loading libraries; memory is the process's peak with all of that, and what it was before reading. What the tools
do differs: HTA makes a table (pandas) of all events; sysom keeps operations, collectives and their steps, pairs
ranks, and hands parts to the store.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / "build" / "bench-hta"
VERSION = "0.5.0"
RECORDED = "*/data/kineto/a100-rank0-of-2.json.gz"
"""Beside the checkout; 40,573 events of one A100."""
BESIDE_MB = 250
"""Size of the generated trace that both read: HTA needs some 5 times that in memory."""
LARGE_MB = 1_100
ROUNDS = 3

METER = """
import json, sys, time
def peak():  # not getrusage: its peak is inherited from the process that started this one
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
def report(read):
    before, start, cpu = peak(), time.perf_counter(), time.process_time()
    rows = read()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(json.dumps({"s": seconds, "cpu": cpu, "before": before, "peak": peak(), "rows": rows}))
"""
OURS = f"""{METER}
from pathlib import Path
from probes.importers import Part, kineto
parts = (one for one in kineto.read([Path(sys.argv[1])], job="bench") if isinstance(one, Part))
ranks = (part.rank_batch for part in parts)
report(lambda: sum(len(rank.operations.kind) + len(rank.collectives.op) for rank in ranks))
"""
THEIRS = f"""{METER}
import logging
logging.disable(logging.CRITICAL)
from hta.common.trace_parser import parse_trace_dataframe
from hta.configs.parser_config import ParserBackend, ParserConfig
settings = ParserConfig.get_default_cfg()
settings.set_parser_backend(ParserBackend[sys.argv[2]])
report(lambda: len(parse_trace_dataframe(sys.argv[1], settings)[1]))
"""
Measured = dict[str, float]


def main() -> None:
    python = _hta()
    recorded = next(iter(sorted(ROOT.parent.glob(RECORDED))), None)
    with tempfile.TemporaryDirectory(prefix="sysom-bench-") as folder:
        files = [] if recorded is None else [recorded]
        if recorded is None:
            print("the recorded trace is not beside this checkout; generated ones only")
        files.append(_generated(Path(folder, f"rank0-{BESIDE_MB}MB.json"), BESIDE_MB))
        for path in files:
            _beside(path, python)
        large = _generated(Path(folder, f"rank0-{LARGE_MB}MB.json"), LARGE_MB)
        print(f"\n{large.name}, sysom alone")
        _print("sysom", [_measure(sys.executable, OURS, str(large))])


def _beside(path: Path, python: str) -> None:
    print(f"\n{path.name}, {path.stat().st_size / 1e6:.1f} MB, median of {ROUNDS} rounds")
    runs: dict[str, list[Measured]] = {
        "sysom": [],
        "HTA, as it comes (json)": [],
        "HTA, saving memory (ijson)": [],
    }
    for _ in range(ROUNDS):
        runs["sysom"].append(_measure(sys.executable, OURS, str(path)))
        runs["HTA, as it comes (json)"].append(_measure(python, THEIRS, str(path), "JSON"))
        runs["HTA, saving memory (ijson)"].append(
            _measure(python, THEIRS, str(path), "IJSON_BATCH_AND_COMPRESS")
        )
    ours, *others = (_print(name, measured) for name, measured in runs.items())
    for name, other in zip(list(runs)[1:], others, strict=True):
        wall, cpu, memory = (theirs / mine for theirs, mine in zip(other, ours, strict=True))
        print(
            f"  {name}: {wall:.1f} × the time of sysom, {cpu:.1f} × its CPU time, {memory:.1f} × its memory"
        )


def _print(name: str, runs: list[Measured]) -> tuple[float, float, float]:
    seconds = statistics.median(run["s"] for run in runs)
    cpu = statistics.median(run["cpu"] for run in runs)
    peak = statistics.median(run["peak"] for run in runs)
    first = runs[0]
    print(
        f"  {name:27} {seconds:7.2f} s ({cpu:.2f} s of CPU)  peak {peak:6.0f} MiB"
        f" ({first['before']:.0f} before reading)  {first['rows']:,.0f} rows"
    )
    return seconds, cpu, peak


def _measure(python: str, program: str, *arguments: str) -> Measured:
    done = subprocess.run(
        [python, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{python} failed on {arguments[0]}:\n{done.stderr[-2000:]}")
    measured: Measured = json.loads(done.stdout.splitlines()[-1])
    return measured


def _hta() -> str:
    """A Python with HolisticTraceAnalysis in it; installed on the first run."""
    python = VENV / "bin" / "python"
    if not python.exists():
        print(f"installing HolisticTraceAnalysis {VERSION} into {VENV.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", f"HolisticTraceAnalysis=={VERSION}", "ijson>=3.3"],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    return str(python)


def _generated(path: Path, megabytes: int) -> Path:
    """A trace of one rank of eight, as Kineto writes it: per kernel an operator, a launch and two ends of a flow;
    an all-reduce per 1,000 kernels; a step per all-reduce."""
    with path.open("w") as file:
        file.write(
            '{\n  "schemaVersion": 1, "deviceProperties": [],\n  "distributedInfo": {"backend": "nccl", "rank": 0,'
            ' "world_size": 8, "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 8,'
            ' "ranks": [0, 1, 2, 3, 4, 5, 6, 7]}]},\n  "baseTimeNanoseconds": 1711964646000000000,\n'
            '  "traceEvents": ['
        )
        correlations = count(1)
        for number in count():
            _step(file, number, 4458676416788.0 + number * 51_000, correlations)
            if file.tell() > megabytes * 1_000_000:
                break
        file.write(
            '  {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 1}\n  ],'
        )
        file.write('\n  "traceName": "generated"\n}')
    return path


KERNEL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, float,"
    " at::native::binary_internal::MulFunctor<float> >, at::detail::Array<char*, 2> >(int,"
    " at::native::AUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> >,"
    " at::detail::Array<char*, 2>)"
)
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
HOST = '"pid": 2910249, "tid": 2919752'
GPU = '"queued": 0, "device": 0, "context": 1, "registers per thread": 16, "shared memory": 0, "grid": [512, 1, 1]'
GROUP = (
    ', "Collective name": "allreduce", "In msg nelems": 6637568, "Out msg nelems": 6637568, "Group size": 8,'
    ' "dtype": "Float", "Process Group Name": "0", "Process Group Description": "default_pg",'
    ' "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"'
)
SHAPES = (
    '"Concrete Inputs": ["", ""], "Input type": ["float", "float"], "Input Strides": [[4096, 1], [1]],'
    ' "Input Dims": [[4096, 4096], [1]]'
)


def _step(file: TextIO, number: int, begin: float, correlations: Iterator[int]) -> None:
    file.write(
        _complete("user_annotation", f"ProfilerStep#{number}", HOST, begin, 50_900, '"External id": 1')
    )
    for place in range(1_001):
        at, tie = begin + 50 * place, next(correlations)
        launch, name, stream, told = "cudaLaunchKernel", KERNEL, 7, ""
        if place == 1_000:
            launch, name, stream, told = "cudaLaunchKernelExC", NCCL, 40, GROUP
        own = f'"External id": {tie}, '
        ran = f'{own}{GPU}, "stream": {stream}, "correlation": {tie}{told}'
        file.write(_complete("cpu_op", "aten::mul", HOST, at, 40.1, f'{own}{SHAPES}, "Ev Idx": {tie}'))
        called = f'{own}"cbid": 211, "correlation": {tie}'
        file.write(_complete("cuda_runtime", launch, HOST, at + 10, 5.284, called))
        file.write(_flow("s", HOST, at + 10, tie, ""))
        file.write(_complete("kernel", name, f'"pid": 0, "tid": {stream}', at + 100, 41.407, ran))
        file.write(_flow("f", f'"pid": 0, "tid": {stream}', at + 100, tie, ', "bp": "e"'))


def _complete(cat: str, name: str, where: str, ts: float, dur: float, args: str) -> str:
    return (
        f'\n  {{\n    "ph": "X", "cat": "{cat}", "name": "{name}", {where},\n'
        f'    "ts": {ts:.3f}, "dur": {dur:.3f},\n    "args": {{\n      {args}\n    }}\n  }},'
    )


def _flow(end: str, where: str, ts: float, tie: int, binding: str) -> str:
    return (
        f'\n  {{\n    "ph": "{end}", "id": {tie}, {where}, "ts": {ts:.3f},\n'
        f'    "cat": "ac2g", "name": "ac2g"{binding}\n  }},'
    )


if __name__ == "__main__":
    main()
