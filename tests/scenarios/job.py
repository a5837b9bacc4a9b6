"""Faults of the whole job, several at once, and none."""

from __future__ import annotations

from collections.abc import Generator

from tests.scenarios.cpu import hog_process
from tests.scenarios.fault import BUSIER, Expected, Fault, Run


def every_50th(run: Run) -> Generator[None, None, None]:
    """One step in 50 takes much longer on one rank."""
    wrong = run.goes_wrong(run.rank, f"now-and-then:50:{run.draw.randrange(600, 900)}")
    yield
    yield
    wrong()
    yield


def all_alike(run: Run) -> Generator[None, None, None]:
    """Each rank takes longer, all as much."""
    begin = [run.goes_wrong(rank, "sleeps:20") for rank in range(run.world)]
    yield
    yield
    for wrong in begin:
        wrong()
    yield


def two_at_once(run: Run) -> Generator[None, None, None]:
    """A process on one rank's CPU, and another rank that sleeps."""
    run.options = list(BUSIER)
    wrong = run.goes_wrong(run.ranks[1], f"sleeps:{run.draw.randrange(25, 40)}")
    yield
    yield
    with hog_process(run):
        wrong()
        yield


def nothing(_run: Run) -> Generator[None, None, None]:
    """A healthy job."""
    yield
    yield
    yield


FAULTS = (
    Fault(
        "every-50th-step",
        every_50th,
        # Plain Python; its samples may be too few to say so.
        Expected("slow", cause="slow-python", or_cause="runs-longer"),
        after_s=40.0,
    ),
    Fault("all-alike", all_alike, Expected("slow", culprits=0, layer="job", owner="job"), spread=True),
    Fault("two-at-once", two_at_once, Expected("slow", culprits=2), culprits=2, more_ranks=1),
    Fault("healthy", nothing, Expected("healthy", culprits=0, layer=None), bite="nothing", spread=True),
)
