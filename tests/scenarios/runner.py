"""One run of one fault: a real job under a real agent, the fault put in, the verdict asked for, all of it recorded.

A run first proves, by the job's own log, that the fault bit; one that did not is void: it is counted apart, and is
neither right nor wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.stack import NODE, TOKEN, agent_process, server_thread, until
from bot.demo import job as demo_job
from bot.settings import Settings
from diagnosis.service import diagnose_job
from diagnosis.store import UnknownJob, open_store
from diagnosis.verdict import Verdict
from tests.live.conftest import Stack, Watched
from tests.scenarios.fault import Fault, Run
from tests.scenarios.ground import NoGround, descendants, own_folder
from tests.scenarios.tap import Tap, tapped

SCRIPT = "tests.scenarios.rank"
FEWEST, MOST, PER_CPU = 4, 8, 2
"""How many ranks a job has: two per CPU, at least four and at most eight."""
BEFORE_S = 15.0
"""How long the job trains undisturbed under the agent."""
BITES = 1.2
"""Steps must take so many times as long as before."""
STANDS_S = 5.0
"""A job without a step for so long stands still."""
ASK_S = 3.0
"""How often the verdict is asked for meanwhile."""
AT_MOST = 3.0
"""A fault whose steps are so long that there are few lasts up to so many times as long."""
START_S = 240.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run."""

    fault: str
    seed: int
    world: int
    ranks: list[int]
    """Who must be named; what is at fault in the order in which it was drawn."""
    words: list[str]
    bit: bool
    before_ms: float
    """Mean true step, by the job's log."""
    after_ms: float | None
    """None: there were no steps any more."""
    status: str
    culprits: list[int]
    cause: str | None
    layer: str | None
    owner: str | None
    confidence: float
    seconds: float | None
    """From putting it in to the first verdict that was right; None: none was, while it was asked for."""
    summary: str
    details: list[str]
    """What is said of each culprit."""
    recording: str = ""
    at: str = ""
    cpus: int = 0


def prepare(fault: Fault, seed: int, folder: Path) -> Run:
    """Draw a run's places; the same seed draws the same on a machine of as many CPUs."""
    draw = random.Random(f"{fault.name} {seed}")
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise NoGround("there is a single CPU here: no rank can be apart from the others")
    world = draw.randint(FEWEST, max(FEWEST, min(MOST, PER_CPU * len(cpus)))) + fault.more_ranks
    ranks = draw.sample(range(world), fault.culprits)
    cpu = draw.choice(cpus)
    others = cpus if fault.spread else [other for other in cpus if other != cpu]
    placed = [others[rank % len(others)] for rank in range(world)]
    if not fault.spread:
        placed[ranks[0]] = cpu
    return Run(fault.name, seed, world, ranks, cpu, placed, draw, folder)


@dataclass
class Ground:
    """A server, an agent, and the tap between them: for one run after the other."""

    stack: Stack
    tap: Tap


@contextmanager
def ground() -> Iterator[Ground]:
    """Start them."""
    with own_folder("stack") as folder, _ground(folder) as on:
        yield on


@contextmanager
def _ground(folder: Path) -> Iterator[Ground]:
    settings = Settings(state=str(folder / "server"), listen="127.0.0.1:0", node_tokens={NODE: TOKEN})
    with (
        server_thread(settings) as url,
        tapped(url) as tap,
        agent_process(tap.url, folder / "agent", quiet=True) as agent,
    ):
        yield Ground(Stack(tap.url, settings.store_url(), folder, agent), tap)
        assert agent.poll() is None, "the agent ended during the runs"


def run(fault: Fault, seed: int, on: Ground, folder: Path, *, before_s: float = BEFORE_S) -> Result:
    """Do one run; its logs and its recording go into ``folder``, which is new. Raises NoGround, and AssertionError
    with the job's words when that ended by itself."""
    folder.mkdir(parents=True)
    this = prepare(fault, seed, folder)
    on.tap.forget()
    course = fault.course(this)
    with contextlib.closing(course), _affinities(), contextlib.ExitStack() as ending:
        next(course)
        this.job = demo_job.start(
            this.name,
            cpus=this.cpus,
            options=this.options,
            rank_options=this.rank_options,
            logs=folder,
            script=SCRIPT,
        )
        ending.callback(this.job.stop)
        watched = Watched(this.name, this.job, folder, on.stack)
        next(course)
        _until_watched(watched, this)
        if not fault.spread:
            _keep_off(this.cpu, {os.getpid(), on.stack.agent.pid}, {rank.pid for rank in this.job.ranks})
        watched_ns = time.monotonic_ns()
        watched.seconds_of_steps(before_s)
        began_ns = time.monotonic_ns()
        next(course)
        right_after_s = _watch(fault, this, watched, began_ns)
        ended_ns = time.monotonic_ns()
        verdict = on.stack.diagnose(this.name)
        starts = [watched.starts_ns(rank) for rank in range(this.world)]
        if fault.bite != "stops":
            watched.check()
        with contextlib.suppress(StopIteration):
            next(course)
    if right_after_s is None and is_right(fault, this.ranks, verdict):
        right_after_s = (time.monotonic_ns() - began_ns) / 1e9
    result = _result(fault, this, verdict, starts, (watched_ns, began_ns, ended_ns), right_after_s)
    path = folder / f"{this.name}.sysomrec"
    on.tap.record(path, this.name, json.dumps(_truth(fault, result)), len(os.sched_getaffinity(0)))
    return msgspec.structs.replace(result, recording=str(path))


def _watch(fault: Fault, this: Run, watched: Watched, began_ns: int) -> float | None:
    """Let the fault last; gives after how many seconds a verdict was right first."""
    right_after_s = None
    since_s, steps = 0.0, 0
    while lasts(fault, since_s, steps):
        left_s = fault.after_s - since_s
        time.sleep(min(ASK_S, left_s) if left_s > 0 else ASK_S)
        if fault.bite != "stops":
            watched.check()
        if right_after_s is None and fault.bite != "nothing":
            verdict = diagnose_job(watched.stack.store, this.name, now_ns=time.time_ns())
            if is_right(fault, this.ranks, verdict):
                right_after_s = (time.monotonic_ns() - began_ns) / 1e9
        since_s = (time.monotonic_ns() - began_ns) / 1e9
        steps = sum(start > began_ns for start in watched.starts_ns())
    return right_after_s


def lasts(fault: Fault, since_s: float, steps: int) -> bool:
    """Whether a fault is left in longer, after so many seconds and steps: where steps are long, there are few."""
    few = fault.bite == "slower" and steps < fault.after_steps
    return since_s < fault.after_s * (AT_MOST if few else 1.0)


def is_right(fault: Fault, ranks: list[int], verdict: Verdict) -> bool:
    """Whether a verdict has the status, the culprits, and the cause where today's catalogue has that."""
    known = fault.expected.cause_is_known
    return names_the_culprits(fault, ranks, verdict) and (not known or fault.expected.accepts(verdict.cause))


def names_the_culprits(fault: Fault, ranks: list[int], verdict: Verdict) -> bool:
    """Whether a verdict has the status, and all culprits and nobody else."""
    named = {culprit.rank for culprit in verdict.culprits}
    return verdict.status == fault.expected.status and named == set(ranks[: fault.expected.culprits])


def mean_step_ms(starts_ns: list[int], since_ns: int, until_ns: int) -> float | None:
    """Mean of the steps that ended between two instants, the one that was going on at the first with its whole
    length: a pause at the very beginning counts. None when none ended."""
    ended = [start for start in starts_ns if since_ns < start <= until_ns]
    before = [start for start in starts_ns if start <= since_ns]
    edges = [*before[-1:], *ended]
    return (edges[-1] - edges[0]) / (len(edges) - 1) / 1e6 if ended and len(edges) > 1 else None


def has_bitten(fault: Fault, before_ms: float, after_ms: float | None, stood_s: float) -> bool:
    """Whether the job's log shows the fault; ``stood_s``: time without a step at the end. Of a healthy run there is
    nothing to show."""
    if fault.bite == "nothing":
        return True
    if fault.bite == "stops":
        return stood_s >= STANDS_S
    return after_ms is not None and after_ms >= BITES * before_ms


def _result(
    fault: Fault,
    this: Run,
    verdict: Verdict,
    starts: list[list[int]],
    moments_ns: tuple[int, int, int],
    seconds: float | None,
) -> Result:
    watched_ns, began_ns, ended_ns = moments_ns
    own = starts[0]
    before_ms = mean_step_ms(own, watched_ns, began_ns)
    assert before_ms is not None, "no step ended before the fault"
    after_ms = mean_step_ms(own, began_ns, ended_ns)
    stood_s = (ended_ns - max(max(one) for one in starts)) / 1e9
    return Result(
        fault=fault.name,
        seed=this.seed,
        world=this.world,
        ranks=this.ranks[: fault.expected.culprits],
        words=this.words,
        bit=has_bitten(fault, before_ms, after_ms, stood_s),
        before_ms=round(before_ms, 2),
        after_ms=None if after_ms is None or fault.bite == "stops" else round(after_ms, 2),
        status=verdict.status,
        culprits=[culprit.rank for culprit in verdict.culprits],
        cause=verdict.cause,
        layer=verdict.layer,
        owner=verdict.owner,
        confidence=verdict.confidence,
        seconds=None if seconds is None else round(seconds, 1),
        summary=verdict.summary,
        details=[culprit.detail for culprit in verdict.culprits],
        at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        cpus=len(os.sched_getaffinity(0)),
    )


def _truth(fault: Fault, result: Result) -> dict[str, object]:
    """What a recording's note says of it: the cause where there is a rule for it now, as what is recorded now need
    not hold what a later rule goes by."""
    names = ("fault", "seed", "world", "ranks", "words", "bit", "before_ms", "after_ms")
    cause = fault.expected.cause if fault.expected.cause_is_known else None
    return {name: getattr(result, name) for name in names} | {"cause": cause}


def _until_watched(watched: Watched, this: Run) -> None:
    """Until all ranks train and the server knows all of them."""

    def trains() -> bool:
        watched.check()
        return all(len(watched.starts_ns(rank)) > 5 for rank in range(this.world))

    def known() -> bool:
        watched.check()
        with contextlib.suppress(UnknownJob):
            store = open_store(watched.stack.store, read_only=True)
            try:
                return any(info.job == this.name and info.ranks_seen == this.world for info in store.jobs())
            finally:
                store.close()
        return False

    until(trains, f"steps of {this.name}", START_S)
    until(known, f"all ranks of {this.name} at the server", START_S)


@contextmanager
def _affinities() -> Iterator[None]:
    """This process and what it starts may run on any CPU again afterwards."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        for pid in (os.getpid(), *descendants(os.getpid())):
            _may_run_on(pid, before)


def _keep_off(cpu: int, roots: set[int], ranks: set[int]) -> None:
    """Keep the agent, the server and this process, but no rank, off a CPU."""
    spared = ranks | {child for rank in ranks for child in descendants(rank)}
    others = os.sched_getaffinity(0) - {cpu}
    for pid in roots | {child for root in roots for child in descendants(root)}:
        if pid not in spared:
            _may_run_on(pid, others)


def _may_run_on(pid: int, cpus: set[int]) -> None:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(task.name), cpus)
