"""What a fault is, and the run that it is put into."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bot.demo.job import TrainingJob
from diagnosis.causes import TITLES
from diagnosis.verdict import Layer, Owner, Status

SPARING = ("--device-ms", "40", "--compute", "1", "--width", "128")
"""So little work, about 3 ms of CPU per step, that what else runs on a machine hardly matters."""
BUSIER = ("--device-ms", "25", "--compute", "2", "--width", "256")
"""Work enough to be hurt by others on the CPU: who sleeps most of the time goes first when it wakes."""
USUAL_STEPS = 100
TRADES = ("backup", "indexer", "rsync", "scanner", "compress", "updatedb", "thumbnail", "logship")


@dataclass
class Run:
    """One run: what was drawn for it, and its job once that is started."""

    fault: str
    seed: int
    world: int
    ranks: list[int]
    """The ranks that the fault is for, in the order in which a course asks for them: ``ranks[0]`` is the rank."""
    cpu: int
    """Of ``ranks[0]`` alone."""
    cpus: list[int]
    """Rank → CPU."""
    draw: random.Random
    folder: Path
    options: list[str] = field(default_factory=lambda: list(SPARING))
    """Of all ranks."""
    rank_options: dict[int, list[str]] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    """Must be said of the culprit: names of what is at fault."""
    job: TrainingJob | None = None

    @property
    def name(self) -> str:
        """The job's."""
        return f"{self.fault}-{self.seed}"

    @property
    def rank(self) -> int:
        return self.ranks[0]

    def pid(self, rank: int) -> int:
        assert self.job is not None
        return self.job.ranks[rank].pid

    def usual_step_s(self) -> float:
        """Median of the newest true steps, before anything is put in: limits are set by it, so that they bite on a
        slow machine too."""
        lines = (self.folder / f"steps-{self.rank}.jsonl").read_text().splitlines()[-USUAL_STEPS:-1]
        starts = [json.loads(line)["start_ns"] for line in lines]
        median_ns: float = statistics.median(b - a for a, b in itertools.pairwise(starts))
        return median_ns / 1e9

    def intruder(self) -> str:
        """A name for a process; one of the words."""
        name = f"{self.draw.choice(TRADES)}-{self.draw.randrange(1 << 16):04x}"
        self.words.append(name)
        return name

    def option(self, rank: int, *words: str) -> None:
        """Tell one rank more."""
        self.rank_options.setdefault(rank, []).extend(words)

    def goes_wrong(self, rank: int, fault: str) -> Callable[[], None]:
        """Have a rank's own code go wrong (``tests/scenarios/rank.py``) from when what this gives is called."""
        when = self.folder / f"fault-{rank}"
        self.option(rank, "--fault", fault, "--when", str(when))
        return when.touch


Course = Callable[[Run], Generator[None, None, None]]
"""A fault over time, as a generator. Up to its first ``yield`` the job is not started yet; up to the second it
starts; then it trains undisturbed. After the second ``yield`` the fault is put in, and at the third it is. What
comes after that, and ``finally``, takes it away; then the job has been stopped."""


@dataclass(frozen=True)
class Expected:
    """The verdict that is right."""

    status: Status
    culprits: int = 1
    """So many of ``Run.ranks``, from the first on."""
    cause: str | None = None
    """Id of the catalogue that names it once there is a rule; None where no claim is made."""
    or_cause: str | None = None
    """As right: where one fault takes the time in two ways, and which of them takes more is chance."""
    layer: Layer | None = "os"
    owner: Owner | None = None
    """None: no claim."""

    @property
    def cause_is_known(self) -> bool:
        """Whether today's catalogue has the cause: only then can it be asked for."""
        return self.cause is None or self.cause in TITLES

    def accepts(self, cause: str | None) -> bool:
        """Whether a cause that was named is right, whatever the catalogue has."""
        return self.cause is None or (cause is not None and cause in (self.cause, self.or_cause))


Bite = Literal["slower", "stops", "nothing"]
"""How the job's own log shows that the fault is there: steps take longer, or there are none any more, or it must
not be seen at all (a healthy run)."""


@dataclass(frozen=True)
class Fault:
    """A fault that can be put in, and what must be said of it."""

    name: str
    course: Course
    expected: Expected
    bite: Bite = "slower"
    after_s: float = 20.0
    """How long it is left in before the verdict is asked for."""
    after_steps: int = 120
    """And for so many steps, where that takes longer."""
    spread: bool = False
    """The ranks share all CPUs alike: for what is no single rank's fault."""
    culprits: int = 1
    """Ranks to draw for the course."""
    more_ranks: int = 0
    """Beyond what is drawn: two culprits of four would leave no majority to compare with."""
