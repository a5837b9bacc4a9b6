"""What a rank runs: Python, its garbage collector, libraries, the kernel; and who else runs Python meanwhile.

Rests on samples (docs/probes/on_cpu.md). Their shares split the time that the driving thread ran, which is known
exactly; what they cannot tell for want of samples is not named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from diagnosis.findings import OTHERS, Extra, HostTime, Judgement
from diagnosis.limits import EXPLAINS
from diagnosis.wording import ms

PROBE = "on_cpu"
Code = tuple[str, str]
"""Kind and, of native code, library, as the probe's labels."""
GC: Code = ("gc", "")
PYTHON: Code = ("python", "")
INTERPRETER: Code = ("interpreter", "")
"""Either of the two, in a file without symbols."""
_IN_PYTHON = (GC, PYTHON, INTERPRETER)

DEVIATIONS = 1.96
"""Half of an interval in standard deviations: 19 of 20 such intervals hold the truth (samples are counted events:
Poisson, each kind by itself)."""
PRECISE = 1 - EXPLAINS
"""How large that half may be, as a share of what is to be explained: as much as a cause may leave unexplained.
Where nothing else ran, 97 samples do: 2 s of CPU time."""
COVERED = 0.5
"""The samples must stand for this share of the time that the rank ran, or the probe was on for too little of it."""
BY_TIMEOUT = 0.5
"""Who waits for Python's lock looks again every 5 ms (sys.getswitchinterval). While another thread computes, its
waits end by that timeout, at least for this share of them; work that was handed over ends by its result."""
_C_LIBRARY = re.compile(r"(?:ld-linux|ld-musl|libc|libm|libpthread)\b.*")
"""Works for whoever calls it: shared out among them."""
_NAMED = 3
_WORTH_NAMING = 0.05


@dataclass(frozen=True)
class Ran:
    """How much longer than its peers the driving thread ran in each kind of code, ms per step, and half of the
    interval of each; empty where it is not told."""

    mine: Mapping[Code, float]
    theirs: Mapping[Code, float]
    error: Mapping[Code, float]
    samples: float
    """Of this rank."""

    def over(self, *codes: Code) -> float:
        return sum(self.mine.get(code, 0.0) - self.theirs.get(code, 0.0) for code in codes)

    def half(self, *codes: Code) -> float:
        """Half of the interval of their sum."""
        return math.sqrt(sum(self.error.get(code, 0.0) ** 2 for code in codes))


_NOTHING = Ran({}, {}, {}, 0.0)


def ran_in(extra: Extra) -> Ran:
    """Of a rank and its peers, where both are told of."""
    if PROBE not in extra.host.told or not extra.comparable(PROBE):
        return _NOTHING
    mine, my_error, samples = _split(extra.host, extra.parts)
    theirs, their_error, their_samples = _split(extra.peers_host, extra.peers_parts)
    if not samples or not their_samples:
        return _NOTHING
    if (
        INTERPRETER in mine or INTERPRETER in theirs
    ):  # the coarser of the two: or one's would lack the other's
        mine, theirs = _coarse(mine), _coarse(theirs)
        my_error, their_error = _coarse(my_error), _coarse(their_error)
    codes = mine.keys() | theirs.keys()
    error = {
        code: DEVIATIONS * math.sqrt(my_error.get(code, 0.0) + their_error.get(code, 0.0)) for code in codes
    }
    return Ran(mine, theirs, error, samples)


def _split(of: HostTime, parts: Mapping[str, float]) -> tuple[dict[Code, float], dict[Code, float], float]:
    """ms per step by kind of code, the variance of each, and the number of samples; nothing where these stand for
    too little of the time."""
    raw: dict[Code, float] = {}
    for labels, value in of.rows("on_cpu_ns"):
        if labels.get("thread") == "driving":
            code = labels.get("in", ""), labels.get("library", "")
            raw[code] = raw.get(code, 0.0) + value
    whole, samples = sum(raw.values()), of.total("on_cpu_samples") * of.steps
    ran = parts["running"] + parts["interrupted"]
    if whole <= 0 or samples <= 0 or whole < COVERED * ran:
        return {}, {}, 0.0
    told = {code: value * ran / whole for code, value in raw.items()}
    variance = {code: value * ran / samples for code, value in told.items()}
    return _shared_out(told), _shared_out(variance), samples


def _shared_out(by_code: dict[Code, float]) -> dict[Code, float]:
    """The C library's to the other code of the program, in proportion."""
    library = {code for code in by_code if code[0] == "native" and _C_LIBRARY.fullmatch(code[1])}
    callers = sum(value for code, value in by_code.items() if code not in library and code[0] != "kernel")
    if callers <= 0:
        return by_code
    grown = 1 + sum(by_code[code] for code in library) / callers
    return {
        code: value * (1.0 if code[0] == "kernel" else grown)
        for code, value in by_code.items()
        if code not in library
    }


def _coarse(by_code: dict[Code, float]) -> dict[Code, float]:
    rest = {code: value for code, value in by_code.items() if code not in _IN_PYTHON}
    return rest | {INTERPRETER: sum(by_code.get(code, 0.0) for code in _IN_PYTHON)}


# --- running longer ----------------------------------------------------------------------------------------


def reclaim_running_over(extra: Extra) -> float:
    """How much longer than its peers the driving thread ran in the kernel to free memory: what it spent there in
    all, without its sleeps, as far as it ran longer."""
    if not extra.comparable("memory"):
        return 0.0
    over = extra.host.reclaiming - extra.peers_host.reclaiming - extra.asleep_over("reclaim")
    return max(0.0, min(over, extra.over("running")))


def ran_longer(extra: Extra) -> tuple[float, float]:
    """How much longer than its peers the rank ran, without freeing memory; and how much longer it waited for a CPU
    for that reason.

    Who runs longer is interrupted by others longer: what each of them takes from a peer per ms that the peer
    runs, it takes from this rank for each ms that it runs more. That belongs to running longer where running
    is most of the extra time; what anybody takes beyond that rate does not.
    """
    longer = max(0.0, extra.over("running") - reclaim_running_over(extra))
    theirs, along = extra.peers_parts["running"], 0.0
    if longer > 0.5 * extra.own and theirs > 0:
        at_peers_rate = sum(
            min(over, extra.peers_took.get(group, 0.0) * longer / theirs)
            for group, over in extra.excess(*OTHERS).items()
        )
        along = max(0.0, min(at_peers_rate, extra.over("runnable")))
    return longer, along


def _named(extra: Extra) -> tuple[Code, ...]:
    """In which code nearly all of what the rank ran longer was: the collector, or Python with it; or nothing."""
    ran, (longer, _) = ran_in(extra), ran_longer(extra)
    for codes in ((GC,), (PYTHON, GC)):
        enough = ran.over(*codes) >= EXPLAINS * longer > 0 and ran.half(*codes) <= PRECISE * longer
        if enough and not _all_alike(ran, *codes):
            return codes
    return ()


def _all_alike(ran: Ran, *codes: Code) -> bool:
    """Whether its other code takes nearly as many times as long as its peers' as this code does, or may for all
    that samples tell: then it is as well a slower CPU, or more of the same. Peers may run nothing else."""
    others = [code for code in ran.error if code not in codes]
    mine, theirs = (sum(of.get(code, 0.0) for code in codes) for of in (ran.mine, ran.theirs))
    rest, their_rest = (sum(of.get(code, 0.0) for code in others) for of in (ran.mine, ran.theirs))
    return min(theirs, their_rest) > 0 and (rest + ran.half(*others)) * theirs >= EXPLAINS * mine * their_rest


def _explained(extra: Extra, *codes: Code) -> float:
    """What running longer in this code explains, with the waits that go along with it; 0 unless that is named."""
    if _named(extra) != codes:
        return 0.0
    longer, along = ran_longer(extra)
    return min(1.0, ran_in(extra).over(*codes) / longer) * (longer + along)


def named_elsewhere(extra: Extra) -> float:
    """Of what the rank ran longer, what the causes here explain."""
    return _explained(extra, GC) + _explained(extra, PYTHON, GC)


def python_gc(extra: Extra) -> Judgement:
    """CPython's cycle collector goes through all objects that there are: again and again, if there are many."""
    ran = ran_in(extra)
    words = (
        f"rank {extra.rank} runs Python's garbage collector for {_beside(ran, GC)}"
        if ran.samples
        else "what runs is not told of the rank and its peers"
    )
    actions = (
        f"In the code of rank {extra.rank}: gc.freeze() once all that stays is loaded, or gc.disable() and "
        f"gc.collect() every some hundred steps, in the same step on all ranks; keep fewer objects (arrays and "
        f"tensors instead of lists and dicts). Which collections take long: gc.callbacks, gc.get_stats().",
        f"Then diagnose again: rank {extra.rank} should run the collector for about "
        f"{ms(ran.theirs.get(GC, 0.0))} per step, as its peers do.",
    )
    return Judgement(_explained(extra, GC), "job", f"{words}; {_rest(extra, ran, GC)}", actions, words)


def slow_python(extra: Extra) -> Judgement:
    """The interpreter runs longer: more to do in Python, or in slow Python. What the collector takes is part of it
    where it is not most of it: objects are made by code."""
    ran = ran_in(extra)
    words = (
        f"rank {extra.rank} runs Python code for {_beside(ran, PYTHON)}"
        if ran.samples
        else "what runs is not told of the rank and its peers"
    )
    actions = (
        f"See which function: py-spy record --pid {extra.pid} --duration 10 on {extra.node}, beside a peer's; do "
        f"less per step (tokenise ahead, log less), in worker processes, or in a library that is not Python.",
        f"Then diagnose again: rank {extra.rank} should run Python for about "
        f"{ms(ran.theirs.get(PYTHON, 0.0))} per step, as its peers do.",
    )
    collector = f", and its garbage collector for {_beside(ran, GC)}" if ran.over(GC) >= 0.1 else ""
    detail = f"{words}{collector}; {_rest(extra, ran, PYTHON, GC)}"
    return Judgement(_explained(extra, PYTHON, GC), "job", detail, actions, words)


def _beside(ran: Ran, code: Code) -> str:
    return f"{ms(ran.mine.get(code, 0.0))} per step, its peers for {ms(ran.theirs.get(code, 0.0))}"


def _rest(extra: Extra, ran: Ran, *codes: Code) -> str:
    """What was looked at besides, and how sure the figures are."""
    longer, _ = ran_longer(extra)
    return (
        f"it runs {ms(longer)} longer in all, {ms(max(0.0, longer - ran.over(*codes)))} of it elsewhere "
        f"(± {ms(ran.half(*codes))}, by {ran.samples:,.0f} samples)"
    )


def in_what_code(extra: Extra) -> str:
    """In which code the rank ran longer, in words that go on a sentence; empty where no probe tells."""
    ran, (longer, _) = ran_in(extra), ran_longer(extra)
    if not ran.samples or longer <= 0:
        return ""
    codes = sorted(ran.error, key=lambda code: (-ran.over(code), code))
    half = max((ran.half(code) for code in codes), default=0.0)
    if half > PRECISE * longer:
        needed = ran.samples * (half / (PRECISE * longer)) ** 2
        return (
            f"; in which code is not known yet: {ran.samples:,.0f} samples tell it to ± {ms(half)}, about "
            f"{_round_up(needed):,} are needed"
        )
    most = [code for code in codes if ran.over(code) >= max(_WORTH_NAMING * longer, ran.half(code))][:_NAMED]
    if not most:
        return "; that is spread over all the code that it runs"
    words = ", ".join(f"{ms(ran.over(code))} in {_called(code)}" for code in most)
    return f"; it is {words} (± {ms(half)}, by {ran.samples:,.0f} samples)"


def _round_up(samples: float) -> int:
    """To two digits."""
    unit: int = 10 ** max(0, int(math.log10(samples)) - 1)
    return math.ceil(samples / unit) * unit


def _called(code: Code) -> str:
    kind, library = code
    return {
        "gc": "Python's garbage collector",
        "python": "Python code",
        "interpreter": "Python's interpreter (its file has no symbols: code or garbage collector?)",
        "kernel": "the kernel",
        "native": "libraries that are not listed" if library == "other" else library,
    }.get(kind, "code that is not known")


# --- Python's lock -----------------------------------------------------------------------------------------


def _holders(of: HostTime) -> dict[str, float]:
    """Threads beside the driving one → ms per step for which they run Python."""
    held: dict[str, float] = {}
    for labels, value in of.rows("on_cpu_ns"):
        thread = labels.get("thread", "")
        if thread != "driving" and (labels.get("in", ""), "") in _IN_PYTHON:
            held[thread] = held.get(thread, 0.0) + value
    return held


def gil_over(extra: Extra) -> float:
    """How much longer than its peers the rank waits for Python's lock: on a futex, by timeouts, until another
    thread of its process hands it over, while others of its threads run Python for as long.

    The time for which these run is sampled: even the lower end of its interval must cover ``EXPLAINS`` of the
    waits.
    """
    by_timeout, by_own = extra.ended_over(["futex"], "interrupt"), extra.ended_over(["futex"], "own")
    waited = min(extra.asleep_over("futex"), by_timeout + by_own)
    if by_own <= 0 or by_timeout < BY_TIMEOUT * (by_timeout + by_own):
        return 0.0
    if not ran_in(extra).samples:  # of the rank or its peers too little is told to compare their threads
        return 0.0
    mine, theirs = sum(_holders(extra.host).values()), sum(_holders(extra.peers_host).values())
    held = mine - theirs
    half = DEVIATIONS * math.sqrt(_variance(extra.host, mine) + _variance(extra.peers_host, theirs))
    return max(0.0, min(waited, held)) if held - half >= EXPLAINS * waited else 0.0


def _variance(of: HostTime, took: float) -> float:
    """Of ms per step that were sampled."""
    samples = of.total("on_cpu_samples") * of.steps
    whole = sum(ms_ for labels, ms_ in of.rows("on_cpu_ns") if labels.get("thread") == "driving")
    return took * whole / samples if samples > 0 else 0.0


def gil(extra: Extra) -> Judgement:
    """Another thread of the process holds the interpreter's lock while the driving one wants it; and the CPU that
    it computes on, where both have the same one."""
    holders = _holders(extra.host)
    threads = sorted(holders, key=lambda name: (-holders[name], name))[:_NAMED]
    told = ", ".join(f"{'others' if name == 'other' else name} for {ms(holders[name])}" for name in threads)
    waits = gil_over(extra)
    words = (
        f"other threads of rank {extra.rank} run Python for {ms(sum(holders.values()))} per step, those of its "
        f"peers for {ms(sum(_holders(extra.peers_host).values()))}"
    )
    actions = (
        f"Move the work of that thread to a process of its own (DataLoader workers, multiprocessing), or to a "
        f"library that lets go of the lock: py-spy dump --pid {extra.pid} on {extra.node} says what it runs.",
        f"Then diagnose again: rank {extra.rank} should wait for its own threads as long as its peers do.",
    )
    crowded = min(max(0.0, extra.over("runnable")), sum(extra.excess("own").values())) if waits > 0 else 0.0
    also = f", and {ms(crowded)} for the CPU that its threads share," if crowded >= 1.0 else ""
    detail = (
        f"rank {extra.rank} waits {ms(waits)} per step longer than its peers for Python's lock (GIL){also} "
    )
    detail += f"while threads of its own run Python: {told}"
    return Judgement(waits + crowded, "job", detail, actions, words)
