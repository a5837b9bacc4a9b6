"""A small real training job: PyTorch DDP over gloo on CPUs. One process per rank; the launcher sets
RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun does.

Each step computes a little, sleeps as a stand-in for the time a GPU would work, and all-reduces the
gradients. Its log of true step times is what sysom's own answer is checked against.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from probes.lifetime import end_with_parent

FIRST_STEP = "the first step is done"
"""Said once: until then a rank imports PyTorch, for minutes on a busy machine."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps; 0: go on until told")
    parser.add_argument("--width", type=int, default=256, help="width of the three linear layers")
    parser.add_argument("--device-ms", type=float, default=20.0, help="sleep per step, as a device's work")
    parser.add_argument("--compute", type=int, default=1, help="forward and backward passes per step")
    parser.add_argument("--cpu", type=int, default=-1, help="run on this CPU only")
    parser.add_argument("--log", type=Path, help="write each step's start to this file, as JSON lines")
    parser.add_argument("--groups", action="store_true", help="all-reduce in two halves of the world, too")
    parser.add_argument("--slow-from", type=int, default=0, help="first step of the fault below")
    parser.add_argument("--sleep-ms", type=float, default=0.0, help="fault: this rank sleeps longer per step")
    parser.add_argument(
        "--burn-ms", type=float, default=0.0, help="fault: this rank computes longer per step"
    )
    parser.add_argument("--parent", type=int, help="pid of the process that starts this one, to end with it")
    return parser.parse_args()


def burn(milliseconds: float) -> None:
    """Use this thread's CPU for so long, measured in CPU time."""
    until = time.thread_time() + milliseconds / 1e3
    while time.thread_time() < until:
        pass


def main(load: Callable[[], None] = lambda: None) -> None:
    """Train. ``load`` stands in for getting the step's data, at the beginning of each step."""
    options = arguments()
    end_with_parent(options.parent)
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    if options.cpu >= 0:  # after the import, which is heavy, and before gloo starts its threads
        os.sched_setaffinity(0, {options.cpu})
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.groups:
        halves = [dist.new_group(list(range(world // 2))), dist.new_group(list(range(world // 2, world)))]
        half = halves[rank >= world // 2]

    torch.manual_seed(rank)
    width = options.width
    layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(width, width)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = torch.randn(32, width)
    log = options.log.open("w") if options.log else None

    step = 0
    while not options.steps or step < options.steps:
        if log:
            log.write(json.dumps({"step": step, "start_ns": time.monotonic_ns()}) + "\n")
            log.flush()
        load()
        optimizer.zero_grad()
        for _ in range(options.compute - 1):
            with model.no_sync():
                model(samples).square().mean().backward()
        loss = model(samples).square().mean()
        time.sleep(options.device_ms / 1e3)
        if step >= options.slow_from:
            if options.sleep_ms:
                time.sleep(options.sleep_ms / 1e3)
            if options.burn_ms:
                burn(options.burn_ms)
        loss.backward()
        if options.groups:
            dist.all_reduce(torch.ones(1000), group=half)
        optimizer.step()
        step += 1
        if step == 1:
            print(FIRST_STEP, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:  # a peer died: say so as training scripts do, and end
        print(f"rank {os.environ.get('RANK')}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
